//! The body of llama.cpp's `/infill`.

use super::fields::Fields;
use super::settings::{GENERATION, SAMPLING, generation_params};
use super::table::{Kind, Object, field};
use super::unsupported::{IGNORED, METADATA, UNSUPPORTED};
use super::{CompletionRequest, Prompt, Result, format};

static OTHER_FILE: Object = Object {
    name: "OtherFile",
    groups: &[&[field("text", Kind::Text, "its text").required(), field("filename", Kind::Text, "its name")]],
};

/// The fields of `/infill`.
pub static INFILL: Object = Object {
    name: "InfillRequest",
    groups: &[
        &[
            field("input_prefix", Kind::Text, "the text before the gap").required(),
            field("input_suffix", Kind::Text, "the text after it").required(),
            field("prompt", Kind::Text, "the beginning of the answer"),
            field("input_extra", Kind::Objects(&OTHER_FILE), "texts of other files, before all"),
        ],
        GENERATION,
        SAMPLING,
        format::FORMATS,
        UNSUPPORTED,
        IGNORED,
        METADATA,
    ],
};

impl CompletionRequest {
    /// Parses the body of `/infill`: texts around a gap, the beginning of what is to fill it, and texts of other files.
    pub fn parse_infill(body: &[u8]) -> Result<Self> {
        let json = super::json(body)?;
        let fields = Fields::of(&json, "", &INFILL)?;
        let mut params = generation_params(&fields)?;
        let before = others(&fields)? + fields.required_string("input_prefix")?;
        let after = fields.required_string("input_suffix")?.to_owned();
        let begun = fields.string("prompt").unwrap_or_default().to_owned();
        params.notes = fields.unknown().collect();
        Ok(CompletionRequest { params, prompts: vec![Prompt::Gap { before, after, begun }] })
    }
}

/// The texts of other files, each below its name.
fn others(fields: &Fields) -> Result<String> {
    let mut all = String::new();
    for other in fields.objects("input_extra")? {
        let name = other.string("filename").map_or(String::new(), |name| format!("// {name}\n"));
        all += &format!("{name}{}\n", other.required_string("text")?);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn parse(body: Value) -> Result<CompletionRequest> {
        CompletionRequest::parse_infill(body.to_string().as_bytes())
    }

    #[test]
    fn texts_around_a_gap_are_read() {
        let body = json!({
            "input_prefix": "fn a() {", "input_suffix": "}", "prompt": "  let", "n_predict": 8, "top_k": 40.0,
            "input_extra": [{"filename": "b.rs", "text": "fn b() {}"}, {"text": "c"}], "samplers": [], "t_max_predict_ms": 500,
        });
        let CompletionRequest { params, prompts } = parse(body).unwrap();
        let before = "// b.rs\nfn b() {}\nc\nfn a() {".to_owned();
        assert_eq!(prompts, [Prompt::Gap { before, after: "}".into(), begun: "  let".into() }]);
        assert_eq!((params.max_tokens, params.notes.len()), (Some(8), 1));
        for (body, param) in [
            (json!({"input_prefix": "a"}), "input_suffix"),
            (json!({"input_prefix": "a", "input_suffix": 1}), "input_suffix"),
            (json!({"input_prefix": "a", "input_suffix": "b", "input_extra": [{}]}), "input_extra[0].text"),
        ] {
            assert_eq!(parse(body).unwrap_err().param.as_deref(), Some(param));
        }
    }
}
