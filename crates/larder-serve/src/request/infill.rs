//! The body of llama.cpp's `/infill`.

use serde_json::Value;

use super::dialogue::required_string;
use super::fields::{Fields, wrong_type};
use super::{CompletionRequest, Prompt, Result, generation_params, unsupported};

impl CompletionRequest {
    /// Parses the body of `/infill`: texts around a gap, the beginning of what is to fill it, and texts of other files.
    pub fn parse_infill(body: &[u8]) -> Result<Self> {
        let json = super::json(body)?;
        let fields = Fields::of(&json, "")?;
        let mut params = generation_params(&fields)?;
        let before = others(&fields)? + required_string(&fields, "input_prefix")?;
        let after = required_string(&fields, "input_suffix")?.to_owned();
        let begun = fields.string("prompt")?.unwrap_or_default().to_owned();
        params.notes = unsupported::unknown(&fields).collect();
        Ok(CompletionRequest { params, prompts: vec![Prompt::Gap { before, after, begun }] })
    }
}

/// The texts of other files, each below its name.
fn others(fields: &Fields) -> Result<String> {
    let mut all = String::new();
    for (i, other) in fields.array("input_extra")?.unwrap_or_default().iter().enumerate() {
        let other = Fields::of(other, &format!("input_extra[{i}]"))?;
        let text = other.required("text")?;
        let text = text.as_str().ok_or_else(|| wrong_type(&other.name("text"), "a string", text))?;
        let name = other.get("filename").and_then(Value::as_str);
        all += &format!("{}{text}\n", name.map_or(String::new(), |name| format!("// {name}\n")));
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

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
