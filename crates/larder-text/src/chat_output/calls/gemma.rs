//! Calls of Gemma 4: `name{key:<|"|>text<|"|>,other:1}`.

use serde_json::{Map, Value};

const QUOTE: &str = "<|\"|>";
/// Deepest nesting of values.
const DEPTH_MAX: usize = 64;

/// The call in `text`.
pub fn call(text: &str) -> Option<Vec<(String, Map<String, Value>)>> {
    let (name, arguments) = text.trim().split_once('{')?;
    let mut rest = arguments;
    let arguments = object(&mut rest, 0)?;
    let is_name = !name.is_empty() && !name.contains(char::is_whitespace);
    (is_name && rest.trim().is_empty()).then(|| vec![(name.to_owned(), arguments)])
}

/// An object behind its opening brace.
fn object(rest: &mut &str, depth: usize) -> Option<Map<String, Value>> {
    let mut object = Map::new();
    if take(rest, "}") {
        return Some(object);
    }
    loop {
        let key = match string(rest) {
            Some(key) => key,
            None => {
                let at = rest.find(':')?;
                let key = rest[..at].trim().to_owned();
                *rest = &rest[at..];
                key
            }
        };
        if !take(rest, ":") {
            return None;
        }
        object.insert(key, value(rest, depth)?);
        if take(rest, "}") {
            return Some(object);
        }
        if !take(rest, ",") {
            return None;
        }
    }
}

fn array(rest: &mut &str, depth: usize) -> Option<Vec<Value>> {
    let mut array = Vec::new();
    if take(rest, "]") {
        return Some(array);
    }
    loop {
        array.push(value(rest, depth)?);
        if take(rest, "]") {
            return Some(array);
        }
        if !take(rest, ",") {
            return None;
        }
    }
}

fn value(rest: &mut &str, depth: usize) -> Option<Value> {
    if depth > DEPTH_MAX {
        return None;
    }
    if let Some(text) = string(rest) {
        return Some(text.into());
    }
    if take(rest, "{") {
        return object(rest, depth + 1).map(Value::Object);
    }
    if take(rest, "[") {
        return array(rest, depth + 1).map(Value::Array);
    }
    let end = rest.find([',', '}', ']'])?;
    let word = rest[..end].trim();
    *rest = &rest[end..];
    Some(match word {
        "None" | "" => Value::Null,
        word => serde_json::from_str(word).unwrap_or_else(|_| word.into()),
    })
}

fn string(rest: &mut &str) -> Option<String> {
    let (text, after) = rest.trim_start().strip_prefix(QUOTE)?.split_once(QUOTE)?;
    *rest = after;
    Some(text.to_owned())
}

fn take(rest: &mut &str, mark: &str) -> bool {
    match rest.trim_start().strip_prefix(mark) {
        Some(after) => {
            *rest = after;
            true
        }
        None => false,
    }
}
