//! Images in the prompt of a chat: the template shows each as one token, in whose place those of its picture come.

use std::borrow::Cow;
use std::sync::Arc;

use larder_engine::ImageMarks;
use serde_json::{Value, json};

use crate::error::{ApiError, Result};
use crate::model::ServedModel;
use crate::request::ChatRequest;
use crate::request::content::{flattened, image_index, parts_of};
use crate::request::image::SeenPicture;

/// Keeps texts that have the token of an image in them from becoming one: a character which no text of the request has
/// divides it, and the text is tokenised in pieces.
pub struct TextGuard {
    /// The token of an image, as text.
    mark: String,
    divider: char,
}

impl TextGuard {
    /// For a request, whose texts are as they were sent.
    fn of(request: &ChatRequest, mark: String) -> Result<Self> {
        let texts = Value::from(request.messages.clone()).to_string();
        // Characters that Unicode keeps free for such uses.
        let free = ('\u{fdd0}'..='\u{fdef}').find(|divider| !texts.contains(*divider));
        let none = || ApiError::bad_request("A chat with images cannot have all of the characters U+FDD0 to U+FDEF.");
        free.map(|divider| TextGuard { mark, divider }).ok_or_else(none)
    }

    /// The request with its texts guarded.
    fn guarded(&self, request: &ChatRequest) -> ChatRequest {
        let mut messages = request.messages.clone();
        messages.iter_mut().for_each(|message| self.guard(message));
        request.with_messages(messages)
    }

    fn guard(&self, value: &mut Value) {
        match value {
            Value::String(text) if text.contains(&self.mark) => {
                let first = self.mark.chars().next().map_or(0, char::len_utf8);
                let (begin, end) = self.mark.split_at(first);
                *text = text.replace(&self.mark, &format!("{begin}{}{end}", self.divider));
            }
            Value::Array(values) => values.iter_mut().for_each(|value| self.guard(value)),
            Value::Object(map) => map.values_mut().for_each(|value| self.guard(value)),
            _ => {}
        }
    }

    /// The text as it was sent.
    pub fn removed(&self, text: String) -> String {
        if text.contains(self.divider) { text.replace(self.divider, "") } else { text }
    }
}

impl ServedModel {
    /// What guards the texts of a request, and the request with them guarded; `None` if it has no images.
    pub(super) fn text_guard(&self, request: &ChatRequest) -> Result<Option<(TextGuard, ChatRequest)>> {
        let Some(marks) = self.image_marks().filter(|_| !request.seen.0.is_empty()) else { return Ok(None) };
        let guard = TextGuard::of(request, self.image_token(marks))?;
        let request = guard.guarded(request);
        Ok(Some((guard, request)))
    }

    fn image_marks(&self) -> Option<&ImageMarks> {
        self.vision.sight.as_ref().map(|sight| sight.marks())
    }

    /// The token of an image, as text.
    fn image_token(&self, marks: &ImageMarks) -> String {
        let named = self.tokenizer.special_tokens().find(|(_, id)| *id == marks.image);
        named.map_or_else(|| self.tokenizer.decode(&[marks.image], false), |(name, _)| name)
    }

    /// Messages as the template can show their images: as parts, or as the text that it would print.
    pub(super) fn with_images_shown<'a>(&self, messages: &'a [Value]) -> Cow<'a, [Value]> {
        let has_image = |message: &Value| parts_of(message).iter().any(|part| image_index(part).is_some());
        let Some(marks) = self.image_marks().filter(|_| messages.iter().any(has_image)) else {
            return Cow::Borrowed(messages);
        };
        let roles = self.showing_roles(marks);
        let shown = |message: &Value| {
            let mut message = message.clone();
            if has_image(&message) {
                let role = message["role"].as_str().unwrap_or_default();
                message["content"] = if roles.contains(&role) {
                    parts_of(&message).iter().map(without_index).collect()
                } else {
                    flattened(parts_of(&message), |_| marks.text.clone()).into()
                };
            }
            message
        };
        Cow::Owned(messages.iter().map(shown).collect())
    }

    /// The roles whose images the template shows.
    fn showing_roles(&self, marks: &ImageMarks) -> &[&'static str] {
        self.vision.showing_roles.get_or_init(|| {
            // Calls that become text are joined with contents that are texts.
            let template = self.template.as_ref().filter(|_| !self.chat_format.has_generic_calls());
            let (token, roles) = (self.image_token(marks), ["user", "tool", "system"]);
            roles.into_iter().filter(|role| template.is_some_and(|own| own.shows_images(role, &token))).collect()
        })
    }

    /// Tokenises the guarded text of a chat: the tokens of pictures are in the place of images.
    pub(super) fn encode_with_images(
        &self,
        text: &str,
        request: &ChatRequest,
        guard: &TextGuard,
        special: bool,
    ) -> Result<Vec<u32>> {
        let mut tokens = Vec::new();
        for (i, piece) in text.split(guard.divider).enumerate() {
            tokens.extend(self.encode(piece, special && i == 0, "messages")?);
        }
        let Some(marks) = self.image_marks() else { return Ok(tokens) };
        let pictures = pictures_of(request);
        let shown = tokens.iter().filter(|id| **id == marks.image).count();
        if shown != pictures.len() {
            let message = format!(
                "Invalid 'messages': the prompt shows {shown} images, and the messages have {}; no tool may be described \
                 with the text '{}', and no image be where the chat template shows none.",
                pictures.len(),
                guard.mark
            );
            return Err(ApiError::invalid_field("messages", "invalid_value", message));
        }
        let of_pictures = pictures.iter().fold(0, |all: usize, seen| all.saturating_add(seen.picture.grid.tokens()));
        let all = (tokens.len() - shown).saturating_add(of_pictures);
        if all >= self.context.tokens {
            let said = self.context.too_long("The prompt", all);
            return Err(self.too_long("messages", &said, all));
        }
        let mut pictures = pictures.into_iter();
        let mut expanded = Vec::with_capacity(all);
        for id in tokens {
            match if id == marks.image { pictures.next() } else { None } {
                Some(seen) => expanded.extend(seen.picture.tokens()),
                None => expanded.push(id),
            }
        }
        Ok(expanded)
    }

    /// Tokens of the images of a message.
    pub(super) fn tokens_of_images(&self, request: &ChatRequest, message: &Value) -> usize {
        let seen = parts_of(message).iter().filter_map(|part| request.seen.0.get(image_index(part)?));
        seen.fold(0, |all: usize, seen| all.saturating_add(seen.picture.grid.tokens()))
    }
}

/// The pictures of the messages, in the order in which they show them.
pub fn pictures_of(request: &ChatRequest) -> Vec<Arc<SeenPicture>> {
    let parts = request.messages.iter().flat_map(parts_of);
    parts.filter_map(|part| request.seen.0.get(image_index(part)?).cloned()).collect()
}

fn without_index(part: &Value) -> Value {
    if image_index(part).is_some() { json!({"type": "image"}) } else { part.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_text_of_a_request_becomes_an_image() {
        let mark = "<|image_pad|>";
        let content = format!("a{mark}b\u{fdd0}{mark}");
        let body = json!({"messages": [{"role": "user", "content": content}]}).to_string();
        let request = ChatRequest::parse(body.as_bytes()).unwrap();
        let guard = TextGuard::of(&request, mark.to_owned()).unwrap();
        let guarded = guard.guarded(&request);
        let text = guarded.messages[0]["content"].as_str().unwrap().to_owned();
        assert_eq!(text.split('\u{fdd1}').collect::<Vec<_>>(), ["a<", "|image_pad|>b\u{fdd0}<", "|image_pad|>"]);
        assert_eq!(guard.removed(text), content);
        let all: String = ('\u{fdd0}'..='\u{fdef}').collect();
        let body = json!({"messages": [{"role": "user", "content": all}]}).to_string();
        assert!(TextGuard::of(&ChatRequest::parse(body.as_bytes()).unwrap(), mark.to_owned()).is_err());
    }
}
