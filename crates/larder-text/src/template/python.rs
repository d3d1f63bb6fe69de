//! Python's formatting of values: `json.dumps`, `str` and `repr`.

use minijinja::{Error, ErrorKind, Value, value::ValueKind};

use super::{
    budget::{Budget, check_depth},
    writer::Writer,
};

/// The supported keyword arguments of `json.dumps`.
pub(super) struct Dumps {
    pub(super) ensure_ascii: bool,
    pub(super) indent: Option<String>,
    pub(super) separators: (String, String),
    pub(super) sort_keys: bool,
}

impl Dumps {
    /// Formats `value` as JSON.
    pub(super) fn json(&self, value: &Value, budget: &Budget) -> Result<String, Error> {
        let mut out = Writer::new(budget);
        self.write(value, 0, &mut out)?;
        out.finish()
    }

    fn write(&self, value: &Value, depth: usize, out: &mut Writer) -> Result<(), Error> {
        check_depth(depth)?;
        match value.kind() {
            ValueKind::None => out.push_str("null")?,
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" })?,
            ValueKind::Number => out.push_str(&number(value, ["NaN", "Infinity", "-Infinity"]))?,
            ValueKind::String => self.string(value.as_str().unwrap_or_default(), out)?,
            ValueKind::Seq | ValueKind::Iterable => {
                let write = |item: Value, out: &mut Writer| self.write(&item, depth + 1, out);
                self.container(['[', ']'], items(value)?, depth, out, write)?;
            }
            ValueKind::Map => {
                let write = |(key, item): (Value, Value), out: &mut Writer| {
                    self.key(&key, out)?;
                    out.push_str(&self.separators.1)?;
                    self.write(&item, depth + 1, out)
                };
                let mut pairs = pairs(value)?;
                if self.sort_keys {
                    // Keys of other kinds are refused when they are written.
                    pairs.sort_by_key(|(key, _)| match key.kind() {
                        ValueKind::String | ValueKind::Number | ValueKind::Bool => key.to_string(),
                        _ => String::new(),
                    });
                }
                self.container(['{', '}'], pairs, depth, out, write)?;
            }
            kind => return Err(Error::new(ErrorKind::BadSerialization, format!("{kind} is not JSON serializable"))),
        }
        Ok(())
    }

    fn container<T>(
        &self,
        [open, close]: [char; 2],
        items: Vec<T>,
        depth: usize,
        out: &mut Writer,
        mut write: impl FnMut(T, &mut Writer) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let empty = items.is_empty();
        out.push(open)?;
        for (index, item) in items.into_iter().enumerate() {
            if index > 0 {
                out.push_str(&self.separators.0)?;
            }
            self.new_line(depth + 1, out)?;
            write(item, out)?;
        }
        if !empty {
            self.new_line(depth, out)?;
        }
        out.push(close)
    }

    fn new_line(&self, depth: usize, out: &mut Writer) -> Result<(), Error> {
        match &self.indent {
            None => Ok(()),
            Some(indent) => {
                out.push('\n')?;
                out.push_str(&indent.repeat(depth))
            }
        }
    }

    fn key(&self, key: &Value, out: &mut Writer) -> Result<(), Error> {
        match key.kind() {
            ValueKind::String => self.string(key.as_str().unwrap_or_default(), out),
            ValueKind::None | ValueKind::Bool | ValueKind::Number => {
                out.push('"')?;
                self.write(key, 0, out)?;
                out.push('"')
            }
            kind => Err(Error::new(ErrorKind::BadSerialization, format!("{kind} cannot be a JSON key"))),
        }
    }

    fn string(&self, text: &str, out: &mut Writer) -> Result<(), Error> {
        out.push('"')?;
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\"")?,
                '\\' => out.push_str("\\\\")?,
                '\n' => out.push_str("\\n")?,
                '\r' => out.push_str("\\r")?,
                '\t' => out.push_str("\\t")?,
                '\u{8}' => out.push_str("\\b")?,
                '\u{c}' => out.push_str("\\f")?,
                c if c < ' ' || (self.ensure_ascii && !(' '..='~').contains(&c)) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        out.push_str(&format!("\\u{unit:04x}"))?;
                    }
                }
                c => out.push(c)?,
            }
        }
        out.push('"')
    }
}

/// The text that Python prints for `value`: strings unchanged, containers as `repr`.
pub(super) fn display(value: &Value, budget: &Budget) -> Result<String, Error> {
    let mut out = Writer::new(budget);
    write(value, &mut out)?;
    out.finish()
}

/// Writes what [`display`] gives.
pub(super) fn write(value: &Value, out: &mut Writer) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => out.push_str(text),
        None => repr(value, 0, out),
    }
}

fn repr(value: &Value, depth: usize, out: &mut Writer) -> Result<(), Error> {
    check_depth(depth)?;
    match value.kind() {
        ValueKind::Number => out.push_str(&number(value, ["nan", "inf", "-inf"])),
        ValueKind::String => repr_text(value.as_str().unwrap_or_default(), out),
        ValueKind::Seq | ValueKind::Iterable => {
            let tuple = value.is_tuple();
            out.push(if tuple { '(' } else { '[' })?;
            let items = items(value)?;
            for (index, item) in items.iter().enumerate() {
                out.push_str(if index > 0 { ", " } else { "" })?;
                repr(item, depth + 1, out)?;
            }
            out.push_str(if tuple && items.len() == 1 { "," } else { "" })?;
            out.push(if tuple { ')' } else { ']' })
        }
        ValueKind::Map => {
            out.push('{')?;
            for (index, (key, item)) in pairs(value)?.iter().enumerate() {
                out.push_str(if index > 0 { ", " } else { "" })?;
                repr(key, depth + 1, out)?;
                out.push_str(": ")?;
                repr(item, depth + 1, out)?;
            }
            out.push('}')
        }
        _ => out.push_str(&value.to_string()),
    }
}

fn repr_text(text: &str, out: &mut Writer) -> Result<(), Error> {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote)?;
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\")?,
            '\n' => out.push_str("\\n")?,
            '\r' => out.push_str("\\r")?,
            '\t' => out.push_str("\\t")?,
            c if c == quote => out.push_str(if c == '"' { "\\\"" } else { "\\'" })?,
            c if c.is_control() => out.push_str(&format!("\\x{:02x}", c as u32))?,
            c => out.push(c)?,
        }
    }
    out.push(quote)
}

/// An integer, or a float with the fewest digits that parse back to it. `odd` are the names of NaN, infinity and minus
/// infinity.
fn number(value: &Value, odd: [&str; 3]) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    let Ok(float) = f64::try_from(value.clone()) else {
        return value.to_string();
    };
    if !float.is_finite() {
        let which = if float.is_nan() { 0 } else { 1 + usize::from(float < 0.0) };
        return odd[which].to_owned();
    }
    let scientific = format!("{float:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.parse::<i32>() {
        Ok(exponent) if !(-4..16).contains(&exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.abs())
        }
        _ => format!("{float:?}"),
    }
}

fn items(value: &Value) -> Result<Vec<Value>, Error> {
    value.try_iter()?.checked().collect()
}

fn pairs(value: &Value) -> Result<Vec<(Value, Value)>, Error> {
    value.try_iter()?.checked().map(|key| key.and_then(|key| Ok((key.clone(), value.get_item(&key)?)))).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn budget() -> Budget {
        Budget::new(1 << 20, Duration::from_secs(60))
    }

    fn display(value: &Value) -> Result<String, Error> {
        super::display(value, &budget())
    }

    fn value(json: &str) -> Value {
        crate::template::input::value_of(&serde_json::from_str(json).unwrap())
    }

    fn dumps(indent: Option<&str>, ensure_ascii: bool) -> Dumps {
        let item = if indent.is_some() { "," } else { ", " };
        let separators = (item.into(), ": ".into());
        Dumps { ensure_ascii, indent: indent.map(str::to_owned), separators, sort_keys: false }
    }

    #[test]
    fn json_is_written_as_python_writes_it() {
        let json = r#"{"b": [1, 2.0, 1e16, 1e-5, -0.25], "a": {"é<'\"\n\u0001🦆": null, "t": true}, "e": [], "o": {}}"#;
        assert_eq!(
            dumps(None, false).json(&value(json), &budget()).unwrap(),
            r#"{"b": [1, 2.0, 1e+16, 1e-05, -0.25], "a": {"é<'\"\n\u0001🦆": null, "t": true}, "e": [], "o": {}}"#
        );
        assert_eq!(dumps(None, true).json(&value(r#""é🦆""#), &budget()).unwrap(), r#""\u00e9\ud83e\udd86""#);
        assert_eq!(
            dumps(Some("  "), false).json(&value(r#"{"a": [1, {}], "b": []}"#), &budget()).unwrap(),
            "{\n  \"a\": [\n    1,\n    {}\n  ],\n  \"b\": []\n}"
        );
    }

    #[test]
    fn keys_can_be_sorted() {
        let sorted = Dumps { sort_keys: true, ..dumps(None, false) };
        assert_eq!(sorted.json(&value(r#"{"b": 1, "a": 2}"#), &budget()).unwrap(), r#"{"a": 2, "b": 1}"#);
    }

    #[test]
    fn values_without_a_json_form_are_errors() {
        assert!(dumps(None, false).json(&Value::UNDEFINED, &budget()).is_err());
        let deep = (0..200).fold(Value::from(1), |inner, _| Value::from(vec![inner]));
        assert!(dumps(None, false).json(&deep, &budget()).unwrap_err().to_string().contains("nested"));
        assert!(display(&deep).is_err());
    }

    #[test]
    fn containers_print_as_python_prints_them() {
        assert_eq!(
            display(&value(r#"{"a": ["x", "it's", "\n\u0007é", 1.0, null, true], "b": 1e100}"#)).unwrap(),
            r#"{'a': ['x', "it's", '\n\x07é', 1.0, None, True], 'b': 1e+100}"#
        );
        assert_eq!(display(&Value::from("it's")).unwrap(), "it's");
        assert_eq!(display(&Value::from(())).unwrap(), "None");
        assert_eq!(display(&Value::UNDEFINED).unwrap(), "");
    }
}
