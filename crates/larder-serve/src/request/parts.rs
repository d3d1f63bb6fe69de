//! The parts that the content of a message has: texts, and images.

use serde_json::Value;

use super::author::Author;
use super::content::Content;
use super::fields::{Fields, wrong_type};
use super::image::{IMAGE_FIELDS, RequestImage};
use super::table::{Field, Kind, Object, field};
use super::unsupported::unread;
use crate::error::{ApiError, Result, excerpt};

/// A text, or parts.
pub const CONTENT: Kind = Kind::Either(&CONTENTS);
static CONTENTS: [Kind; 2] = [Kind::Text, Kind::Objects(&PART)];
static SOURCES: [Kind; 2] = [Kind::Text, Kind::Object(&SOURCE)];

/// The fields of parts of all types.
pub static PART_FIELDS: &[Field] = &[
    field("type", Kind::Text, "`text` and its like, images; others are refused, and omitted in a tool's result"),
    field("text", Kind::Text, "the text"),
    field("refusal", Kind::Text, "the text of `refusal`"),
    field("tool_name", Kind::Text, "the text of `tool_reference`"),
    field("title", Kind::Text, "the first line of `document`"),
    field("source", Kind::Either(&SOURCES), "the rest of it; the picture of `image`"),
];

static PART: Object = Object {
    name: "ContentPart",
    groups: &[PART_FIELDS, IMAGE_FIELDS, &[field("content", Kind::Either(&CONTENTS), "the text of `search_result`")]],
};

static SOURCE: Object = Object {
    name: "PartSource",
    groups: &[&[
        field("type", Kind::Text, "`text` or `content`; of a picture `base64` or `url`"),
        field("data", Kind::Text, "the text of `text`, the file of a picture"),
        field("url", Kind::Text, "the address of a picture, of a host that `--image-urls` names"),
        unread("media_type", "ignored: the file tells"),
        field("content", Kind::Either(&CONTENTS), "that of `content`"),
    ]],
};

/// A field as content: a string, or a list of parts, of which texts have a line or more each.
pub fn content(fields: &Fields, field: &str, author: Author) -> Result<Content> {
    match fields.get(field) {
        None if author == Author::Message => Err(fields.missing(field)),
        None => Ok(Content::default()),
        Some(Value::String(text)) => Ok(text.as_str().into()),
        Some(Value::Array(_)) => {
            let mut content = Content::default();
            for part in fields.objects(field)? {
                content.push(self::part(&part, author)?);
            }
            Ok(content)
        }
        Some(other) => Err(wrong_type(&fields.name(field), "a string or an array of parts", other)),
    }
}

/// One part, under the names of all APIs.
pub fn part(part: &Fields, author: Author) -> Result<Content> {
    let own = |field| part.required_string(field).map(Content::from);
    match part.string("type") {
        None | Some("text" | "input_text" | "output_text") => own("text"),
        Some("refusal") => own("refusal"),
        Some("tool_reference") => own("tool_name"),
        Some("search_result") => content(part, "content", Author::Tool),
        Some("document") => document(part, author),
        Some("image" | "image_url" | "input_image") if author == Author::Answer => unreadable(part, "image", author),
        Some("image" | "image_url" | "input_image") => RequestImage::of_part(part, author).map(Content::from),
        Some("audio" | "input_audio" | "audio_url") => unreadable(part, "audio", author),
        Some("video" | "video_url" | "input_video") => unreadable(part, "video", author),
        Some("file" | "input_file") => unreadable(part, "file", author),
        Some(other) => {
            let path = part.path();
            let message =
                format!("Invalid value for '{path}': parts of the type '{}' are not supported.", excerpt(other));
            Err(ApiError::unsupported(path, message))
        }
    }
}

/// A document, after its title if it has one.
fn document(part: &Fields, author: Author) -> Result<Content> {
    let Some(source) = part.object("source")? else { return Err(part.missing("source")) };
    let rest = match source.string("type") {
        Some("text") => source.required_string("data")?.into(),
        Some("content") => content(&source, "content", author)?,
        _ => return unreadable(part, "document", author),
    };
    let Some(title) = part.string("title") else { return Ok(rest) };
    let mut all = Content::from(title);
    all.push(rest);
    Ok(all)
}

/// What stands in a tool's result for a part that is neither text nor an image.
fn unreadable(part: &Fields, kind: &str, author: Author) -> Result<Content> {
    if author == Author::Tool {
        return Ok(omitted(kind).as_str().into());
    }
    let path = part.path();
    let what = if author == Author::Answer { "an answer is text, and has" } else { "this model reads text, and" };
    let message = format!("Invalid value for '{path}': {what} no part of the type {kind}.");
    Err(ApiError::unsupported(path, message))
}

/// What stands in a tool's result for what the model cannot read.
pub fn omitted(kind: &str) -> String {
    format!("[{kind} omitted: this model reads text]")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    static MESSAGE: Object = Object { name: "Message", groups: &[&[field("content", CONTENT, "")]] };

    fn read_all(content: Value, author: Author) -> std::result::Result<Content, Option<String>> {
        let message = json!({"content": content});
        Fields::of(&message, "", &MESSAGE)
            .and_then(|fields| super::content(&fields, "content", author))
            .map_err(|error| error.param)
    }

    fn read(content: Value, author: Author) -> std::result::Result<String, Option<String>> {
        read_all(content, author).map(Content::into_text)
    }

    #[test]
    fn parts_of_all_apis_are_one_text() {
        let parts = json!([
            {"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, {"text": "c"},
            {"type": "refusal", "refusal": "d"}, {"type": "tool_reference", "tool_name": "grep"},
            {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "e"}},
            {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "f"}]}},
            {"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": "g"}]},
        ]);
        assert_eq!(read(parts, Author::Message).unwrap(), "a\nb\nc\nd\ngrep\nT\ne\nf\ng");
        assert_eq!(read(json!([{"type": "text", "text": "a"}]), Author::Message), read(json!("a"), Author::Message));
    }

    #[test]
    fn a_tools_result_goes_on_without_what_is_no_text() {
        for kind in ["video", "input_audio", "file"] {
            let part = json!([{"type": "text", "text": "seen:"}, {"type": kind, "source": {}}]);
            let read_part = read(part.clone(), Author::Tool).unwrap();
            assert!(read_part.starts_with("seen:\n[") && read_part.ends_with(" omitted: this model reads text]"));
            assert_eq!(read(part, Author::Message), Err(Some("content[1]".into())), "{kind}");
        }
        let pdf = json!([{"type": "document", "source": {"type": "base64", "data": "aGk="}}]);
        assert_eq!(read(pdf.clone(), Author::Tool).unwrap(), "[document omitted: this model reads text]");
        assert_eq!(read(pdf, Author::Message), Err(Some("content[0]".into())));
    }

    #[test]
    fn images_of_all_apis_are_parts() {
        let url = "data:image/png;base64,aGk=";
        let source = json!({"type": "base64", "media_type": "image/png", "data": "aGk="});
        for part in [
            json!({"type": "image_url", "image_url": {"url": url, "detail": "low"}}),
            json!({"type": "image_url", "image_url": url}),
            json!({"type": "image_url", "image_url": "aGk="}),
            json!({"type": "input_image", "image_url": url, "detail": "auto"}),
            json!({"type": "image", "source": source}),
            json!({"type": "image", "source": {"type": "url", "url": "https://a.b/c.png"}}),
            json!({"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}),
            json!({"type": "image"}),
        ] {
            let parts = json!([{"type": "text", "text": "see:"}, part, {"type": "text", "text": "?"}]);
            for author in [Author::Message, Author::Tool] {
                let mut images = vec![];
                let shown = read_all(parts.clone(), author).unwrap().into_value(&mut images);
                assert_eq!((shown[1]["type"].as_str(), images.len()), (Some("image"), 1), "{part}");
                assert_eq!((images[0].field.as_str(), images[0].author), ("content[1]", author));
            }
            assert_eq!(read(parts, Author::Answer), Err(Some("content[1]".into())), "{part}");
        }
    }

    #[test]
    fn only_a_message_needs_content() {
        assert_eq!(read(Value::Null, Author::Message), Err(Some("content".into())));
        for author in [Author::Answer, Author::Tool] {
            assert_eq!(read(Value::Null, author).unwrap(), "");
        }
        assert_eq!(read(json!([{"type": "hologram"}]), Author::Tool), Err(Some("content[0]".into())));
    }
}
