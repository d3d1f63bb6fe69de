//! The parts that the content of a message has, as text.

use serde_json::Value;

use super::dialogue::required_string;
use super::fields::{Fields, wrong_type};
use crate::error::{ApiError, excerpt};

type Result<T> = std::result::Result<T, ApiError>;

/// Whose content it is, which decides on what cannot be read as text: a question about it is refused, a tool's result goes on
/// without it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Author {
    /// A person, or instructions.
    Message,
    /// The model, whose content may be missing.
    Answer,
    /// A tool, whose content may be missing.
    Tool,
}

/// The field `content` as one text: a string, or a list of parts.
pub fn content(fields: &Fields, author: Author) -> Result<String> {
    let name = fields.name("content");
    match fields.get("content") {
        None if author == Author::Message => Err(fields.missing("content")),
        None => Ok(String::new()),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(parts)) => joined(parts, &name, author),
        Some(other) => Err(wrong_type(&name, "a string or an array of parts", other)),
    }
}

/// The text of parts, a line or more each.
fn joined(parts: &[Value], path: &str, author: Author) -> Result<String> {
    let texts = parts.iter().enumerate().map(|(i, part)| text(&Fields::of(part, &format!("{path}[{i}]"))?, author));
    Ok(texts.collect::<Result<Vec<_>>>()?.join("\n"))
}

/// The text of one part, under the names of all APIs.
pub fn text(part: &Fields, author: Author) -> Result<String> {
    let own = |field| required_string(part, field).map(str::to_owned);
    match part.string("type")? {
        None | Some("text" | "input_text" | "output_text") => own("text"),
        Some("refusal") => own("refusal"),
        Some("tool_reference") => own("tool_name"),
        Some("search_result") => content(part, Author::Tool),
        Some("document") => document(part, author),
        Some("image" | "image_url" | "input_image") => unreadable(part, "image", author),
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
fn document(part: &Fields, author: Author) -> Result<String> {
    let Some(source) = part.object("source")? else { return Err(part.missing("source")) };
    let text = match source.string("type")? {
        Some("text") => required_string(&source, "data")?.to_owned(),
        Some("content") => content(&source, author)?,
        _ => return unreadable(part, "document", author),
    };
    Ok(part.string("title")?.map_or(text.clone(), |title| format!("{title}\n{text}")))
}

/// What stands in a tool's result for a part that is no text.
fn unreadable(part: &Fields, kind: &str, author: Author) -> Result<String> {
    if author == Author::Tool {
        return Ok(format!("[{kind} omitted: this model reads text]"));
    }
    let path = part.path();
    let message = format!("Invalid value for '{path}': this model reads text, and no part of the type {kind}.");
    Err(ApiError::unsupported(path, message))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(content: Value, author: Author) -> std::result::Result<String, Option<String>> {
        let message = json!({"content": content});
        Fields::of(&message, "").and_then(|fields| super::content(&fields, author)).map_err(|error| error.param)
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
        for kind in ["image", "image_url", "input_image", "input_audio", "file"] {
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
    fn only_a_message_needs_content() {
        assert_eq!(read(Value::Null, Author::Message), Err(Some("content".into())));
        for author in [Author::Answer, Author::Tool] {
            assert_eq!(read(Value::Null, author).unwrap(), "");
        }
        assert_eq!(read(json!([{"type": "hologram"}]), Author::Tool), Err(Some("content[0]".into())));
    }
}
