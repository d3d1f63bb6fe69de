//! From a request to prompt tokens.

pub mod context;
mod images;
pub mod turns;

use std::sync::Arc;

use larder_text::{ChatInput, ChatTemplate, FillInTokens, TemplateError};
use serde_json::Value;

use crate::error::{ApiError, Result, excerpt};
use crate::model::ServedModel;
use crate::prompt::images::pictures_of;
use crate::prompt::turns::PromptTurns;
use crate::request::image::SeenPicture;
use crate::request::{ChatRequest, Prompt};

/// Code of the error for a prompt that the context does not hold.
pub const TOO_LONG: &str = "context_length_exceeded";

/// A chat as a prompt: tokens, and stop strings beside those of the request.
#[derive(Debug)]
pub struct ChatPrompt {
    /// Prompt tokens, up to where the answer begins or goes on.
    pub tokens: Vec<u32>,
    /// The pictures of its images, each once.
    pub pictures: Vec<Arc<SeenPicture>>,
    /// Text up to where the answer begins.
    pub text: String,
    /// The beginning of an answer that goes on.
    pub begun: String,
    /// Stop strings, for models that do not end their turn themselves.
    pub stop: Vec<String>,
    /// Where its turns begin.
    pub turns: PromptTurns,
}

impl ServedModel {
    /// Applies the chat template and tokenises.
    pub fn chat(&self, request: &ChatRequest) -> Result<ChatPrompt> {
        let (guard, guarded) = self.text_guard(request)?.unzip();
        let request = guarded.as_ref().unwrap_or(request);
        let plain = self.template.is_none();
        let (mut text, mut begun) = self.rendered_parts(request)?;
        let whole = format!("{text}{begun}");
        let tokens = match &guard {
            None => self.encode(&whole, plain, "messages")?,
            Some(guard) => self.encode_with_images(&whole, request, guard, plain)?,
        };
        self.check(&tokens, "messages")?;
        let stop = if plain { vec![format!("\n{}:", name_of("user"))] } else { vec![] };
        let turns = self.turns_of(request, &text, &tokens);
        if let Some(guard) = guard {
            (text, begun) = (guard.removed(text), guard.removed(begun));
        }
        let mut pictures = pictures_of(request);
        pictures.sort_unstable_by_key(|seen| seen.picture.number);
        pictures.dedup_by_key(|seen| seen.picture.number);
        Ok(ChatPrompt { tokens, pictures, text, begun, stop, turns })
    }

    /// The text that a chat becomes.
    pub fn rendered(&self, request: &ChatRequest) -> Result<String> {
        self.rendered_parts(request).map(|(text, begun)| text + &begun)
    }

    /// The text of a chat up to where the answer begins, and the beginning that the request has of it.
    fn rendered_parts(&self, request: &ChatRequest) -> Result<(String, String)> {
        let (begun, earlier) = match request.messages.split_last() {
            Some((last, earlier)) if request.continues && last["role"] == "assistant" => {
                (begun_answer(request, last)?, earlier)
            }
            _ => ("", &request.messages[..]),
        };
        let text = self.dialogue(earlier, request, true)?;
        match begun {
            "" => Ok((text, String::new())),
            begun => Ok((text.clone(), self.chat_format.before_answer(&text) + begun)),
        }
    }

    /// Messages as text: by the chat template, or a plain dialogue.
    fn dialogue(&self, messages: &[Value], request: &ChatRequest, add_generation_prompt: bool) -> Result<String> {
        let tools = request.tools.as_ref().map(|tools| tools.list.as_slice());
        self.dialogue_with(tools, messages, request, add_generation_prompt)
    }

    /// The same with other tools than the request has.
    fn dialogue_with(
        &self,
        tools: Option<&[Value]>,
        messages: &[Value],
        request: &ChatRequest,
        add_generation_prompt: bool,
    ) -> Result<String> {
        let messages = self.with_images_shown(messages);
        let (messages, tools) = self.chat_format.for_template(&messages, tools);
        let Some(template) = &self.template else { return Ok(plain_dialogue(&messages)) };
        let messages = template.adapted(&messages);
        render(
            template,
            &ChatInput { tools, extra: &request.extra, add_generation_prompt, ..ChatInput::new(&messages) },
        )
    }

    /// Tokenises the prompt of a completion.
    pub fn prompt(&self, prompt: &Prompt) -> Result<Vec<u32>> {
        let tokens = self.tokens_of(prompt, "prompt")?;
        self.check(&tokens, "prompt")?;
        Ok(tokens)
    }

    /// Tokenises the prompt of a completion, which may be longer than the context.
    pub fn prompt_tokens(&self, prompt: &Prompt) -> Result<Vec<u32>> {
        self.tokens_of(prompt, "prompt")
    }

    /// Tokenises the text of an embedding.
    pub fn input(&self, input: &Prompt) -> Result<Vec<u32>> {
        let tokens = self.tokens_of(input, "input")?;
        self.check(&tokens, "input")?;
        Ok(tokens)
    }

    fn tokens_of(&self, prompt: &Prompt, param: &str) -> Result<Vec<u32>> {
        let tokens = match prompt {
            Prompt::Text(text) => self.encode(text, true, param)?,
            Prompt::Tokens(tokens) => tokens.clone(),
            Prompt::Gap { before, after, begun } => self.gap(before, after, begun)?,
        };
        if let Some(id) = tokens.iter().find(|id| **id as usize >= self.vocab) {
            let message = format!("Token id {id} is out of range: the vocabulary has {} tokens.", self.vocab);
            return Err(ApiError::invalid_field(param, "invalid_value", message));
        }
        Ok(tokens)
    }

    fn gap(&self, before: &str, after: &str, begun: &str) -> Result<Vec<u32>> {
        let Some(marks) = FillInTokens::of(&self.tokenizer) else {
            let message = "This model has no fill-in tokens, so it cannot fill a gap before a 'suffix' in.";
            return Err(ApiError::unsupported("suffix", message));
        };
        for text in [before, after, begun] {
            self.check_bytes(text, "prompt")?;
        }
        let mut tokens =
            marks.prompt(&self.tokenizer, before, after).map_err(|error| ApiError::bad_request(format!("{error}.")))?;
        tokens.extend(self.encode(begun, false, "prompt")?);
        Ok(tokens)
    }

    /// Tokenises a text, unless it is certainly too long for the context.
    pub fn encode(&self, text: &str, special: bool, param: &str) -> Result<Vec<u32>> {
        self.check_bytes(text, param)?;
        self.tokenizer.encode(text, special).map_err(|error| ApiError::bad_request(format!("{error}.")))
    }

    fn check_bytes(&self, text: &str, param: &str) -> Result<()> {
        let token_bytes = self.tokenizer.longest_text(1);
        if text.len() > self.tokenizer.longest_text(self.context.tokens) {
            let said = self.context.text_too_long("The prompt", text.len(), token_bytes);
            return Err(self.too_long(param, &said, text.len().div_ceil(token_bytes)));
        }
        Ok(())
    }

    /// Refuses a prompt that is empty or that the context does not hold.
    pub fn check(&self, tokens: &[u32], param: &str) -> Result<()> {
        if tokens.is_empty() {
            let message = "The prompt is empty, and this model has no BOS token.";
            return Err(ApiError::invalid_field(param, "empty_prompt", message));
        }
        if tokens.len() >= self.context.tokens {
            let said = self.context.too_long("The prompt", tokens.len());
            return Err(self.too_long(param, &said, tokens.len()));
        }
        Ok(())
    }

    /// An error that ends with the words by which Claude Code and LiteLLM know that a conversation has to be shortened.
    pub(super) fn too_long(&self, param: &str, said: &str, tokens: usize) -> ApiError {
        let context = self.context.tokens;
        let known = format!(
            "prompt is too long: {tokens} tokens > {context}; this model's maximum context length is {context} tokens"
        );
        ApiError::invalid_field(param, TOO_LONG, format!("{said} ({known})."))
    }
}

fn render(template: &ChatTemplate, input: &ChatInput) -> Result<String> {
    let failed = |error: TemplateError| {
        let message = format!("The chat template failed: {}.", excerpt(&error.to_string()));
        ApiError::invalid_field("messages", "invalid_value", message)
    };
    template.render(input).map_err(failed)
}

/// The text of the last message, which an answer continues.
fn begun_answer<'a>(request: &ChatRequest, last: &'a Value) -> Result<&'a str> {
    let fault = if last.get("tool_calls").is_some() {
        "a message that calls tools cannot be continued; their results have to follow it"
    } else if request.params.format.is_some() || request.tools.as_ref().is_some_and(|tools| tools.forced().is_some()) {
        "an answer with a format or a forced call cannot be begun by the request"
    } else {
        return Ok(last["content"].as_str().unwrap_or_default());
    };
    Err(ApiError::unsupported("messages", format!("Invalid 'messages': {fault}.")))
}

/// Without a chat template the model is a base model. The chat becomes a plain dialogue, `User: …` and `Assistant: …`,
/// which base models continue.
fn plain_dialogue(messages: &[Value]) -> String {
    let mut text = String::new();
    for message in messages {
        let part = |key: &str| message.get(key).and_then(Value::as_str).unwrap_or_default();
        match (part("role"), part("content")) {
            ("system", content) => text += &format!("{content}\n\n"),
            (role, content) => text += &format!("{}: {content}\n", name_of(role)),
        }
    }
    text + name_of("assistant") + ":"
}

fn name_of(role: &str) -> &'static str {
    if role == "user" { "User" } else { "Assistant" }
}
