//! Structured output: which text a request asks for.

use larder_text::TextFormat;

use super::fields::Fields;
use super::table::{Field, Kind, Object, field};
use super::unsupported::unread;
use crate::error::{ApiError, Result};

/// What the answer has to match, and the field that says so.
#[derive(Clone, PartialEq, Debug)]
pub struct RequestedFormat {
    /// The field of the request, for errors.
    pub field: &'static str,
    /// What the answer has to match.
    pub format: TextFormat,
}

/// A JSON Schema.
pub const SCHEMA: Kind = Kind::Either(&[Kind::Map, Kind::Boolean]);
/// Kinds of formats.
pub const FORMAT_TYPES: Kind = Kind::Choice(&["text", "json_object", "json_schema"]);

static NAMED_SCHEMA: Object = Object {
    name: "NamedSchema",
    groups: &[&[
        field("schema", SCHEMA, "a JSON Schema").required(),
        unread("name", "ignored"),
        unread("strict", "ignored: a schema is always enforced"),
    ]],
};

static RESPONSE_FORMAT: Object = Object {
    name: "ResponseFormat",
    groups: &[&[
        field("type", FORMAT_TYPES, "what the answer is"),
        field("json_schema", Kind::Object(&NAMED_SCHEMA), "the schema of `json_schema`"),
        field("schema", SCHEMA, "a schema of `json_object`, as in llama.cpp's server"),
    ]],
};

/// What answers have to match; at most one of these.
pub const FORMATS: &[Field] = &[
    field("response_format", Kind::Object(&RESPONSE_FORMAT), "the answer is JSON"),
    field("json_schema", SCHEMA, "the answer is JSON that is valid by this schema"),
    field("grammar", Kind::Text, "the answer is a text of this grammar, in GBNF or llguidance's Lark"),
    field("regex", Kind::Text, "the answer is a text that this regular expression matches as a whole"),
];

/// The format of the answer, by OpenAI's `response_format` or the fields `json_schema`, `grammar` and `regex`; `None`
/// for any text.
pub fn requested_format(fields: &Fields) -> Result<Option<RequestedFormat>> {
    let grammar = fields.string("grammar").filter(|text| !text.trim().is_empty());
    let all = [
        ("response_format", response_format(fields)?),
        ("json_schema", fields.get("json_schema").cloned().map(TextFormat::JsonSchema)),
        ("grammar", grammar.map(TextFormat::of_grammar)),
        ("regex", fields.string("regex").map(|regex| TextFormat::Regex(regex.to_owned()))),
    ];
    let mut given = all.into_iter().filter_map(|(field, format)| Some(RequestedFormat { field, format: format? }));
    let first = given.next();
    if let (Some(first), Some(second)) = (&first, given.next()) {
        let message = format!("Give either '{}' or '{}', not both.", first.field, second.field);
        return Err(ApiError::invalid_field(second.field, "invalid_value", message));
    }
    if first.is_some() && fields.flag("ignore_eos") {
        let message =
            "The 'ignore_eos' parameter is not allowed with structured output, whose end is part of its format.";
        return Err(ApiError::invalid_field("ignore_eos", "invalid_value", message));
    }
    Ok(first)
}

fn response_format(fields: &Fields) -> Result<Option<TextFormat>> {
    let Some(format) = fields.object("response_format")? else { return Ok(None) };
    Ok(match format.string("type") {
        Some("json_object") => match format.get("schema") {
            Some(schema) => Some(TextFormat::JsonSchema(schema.clone())),
            None => Some(TextFormat::JsonObject),
        },
        Some("json_schema") => {
            let schema = format.object("json_schema")?.ok_or_else(|| format.missing("json_schema"))?;
            Some(TextFormat::JsonSchema(schema.required("schema")?.clone()))
        }
        _ => None,
    })
}
