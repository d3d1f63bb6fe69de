//! Calls in Python's syntax: `[name(key="text", other=1)]`.

use serde_json::{Map, Number, Value};

/// Deepest nesting of values.
const DEPTH_MAX: usize = 64;

/// The calls in `text`.
pub fn calls(text: &str) -> Option<Vec<(String, Map<String, Value>)>> {
    let mut rest = text;
    let in_list = take(&mut rest, "[");
    let mut calls = Vec::new();
    loop {
        let name = identifier(&mut rest)?;
        if !take(&mut rest, "(") {
            return None;
        }
        calls.push((name, arguments(&mut rest)?));
        if !take(&mut rest, ",") {
            break;
        }
    }
    ((!in_list || take(&mut rest, "]")) && rest.trim().is_empty()).then_some(calls)
}

/// Keyword arguments behind the opening bracket.
fn arguments(rest: &mut &str) -> Option<Map<String, Value>> {
    let mut arguments = Map::new();
    while !take(rest, ")") {
        let key = identifier(rest)?;
        if !take(rest, "=") {
            return None;
        }
        arguments.insert(key, value(rest, 0)?);
        if !take(rest, ",") && !rest.trim_start().starts_with(')') {
            return None;
        }
    }
    Some(arguments)
}

fn value(rest: &mut &str, depth: usize) -> Option<Value> {
    *rest = rest.trim_start();
    let first = rest.chars().next().filter(|_| depth <= DEPTH_MAX)?;
    match first {
        '"' | '\'' => string(rest, first).map(Value::String),
        '[' | '(' => {
            *rest = &rest[1..];
            list(rest, if first == '[' { "]" } else { ")" }, depth + 1).map(Value::Array)
        }
        '{' => {
            *rest = &rest[1..];
            dictionary(rest, depth + 1).map(Value::Object)
        }
        _ => word(rest),
    }
}

fn list(rest: &mut &str, end: &str, depth: usize) -> Option<Vec<Value>> {
    let mut list = Vec::new();
    while !take(rest, end) {
        list.push(value(rest, depth)?);
        if !take(rest, ",") && !rest.trim_start().starts_with(end) {
            return None;
        }
    }
    Some(list)
}

fn dictionary(rest: &mut &str, depth: usize) -> Option<Map<String, Value>> {
    let mut pairs = Map::new();
    while !take(rest, "}") {
        let Value::String(key) = value(rest, depth)? else { return None };
        if !take(rest, ":") {
            return None;
        }
        pairs.insert(key, value(rest, depth)?);
        if !take(rest, ",") && !rest.trim_start().starts_with('}') {
            return None;
        }
    }
    Some(pairs)
}

fn word(rest: &mut &str) -> Option<Value> {
    let end = rest.find(|c: char| c.is_whitespace() || ",)]}:".contains(c)).unwrap_or(rest.len());
    let (word, after) = rest.split_at(end);
    *rest = after;
    match word {
        "True" | "true" => Some(true.into()),
        "False" | "false" => Some(false.into()),
        "None" | "null" => Some(Value::Null),
        number => serde_json::from_str::<Number>(number).ok().map(Value::Number),
    }
}

/// A string in either quotes, with the escapes that JSON has too.
fn string(rest: &mut &str, quote: char) -> Option<String> {
    let mut text = String::new();
    let mut chars = rest.char_indices().skip(1);
    while let Some((at, c)) = chars.next() {
        match c {
            '\\' => match chars.next()?.1 {
                'n' => text.push('\n'),
                't' => text.push('\t'),
                'r' => text.push('\r'),
                'u' => {
                    let digits: String = chars.by_ref().take(4).map(|(_, digit)| digit).collect();
                    text.push(char::from_u32(u32::from_str_radix(&digits, 16).ok()?).unwrap_or('\u{fffd}'));
                }
                other @ ('\\' | '"' | '\'' | '/') => text.push(other),
                other => text.extend(['\\', other]),
            },
            c if c == quote => {
                *rest = &rest[at + 1..];
                return Some(text);
            }
            c => text.push(c),
        }
    }
    None
}

/// A name, with dots.
fn identifier(rest: &mut &str) -> Option<String> {
    *rest = rest.trim_start();
    let end = rest.find(|c: char| !(c.is_alphanumeric() || "_.-".contains(c))).unwrap_or(rest.len());
    let (name, after) = rest.split_at(end);
    *rest = after;
    (!name.is_empty()).then(|| name.to_owned())
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
