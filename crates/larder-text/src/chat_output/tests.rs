//! Tests of parsers and grammars of every format: whole texts, any pieces, and texts that a forced grammar generates.

use serde_json::{Value, json};

use super::formats::{self, ToolFormat, named};
use super::harmony::HarmonyParser;
use super::marked::MarkedParser;
use super::*;
use crate::TextFormat;
use crate::grammar::testing;
use larder_core::Xoshiro256;

/// What an answer consists of.
#[derive(PartialEq, Debug, Default)]
pub(super) struct Parsed {
    pub(super) reasoning: String,
    pub(super) content: String,
    /// Name, id and arguments of each call.
    calls: Vec<(String, Option<String>, String)>,
}

impl Parsed {
    fn of(parts: Vec<OutputPart>) -> Parsed {
        let mut parsed = Parsed::default();
        for part in parts {
            match part {
                OutputPart::Reasoning(text) => parsed.reasoning += &text,
                OutputPart::Content(text) => parsed.content += &text,
                OutputPart::CallName { name, id } => parsed.calls.push((name, id, String::new())),
                OutputPart::CallArguments(text) => parsed.calls.last_mut().expect("a name comes first").2 += &text,
            }
        }
        parsed
    }

    pub(super) fn calls(&self) -> Vec<(&str, Value)> {
        let json = |text: &str| serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
        self.calls.iter().map(|(name, _, arguments)| (name.as_str(), json(arguments))).collect()
    }
}

pub(super) fn parse(mut parser: Box<dyn OutputParser>, pieces: &[&str]) -> Parsed {
    let mut parts: Vec<OutputPart> = pieces.iter().flat_map(|piece| parser.push(piece)).collect();
    parts.extend(parser.finish());
    Parsed::of(parts)
}

/// The text parsed whole, after checking that any pieces give the same.
fn parsed(parser: impl Fn() -> Box<dyn OutputParser>, text: &str) -> Parsed {
    let whole = parse(parser(), &[text]);
    let chars: Vec<String> = text.chars().map(String::from).collect();
    let chars: Vec<&str> = chars.iter().map(String::as_str).collect();
    assert_eq!(parse(parser(), &chars), whole, "by characters: {text}");
    for (at, _) in text.char_indices() {
        assert_eq!(parse(parser(), &[&text[..at], &text[at..]]), whole, "cut at {at}: {text}");
    }
    whole
}

pub(super) fn tools() -> Vec<ToolSchema> {
    let weather = json!({
        "type": "object",
        "properties": {
            "city": {"type": "string"}, "days": {"type": "integer", "minimum": 0, "maximum": 99}, "units": {"enum": ["metric", "imperial"]},
            "where": {"type": "object", "properties": {}, "additionalProperties": false},
        },
        "required": ["city"],
    });
    let named = |name: &str, parameters| ToolSchema { name: name.into(), parameters };
    vec![
        named("weather", weather),
        named("now", json!({"type": "object", "properties": {}, "additionalProperties": false})),
    ]
}

fn marked(format: &'static str, prompt: &'static str) -> impl Fn() -> Box<dyn OutputParser> {
    let reasoning = formats::reasoning("<think>", |_| false);
    move || Box::new(MarkedParser::new(reasoning, Some(named(format)), tools(), prompt))
}

fn without_tools(prompt: &'static str) -> impl Fn() -> Box<dyn OutputParser> {
    let reasoning = formats::reasoning("<think>", |_| false);
    move || Box::new(MarkedParser::new(reasoning, None, vec![], prompt))
}

/// A call of `weather` and one of `now`, as each format writes them.
const TWO_CALLS: [(&str, &str); 17] = [
    (
        "gemma4",
        "<|tool_call>call:weather{city:<|\"|>Bad \"Ems\"\n<|\"|>,days:3}<tool_call|><|tool_call>call:now{}<tool_call|>",
    ),
    (
        "deepseek_v3.2",
        "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"weather\">\n<｜DSML｜parameter name=\"city\" string=\"true\">Bad \"Ems\"\n\
         </｜DSML｜parameter>\n<｜DSML｜parameter name=\"days\" string=\"false\">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n\
         <｜DSML｜invoke name=\"now\">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    ),
    (
        "deepseek_v4",
        "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"weather\">\n<｜DSML｜parameter name=\"city\" string=\"true\">Bad \"Ems\"\n\
         </｜DSML｜parameter>\n<｜DSML｜parameter name=\"days\" string=\"false\">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n\
         <｜DSML｜invoke name=\"now\">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
    ),
    (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{\"city\": \"Bad \\\"Ems\\\"\\n\", \"days\": 3}\n\
         ```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    (
        "deepseek_v3.1",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"city\": \"Bad \\\"Ems\\\"\\n\", \"days\": 3}<｜tool▁call▁end｜>\
         <｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>\
         {\"city\": \"Bad \\\"Ems\\\"\\n\", \"days\": 3}<|tool_call_end|><|tool_call_begin|>functions.now:1\
         <|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    (
        "solar_open",
        "<|tool_calls|><|tool_call:begin|>abc<|tool_call:name|>weather<|tool_call:args|>{\"city\": \"Bad \\\"Ems\\\"\\n\", \"days\": 3}\
         <|tool_call:end|><|tool_call:begin|>def<|tool_call:name|>now<|tool_call:args|>{}<|tool_call:end|>",
    ),
    (
        "mistral",
        "[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{\"city\": \"Bad \\\"Ems\\\"\\n\", \"days\": 3}[TOOL_CALLS]now[ARGS]{}",
    ),
    (
        "mistral_list",
        "[TOOL_CALLS] [{\"name\": \"weather\", \"arguments\": {\"city\": \"Bad \\\"Ems\\\"\\n\", \"days\": 3}}, \
         {\"name\": \"now\", \"arguments\": {}}]",
    ),
    (
        "minimax_m2",
        "<minimax:tool_call>\n<invoke name=\"weather\">\n<parameter name=\"city\">Bad \"Ems\"\n</parameter>\n<parameter name=\"days\">3\
         </parameter>\n</invoke>\n<invoke name=\"now\">\n</invoke>\n</minimax:tool_call>",
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\nBad \"Ems\"\n\n</parameter>\n<parameter=days>\n3\n</parameter>\n\
         </function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
    (
        "hunyuan_v3",
        "<tool_calls:opensource>\n<tool_call:opensource>weather<tool_sep:opensource>\n<arg_key:opensource>city</arg_key:opensource>\n\
         <arg_value:opensource>Bad \"Ems\"\n</arg_value:opensource>\n<arg_key:opensource>days</arg_key:opensource>\n\
         <arg_value:opensource>3</arg_value:opensource>\n</tool_call:opensource>\n<tool_call:opensource>now<tool_sep:opensource>\n\
         </tool_call:opensource>\n</tool_calls:opensource>",
    ),
    (
        "glm4",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bad \"Ems\"\n</arg_value>\n<arg_key>days</arg_key>\n\
         <arg_value>3</arg_value>\n</tool_call>\n<tool_call>now</tool_call>",
    ),
    (
        "hermes",
        "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Bad \\\"Ems\\\"\\n\", \"days\": 3}}\n</tool_call>\n\
         <tool_call>\n{\"arguments\": \"{}\", \"name\": \"now\"}\n</tool_call>",
    ),
    (
        "granite3",
        "<|tool_call|>[{\"name\": \"weather\", \"arguments\": {\"city\": \"Bad \\\"Ems\\\"\\n\", \"days\": 3}}, {\"name\": \"now\"}]",
    ),
    ("lfm2", "<|tool_call_start|>[weather(city=\"Bad \\\"Ems\\\"\\n\", days=3), now()]<|tool_call_end|>"),
    (
        "llama3",
        "{\"name\": \"weather\", \"parameters\": {\"city\": \"Bad \\\"Ems\\\"\\n\", \"days\": 3}}; \
         {\"type\": \"function\", \"name\": \"now\", \"parameters\": {}}",
    ),
];

#[test]
fn calls_of_every_format_are_read_in_any_pieces() {
    assert_eq!(TWO_CALLS.map(|(name, _)| name).to_vec(), formats::names());
    for (name, text) in TWO_CALLS {
        let parsed = parsed(marked(name, ""), text);
        let expected = vec![("weather", json!({"city": "Bad \"Ems\"\n", "days": 3})), ("now", json!({}))];
        assert_eq!((parsed.calls(), parsed.content.as_str()), (expected, ""), "{name}");
    }
}

#[test]
fn reasoning_and_content_come_before_calls() {
    let call = "<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>";
    let text = format!("<think>\nhm, a<b\n</think>\n\nI look.\n\n{call}\n");
    let whole = parsed(marked("hermes", "assistant\n"), &text);
    assert_eq!((whole.reasoning.as_str(), whole.content.as_str()), ("hm, a<b", "I look."));
    assert_eq!(whole.calls(), [("now", json!({}))]);
    let opened = parsed(marked("hermes", "assistant\n<think>\n"), "hm</think>Yes, <tool or <thi");
    assert_eq!((opened.reasoning.as_str(), opened.content.as_str()), ("hm", "Yes, <tool or <thi"));
}

#[test]
fn without_tools_calls_are_content() {
    let call = "<tool_call>\n{\"name\": \"now\"}\n</tool_call>";
    assert_eq!(parsed(without_tools(""), call).content, call);
    let text = "  Use <think> here, </think> there.\n";
    assert_eq!(parsed(without_tools(""), text).content, text);
    let thought = parsed(without_tools(""), "<think>a</think>\nUse </think>.");
    assert_eq!((thought.reasoning.as_str(), thought.content.as_str()), ("a", "Use </think>."));
}

#[test]
fn what_is_no_call_is_content() {
    for (format, text) in [
        ("hermes", "<tool_call> is a mark"),
        ("hermes", "<tool_call>\n{\"nam"),
        ("hermes", "<tool_call>[1, 2]"),
        ("llama3", "{\"name\": \"nothing I know\", \"parameters\": {}}"),
        ("llama3", "{\"a\": [1, {\"b\": 2}]}"),
        ("glm4", "<tool_call>"),
        ("lfm2", "<|tool_call_start|>print hello<|tool_call_end|>"),
        ("gemma4", "<|tool_call>call:me maybe"),
        ("kimi_k2", "plain {text} [with] <marks>"),
    ] {
        let parsed = parsed(marked(format, ""), text);
        assert_eq!((parsed.content.as_str(), parsed.calls.len()), (text, 0), "{format}");
    }
}

#[test]
fn calls_behind_what_is_no_call_are_read() {
    let call = r#"<|python_tag|>{"name": "now", "parameters": {}}"#;
    let got = parsed(marked("llama3", ""), &format!("{{\"  a\"B {call}"));
    assert_eq!((got.content.as_str(), got.calls()), ("{\"  a\"B", vec![("now", json!({}))]));
    let got =
        parsed(marked("hermes", ""), "<tool_call>no <tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>");
    assert_eq!((got.content.as_str(), got.calls()), ("<tool_call>no", vec![("now", json!({}))]));
}

#[test]
fn a_second_name_ends_a_call() {
    let got = parsed(marked("hermes", ""), r#"<tool_call>{"name": "now", "name": 1, "a": 2}"#);
    assert_eq!((got.calls.len(), got.content.as_str()), (1, r#", "a": 2}"#));
}

#[test]
fn ids_of_the_model_are_kept() {
    let ids = |format: &str| {
        let text = TWO_CALLS.iter().find(|(name, _)| *name == format).unwrap().1;
        let parser: Box<dyn OutputParser> = Box::new(MarkedParser::new(None, Some(named(format)), tools(), ""));
        parse(parser, &[text]).calls.into_iter().map(|(_, id, _)| id).collect::<Vec<_>>()
    };
    let id = |text: &str| Some(text.to_owned());
    assert_eq!(ids("kimi_k2"), [id("functions.weather:0"), id("functions.now:1")]);
    assert_eq!(ids("solar_open"), [id("abc"), id("def")]);
    assert_eq!(ids("mistral"), [id("abcdefghi"), None]);
    assert_eq!(ids("hermes"), [None, None]);
}

#[test]
fn arguments_arrive_while_they_are_generated() {
    for (format, before, after) in [
        ("hermes", "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Lon", "don\"}}\n</tool_call>"),
        ("glm4", "<tool_call>weather<arg_key>city</arg_key><arg_value>Lon", "don</arg_value></tool_call>"),
    ] {
        let mut parser = marked(format, "")();
        let early = Parsed::of(parser.push(before));
        assert_eq!((early.calls[0].0.as_str(), early.calls[0].2.as_str()), ("weather", "{\"city\": \"Lon"), "{format}");
        let mut rest = vec![OutputPart::CallName { name: "weather".into(), id: None }];
        rest.extend(parser.push(after));
        assert_eq!(Parsed::of(rest).calls[0].2, "don\"}", "{format}");
    }
}

#[test]
fn values_are_json_unless_the_schema_says_string() {
    let text = "<tool_call>weather<arg_key>city</arg_key><arg_value>42</arg_value><arg_key>days</arg_key><arg_value>two\
                </arg_value><arg_key>units</arg_key><arg_value>metric</arg_value><arg_key>where</arg_key>\
                <arg_value>{\"x\": [1, null]}</arg_value><arg_key>other</arg_key><arg_value>true</arg_value></tool_call>";
    let expected = json!({"city": "42", "days": "two", "units": "metric", "where": {"x": [1, null]}, "other": true});
    assert_eq!(parsed(marked("glm4", ""), text).calls(), [("weather", expected)]);
    let nested = "<|tool_call>call:weather{where:{a:[1,<|\"|>b, }<|\"|>,{}],<|\"|>k y<|\"|>:null},city:<|\"|><|\"|>}<tool_call|>";
    let expected = json!({"where": {"a": [1, "b, }", {}], "k y": null}, "city": ""});
    assert_eq!(parsed(marked("gemma4", ""), nested).calls(), [("weather", expected)]);
    let python =
        "<|tool_call_start|>[weather(city='it\\'s', where={'a': [1.5, None, (True,)]}, days=-3)]<|tool_call_end|>";
    let expected = json!({"city": "it's", "where": {"a": [1.5, null, [true]]}, "days": -3});
    assert_eq!(parsed(marked("lfm2", ""), python).calls(), [("weather", expected)]);
}

#[test]
fn cut_calls_keep_what_was_generated() {
    let cut = parsed(marked("hermes", ""), "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Lon");
    assert_eq!(cut.calls, [("weather".into(), None, "{\"city\": \"Lon".into())]);
    let cut = parsed(marked("glm4", ""), "<tool_call>weather<arg_key>city</arg_key><arg_value>Lon</arg_v");
    assert_eq!(cut.calls, [("weather".into(), None, "{\"city\": \"Lon</arg_v".into())]);
    for (format, text) in [
        ("hermes", "<tool_call>\n{\"name\": \"weather\", \"argu"),
        ("glm4", "<tool_call>weather<arg_key>days</arg_key><arg_value>12"),
        ("glm4", "<tool_call>weather<arg_key>da"),
    ] {
        let cut = parsed(marked(format, ""), text);
        assert_eq!((cut.calls.len(), cut.content.as_str()), (1, ""), "{text}");
    }
}

#[test]
fn deep_and_long_calls_are_bounded() {
    let deep = format!("<|tool_call_start|>[now(a={}", "[".repeat(100_000));
    assert_eq!(parse(marked("lfm2", "")(), &[&deep]).content, deep);
    let long = format!("<tool_call>{}", "x".repeat(5000));
    assert_eq!(parse(marked("glm4", "")(), &[&long, "</tool_call>"]).calls.len(), 0);
    let mut parser = marked("kimi_k2", "")();
    parser.push("<|tool_call_begin|>");
    let parts = parser.push(&"x".repeat(5000));
    assert!(Parsed::of(parts).content.len() > 5000);
}

#[test]
fn messages_of_harmony_are_separated() {
    let with_tools = || Box::new(HarmonyParser::new(true)) as Box<dyn OutputParser>;
    let text = "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>\
                <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{\"city\":\"Rom\"}<|call|>";
    let whole = parsed(with_tools, text);
    assert_eq!((whole.reasoning.as_str(), whole.content.as_str()), ("I think.", "Wait."));
    assert_eq!(whole.calls(), [("weather", json!({"city": "Rom"}))]);
    let other = parsed(with_tools, " to=functions.now<|channel|>commentary json<|message|><|call|>");
    assert_eq!(other.calls(), [("now", json!({}))]);
    let last = parsed(with_tools, "<|channel|>final<|message|>Yes < 3");
    assert_eq!((last.content.as_str(), last.reasoning.as_str()), ("Yes < 3", ""));
    assert_eq!(parsed(with_tools, "Just text").content, "Just text");
    assert_eq!(parsed(with_tools, "").content, "");
}

/// Special tokens that models of all formats have, as far as marks contain them.
fn special_tokens(format: &ToolFormat) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for mark in format.marks() {
        let mut rest = mark;
        while let Some(at) = rest.find(['<', '[']) {
            let close = if rest[at..].starts_with('<') { '>' } else { ']' };
            let Some(end) = rest[at..].find(close) else { break };
            let name = &rest[at..=at + end];
            let whole = name.len() > 2 && !name.contains(['"', '=', '\n']);
            if whole && !names.iter().any(|known| known == name) {
                names.push(name.to_owned());
            }
            rest = &rest[at + end + 1..];
        }
    }
    names
}

/// Draws texts of the forced grammar and reads them again.
fn check_forced(style: Style, tokenizer: &Tokenizer, parser: impl Fn() -> Box<dyn OutputParser>, name: &str) {
    let format = ChatFormat { style, shown: vec![] };
    let (compiler, mut rng) = (testing::compiler(tokenizer), Xoshiro256::new(7));
    let tools = tools();
    let forced = AllowedCalls { tools: &tools, parallel: true, or_text: false };
    let rules = format.answer_rules(tokenizer, "assistant\n", Some(&forced), false).unwrap().unwrap();
    let compiled = compiler.compile_answer(&rules, None).unwrap_or_else(|e| panic!("{name}: {e}: {rules:?}"));
    let one = ["llama3", "lfm2", "harmony"].contains(&name);
    let (mut texts, mut several) = (0, 0);
    for _ in 0..150 {
        let Some(text) = testing::random_text(tokenizer, compiled.clone(), &mut rng, 600) else { continue };
        let parsed = parse(parser(), &[&text]);
        assert_eq!(parsed.content, "", "{name}: {text}");
        let calls = parsed.calls();
        (texts, several) = (texts + 1, several + usize::from(calls.len() > 1));
        assert!(!calls.is_empty(), "{name}: {text}");
        for (called, arguments) in calls {
            match called {
                "weather" => {
                    let known = |key: &String| ["city", "days", "units", "where"].contains(&key.as_str());
                    assert!(arguments.as_object().unwrap().keys().all(known), "{name}: {arguments}");
                    assert!(arguments["city"].is_string(), "{name}: {arguments} in {text}");
                    assert!(arguments.get("days").is_none_or(Value::is_i64), "{name}: {arguments} in {text}");
                }
                "now" => assert!(arguments.is_object(), "{name}: {arguments}"),
                other => panic!("{name}: {other} in {text}"),
            }
        }
        if texts >= 8 && (one || several > 0) {
            break;
        }
    }
    assert!(texts >= 8 && (several > 0) != one, "{name}: {several} of {texts} texts have several calls");
}

#[test]
fn forced_calls_of_every_format_are_read_again() {
    let words =
        ["</parameter>", "</arg_value>", "</think>", "<think>", "weather", "now", "city", "</｜DSML｜parameter>"];
    for name in formats::names() {
        let style = Style::Marked { reasoning: formats::reasoning("<think>", |_| false), tools: named(name) };
        let special = special_tokens(named(name));
        let special: Vec<&str> = special.iter().map(String::as_str).collect();
        for special in [&special[..], &[]] {
            check_forced(style, &testing::byte_tokenizer(&words, special), marked(name, "assistant\n"), name);
        }
    }
}

#[test]
fn forced_calls_of_harmony_are_read_again() {
    let tokenizer = testing::byte_tokenizer(&["weather"], &harmony::MARKS);
    check_forced(Style::Harmony, &tokenizer, || Box::new(HarmonyParser::new(true)), "harmony");
}

#[test]
fn reasoning_may_precede_a_format() {
    let words = ["</think>", "<think>"];
    let tokenizer = testing::byte_tokenizer(&words, &[]);
    let (compiler, mut rng) = (testing::compiler(&tokenizer), Xoshiro256::new(3));
    let style = Style::Marked { reasoning: formats::reasoning("<think>", |_| false), tools: &formats::GENERIC };
    let format = ChatFormat { style, shown: vec![] };
    assert_eq!(format.answer_rules(&tokenizer, "assistant\n<think>\n\n</think>\n", None, true).unwrap(), None);
    let answer = TextFormat::Regex("(yes|no)!".into());
    for (prompt, always) in [("assistant\n<think>\n", true), ("assistant\n", false)] {
        let rules = format.answer_rules(&tokenizer, prompt, None, true).unwrap().unwrap();
        let compiled = compiler.compile_answer(&rules, Some(&answer)).unwrap();
        let draw = |_| testing::random_text(&tokenizer, compiled.clone(), &mut rng, 400);
        let texts: Vec<String> = (0..40).filter_map(draw).collect();
        let thoughts = texts.iter().filter(|text| text.contains("</think>")).count();
        assert!(texts.len() > 10 && thoughts > 0 && (thoughts == texts.len()) == always, "{prompt}: {texts:?}");
        for text in &texts {
            let parsed = parse(format.parser(prompt, vec![]), &[text]);
            assert!(["yes!", "no!"].contains(&parsed.content.as_str()), "{prompt}: {text}");
        }
    }
}

#[test]
fn an_answer_is_a_call_or_of_a_format() {
    let tokenizer = testing::byte_tokenizer(&["<tool_call>\n", "now"], &[]);
    let (compiler, mut rng) = (testing::compiler(&tokenizer), Xoshiro256::new(3));
    let format = ChatFormat { style: Style::Marked { reasoning: None, tools: named("hermes") }, shown: vec![] };
    let tools = &tools()[1..];
    let forced = AllowedCalls { tools, parallel: false, or_text: false };
    let rules = format.answer_rules(&tokenizer, "", Some(&forced), true).unwrap().unwrap();
    let compiled = compiler.compile_answer(&rules, Some(&TextFormat::Regex("yes".into()))).unwrap();
    let texts: Vec<String> =
        (0..40).filter_map(|_| testing::random_text(&tokenizer, compiled.clone(), &mut rng, 300)).collect();
    let answers = texts.iter().filter(|text| *text == "yes").count();
    let calls = texts.iter().filter(|text| text.starts_with("<tool_call>\n{\"name\": \"now\"")).count();
    assert!(answers > 0 && calls > 0 && answers + calls == texts.len(), "{texts:?}");
}

#[test]
fn reasoning_may_stay_in_the_content_beside_calls() {
    let reasoning = formats::reasoning("<think> {{ x }} </think>", |_| true);
    let style = Style::Marked { reasoning, tools: named("hermes") };
    let format = ChatFormat { style, shown: vec![] };
    let text = "<think>hm</think>I look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {}}\n</tool_call>";
    let separated = parsed(|| format.parser("", tools()), text);
    assert_eq!((separated.reasoning.as_str(), separated.content.as_str()), ("hm", "I look."));
    let together = parsed(|| format.with_reasoning_as_content().parser("", tools()), text);
    assert_eq!((together.reasoning.as_str(), together.content.as_str()), ("", "<think>hm</think>I look."));
    assert_eq!((together.calls(), separated.calls().len()), (separated.calls(), 1));
}

#[test]
fn a_schema_that_is_too_large_is_an_error() {
    let properties: serde_json::Map<_, _> =
        (0..20_000).map(|i| (format!("property number {i}"), json!({"type": "string"}))).collect();
    let tools =
        vec![ToolSchema { name: "large".into(), parameters: json!({"type": "object", "properties": properties}) }];
    let format = ChatFormat { style: Style::Marked { reasoning: None, tools: named("hermes") }, shown: vec![] };
    let forced = AllowedCalls { tools: &tools, parallel: false, or_text: false };
    let error =
        format.answer_rules(&testing::byte_tokenizer(&[], &[]), "", Some(&forced), false).unwrap_err().to_string();
    assert!(error.contains("more than 262144 bytes"), "{error}");
}

#[test]
fn optional_strings_are_strings_unless_they_are_null() {
    let schema = json!({
        "type": "object", "$defs": {"Name": {"type": "string"}, "Loop": {"$ref": "#/$defs/Loop"}},
        "properties": {
            "a": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "b": {"type": ["string", "null"]},
            "c": {"$ref": "#/$defs/Name"}, "d": {"enum": ["x", null]}, "e": {"type": ["integer", "null"]},
            "f": {"$ref": "#/$defs/Loop"}, "g": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        },
    });
    let tools = vec![ToolSchema { name: "find".into(), parameters: schema }];
    let style = Style::Marked { reasoning: None, tools: named("glm4") };
    let format = ChatFormat { style, shown: vec![] };
    let parser = || format.parser("", tools.clone());
    let call = |values: [&str; 7]| {
        let arguments = ["a", "b", "c", "d", "e", "f", "g"].iter().zip(values);
        let arguments = arguments.map(|(key, value)| format!("<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"));
        parsed(parser, &format!("<tool_call>find{}</tool_call>", arguments.collect::<String>())).calls()[0].1.clone()
    };
    assert_eq!(
        call(["12", "true", "12", "x", "12", "12", "12"]),
        json!({"a": "12", "b": "true", "c": "12", "d": "x", "e": 12, "f": 12, "g": 12})
    );
    assert_eq!(
        call(["null", "null", "null", "null", "null", "null", "x"]),
        json!({"a": null, "b": null, "c": "null", "d": null, "e": null, "f": null, "g": "x"})
    );
}
