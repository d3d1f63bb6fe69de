//! The body of `/mathml`.

use super::fields::Fields;
use super::json;
use super::table::{Kind, Object, field};
use crate::error::{ApiError, Result};
use crate::page::formula::Formula;

/// Formulas of a request.
const FORMULAS_MAX: usize = 64;
/// Bytes of all formulas of a request.
const BYTES_MAX: usize = 64 << 10;

static FORMULA: Object = Object {
    name: "Formula",
    groups: &[&[
        field("latex", Kind::Text, "its source, at most 4,000 bytes").required(),
        field("display", Kind::Flag(false), "stands in a line of its own"),
    ]],
};

/// The fields of `/mathml`.
pub static MATHML: Object = Object {
    name: "MathmlRequest",
    groups: &[&[field("formulas", Kind::Objects(&FORMULA), "1 to 64 formulas of at most 64 KiB").required()]],
};

/// The body of `/mathml`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MathmlRequest {
    /// At least one.
    pub formulas: Vec<Formula>,
}

impl MathmlRequest {
    /// Parses and checks a body.
    pub fn parse(body: &[u8]) -> Result<Self> {
        let json = json(body)?;
        let fields = Fields::of(&json, "", &MATHML)?;
        let list = fields.objects("formulas")?;
        let refuse = |what: String| Err(ApiError::invalid_field("formulas", "invalid_value", what));
        if list.is_empty() || list.len() > FORMULAS_MAX {
            return refuse(format!("'formulas' must have 1 to {FORMULAS_MAX} formulas, but it has {}.", list.len()));
        }
        let formulas = list.iter().map(formula).collect::<Result<Vec<_>>>()?;
        let bytes: usize = formulas.iter().map(|formula| formula.latex.len()).sum();
        if bytes > BYTES_MAX {
            return refuse(format!("'formulas' has {bytes} bytes, but at most {BYTES_MAX} are converted at a time."));
        }
        Ok(MathmlRequest { formulas })
    }
}

fn formula(fields: &Fields) -> Result<Formula> {
    Ok(Formula { latex: fields.required_string("latex")?.to_owned(), display: fields.flag("display") })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn parse(body: &Value) -> Result<MathmlRequest> {
        MathmlRequest::parse(body.to_string().as_bytes())
    }

    #[test]
    fn formulas_are_inline_by_default() {
        let request = parse(&json!({"formulas": [{"latex": "x"}, {"latex": "y", "display": true}]})).unwrap();
        let shown: Vec<_> = request.formulas.iter().map(|formula| (&formula.latex[..], formula.display)).collect();
        assert_eq!(shown, [("x", false), ("y", true)]);
    }

    #[test]
    fn errors_name_the_field() {
        for (body, param) in [
            (json!({}), "formulas"),
            (json!({"formulas": "x"}), "formulas"),
            (json!({"formulas": []}), "formulas"),
            (json!({"formulas": vec![json!({"latex": "x"}); FORMULAS_MAX + 1]}), "formulas"),
            (json!({"formulas": vec![json!({"latex": "x".repeat(2000)}); 40]}), "formulas"),
            (json!({"formulas": [{"latex": "x"}, "y"]}), "formulas[1]"),
            (json!({"formulas": [{"display": true}]}), "formulas[0].latex"),
            (json!({"formulas": [{"latex": 1}]}), "formulas[0].latex"),
            (json!({"formulas": [{"latex": "x", "display": "yes"}]}), "formulas[0].display"),
        ] {
            let error = parse(&body).unwrap_err();
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some(param)), "{error}");
        }
    }
}
