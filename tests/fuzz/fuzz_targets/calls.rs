//! Generated texts, any: reasoning, content and tool calls are the same whether the text comes whole or in pieces, and
//! in time.

#![no_main]

use larder_text::{ChatFormat, ChatTemplate, OutputPart, Tokenizer, TokenizerConfig, ToolSchema};
use larder_fuzz::in_time;
use libfuzzer_sys::fuzz_target;
use serde_json::json;

/// What is in the templates of each format. The first byte of an input chooses one.
const SIGNS: &[&str] = &[
    "",
    "<think> <tool_call> \"arguments\": ",
    "<think> <tool_call> <arg_key>",
    "<think> <tool_call> <function=",
    "<|tool_call>call: <|channel>",
    "DSML function_calls>",
    "DSML tool_calls> <think>",
    "<｜tool▁sep｜> ```json",
    "<｜tool▁sep｜>",
    "<|tool_call_argument_begin|>",
    "<|tool_call:args|>",
    "[TOOL_CALLS] [ARGS] [THINK]",
    "[TOOL_CALLS]",
    "<minimax:tool_call> <invoke name= <think>",
    "'<arg_key{}>' ':opensource' '<think{}>'",
    "<|tool_call|>",
    "<|tool_call_start|>[",
    "\"parameters\" {\"name\": function name",
    "<|start|> <|channel|> <|message|>",
];

fuzz_target!(|bytes: &[u8]| {
    let [kind, text @ ..] = bytes else { return };
    let Ok(text) = std::str::from_utf8(text) else { return };
    let kind = usize::from(*kind) % SIGNS.len();
    FORMATS.with(|formats| compare(SIGNS[kind], &formats[kind], text));
});

thread_local! {
    /// A format for each of the signs.
    static FORMATS: Vec<ChatFormat> = {
        let config = TokenizerConfig::from_bytes(b"{}").unwrap();
        let tokenizer = include_bytes!("../../golden/olmoe/tokenizer.json");
        let tokenizer = Tokenizer::from_bytes(tokenizer, &config).unwrap();
        let format = |signs: &&str| {
            let template = format!("{{% raw %}}{signs}{{% endraw %}}");
            let template = ChatTemplate::new(Some(template.as_bytes()), &config).unwrap().unwrap();
            ChatFormat::of_template(&template, &tokenizer)
        };
        SIGNS.iter().map(format).collect()
    };
}

/// Parses a text whole and character by character.
fn compare(signs: &str, format: &ChatFormat, text: &str) {
    let parameters = json!({"type": "object", "properties": {
        "a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": ["boolean", "null"]}, "d": {"type": "array"},
    }});
    let tools = || vec![ToolSchema { name: "add".into(), parameters: parameters.clone() }];

    let whole = in_time(|| {
        let mut parser = format.parser("", tools());
        let mut parts = parser.push(text);
        parts.extend(parser.finish());
        joined(parts)
    });
    // Searching again after each piece may cost the square of the length.
    if text.len() <= 4096 {
        let pieces = in_time(|| {
            let mut parser = format.parser("", tools());
            let mut parts: Vec<OutputPart> = text.split_inclusive(|_| true).flat_map(|c| parser.push(c)).collect();
            parts.extend(parser.finish());
            joined(parts)
        });
        assert_eq!(whole, pieces, "{signs}: {text:?}");
    }
}

/// Parts of one kind that follow each other are one.
fn joined(parts: Vec<OutputPart>) -> Vec<OutputPart> {
    let mut out: Vec<OutputPart> = vec![];
    for part in parts {
        match (out.last_mut(), part) {
            (Some(OutputPart::Content(text)), OutputPart::Content(more))
            | (Some(OutputPart::Reasoning(text)), OutputPart::Reasoning(more))
            | (Some(OutputPart::CallArguments(text)), OutputPart::CallArguments(more)) => *text += &more,
            (_, part) => out.push(part),
        }
    }
    out
}
