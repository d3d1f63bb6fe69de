//! The images of a chat: parts of its messages, with a picture of their own or one that comes with the chat.

use std::borrow::Cow;

use anyhow::{Context, Result, bail};
use larder_engine::PictureTextError;
use serde_json::{Value, json};

use crate::vision::{PictureFile, content_with_images};

/// Messages of a chat as templates have them, and the files of their images in order.
#[derive(Debug)]
pub(crate) struct SeenMessages<'a> {
    pub messages: Vec<Value>,
    pub files: Vec<Cow<'a, PictureFile>>,
}

impl<'a> SeenMessages<'a> {
    /// Of messages with parts `image_url`, which have their own pictures, and parts `image`, to which the `given` ones
    /// belong. If there is no part `image`, those stand before the last message.
    pub fn of(messages: &[Value], given: &'a [PictureFile]) -> Result<Self> {
        let mut messages = messages.to_vec();
        if parts(&mut messages).all(|part| part["type"] != "image") {
            put_before_last(&mut messages, given.len());
        }
        let (mut files, mut taken) = (Vec::new(), 0);
        for part in parts(&mut messages) {
            match part["type"].as_str() {
                Some("image") => {
                    files.extend(given.get(taken).map(Cow::Borrowed));
                    taken += 1;
                }
                Some("image_url") => {
                    let file = own_file(part).with_context(|| format!("image {}", files.len() + 1))?;
                    files.push(Cow::Owned(file));
                }
                _ => {}
            }
        }
        if taken != given.len() {
            let images = given.len();
            bail!(
                "the messages have parts of the type image for {taken} of {images} images; give one image for each part"
            );
        }
        Ok(SeenMessages { messages: without_pictures(messages), files })
    }
}

/// Messages as templates have them: each image is a part `{"type": "image"}`.
pub(crate) fn without_pictures(mut messages: Vec<Value>) -> Vec<Value> {
    let with_urls = parts(&mut messages).filter(|part| part["type"] == "image_url");
    with_urls.for_each(|part| *part = json!({"type": "image"}));
    messages
}

/// The parts of all messages, in order.
fn parts(messages: &mut [Value]) -> impl Iterator<Item = &mut Value> {
    messages.iter_mut().filter_map(|message| message.get_mut("content")?.as_array_mut()).flatten()
}

/// Puts images before what the last message says.
fn put_before_last(messages: &mut [Value], images: usize) {
    let Some(content) = messages.last_mut().and_then(|message| message.get_mut("content")) else { return };
    match content {
        Value::Array(parts) => drop(parts.splice(..0, std::iter::repeat_n(json!({"type": "image"}), images))),
        Value::String(text) => {
            let shown = content_with_images(images, text);
            *content = shown;
        }
        _ => {}
    }
}

/// The picture of a part `image_url`, in OpenAI's form.
fn own_file(part: &Value) -> Result<PictureFile, PictureTextError> {
    let url = &part["image_url"];
    let url = url.get("url").unwrap_or(url).as_str().ok_or(PictureTextError::Missing)?;
    PictureFile::of_text(url)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Value {
        json!({"type": "text", "text": text})
    }

    fn files(seen: &SeenMessages) -> Vec<Vec<u8>> {
        seen.files.iter().map(|file| file.to_vec()).collect()
    }

    #[test]
    fn images_belong_to_parts_or_stand_before_the_last_message() {
        let image = json!({"type": "image"});
        let url = json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}});
        let given = [b"a", b"b"].map(|bytes| PictureFile::from(bytes.to_vec()));
        let say = |content: Value| json!({"role": "user", "content": content});
        let talk = [say(json!([text("x"), image, url])), say(json!([image, text("y")]))];
        let seen = SeenMessages::of(&talk, &given).unwrap();
        assert_eq!(seen.messages, [say(json!([text("x"), image, image])), talk[1].clone()]);
        assert_eq!(files(&seen), [&b"a"[..], b"hi", b"b"]);
        assert_eq!(without_pictures(talk.to_vec()), seen.messages);
        for (last, shown) in [
            (json!("y"), json!([image, image, text("y")])),
            (json!([url, text("y")]), json!([image, image, image, text("y")])),
        ] {
            let seen = SeenMessages::of(&[say("x".into()), say(last)], &given).unwrap();
            assert_eq!(seen.messages, [say("x".into()), say(shown)]);
            assert_eq!(files(&seen)[..2], [b"a", b"b"]);
        }
        let plain = [say("x".into()), json!(1)];
        assert_eq!(SeenMessages::of(&plain, &[]).unwrap().messages, plain);
    }

    #[test]
    fn what_fits_no_part_is_refused_in_a_sentence() {
        let given = [PictureFile::from(vec![1])];
        let refused = |content: Value, given: &[PictureFile]| {
            let error = SeenMessages::of(&[json!({"role": "user", "content": content})], given).unwrap_err();
            crate::sentence(&error)
        };
        let image = json!({"type": "image"});
        let one = "the messages have parts of the type image for 1 of 0 images; give one image for each part";
        assert_eq!(refused(json!([image]), &[]), one);
        assert!(refused(json!([image, image]), &given).contains("for 2 of 1 images"));
        assert!(refused(json!(null), &given).contains("for 0 of 1 images"));
        let address = refused(json!([{"type": "image_url", "image_url": "http://a.b/c.png"}]), &[]);
        assert!(address.starts_with("image 1: pictures are not fetched from addresses"), "{address}");
        assert!(refused(json!([{"type": "image_url"}]), &[]).contains("the image has no picture"));
    }
}
