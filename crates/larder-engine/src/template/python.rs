//! Python's formatting of values (`json.dumps`, `repr`) and the string methods that templates use.

use minijinja::{
    Error, ErrorKind, State, Value,
    value::{ValueKind, from_args},
};

/// Maximum nesting of values: deeper ones are an error instead of a stack overflow.
const MAX_DEPTH: usize = 128;

/// The supported keyword arguments of `json.dumps`.
pub(super) struct Dumps {
    pub(super) ensure_ascii: bool,
    pub(super) indent: Option<String>,
    pub(super) separators: (String, String),
    pub(super) sort_keys: bool,
}

impl Dumps {
    /// Formats `value` as JSON.
    pub(super) fn json(&self, value: &Value) -> Result<String, Error> {
        let mut out = String::new();
        self.write(value, 0, &mut out)?;
        Ok(out)
    }

    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        check_depth(depth)?;
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&number(value, ["NaN", "Infinity", "-Infinity"])),
            ValueKind::String => self.string(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq | ValueKind::Iterable => {
                let write = |item: Value, out: &mut String| self.write(&item, depth + 1, out);
                self.container(['[', ']'], items(value)?, depth, out, write)?;
            }
            ValueKind::Map => {
                let write = |(key, item): (Value, Value), out: &mut String| {
                    self.key(&key, out)?;
                    out.push_str(&self.separators.1);
                    self.write(&item, depth + 1, out)
                };
                let mut pairs = pairs(value)?;
                if self.sort_keys {
                    pairs.sort_by_key(|(key, _)| key.to_string());
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
        out: &mut String,
        mut write: impl FnMut(T, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let empty = items.is_empty();
        out.push(open);
        for (index, item) in items.into_iter().enumerate() {
            if index > 0 {
                out.push_str(&self.separators.0);
            }
            self.new_line(depth + 1, out);
            write(item, out)?;
        }
        if !empty {
            self.new_line(depth, out);
        }
        out.push(close);
        Ok(())
    }

    fn new_line(&self, depth: usize, out: &mut String) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            out.push_str(&indent.repeat(depth));
        }
    }

    fn key(&self, key: &Value, out: &mut String) -> Result<(), Error> {
        match key.kind() {
            ValueKind::String => self.string(key.as_str().unwrap_or_default(), out),
            ValueKind::None | ValueKind::Bool | ValueKind::Number => {
                out.push('"');
                self.write(key, 0, out)?;
                out.push('"');
            }
            kind => return Err(Error::new(ErrorKind::BadSerialization, format!("{kind} cannot be a JSON key"))),
        }
        Ok(())
    }

    fn string(&self, text: &str, out: &mut String) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if c < ' ' || (self.ensure_ascii && !(' '..='~').contains(&c)) => {
                    c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| out.push_str(&format!("\\u{unit:04x}")));
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

/// The text that Python prints for `value`: strings unchanged, containers as `repr`.
pub(super) fn display(value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    match value.kind() {
        ValueKind::Seq | ValueKind::Map | ValueKind::Number => repr(value, 0, &mut out)?,
        _ => out = value.to_string(),
    }
    Ok(out)
}

fn repr(value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
    check_depth(depth)?;
    match value.kind() {
        ValueKind::Number => out.push_str(&number(value, ["nan", "inf", "-inf"])),
        ValueKind::String => repr_text(value.as_str().unwrap_or_default(), out),
        ValueKind::Seq => {
            let tuple = value.is_tuple();
            out.push(if tuple { '(' } else { '[' });
            let items = items(value)?;
            for (index, item) in items.iter().enumerate() {
                out.push_str(if index > 0 { ", " } else { "" });
                repr(item, depth + 1, out)?;
            }
            out.push_str(if tuple && items.len() == 1 { "," } else { "" });
            out.push(if tuple { ')' } else { ']' });
        }
        ValueKind::Map => {
            out.push('{');
            for (index, (key, item)) in pairs(value)?.iter().enumerate() {
                out.push_str(if index > 0 { ", " } else { "" });
                repr(key, depth + 1, out)?;
                out.push_str(": ");
                repr(item, depth + 1, out)?;
            }
            out.push('}');
        }
        _ => out.push_str(&value.to_string()),
    }
    Ok(())
}

fn repr_text(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c if c.is_control() => out.push_str(&format!("\\x{:02x}", c as u32)),
            c => out.push(c),
        }
    }
    out.push(quote);
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

fn check_depth(depth: usize) -> Result<(), Error> {
    if depth <= MAX_DEPTH {
        return Ok(());
    }
    Err(Error::new(ErrorKind::BadSerialization, format!("a value is nested more than {MAX_DEPTH} levels deep")))
}

/// Python's string methods: those that minijinja's compatibility layer lacks, then that layer.
pub(super) fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let (Some(text), "removeprefix" | "removesuffix" | "partition" | "rpartition" | "rsplit") = (value.as_str(), name)
    else {
        return minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args);
    };
    let (part, limit): (&str, Option<usize>) = from_args(args)?;
    let triple = |split: Option<(&str, &str)>, otherwise: [&str; 3]| {
        let parts = split.map_or(otherwise, |(before, after)| [before, part, after]);
        Value::from(parts.map(Value::from).to_vec())
    };
    Ok(match name {
        "removeprefix" => Value::from(text.strip_prefix(part).unwrap_or(text)),
        "removesuffix" => Value::from(text.strip_suffix(part).unwrap_or(text)),
        "partition" => triple(text.split_once(part), [text, "", ""]),
        "rpartition" => triple(text.rsplit_once(part), ["", "", text]),
        _ => {
            let mut parts: Vec<&str> = text.rsplitn(limit.map_or(usize::MAX, |n| n.saturating_add(1)), part).collect();
            parts.reverse();
            parts.into_iter().map(Value::from).collect()
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

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
            dumps(None, false).json(&value(json)).unwrap(),
            r#"{"b": [1, 2.0, 1e+16, 1e-05, -0.25], "a": {"é<'\"\n\u0001🦆": null, "t": true}, "e": [], "o": {}}"#
        );
        assert_eq!(dumps(None, true).json(&value(r#""é🦆""#)).unwrap(), r#""\u00e9\ud83e\udd86""#);
        assert_eq!(
            dumps(Some("  "), false).json(&value(r#"{"a": [1, {}], "b": []}"#)).unwrap(),
            "{\n  \"a\": [\n    1,\n    {}\n  ],\n  \"b\": []\n}"
        );
    }

    #[test]
    fn keys_can_be_sorted() {
        let sorted = Dumps { sort_keys: true, ..dumps(None, false) };
        assert_eq!(sorted.json(&value(r#"{"b": 1, "a": 2}"#)).unwrap(), r#"{"a": 2, "b": 1}"#);
    }

    #[test]
    fn values_without_a_json_form_are_errors() {
        assert!(dumps(None, false).json(&Value::UNDEFINED).is_err());
        let deep = (0..200).fold(Value::from(1), |inner, _| Value::from(vec![inner]));
        assert!(dumps(None, false).json(&deep).unwrap_err().to_string().contains("nested"));
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
