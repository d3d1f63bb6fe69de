//! Tool calls of models whose template knows none: the tools are described in the system turn, and calls and results
//! are text between marks.

use std::borrow::Cow;
use std::fmt::Write;

use serde_json::{Value, json};

use super::formats::GENERIC;

/// Marks around the result of a call.
const RESULT: (&str, &str) = ("<tool_response>\n", "\n</tool_response>");

/// Messages that a template without tools can print. They are as given where there is nothing to describe.
pub fn described<'a>(messages: &'a [Value], tools: Option<&[Value]>) -> Cow<'a, [Value]> {
    let has_calls = |message: &Value| message["role"] == "tool" || message.get("tool_calls").is_some();
    if tools.is_none() && !messages.iter().any(has_calls) {
        return Cow::Borrowed(messages);
    }
    let mut all: Vec<Value> = messages.iter().map(as_text).collect();
    if let Some(tools) = tools {
        let description = description(tools);
        match all.first_mut().filter(|first| first["role"] == "system") {
            Some(system) => system["content"] = format!("{}\n\n{description}", content(system)).into(),
            None => all.insert(0, json!({"role": "system", "content": description})),
        }
    }
    Cow::Owned(all)
}

/// A line for each tool, and how to call one.
fn description(tools: &[Value]) -> String {
    let (open, close) = (GENERIC.open, GENERIC.close);
    let mut text = "# Tools\n\nTools that can be called, one per line:\n".to_owned();
    for tool in tools {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{}", tool.get("function").unwrap_or(tool));
    }
    text + &format!(
        "\nA call is JSON between two marks, and ends the answer:\n{open}{{\"name\": \"…\", \"arguments\": {{…}}}}{close}\n\
         Its result follows between {} and {}.",
        RESULT.0.trim(),
        RESULT.1.trim()
    )
}

/// A message whose calls, or whose result of one, are part of its content.
fn as_text(message: &Value) -> Value {
    if message["role"] == "tool" {
        return json!({"role": "user", "content": format!("{}{}{}", RESULT.0, content(message), RESULT.1)});
    }
    let Some(calls) = message["tool_calls"].as_array() else { return message.clone() };
    let call = |call: &Value| {
        let function = &call["function"];
        let call = json!({"name": function["name"], "arguments": function["arguments"]});
        format!("{}{call}{}", GENERIC.open, GENERIC.close)
    };
    let text = Some(content(message)).filter(|text| !text.is_empty()).map(str::to_owned);
    let parts: Vec<String> = text.into_iter().chain(calls.iter().map(call)).collect();
    let mut message = message.clone();
    message["content"] = parts.join("\n").into();
    message.as_object_mut().map(|fields| fields.remove("tool_calls"));
    message
}

fn content(message: &Value) -> &str {
    message["content"].as_str().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat_output::tests::{parse, tools};
    use crate::chat_output::{AllowedCalls, ChatFormat};
    use crate::grammar::testing;
    use larder_core::Xoshiro256;

    #[test]
    fn tools_calls_and_results_become_text() {
        let tool = json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}});
        let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}});
        let messages = [
            json!({"role": "system", "content": "Be brief."}),
            json!({"role": "user", "content": "hi"}),
            json!({"role": "assistant", "content": "I look.", "tool_calls": [call]}),
            json!({"role": "tool", "content": "42", "tool_call_id": "1"}),
        ];
        let all = described(&messages, Some(std::slice::from_ref(&tool)));
        let system = content(&all[0]);
        assert!(system.starts_with("Be brief.\n\n# Tools") && system.contains("\n{\"name\":\"f\",\"parameters\""));
        assert_eq!(all[1], messages[1]);
        let called = "I look.\n<tool_call>\n{\"name\":\"f\",\"arguments\":{\"a\":1}}\n</tool_call>";
        assert_eq!(all[2], json!({"role": "assistant", "content": called}));
        assert_eq!(all[3], json!({"role": "user", "content": "<tool_response>\n42\n</tool_response>"}));
        assert_eq!(described(&messages[1..2], Some(&[tool]))[0]["role"], "system");
    }

    #[test]
    fn messages_without_tools_stay_as_they_are() {
        let messages = [json!({"role": "user", "content": "hi"})];
        assert!(matches!(described(&messages, None), Cow::Borrowed(_)));
    }

    #[test]
    fn a_generic_call_is_held_in_form_once_it_has_begun() {
        for special in [&[][..], &["<tool_call>", "</tool_call>"]] {
            let tokenizer = testing::byte_tokenizer(&["<tool_call>", "\n", "now", "I look. "], special);
            let (compiler, mut rng) = (testing::compiler(&tokenizer), Xoshiro256::new(5));
            let (format, tools) = (ChatFormat::plain(), tools());
            let allowed = AllowedCalls { tools: &tools[1..], parallel: false, or_text: true };
            let rules = format.answer_rules(&tokenizer, "", Some(&allowed), false).unwrap().unwrap();
            let compiled = compiler.compile_answer(&rules, None).unwrap();
            let (mut plain, mut called) = (0, 0);
            for _ in 0..200 {
                let Some(text) = testing::random_text(&tokenizer, compiled.clone(), &mut rng, 300) else { continue };
                let parsed = parse(format.parser("", tools.clone()), &[&text]);
                let calls = parsed.calls();
                assert_eq!(calls.len(), usize::from(text.contains("<tool_call>")), "{text}");
                assert!(calls.iter().all(|(name, arguments)| *name == "now" && arguments.is_object()), "{text}");
                (plain, called) = (plain + usize::from(calls.is_empty()), called + calls.len());
            }
            assert!(plain > 0 && called > 0, "{plain} and {called}");
        }
    }
}
