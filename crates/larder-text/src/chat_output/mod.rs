//! What a chat model generates, separated into reasoning, content and tool calls.
//!
//! Each family of models marks reasoning and calls in its own way. [`ChatFormat::of_template`] finds the way of a model
//! from its chat template, by the tables in [`formats`]; an [`OutputParser`] then takes the text as it is generated and
//! returns each part as soon as it is certain. The other direction, a grammar that forces calls, is [`call_grammar`].

mod call_grammar;
mod calls;
mod formats;
mod generic;
mod harmony;
mod marked;
mod tools;

use std::borrow::Cow;

use serde_json::Value;

use crate::ChatTemplate;
use crate::grammar::GrammarError;
use crate::tokens::Tokenizer;

pub use call_grammar::{AllowedCalls, AnswerRules};
pub use tools::ToolSchema;

use formats::{ReasoningMarks, ToolFormat};
use harmony::HarmonyParser;
use marked::MarkedParser;

/// A part of a generated text. Consecutive parts of one kind continue each other.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum OutputPart {
    /// Reasoning before the answer.
    Reasoning(String),
    /// The answer.
    Content(String),
    /// The beginning of a tool call: the tool's name, and the call's id if the model gives one.
    CallName {
        /// Name of the tool.
        name: String,
        /// The model's own id.
        id: Option<String>,
    },
    /// More of the arguments of the call that began last, as JSON.
    CallArguments(String),
}

/// How a model writes reasoning and tool calls.
#[derive(Clone, Debug)]
pub struct ChatFormat {
    style: Style,
    /// Special tokens that the parser has to see.
    shown: Vec<u32>,
}

#[derive(Clone, Copy, Debug)]
enum Style {
    /// Messages with headers, as gpt-oss writes them.
    Harmony,
    /// Marks around reasoning and around calls.
    Marked { reasoning: Option<&'static ReasoningMarks>, tools: &'static ToolFormat },
}

/// Takes generated text in pieces and returns its parts.
pub trait OutputParser: Send {
    /// Takes more text, and returns the parts that are certain now.
    fn push(&mut self, text: &str) -> Vec<OutputPart>;

    /// Ends the text, and returns what was held back.
    fn finish(&mut self) -> Vec<OutputPart>;
}

impl ChatFormat {
    /// The format of the model with this template. Where the template has no tool calls that are known, they are
    /// [generic](Self::for_template).
    pub fn of_template(template: &ChatTemplate, tokenizer: &Tokenizer) -> Self {
        let source = template.source(true);
        let style = if harmony::is_of(source) {
            Style::Harmony
        } else {
            Style::Marked {
                reasoning: formats::reasoning(source, |mark| tokenizer.id(mark).is_some()),
                tools: formats::tools(source).unwrap_or(&formats::GENERIC),
            }
        };
        let marks = style.marks();
        let in_marks = |name: &str| marks.iter().any(|mark| mark.contains(name));
        let shown = tokenizer.special_tokens().filter(|(name, _)| in_marks(name)).map(|(_, id)| id).collect();
        ChatFormat { style, shown }
    }

    /// The format of a model without a template: all of its text is content, but for generic calls.
    pub fn plain() -> Self {
        ChatFormat { style: Style::Marked { reasoning: None, tools: &formats::GENERIC }, shown: vec![] }
    }

    /// Messages and tools as the template reads them. Where it knows no calls of tools, those are described in the
    /// messages.
    pub fn for_template<'a>(
        &self,
        messages: &'a [Value],
        tools: Option<&'a [Value]>,
    ) -> (Cow<'a, [Value]>, Option<&'a [Value]>) {
        if self.has_generic_calls() {
            (generic::described(messages, tools), None)
        } else {
            (Cow::Borrowed(messages), tools)
        }
    }

    /// Whether calls are only known from their description, so that a grammar has to hold them in form.
    pub fn has_generic_calls(&self) -> bool {
        matches!(self.style, Style::Marked { tools, .. } if std::ptr::eq(tools, &formats::GENERIC))
    }

    /// The same format with reasoning as content, marks included. Messages with headers stay separated.
    pub fn with_reasoning_as_content(&self) -> Self {
        let style = match self.style {
            Style::Harmony => Style::Harmony,
            Style::Marked { tools, .. } => Style::Marked { reasoning: None, tools },
        };
        ChatFormat { style, shown: self.shown.clone() }
    }

    /// The name of the format of tool calls.
    pub fn tool_format(&self) -> &'static str {
        match self.style {
            Style::Harmony => "harmony",
            Style::Marked { tools, .. } => tools.name,
        }
    }

    /// The text between `prompt` and an answer that the request begins: the end of reasoning, the header of a message.
    pub fn before_answer(&self, prompt: &str) -> String {
        match self.style {
            Style::Harmony => format!("{}final{}", harmony::CHANNEL, harmony::MESSAGE),
            Style::Marked { reasoning: Some(marks), .. } if marks.are_open(prompt) => format!("\n{}\n\n", marks.close),
            Style::Marked { .. } => String::new(),
        }
    }

    /// Special tokens whose names have to be in the text that is parsed.
    pub fn shown_tokens(&self) -> &[u32] {
        &self.shown
    }

    /// A parser for the answer to `prompt`, whose end tells whether the model reasons already. Without `tools`, calls
    /// are content.
    pub fn parser(&self, prompt: &str, tools: Vec<ToolSchema>) -> Box<dyn OutputParser> {
        match self.style {
            Style::Harmony => Box::new(HarmonyParser::new(!tools.is_empty())),
            Style::Marked { reasoning, tools: format } => {
                let format = Some(format).filter(|_| !tools.is_empty());
                Box::new(MarkedParser::new(reasoning, format, tools, prompt))
            }
        }
    }

    /// The rules of an answer to `prompt` that has to call tools, or to match a format, or either. `None` if nothing
    /// can precede the format.
    pub fn answer_rules(
        &self,
        tokenizer: &Tokenizer,
        prompt: &str,
        calls: Option<&AllowedCalls>,
        has_format: bool,
    ) -> Result<Option<AnswerRules>, GrammarError> {
        call_grammar::answer_rules(self.style, tokenizer, prompt, calls, has_format)
    }
}

impl Style {
    /// All texts that may contain special tokens.
    fn marks(&self) -> Vec<&'static str> {
        match self {
            Style::Harmony => harmony::MARKS.to_vec(),
            Style::Marked { reasoning, tools } => {
                let reasoning = reasoning.iter().flat_map(|marks| [marks.open, marks.close]);
                reasoning.chain(tools.marks()).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests;
