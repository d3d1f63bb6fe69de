//! The grammar of an answer: a format that was requested, tool calls, or either, with reasoning before them.

use larder_engine::{AllowedCalls, Grammar, GrammarCompiler, GrammarError};

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

    /// The grammar of the answer to a chat with this prompt, if tools have to be called, a format was requested, or calls are
    /// generic.
    pub fn chat_grammar(&self, request: &ChatRequest, prompt: &str) -> Result<Option<Grammar>> {
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
        let rules = rules.map_err(|error| invalid("tools", &error))?;
        let (Some(rules), format) = (rules, requested.map(|requested| &requested.format)) else {
            return self.completion_grammar(requested);
        };
        let field = requested.map_or("tools", |requested| requested.field);
        match self.compile(field, |compiler| compiler.compile_answer(&rules, format)) {
            // A call that nobody asks for may do without its grammar.
            Err(error) if or_text => {
                self.server.notes.log(&[format!("calls are not held in form: {error}")]);
                Ok(None)
            }
            compiled => compiled.map(Some),
        }
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
