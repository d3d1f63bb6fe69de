//! The pictures of a chat: what a model reads in them before the chat is tokenised, and what becomes of them where it
//! reads text only.

use std::sync::Arc;

use serde_json::Value;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;

use super::work::run_permitted;
use crate::error::{ApiError, Result};
use crate::fetch::FileRoom;
use crate::model::ServedVision;
use crate::request::ChatRequest;
use crate::request::author::Author;
use crate::request::content::{flattened, image_index, parts_of};
use crate::request::image::{IMAGES_MAX, RequestImage, SeenPictures};
use crate::request::parts::omitted;
use crate::state::{App, SharedState};

/// A chat whose pictures were read, one after the other; for a model that sees none, without those of tools.
pub async fn seen(app: &App, chat: ChatRequest) -> Result<ChatRequest> {
    let vision = &app.model.vision;
    let Some(sight) = vision.sight.clone().filter(|_| !chat.images.is_empty()) else {
        return without_images(chat, vision);
    };
    check_count(&chat.images)?;
    let limit = app.server.options.timeout;
    let fetching = timeout(limit, fetched(&app.server, &chat.images, sight.most_bytes()));
    let (files, room) = fetching.await.map_err(|_| ApiError::timed_out(limit.as_secs()))??;
    let room = Arc::new(room);
    run_permitted(&app.server.picture_permits, move || {
        let images = chat.images.iter().zip(files);
        let read = |(image, file): (&Arc<RequestImage>, _)| image.read(file, &*sight, room.clone()).map(Arc::new);
        let seen = SeenPictures(images.map(read).collect::<Result<_>>()?);
        // The images as they were sent are not needed any more.
        Ok(ChatRequest { seen, images: vec![], ..chat })
    })
    .await
}

/// The file of each image that is on another server, and the place of all files of the request in memory.
async fn fetched(
    server: &SharedState,
    images: &[Arc<RequestImage>],
    most: usize,
) -> Result<(Vec<Option<Vec<u8>>>, OwnedSemaphorePermit)> {
    // Nothing is fetched for a request that is refused.
    for image in images {
        image.url()?.map_or(Ok(()), |url| server.fetcher.check(url)).map_err(|why| image.unfetched(why))?;
    }
    let bytes = images.iter().map(|image| image.bytes()).sum();
    let permits = server.options.picture_permits(bytes);
    let taken = server.picture_room.clone().acquire_many_owned(permits).await;
    let taken = taken.map_err(|_| ApiError::shutting_down())?;
    let mut room = FileRoom::new(server.picture_room.clone(), taken, server.options.all_permits());
    let mut files = Vec::with_capacity(images.len());
    for image in images {
        files.push(match image.url()? {
            Some(url) => {
                let file = server.fetcher.fetch(url, most, &mut room).await;
                Some(file.map_err(|why| image.unfetched(why))?)
            }
            None => None,
        });
    }
    Ok((files, room.into_permits()))
}

fn check_count(images: &[Arc<RequestImage>]) -> Result<()> {
    match images.get(IMAGES_MAX) {
        None => Ok(()),
        Some(image) => {
            let message = format!("Invalid value for '{}': a request has at most {IMAGES_MAX} images.", image.field);
            Err(ApiError::invalid_field(&image.field, "too_many_images", message))
        }
    }
}

/// A chat without images: a question about one is refused, a tool's result goes on without it.
pub fn without_images(mut chat: ChatRequest, vision: &ServedVision) -> Result<ChatRequest> {
    if chat.images.is_empty() || vision.sight.is_some() {
        return Ok(chat);
    }
    if let Some(image) = chat.images.iter().find(|image| image.author != Author::Tool) {
        return Err(unseen(&image.field, vision));
    }
    for message in &mut chat.messages {
        let parts = parts_of(message);
        if parts.iter().any(|part| image_index(part).is_some()) {
            message["content"] = as_lines(parts).into();
        }
    }
    chat.images.clear();
    Ok(chat)
}

/// Texts, and what stands for images, a line or more each.
fn as_lines(parts: &[Value]) -> String {
    let line = |part: &Value| match image_index(part) {
        Some(_) => omitted("image"),
        None => flattened(std::slice::from_ref(part), |_| String::new()),
    };
    parts.iter().map(line).collect::<Vec<_>>().join("\n")
}

fn unseen(field: &str, vision: &ServedVision) -> ApiError {
    let why = match vision.blindness.as_str() {
        "" => "this model reads text, and sees no images",
        why => why,
    };
    let message = format!("Invalid value for '{field}': {why}.");
    ApiError::unsupported(field, message)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn chat(messages: &Value) -> ChatRequest {
        ChatRequest::parse(json!({"messages": messages}).to_string().as_bytes()).unwrap()
    }

    #[test]
    fn a_model_that_reads_text_goes_on_without_images_of_tools_only() {
        let vision = ServedVision { blindness: "this model is blind; a_vl sees".into(), ..ServedVision::default() };
        let shown = json!([{"type": "text", "text": "seen:"}, {"type": "image_url", "image_url": {"url": "aGk="}}]);
        let of_tool = chat(&json!([{"role": "user", "content": "?"}, {"role": "tool", "content": shown}]));
        let left = without_images(of_tool, &vision).unwrap();
        assert_eq!(left.messages[1]["content"], "seen:\n[image omitted: this model reads text]");
        assert!(left.images.is_empty());
        let of_user = chat(&json!([{"role": "user", "content": shown}]));
        let error = without_images(of_user, &vision).unwrap_err();
        assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some("messages[0].content[1]")));
        assert!(error.message.ends_with(": this model is blind; a_vl sees."), "{error}");
    }
}
