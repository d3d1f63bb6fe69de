//! The grammar of an answer: a format that was requested, tool calls, or either, with reasoning before them.

use larder_text::{AllowedCalls, AnswerRules, Grammar, GrammarCompiler, GrammarError, TextFormat};

use crate::error::{ApiError, Result};
use crate::model::ServedModel;
use crate::request::{ChatRequest, RequestedFormat, ToolChoice};
use crate::state::ServerState;

/// The grammar of an answer, not yet compiled.
pub struct AnswerGrammar {
    /// The field of the request, for errors.
    field: &'static str,
    /// The rules of an answer with calls, or with reasoning.
    rules: Option<AnswerRules>,
    /// The requested format.
    format: Option<TextFormat>,
    /// Whether the answer may do without it, as calls do that were not asked for.
    is_optional: bool,
}

impl From<RequestedFormat> for AnswerGrammar {
    /// The grammar of a text of nothing but a format.
    fn from(requested: RequestedFormat) -> Self {
        AnswerGrammar { field: requested.field, rules: None, format: Some(requested.format), is_optional: false }
    }
}

impl ServerState {
    /// The grammar of the answer to a chat with this prompt, if tools have to be called, a format was requested, or
    /// calls are generic.
    pub fn chat_grammar(&self, request: &ChatRequest, prompt: &str) -> Result<Option<AnswerGrammar>> {
        let requested = request.params.format.as_ref();
        let tools = request.tools.as_ref();
        let is_forced = tools.is_some_and(|tools| tools.choice != ToolChoice::Auto);
        if is_forced && request.params.ignore_eos {
            let message =
                "The 'ignore_eos' parameter is not allowed with a forced tool call, whose end is part of its form.";
            return Err(ApiError::invalid_field("ignore_eos", "invalid_value", message));
        }
        // A forced call goes before a format; a call that the model may choose is an alternative to it.
        let requested = requested.filter(|_| !is_forced);
        let or_text = !is_forced && requested.is_none();
        let is_held = !or_text || self.model.chat_format.has_generic_calls() && !request.params.ignore_eos;
        let callable = tools.filter(|_| is_held);
        let schemas = callable.map(|tools| tools.forced().unwrap_or_else(|| tools.schemas.clone()));
        let parallel = tools.is_some_and(|tools| tools.parallel);
        let calls = schemas.as_ref().map(|tools| AllowedCalls { tools, parallel, or_text });
        if calls.is_none() && requested.is_none() {
            return Ok(None);
        }
        let ServedModel { chat_format, tokenizer, .. } = &self.model;
        let rules = chat_format.answer_rules(tokenizer, prompt, calls.as_ref(), requested.is_some());
        let rules = match rules {
            Err(error) if or_text => {
                self.do_without(&error);
                return Ok(None);
            }
            rules => rules.map_err(|error| invalid("tools", &error))?,
        };
        let field = requested.map_or("tools", |requested| requested.field);
        let format = requested.map(|requested| requested.format.clone());
        Ok(Some(AnswerGrammar { field, rules, format, is_optional: or_text }))
    }

    fn do_without(&self, error: &GrammarError) {
        self.server.notes.log(&[format!("calls are not held in form: {error}")]);
    }

    /// Compiles a grammar. The first prepares the vocabulary.
    pub fn compile(&self, grammar: &AnswerGrammar) -> Result<Option<Grammar>> {
        let AnswerGrammar { field, rules, format, is_optional } = grammar;
        let ServedModel { tokenizer, vocab, generation, .. } = &self.model;
        let compiler = self.grammars.get_or_init(|| GrammarCompiler::new(tokenizer, *vocab, &generation.eos));
        let compiled = compiler.as_ref().map_err(GrammarError::clone).and_then(|compiler| match (rules, format) {
            (Some(rules), format) => compiler.compile_answer(rules, format.as_ref()).map(Some),
            (None, Some(format)) => compiler.compile(format).map(Some),
            (None, None) => Ok(None),
        });
        match compiled {
            Err(error) if *is_optional => {
                self.do_without(&error);
                Ok(None)
            }
            compiled => compiled.map_err(|error| invalid(field, &error)),
        }
    }
}

fn invalid(field: &str, error: &GrammarError) -> ApiError {
    ApiError::invalid_field(field, "invalid_grammar", format!("Invalid '{field}': {error}."))
}
