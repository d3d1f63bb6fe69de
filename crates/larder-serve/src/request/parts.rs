//! The parts that the content of a message has, as text.

use serde_json::Value;

use super::fields::{Fields, wrong_type};
use super::table::{Field, Kind, Object, field};
use crate::error::{ApiError, Result, excerpt};

/// Whose content it is, which decides on what cannot be read as text: a question about it is refused, a tool's result
/// goes on without it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Author {
    /// A person, or instructions.
    Message,
    /// The model, whose content may be missing.
    Answer,
    /// A tool, whose content may be missing.
    Tool,
}

/// A text, or parts.
pub const CONTENT: Kind = Kind::Either(&CONTENTS);
static CONTENTS: [Kind; 2] = [Kind::Text, Kind::Objects(&PART)];
static SOURCES: [Kind; 2] = [Kind::Text, Kind::Object(&SOURCE)];

/// The fields of parts of all types.
pub static PART_FIELDS: &[Field] = &[
    field("type", Kind::Text, "`text` and its like; what is no text is refused, and omitted in a tool's result"),
    field("text", Kind::Text, "the text"),
    field("refusal", Kind::Text, "the text of `refusal`"),
    field("tool_name", Kind::Text, "the text of `tool_reference`"),
    field("title", Kind::Text, "the first line of `document`"),
    field("source", Kind::Either(&SOURCES), "the rest of it"),
];

static PART: Object = Object {
    name: "ContentPart",
    groups: &[PART_FIELDS, &[field("content", Kind::Either(&CONTENTS), "the text of `search_result`")]],
};

static SOURCE: Object = Object {
    name: "DocumentSource",
    groups: &[&[
        field("type", Kind::Text, "`text` or `content`"),
        field("data", Kind::Text, "the text of `text`"),
        field("content", Kind::Either(&CONTENTS), "that of `content`"),
    ]],
};

/// A field as one text: a string, or a list of parts, a line or more each.
pub fn content(fields: &Fields, field: &str, author: Author) -> Result<String> {
    match fields.get(field) {
        None if author == Author::Message => Err(fields.missing(field)),
        None => Ok(String::new()),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(_)) => {
            let parts = fields.objects(field)?;
            Ok(parts.iter().map(|part| text(part, author)).collect::<Result<Vec<_>>>()?.join("\n"))
        }
        Some(other) => Err(wrong_type(&fields.name(field), "a string or an array of parts", other)),
    }
}

/// The text of one part, under the names of all APIs.
pub fn text(part: &Fields, author: Author) -> Result<String> {
    let own = |field| part.required_string(field).map(str::to_owned);
    match part.string("type") {
        None | Some("text" | "input_text" | "output_text") => own("text"),
        Some("refusal") => own("refusal"),
        Some("tool_reference") => own("tool_name"),
        Some("search_result") => content(part, "content", Author::Tool),
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
    let text = match source.string("type") {
        Some("text") => source.required_string("data")?.to_owned(),
        Some("content") => content(&source, "content", author)?,
        _ => return unreadable(part, "document", author),
    };
    Ok(part.string("title").map_or(text.clone(), |title| format!("{title}\n{text}")))
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

    static MESSAGE: Object = Object { name: "Message", groups: &[&[field("content", CONTENT, "")]] };

    fn read(content: Value, author: Author) -> std::result::Result<String, Option<String>> {
        let message = json!({"content": content});
        Fields::of(&message, "", &MESSAGE)
            .and_then(|fields| super::content(&fields, "content", author))
            .map_err(|error| error.param)
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
