//! The tables of formats: how families of models mark reasoning and write tool calls. A new format is a row here.

use super::calls::{CallHead, CallSyntax};

/// Marks around the reasoning that precedes an answer.
#[derive(Debug)]
pub struct ReasoningMarks {
    /// Before the reasoning; the prompt may end with it.
    pub open: &'static str,
    /// Behind it.
    pub close: &'static str,
    /// Part of a template that has these marks, where it does not contain `open` itself.
    sign: &'static str,
}

/// How a family writes tool calls. White space at the ends of marks is what the template prints; a parser does without
/// it.
#[derive(Debug)]
pub struct ToolFormat {
    /// A name for tests and documentation.
    pub name: &'static str,
    /// Parts of a template that has this format: all of one of the lists are in it.
    signs: &'static [&'static [&'static str]],
    /// Marks around all calls of an answer; empty if there are none.
    pub section: (&'static str, &'static str),
    /// Mark before each call; empty where calls are a JSON list.
    pub open: &'static str,
    /// Mark behind each call.
    pub close: &'static str,
    /// Between two calls.
    pub separator: &'static str,
    /// What is between `open` and `close`.
    pub syntax: CallSyntax,
}

impl ReasoningMarks {
    /// Whether a text ends within reasoning that has just begun.
    pub fn are_open(&self, text: &str) -> bool {
        text.trim_end().ends_with(self.open.trim())
    }
}

/// Reasoning, the most specific marks first.
static REASONING: [ReasoningMarks; 4] = [
    ReasoningMarks { open: "<|channel>thought\n", close: "<channel|>", sign: "<|channel>" },
    ReasoningMarks { open: "<think:opensource>", close: "</think:opensource>", sign: "'<think{}>'" },
    ReasoningMarks { open: "[THINK]", close: "[/THINK]", sign: "[THINK]" },
    ReasoningMarks { open: "<think>", close: "</think>", sign: "<think>" },
];

/// Tool calls, the most specific signs first.
static TOOLS: [ToolFormat; 17] = [
    ToolFormat {
        name: "gemma4",
        signs: &[&["<|tool_call>call:"]],
        section: ("", ""),
        open: "<|tool_call>call:",
        close: "<tool_call|>",
        separator: "",
        syntax: CallSyntax::Gemma,
    },
    ToolFormat {
        name: "deepseek_v3.2",
        signs: &[&["DSML", "function_calls>"]],
        section: ("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"),
        open: "<｜DSML｜invoke name=\"",
        close: "</｜DSML｜invoke>\n",
        separator: "",
        syntax: CallSyntax::Parameters {
            name_end: "\">\n",
            key: ("<｜DSML｜parameter name=\"", "\">"),
            value: ("", "</｜DSML｜parameter>\n"),
            has_type: true,
        },
    },
    ToolFormat {
        name: "deepseek_v4",
        signs: &[&["DSML", "tool_calls>"]],
        section: ("<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>"),
        open: "<｜DSML｜invoke name=\"",
        close: "</｜DSML｜invoke>\n",
        separator: "",
        syntax: CallSyntax::Parameters {
            name_end: "\">\n",
            key: ("<｜DSML｜parameter name=\"", "\">"),
            value: ("", "</｜DSML｜parameter>\n"),
            has_type: true,
        },
    },
    ToolFormat {
        name: "deepseek_v3",
        signs: &[&["<｜tool▁sep｜>", "```json"]],
        section: ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        open: "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        close: "\n```<｜tool▁call▁end｜>",
        separator: "\n",
        syntax: CallSyntax::Json { name_end: "\n```json\n", head: CallHead::Name },
    },
    ToolFormat {
        name: "deepseek_v3.1",
        signs: &[&["<｜tool▁sep｜>"]],
        section: ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        open: "<｜tool▁call▁begin｜>",
        close: "<｜tool▁call▁end｜>",
        separator: "",
        syntax: CallSyntax::Json { name_end: "<｜tool▁sep｜>", head: CallHead::Name },
    },
    ToolFormat {
        name: "kimi_k2",
        signs: &[&["<|tool_call_argument_begin|>"]],
        section: ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        open: "<|tool_call_begin|>",
        close: "<|tool_call_end|>",
        separator: "",
        syntax: CallSyntax::Json {
            name_end: "<|tool_call_argument_begin|>",
            head: CallHead::Numbered { prefix: "functions." },
        },
    },
    ToolFormat {
        name: "solar_open",
        signs: &[&["<|tool_call:args|>"]],
        section: ("<|tool_calls|>", ""),
        open: "<|tool_call:begin|>",
        close: "<|tool_call:end|>",
        separator: "",
        syntax: CallSyntax::Json { name_end: "<|tool_call:args|>", head: CallHead::IdThenName("<|tool_call:name|>") },
    },
    ToolFormat {
        name: "mistral",
        signs: &[&["[TOOL_CALLS]", "[ARGS]"]],
        section: ("", ""),
        open: "[TOOL_CALLS]",
        close: "",
        separator: "",
        syntax: CallSyntax::Json { name_end: "[ARGS]", head: CallHead::NameThenId("[CALL_ID]") },
    },
    ToolFormat {
        name: "mistral_list",
        signs: &[&["[TOOL_CALLS]"]],
        section: ("[TOOL_CALLS][", "]"),
        open: "",
        close: "",
        separator: ", ",
        syntax: CallSyntax::NamedJson { arguments: "arguments", may_be_bare: false },
    },
    ToolFormat {
        name: "minimax_m2",
        signs: &[&["<minimax:tool_call>", "<invoke name="]],
        section: ("<minimax:tool_call>\n", "</minimax:tool_call>"),
        open: "<invoke name=\"",
        close: "</invoke>\n",
        separator: "",
        syntax: CallSyntax::Parameters {
            name_end: "\">\n",
            key: ("<parameter name=\"", "\">"),
            value: ("", "</parameter>\n"),
            has_type: false,
        },
    },
    ToolFormat {
        name: "qwen3_coder",
        signs: &[&["<tool_call>", "<function="]],
        section: ("<tool_call>\n", "</tool_call>"),
        open: "<function=",
        close: "</function>\n",
        separator: "",
        syntax: CallSyntax::Parameters {
            name_end: ">\n",
            key: ("<parameter=", ">"),
            value: ("\n", "\n</parameter>\n"),
            has_type: false,
        },
    },
    ToolFormat {
        name: "hunyuan_v3",
        signs: &[&["'<arg_key{}>'", "':opensource'"]],
        section: ("<tool_calls:opensource>\n", "</tool_calls:opensource>"),
        open: "<tool_call:opensource>",
        close: "</tool_call:opensource>\n",
        separator: "",
        syntax: CallSyntax::Parameters {
            name_end: "<tool_sep:opensource>\n",
            key: ("<arg_key:opensource>", "</arg_key:opensource>\n"),
            value: ("<arg_value:opensource>", "</arg_value:opensource>\n"),
            has_type: false,
        },
    },
    ToolFormat {
        name: "glm4",
        signs: &[&["<tool_call>", "<arg_key>"]],
        section: ("", ""),
        open: "<tool_call>",
        close: "</tool_call>",
        separator: "\n",
        syntax: CallSyntax::Parameters {
            name_end: "",
            key: ("<arg_key>", "</arg_key>"),
            value: ("<arg_value>", "</arg_value>"),
            has_type: false,
        },
    },
    ToolFormat {
        name: "hermes",
        signs: &[&["<tool_call>", "arguments\": "], &["<tool_call>", "arguments\\\": "]],
        section: ("", ""),
        open: "<tool_call>\n",
        close: "\n</tool_call>",
        separator: "\n",
        syntax: CallSyntax::NamedJson { arguments: "arguments", may_be_bare: false },
    },
    ToolFormat {
        name: "granite3",
        signs: &[&["<|tool_call|>"]],
        section: ("<|tool_call|>[", "]"),
        open: "",
        close: "",
        separator: ", ",
        syntax: CallSyntax::NamedJson { arguments: "arguments", may_be_bare: false },
    },
    ToolFormat {
        name: "lfm2",
        signs: &[&["<|tool_list_start|>"], &["<|tool_call_start|>["]],
        section: ("", ""),
        open: "<|tool_call_start|>",
        close: "<|tool_call_end|>",
        separator: "",
        syntax: CallSyntax::Python,
    },
    ToolFormat {
        name: "llama3",
        signs: &[&["\"parameters\"", "{\"name\": function name"]],
        section: ("<|python_tag|>", ""),
        open: "",
        close: "",
        separator: "; ",
        syntax: CallSyntax::NamedJson { arguments: "parameters", may_be_bare: true },
    },
];

/// Calls of models whose template has none that are known.
pub static GENERIC: ToolFormat = ToolFormat {
    name: "generic",
    signs: &[],
    section: ("", ""),
    open: "<tool_call>\n",
    close: "\n</tool_call>",
    separator: "\n",
    syntax: CallSyntax::NamedJson { arguments: "arguments", may_be_bare: false },
};

/// The reasoning marks of a template, or those of which the tokenizer has a token of their own.
pub fn reasoning(template: &str, has_token: impl Fn(&str) -> bool) -> Option<&'static ReasoningMarks> {
    let by_template = REASONING.iter().find(|marks| template.contains(marks.sign));
    by_template.or_else(|| REASONING.iter().find(|marks| has_token(marks.open) && has_token(marks.close)))
}

/// The format of tool calls that a template has.
pub fn tools(template: &str) -> Option<&'static ToolFormat> {
    let has_all = |signs: &&'static [&'static str]| signs.iter().all(|sign| template.contains(sign));
    TOOLS.iter().find(|format| format.signs.iter().any(has_all))
}

impl ToolFormat {
    /// All texts that may contain special tokens.
    pub fn marks(&self) -> Vec<&'static str> {
        let mut marks = vec![self.section.0, self.section.1, self.open, self.close];
        match self.syntax {
            CallSyntax::Json { name_end, head } => marks.extend([name_end, head.mark()]),
            CallSyntax::Parameters { name_end, key, value, .. } => {
                marks.extend([name_end, key.0, key.1, value.0, value.1]);
            }
            CallSyntax::Gemma => marks.push("<|\"|>"),
            CallSyntax::NamedJson { .. } | CallSyntax::Python => {}
        }
        marks
    }
}

#[cfg(test)]
pub(super) fn named(name: &str) -> &'static ToolFormat {
    TOOLS.iter().find(|format| format.name == name).unwrap()
}

#[cfg(test)]
pub(super) fn names() -> Vec<&'static str> {
    TOOLS.iter().map(|format| format.name).collect()
}

#[cfg(test)]
mod tests {
    use crate::chat_output::formats::{self, named};
    use crate::chat_output::tests::parse;
    use crate::chat_output::{ChatFormat, Style};

    #[test]
    fn a_begun_answer_follows_the_end_of_reasoning() {
        let style = Style::Marked { reasoning: formats::reasoning("<think>", |_| false), tools: named("hermes") };
        let format = ChatFormat { style, shown: vec![] };
        assert_eq!(format.before_answer("assistant\n<think>\n"), "\n</think>\n\n");
        assert_eq!(format.before_answer("assistant\n"), "");
        for (format, prompt) in
            [(format, "assistant\n<think>\n"), (ChatFormat { style: Style::Harmony, shown: vec![] }, "")]
        {
            let mut parser = format.parser(prompt, vec![]);
            parser.push(&(format.before_answer(prompt) + "{\"a\":"));
            let parsed = parse(parser, &["1}"]);
            assert_eq!((parsed.reasoning.as_str(), parsed.content.as_str()), ("", "1}"));
        }
    }
}
