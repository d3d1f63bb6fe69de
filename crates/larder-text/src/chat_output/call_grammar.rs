//! Grammars of answers: forced tool calls, and reasoning before them or before a format.

use std::fmt::Write;

use serde_json::Value;

use super::Style;
use super::calls::{CallHead, CallSyntax};
use super::formats::{ReasoningMarks, ToolFormat};
use super::harmony::{CHANNEL, CONSTRAIN, MESSAGE, START};
use super::tools::{ToolSchema, WrittenArgument};
use crate::grammar::{GrammarError, RULES_BYTES_MAX, with_white_space};
use crate::tokens::{TokenBytes, Tokenizer};

/// Longest name of a special token in a mark.
const SPECIAL_BYTES_MAX: usize = 64;

/// The calls that an answer has to be, or may be.
#[derive(Clone, Copy, Debug)]
pub struct AllowedCalls<'a> {
    /// The tools of which one is called.
    pub tools: &'a [ToolSchema],
    /// Whether several calls may follow each other.
    pub parallel: bool,
    /// Whether text may stand before them or in their place.
    pub or_text: bool,
}

/// Lark rules of a whole answer: `start`, which refers to `@answer` if a format may follow.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AnswerRules(String);

impl AnswerRules {
    /// The rules.
    pub fn lark(&self) -> &str {
        &self.0
    }
}

/// The rules of an answer in a style: calls, or a format, or either; before both there may be reasoning. `None` if
/// nothing but the format can be.
pub(super) fn answer_rules(
    style: Style,
    tokenizer: &Tokenizer,
    prompt: &str,
    calls: Option<&AllowedCalls>,
    has_format: bool,
) -> Result<Option<AnswerRules>, GrammarError> {
    let mut lark = Lark { tokenizer, rules: String::new(), error: None };
    match (style, calls) {
        (_, None) => {}
        (Style::Harmony, Some(calls)) => harmony_calls(&mut lark, calls),
        (Style::Marked { tools: format, .. }, Some(calls)) => marked_calls(&mut lark, format, calls),
    }
    let before = match style {
        Style::Harmony => harmony_reasoning(&mut lark),
        Style::Marked { reasoning, .. } => reasoning.and_then(|marks| marked_reasoning(&mut lark, marks, prompt)),
    };
    let header = match style {
        Style::Harmony if before.is_some() => lark.literal(&format!("{CHANNEL}final{MESSAGE}")),
        _ => String::new(),
    };
    let answer = match (calls, has_format) {
        (Some(_), true) => format!("(calls | {header} @answer)"),
        (Some(calls), false) => if calls.or_text { "text_or_calls" } else { "calls" }.into(),
        (None, _) if before.is_none() => return Ok(None),
        (None, _) => format!("{header} @answer"),
    };
    match lark.error {
        Some(error) => Err(error),
        None => Ok(Some(AnswerRules(format!("start: {} {answer}\n{}", before.unwrap_or_default(), lark.rules)))),
    }
}

/// Rules in the making.
struct Lark<'a> {
    tokenizer: &'a Tokenizer,
    rules: String,
    /// The first schema that cannot be a rule.
    error: Option<GrammarError>,
}

/// A piece of a mark.
enum Piece {
    Special(u32),
    Text(String),
}

impl Lark<'_> {
    /// Adds a rule, until there are more than a compiler takes.
    fn rule(&mut self, name: &str, body: &str) {
        if self.is_full() {
            return;
        }
        let _ = writeln!(self.rules, "{name}: {body}");
    }

    /// Whether the rules are too long to be compiled, so that no more are needed.
    fn is_full(&self) -> bool {
        self.rules.len() > RULES_BYTES_MAX
    }

    /// Special tokens, and the text between them.
    fn pieces(&self, mark: &str) -> Vec<Piece> {
        let special = |name: &str| {
            let id = self.tokenizer.id(name)?;
            matches!(self.tokenizer.token_bytes(id), TokenBytes::Special(_)).then_some(id)
        };
        let (mut pieces, mut text, mut rest) = (Vec::new(), String::new(), mark);
        while let Some(first) = rest.chars().next() {
            let name = match first {
                '<' | '[' => near(rest).find_map(|bytes| Some((special(&rest[..bytes])?, bytes))),
                _ => None,
            };
            match name {
                Some((id, bytes)) => {
                    if !text.is_empty() {
                        pieces.push(Piece::Text(std::mem::take(&mut text)));
                    }
                    pieces.push(Piece::Special(id));
                    rest = &rest[bytes..];
                }
                None => {
                    text.push(first);
                    rest = &rest[first.len_utf8()..];
                }
            }
        }
        if !text.is_empty() {
            pieces.push(Piece::Text(text));
        }
        pieces
    }

    /// A text as an expression, with its special tokens.
    fn literal(&self, text: &str) -> String {
        expression(&self.pieces(text))
    }

    /// Any text up to `end`, and that, as an expression; rules for it are called `name`.
    fn text_until(&mut self, name: &str, end: &str) -> String {
        let pieces = self.pieces(end);
        match pieces.first() {
            Some(Piece::Text(suffix)) => {
                self.rule(&format!("{name}[suffix={}]", quoted(suffix)), "/(?s:.*)/");
                join([name.to_owned(), expression(&pieces[1..])].into_iter())
            }
            _ => {
                self.rule(name, "/(?s:.*)/");
                join([name.to_owned(), expression(&pieces)].into_iter())
            }
        }
    }

    /// A rule for any text without `mark`.
    fn text_without(&mut self, name: &str, mark: &str) {
        let body = match &self.pieces(mark)[..] {
            // Special tokens are no text.
            [Piece::Text(mark)] => {
                let mark = fancy_regex::escape(mark).replace('/', r"\/");
                format!("/(?s:.*)/ & ~/(?s:.*){mark}(?s:.*)/")
            }
            _ => "/(?s:.*)/".to_owned(),
        };
        self.rule(name, &body);
    }

    /// A rule for JSON that is valid by `schema`.
    fn json(&mut self, name: &str, schema: &Value) -> String {
        match with_white_space(schema) {
            Ok(schema) => self.rule(name, &format!("%json {schema}")),
            Err(error) => _ = self.error.get_or_insert(error),
        }
        name.to_owned()
    }
}

/// Lengths at which a name of a special token may end.
fn near(text: &str) -> impl Iterator<Item = usize> {
    let ends = text.char_indices().map(|(at, c)| (at + c.len_utf8(), c));
    let near = ends.take_while(|(end, _)| *end <= SPECIAL_BYTES_MAX);
    near.filter(|(_, c)| matches!(c, '>' | ']')).map(|(end, _)| end)
}

fn expression(pieces: &[Piece]) -> String {
    join(pieces.iter().map(|piece| match piece {
        Piece::Special(id) => format!("<[{id}]>"),
        Piece::Text(text) => quoted(text),
    }))
}

fn join(parts: impl Iterator<Item = String>) -> String {
    parts.filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" ")
}

/// A string of Lark, which is one of JSON; empty for an empty text.
fn quoted(text: &str) -> String {
    if text.is_empty() { String::new() } else { Value::from(text).to_string() }
}

fn marked_reasoning(lark: &mut Lark, marks: &ReasoningMarks, prompt: &str) -> Option<String> {
    let end = prompt.trim_end();
    if end.ends_with(marks.close) {
        return None;
    }
    let text = lark.text_until("reasoning", marks.close);
    lark.rule("blank", r"/\n{0,2}/");
    Some(if marks.are_open(prompt) {
        format!("{text} blank")
    } else {
        format!("({} {text} blank)?", lark.literal(marks.open))
    })
}

fn harmony_reasoning(lark: &mut Lark) -> Option<String> {
    let specials = [START, CHANNEL, MESSAGE].iter().all(|mark| !matches!(lark.pieces(mark)[..], [Piece::Text(_)]));
    if !specials {
        return None;
    }
    let open = lark.literal(&format!("{CHANNEL}analysis{MESSAGE}"));
    let text = lark.text_until("reasoning", &format!("<|end|>{START}assistant"));
    Some(format!("({open} {text})?"))
}

fn harmony_calls(lark: &mut Lark, allowed: &AllowedCalls) {
    let mut calls = Vec::new();
    for (i, tool) in allowed.tools.iter().enumerate() {
        let arguments = lark.json(&format!("json_{i}"), &tool.closed_parameters());
        let head = format!("{CHANNEL}commentary to=functions.{} {CONSTRAIN}json{MESSAGE}", tool.name);
        calls.push(format!("{} {arguments}", lark.literal(&head)));
    }
    lark.rule("calls", &calls.join(" | "));
}

fn marked_calls(lark: &mut Lark, format: &ToolFormat, allowed: &AllowedCalls) {
    if matches!(format.syntax, CallSyntax::Gemma | CallSyntax::Python) {
        value_rules(lark, format.syntax);
    }
    let mut names = Vec::new();
    for (i, tool) in allowed.tools.iter().enumerate() {
        let body = call(lark, format, tool, i);
        let body = join([body, lark.literal(format.close)].into_iter());
        names.push(format!("call_{i}"));
        lark.rule(&format!("call_{i}"), &body);
    }
    lark.rule("call", &names.join(" | "));
    let is_bare = matches!(format.syntax, CallSyntax::NamedJson { may_be_bare: true, .. });
    let mark = lark.literal(format.open);
    let more = format!("({})*", join([lark.literal(format.separator), mark.clone(), "call".into()].into_iter()));
    // A list of Python's calls is between the marks of one call.
    let more =
        if allowed.parallel && !is_bare && !matches!(format.syntax, CallSyntax::Python) { more } else { String::new() };
    let (open, close) = if is_bare { ("", "") } else { format.section };
    let whole = [lark.literal(open), mark, "call".into(), more.clone(), lark.literal(close)];
    lark.rule("calls", &join(whole.into_iter()));
    if allowed.or_text {
        let before = lark.text_until("before_call", format.open.trim_end());
        let gap = quoted(&format.open[format.open.trim_end().len()..]);
        lark.rule("text_or_calls", &format!("TEXT | {}", join([before, gap, "call".into(), more].into_iter())));
        lark.text_without("TEXT", format.open.trim_end());
    }
}

/// What is between the marks of a call of `tool`.
fn call(lark: &mut Lark, format: &ToolFormat, tool: &ToolSchema, i: usize) -> String {
    let name = tool.name.as_str();
    match format.syntax {
        CallSyntax::NamedJson { arguments: key, .. } => {
            let head = format!("{{\"name\": {}, \"{key}\": ", Value::from(name));
            let arguments = lark.json(&format!("json_{i}"), &tool.closed_parameters());
            join([quoted(&head), arguments, quoted("}")].into_iter())
        }
        CallSyntax::Json { name_end, head } => {
            let head = call_head(lark, head, name);
            let arguments = lark.json(&format!("json_{i}"), &tool.closed_parameters());
            join([head, lark.literal(name_end), arguments].into_iter())
        }
        CallSyntax::Parameters { name_end, key, value, has_type, .. } => {
            let mut parts = vec![lark.literal(&format!("{name}{name_end}"))];
            for (k, (argument, required)) in tool.arguments().into_iter().enumerate() {
                let rule = format!("argument_{i}_{k}");
                let before =
                    lark.literal(&format!("{}{argument}{}{}", key.0, key_end(format, tool, argument), value.0));
                let inner = parameter(lark, &rule, (tool, argument), has_type, value.1);
                parts.push(format!("({before} {inner}){}", if required { "" } else { "?" }));
            }
            join(parts.into_iter())
        }
        CallSyntax::Gemma => {
            let arguments = keyword_arguments(lark, tool, i, ":");
            join([quoted(&format!("{name}{{")), arguments, quoted("}")].into_iter())
        }
        CallSyntax::Python => {
            let arguments = keyword_arguments(lark, tool, i, "=");
            join([quoted(&format!("[{name}(")), arguments, quoted(")]")].into_iter())
        }
    }
}

fn call_head(lark: &Lark, head: CallHead, name: &str) -> String {
    match head {
        CallHead::Name => quoted(name),
        CallHead::NameThenId(mark) => format!("{} ({} /[a-zA-Z0-9]{{9}}/)?", quoted(name), lark.literal(mark)),
        CallHead::IdThenName(mark) => format!("/[a-zA-Z0-9_-]{{1,40}}/ {} {}", lark.literal(mark), quoted(name)),
        CallHead::Numbered { prefix } => format!("{} /[0-9]{{1,3}}/", quoted(&format!("{prefix}{name}:"))),
    }
}

/// The mark behind an argument's name, with the attribute that DeepSeek's format has there.
fn key_end(format: &ToolFormat, tool: &ToolSchema, argument: &str) -> String {
    match format.syntax {
        CallSyntax::Parameters { has_type: true, .. } => {
            format!("\" string=\"{}\">", matches!(tool.written_as(argument), WrittenArgument::Text(_)))
        }
        CallSyntax::Parameters { key, .. } => key.1.to_owned(),
        _ => String::new(),
    }
}

/// The value of an argument and the mark behind it: a string as it is, anything else as JSON. Where an attribute
/// `has_type`, a string or null is JSON.
fn parameter(
    lark: &mut Lark,
    rule: &str,
    (tool, argument): (&ToolSchema, &str),
    has_type: bool,
    close: &str,
) -> String {
    if lark.is_full() {
        return rule.to_owned();
    }
    let (strings, null) = match tool.written_as(argument) {
        WrittenArgument::Text(strings) => (strings, None),
        WrittenArgument::TextOrNull(strings) if !has_type => (strings, Some("null")),
        _ => {
            let json = lark.json(rule, &tool.argument(argument).unwrap_or_default());
            return join([json, lark.literal(close)].into_iter());
        }
    };
    match string_choices(strings) {
        Some(choices) => {
            let choices = choices.into_iter().chain(null).map(quoted).collect::<Vec<_>>().join(" | ");
            join([format!("({choices})"), lark.literal(close)].into_iter())
        }
        None => lark.text_until(rule, close),
    }
}

/// The strings that an `enum` or `const` allows.
fn string_choices(schema: &Value) -> Option<Vec<&str>> {
    let values = match (schema.get("enum"), schema.get("const")) {
        (Some(Value::Array(values)), _) => values.iter().collect(),
        (None, Some(value)) => vec![value],
        _ => return None,
    };
    let texts: Vec<&str> = values.into_iter().filter_map(Value::as_str).filter(|text| !text.is_empty()).collect();
    (!texts.is_empty()).then_some(texts)
}

/// Rules for values in the syntax of Gemma or Python.
fn value_rules(lark: &mut Lark, syntax: CallSyntax) {
    let (string, words) = match syntax {
        CallSyntax::Gemma => {
            let quote = lark.literal("<|\"|>");
            let text = lark.text_until("string_text", "<|\"|>");
            (format!("{quote} {text}"), r#""true" | "false" | "null""#)
        }
        _ => (r#"/"([^"\\\n]|\\["\\nt])*"/"#.to_owned(), r#""True" | "False" | "None""#),
    };
    lark.rule("string", &string);
    lark.rule("number", r"/-?[0-9]{1,18}(\.[0-9]{1,18})?/");
    lark.rule("word", words);
    let pair = if matches!(syntax, CallSyntax::Gemma) { "/[A-Za-z_][A-Za-z0-9_]*/ \":\"" } else { "string \": \"" };
    lark.rule("pair", &format!("{pair} value"));
    lark.rule("list", r#""[" (value ("," value)*)? "]""#);
    lark.rule("dictionary", r#""{" (pair ("," pair)*)? "}""#);
    lark.rule("value", "string | number | word | list | dictionary");
}

/// Keyword arguments in the order of the schema, with commas between those that are given.
fn keyword_arguments(lark: &mut Lark, tool: &ToolSchema, i: usize, equals: &str) -> String {
    let arguments = tool.arguments();
    let comma = if equals == "=" { ", " } else { "," };
    let (mut first, mut rest) = (quoted(""), quoted(""));
    for (k, (argument, required)) in arguments.iter().enumerate().rev() {
        let kind = tool.property(argument).and_then(|schema| schema.get("type"));
        let value = match kind.and_then(Value::as_str) {
            Some("string") => "string",
            Some("integer" | "number") => "number",
            Some("array") => "list",
            Some("object") => "dictionary",
            _ => "value",
        };
        let pair = format!("{} {value}", quoted(&format!("{argument}{equals}")));
        let (first_rule, rest_rule) = (format!("first_{i}_{k}"), format!("rest_{i}_{k}"));
        let (given, later) = (join([pair.clone(), rest.clone()].into_iter()), first.clone());
        let or_later = if later.is_empty() { format!("({given})?") } else { format!("{given} | {later}") };
        lark.rule(&first_rule, if *required { &given } else { &or_later });
        let mark = if *required { "" } else { "?" };
        let body = join([format!("({} {pair}){mark}", quoted(comma)), rest].into_iter());
        lark.rule(&rest_rule, &body);
        (first, rest) = (first_rule, rest_rule);
    }
    first
}
