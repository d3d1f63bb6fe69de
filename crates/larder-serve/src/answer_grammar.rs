//! The grammar of an answer: a format that was requested, tool calls, or either, with reasoning before them.

use larder_engine::{AnswerRules, ForcedCalls, Grammar, GrammarCompiler, GrammarError};

use crate::error::ApiError;
use crate::model::ServedModel;
use crate::request::{ChatRequest, RequestedFormat, ToolChoice};
use crate::server::ServerState;

type Result<T> = std::result::Result<T, ApiError>;

impl ServerState {
    /// The grammar of a completion, if a format was requested.
    pub fn completion_grammar(&self, requested: Option<&RequestedFormat>) -> Result<Option<Grammar>> {
        let Some(RequestedFormat { field, format }) = requested else { return Ok(None) };
        self.compile(field, |compiler| compiler.compile(format)).map(Some)
    }

    /// The grammar of the answer to a chat with this prompt, if tools have to be called or a format was requested.
    pub fn chat_grammar(&self, request: &ChatRequest, prompt: &str) -> Result<Option<Grammar>> {
        let requested = request.params.format.as_ref();
        let tools = request.tools.as_ref();
        let is_forced = tools.is_some_and(|tools| tools.choice != ToolChoice::Auto);
        let format = self.model.chat_format.as_ref().filter(|format| format.tool_format().is_some());
        if is_forced && format.is_none() {
            let message = "The format of this model's tool calls is not known, so a call cannot be forced.";
            return Err(ApiError::unsupported("tool_choice", message));
        }
        if is_forced && request.params.ignore_eos {
            let message =
                "The 'ignore_eos' parameter is not allowed with a forced tool call, whose end is part of its form.";
            return Err(ApiError::invalid_field("ignore_eos", "invalid_value", message));
        }
        // A forced call goes before a format; a call that the model may choose is an alternative to it.
        let requested = requested.filter(|_| !is_forced);
        let callable = tools.filter(|_| format.is_some() && (is_forced || requested.is_some()));
        let schemas = callable.map(|tools| tools.forced().unwrap_or_else(|| tools.schemas.clone()));
        let parallel = tools.is_some_and(|tools| tools.parallel);
        let calls = schemas.as_ref().map(|tools| ForcedCalls { tools, parallel });
        if calls.is_none() && requested.is_none() {
            return Ok(None);
        }
        let rules = self.model.answer_rules(prompt, calls.as_ref(), requested.is_some());
        let rules = rules.map_err(|error| invalid("tools", &error))?;
        let (Some(rules), format) = (rules, requested.map(|requested| &requested.format)) else {
            return self.completion_grammar(requested);
        };
        let field = requested.map_or("tools", |requested| requested.field);
        self.compile(field, |compiler| compiler.compile_answer(&rules, format)).map(Some)
    }

    fn compile(
        &self,
        field: &str,
        compile: impl FnOnce(&GrammarCompiler) -> std::result::Result<Grammar, GrammarError>,
    ) -> Result<Grammar> {
        let ServedModel { tokenizer, vocab, generation, .. } = &self.model;
        let compiler = self.grammars.get_or_init(|| GrammarCompiler::new(tokenizer, *vocab, &generation.eos));
        let grammar = compiler.as_ref().map_err(GrammarError::clone).and_then(compile);
        grammar.map_err(|error| invalid(field, &error))
    }
}

fn invalid(field: &str, error: &GrammarError) -> ApiError {
    ApiError::invalid_field(field, "invalid_grammar", format!("Invalid '{field}': {error}."))
}

impl ServedModel {
    fn answer_rules(
        &self,
        prompt: &str,
        calls: Option<&ForcedCalls>,
        has_format: bool,
    ) -> std::result::Result<Option<AnswerRules>, GrammarError> {
        let Some(format) = &self.chat_format else { return Ok(None) };
        format.answer_rules(&self.tokenizer, prompt, calls, has_format)
    }
}
