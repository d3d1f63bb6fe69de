//! The config of a checkpoint, in which Python may have written numbers that JSON does not have.

use serde_json::Value;

/// These numbers, as Python writes them.
const NAMED: [&str; 3] = ["-Infinity", "Infinity", "NaN"];

/// The config in a file. Numbers that JSON does not have are objects in the form of transformers 5,
/// `{"__float__": "Infinity"}`.
pub fn parse(bytes: &[u8]) -> serde_json::Result<Value> {
    serde_json::from_slice(bytes).or_else(|error| match without_named_numbers(bytes) {
        replaced if replaced.len() == bytes.len() => Err(error),
        replaced => serde_json::from_slice(&replaced),
    })
}

/// `bytes` with such objects in place of numbers with names.
fn without_named_numbers(bytes: &[u8]) -> Vec<u8> {
    let (mut replaced, mut at, mut in_text) = (Vec::with_capacity(bytes.len()), 0, false);
    while at < bytes.len() {
        let rest = &bytes[at..];
        let name = NAMED.into_iter().find(|name| !in_text && rest.starts_with(name.as_bytes()));
        let taken = match (name, rest) {
            (Some(name), _) => {
                replaced.extend_from_slice(format!("{{\"__float__\":\"{name}\"}}").as_bytes());
                at += name.len();
                continue;
            }
            (None, [b'\\', _, ..]) => 2,
            _ => 1,
        };
        in_text ^= rest[0] == b'"';
        replaced.extend_from_slice(&rest[..taken]);
        at += taken;
    }
    replaced
}

/// The value of a key in the part of a config that describes the text decoder, which may be the whole.
pub(super) fn text_value<'a>(config: &'a Value, key: &str) -> &'a Value {
    let nests = [&config["thinker_config"]["text_config"], &config["text_config"], config];
    nests.into_iter().map(|nest| &nest[key]).find(|value| !value.is_null()).unwrap_or(&Value::Null)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn numbers_with_names_become_objects_and_texts_stay() {
        let text =
            r#"{"time_step_limit": [0.0, Infinity], "a": -Infinity, "b": [NaN], "c": "Infinity \" NaN \\", "d": 1}"#;
        let named = |name: &str| json!({ "__float__": name });
        let want = json!({"time_step_limit": [0.0, named("Infinity")], "a": named("-Infinity"), "b": [named("NaN")],
            "c": "Infinity \" NaN \\", "d": 1});
        assert_eq!(parse(text.as_bytes()).unwrap(), want);
    }

    #[test]
    fn other_errors_stay_as_they_are() {
        for bad in [r#"{"a": Infinit}"#, r#"{"a": NaN"#, r#"{"a": "\"#, "", "\\", r#"{"Infinity"}"#] {
            assert!(parse(bad.as_bytes()).is_err(), "{bad}");
        }
        assert_eq!(parse(br#"{"a": [}"#).unwrap_err().to_string(), "expected value at line 1 column 8");
    }
}
