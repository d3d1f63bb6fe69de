//! Chat templates, any text: opened and rendered within their budget, or refused in one sentence.

#![no_main]

use larder_text::{ChatInput, ChatTemplate, TokenizerConfig};
use larder_fuzz::in_time;
use libfuzzer_sys::fuzz_target;
use serde_json::json;

fuzz_target!(|bytes: &[u8]| {
    let config = TokenizerConfig::from_bytes(br#"{"bos_token": "<s>", "eos_token": "</s>"}"#).unwrap();
    let tools = [json!({"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}})];
    let messages = [
        json!({"role": "system", "content": "Be brief. <é漢>"}),
        json!({"role": "user", "content": "Hi\n  there, 1 and 2"}),
        json!({"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}),
        json!({"role": "tool", "content": "3"}),
    ];
    let input = ChatInput { tools: Some(&tools), ..ChatInput::new(&messages) };
    let error = in_time(|| match ChatTemplate::new(Some(bytes), &config) {
        Ok(template) => template.expect("a template was given").render(&input).err(),
        Err(error) => Some(error),
    });
    if let Some(error) = error {
        let text = error.to_string();
        assert!(!text.is_empty() && !text.contains('\n'), "{text:?}");
    }
});
