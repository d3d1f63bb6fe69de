//! From a request to prompt tokens.

use larder_engine::{ChatInput, ChatTemplate, FillInTokens};
use serde_json::Value;

use crate::error::ApiError;
use crate::model::ServedModel;
use crate::request::{ChatRequest, Prompt};

/// Code of the error for a prompt that the context does not hold.
pub const TOO_LONG: &str = "context_length_exceeded";

type Result<T> = std::result::Result<T, ApiError>;

/// A chat as a prompt: tokens, and stop strings beside those of the request.
#[derive(Debug)]
pub struct ChatPrompt {
    /// Prompt tokens, up to where the answer begins.
    pub tokens: Vec<u32>,
    /// Their text.
    pub text: String,
    /// Stop strings, for models that do not end their turn themselves.
    pub stop: Vec<String>,
}

impl ServedModel {
    /// Applies the chat template and tokenises.
    pub fn chat(&self, request: &ChatRequest) -> Result<ChatPrompt> {
        let plain = self.template.is_none();
        let text = self.rendered(request)?;
        let tokens = self.encode(&text, plain, "messages")?;
        self.check(&tokens, "messages")?;
        let stop = if plain { vec![format!("\n{}:", name_of("user"))] } else { vec![] };
        Ok(ChatPrompt { tokens, text, stop })
    }

    /// The text that a chat becomes: by the chat template, or a plain dialogue.
    pub fn rendered(&self, request: &ChatRequest) -> Result<String> {
        self.template.as_ref().map_or_else(|| plain_dialogue(request), |template| render(template, request))
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
            Prompt::Gap { before, after } => self.gap(before, after)?,
        };
        if let Some(id) = tokens.iter().find(|id| **id as usize >= self.vocab) {
            let message = format!("Token id {id} is out of range: the vocabulary has {} tokens.", self.vocab);
            return Err(ApiError::invalid_field(param, "invalid_value", message));
        }
        Ok(tokens)
    }

    fn gap(&self, before: &str, after: &str) -> Result<Vec<u32>> {
        let Some(marks) = FillInTokens::of(&self.tokenizer) else {
            let message = "This model has no fill-in tokens, so 'suffix' is not supported.";
            return Err(ApiError::unsupported("suffix", message));
        };
        for text in [before, after] {
            self.check_bytes(text, "prompt")?;
        }
        marks.prompt(&self.tokenizer, before, after).map_err(|error| ApiError::bad_request(format!("{error}.")))
    }

    /// Tokenises a text, unless it is certainly too long for the context.
    pub fn encode(&self, text: &str, special: bool, param: &str) -> Result<Vec<u32>> {
        self.check_bytes(text, param)?;
        self.tokenizer.encode(text, special).map_err(|error| ApiError::bad_request(format!("{error}.")))
    }

    fn check_bytes(&self, text: &str, param: &str) -> Result<()> {
        let most = self.tokenizer.longest_text(self.context);
        if text.len() > most {
            let message = format!(
                "This model's maximum context length is {} tokens, at most {most} bytes of text, and the prompt alone has {} \
                 bytes.",
                self.context,
                text.len()
            );
            return Err(ApiError::invalid_field(param, TOO_LONG, message));
        }
        Ok(())
    }

    /// Refuses a prompt that is empty or that the context does not hold.
    pub fn check(&self, tokens: &[u32], param: &str) -> Result<()> {
        if tokens.is_empty() {
            let message = "The prompt is empty, and this model has no BOS token.";
            return Err(ApiError::invalid_field(param, "empty_prompt", message));
        }
        if tokens.len() >= self.context {
            let message = format!(
                "This model's maximum context length is {} tokens, and the prompt alone has {}.",
                self.context,
                tokens.len()
            );
            return Err(ApiError::invalid_field(param, TOO_LONG, message));
        }
        Ok(())
    }
}

fn render(template: &ChatTemplate, request: &ChatRequest) -> Result<String> {
    let tools = request.tools.as_ref().map(|tools| tools.list.as_slice());
    let input = ChatInput { tools, extra: &request.extra, ..ChatInput::new(&request.messages) };
    let failed =
        |error| ApiError::invalid_field("messages", "invalid_value", format!("The chat template failed: {error}."));
    template.render(&input).map_err(failed)
}

/// Without a chat template the model is a base model. The chat becomes a plain dialogue, `User: …` and `Assistant: …`,
/// which base models continue; tools are not supported.
fn plain_dialogue(request: &ChatRequest) -> Result<String> {
    if request.tools.is_some() {
        return Err(ApiError::unsupported("tools", "This model has no chat template, so 'tools' is not supported."));
    }
    let mut text = String::new();
    for message in &request.messages {
        let part = |key: &str| message.get(key).and_then(Value::as_str).unwrap_or_default();
        match (part("role"), part("content")) {
            ("tool", _) => {
                let message = "This model has no chat template, so messages with the role 'tool' are not supported.";
                return Err(ApiError::unsupported("messages", message));
            }
            ("system", content) => text += &format!("{content}\n\n"),
            (role, content) => text += &format!("{}: {content}\n", name_of(role)),
        }
    }
    Ok(text + name_of("assistant") + ":")
}

fn name_of(role: &str) -> &'static str {
    if role == "user" { "User" } else { "Assistant" }
}
