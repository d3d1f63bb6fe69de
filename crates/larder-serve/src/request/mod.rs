//! Request bodies, parsed from untrusted bytes.

mod anthropic;
pub mod author;
mod client_lines;
pub mod content;
mod context;
mod dialogue;
mod embeddings;
mod fields;
mod format;
pub mod image;
mod infill;
mod mathml;
mod messages;
mod neutral;
mod ollama;
pub mod parts;
mod responses;
mod settings;
pub mod table;
mod tokens;
mod tools;
pub mod unsupported;

use std::sync::Arc;

use larder_text::ContextFull;
use serde_json::{Map, Value};

use crate::engine::RoutingChange;
use crate::error::{ApiError, Result};
pub use anthropic::{ANTHROPIC, ANTHROPIC_COUNT};
pub use embeddings::{EMBED, EMBED_ONE, EMBEDDINGS, EmbeddingRequest, EmbeddingStyle};
use fields::{Fields, wrong_type};
pub use format::RequestedFormat;
use image::{RequestImage, SeenPictures};
pub use infill::INFILL;
pub use mathml::{MATHML, MathmlRequest};
pub use ollama::{OLLAMA_CHAT, OLLAMA_GENERATE, OLLAMA_SHOW, OllamaGenerateRequest, OllamaLoadRequest, shown_model};
pub use responses::{RESPONSES, ResponsesRequest};
use settings::{
    EFFORT, GENERATION, MODEL, SAMPLING, SamplingParams, TEMPLATE_KWARGS, check_max_tokens, extra, generation_params,
};
use table::{Kind, Object, field};
pub use tokens::{DETOKENIZE, DetokenizeRequest, TOKENIZE, TokenizeRequest};
use tools::OfferedTools;
pub use tools::{Namespaces, RequestedTools, ToolChoice};
use unsupported::{IGNORED, METADATA, UNSUPPORTED, unread};

/// Limit of `top_logprobs`.
const TOP_LOGPROBS: i128 = 20;
/// Limit of the answers to one request: `n` times the number of prompts.
const CHOICES: usize = 64;
/// A prompt, or several.
const PROMPTS: Kind = Kind::Either(&[Kind::Text, TOKENS, Kind::List(&Kind::Either(&[Kind::Text, TOKENS]))]);
const TOKENS: Kind = Kind::List(&Kind::Token);

/// The body of `/v1/chat/completions`.
pub static CHAT: Object = Object {
    name: "ChatRequest",
    groups: &[
        &[
            field("messages", Kind::Objects(&messages::MESSAGE), "the dialogue").required(),
            field("continue_final_message", Kind::Flag(false), "the answer continues the last message, an assistant's"),
            unread("add_generation_prompt", "ignored: `continue_final_message` decides"),
            field("logprobs", Kind::Flag(false), "reports log-probabilities"),
            field("top_logprobs", Kind::Integer(0, TOP_LOGPROBS), "and those of as many of the likeliest tokens"),
            field(
                "reasoning_format",
                Kind::Choice(&["auto", "deepseek", "none"]),
                "`none` leaves reasoning in the content",
            ),
            EFFORT,
            TEMPLATE_KWARGS,
        ],
        GENERATION,
        SAMPLING,
        tools::TOOLS,
        format::FORMATS,
        UNSUPPORTED,
        IGNORED,
        METADATA,
    ],
};

/// The body of `/v1/completions`.
pub static COMPLETION: Object = Object {
    name: "CompletionRequest",
    groups: &[
        &[
            field("prompt", PROMPTS, "a text, token ids, or a list of either").required(),
            field("suffix", Kind::Text, "the answer fills the gap before this text, if the model has fill-in tokens"),
            field("echo", Kind::Flag(false), "the answer begins with the prompt; not with `suffix`"),
            field(
                "logprobs",
                Kind::Integer(0, TOP_LOGPROBS),
                "reports log-probabilities of as many of the likeliest tokens",
            ),
            field("best_of", Kind::Integer(1, CHOICES as i128), "refused unless equal to `n`"),
        ],
        GENERATION,
        SAMPLING,
        format::FORMATS,
        UNSUPPORTED,
        IGNORED,
        METADATA,
    ],
};

/// Generation parameters, common to both endpoints.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct GenerationParams {
    /// Answers to each prompt.
    pub choices: usize,
    /// The model's name, if given.
    pub model: Option<String>,
    /// Limit of generated tokens; `usize::MAX` for as many as the context holds.
    pub max_tokens: Option<usize>,
    /// Sampling parameters, where given.
    pub sampling: SamplingParams,
    /// Seed of the sampler; equal seeds give equal texts.
    pub seed: Option<u64>,
    /// Added to the logits of these tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// Strings that end the generation.
    pub stop: Vec<String>,
    /// Whether to send the text as it is generated.
    pub stream: bool,
    /// Whether a stream ends with the usage.
    pub include_usage: bool,
    /// Whether a stream tells how much of the prompt is computed.
    pub return_progress: bool,
    /// Whether to report log-probabilities, and of how many of the likeliest tokens.
    pub logprobs: Option<usize>,
    /// Whether to go on after an end-of-text token.
    pub ignore_eos: bool,
    /// Whether the answer begins with the prompt.
    pub echo: bool,
    /// What happens when the context is full, if the request says so.
    pub context_full: Option<ContextFull>,
    /// Tokens at the beginning of the prompt that shifts keep; `usize::MAX` for all.
    pub keep: Option<usize>,
    /// What the answer has to match, if not any text.
    pub format: Option<RequestedFormat>,
    /// Sentences for the log about what has no effect.
    pub notes: Vec<String>,
}

/// The body of `/v1/chat/completions`.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct ChatRequest {
    /// Generation parameters.
    pub params: GenerationParams,
    /// The messages as chat templates read them; a content with images is a list of parts.
    pub messages: Vec<Value>,
    /// The images, which parts of messages have by their indices.
    pub images: Vec<Arc<RequestImage>>,
    /// The pictures that a model has read in them, once it has.
    pub seen: SeenPictures,
    /// Whether the answer continues the last message, which is an assistant's.
    pub continues: bool,
    /// The tools that the model may call.
    pub tools: Option<RequestedTools>,
    /// Whether reasoning is separated from the answer.
    pub separate_reasoning: bool,
    /// Further variables for the chat template.
    pub extra: Map<String, Value>,
}

/// The body of `/v1/completions`.
#[derive(Clone, PartialEq, Debug)]
pub struct CompletionRequest {
    /// Generation parameters.
    pub params: GenerationParams,
    /// The texts to continue, at least one.
    pub prompts: Vec<Prompt>,
}

/// The prompt of a completion.
#[derive(Clone, PartialEq, Debug)]
pub enum Prompt {
    /// Text.
    Text(String),
    /// Token ids.
    Tokens(Vec<u32>),
    /// A gap between two texts, which is to be filled in.
    Gap {
        /// The text before it.
        before: String,
        /// The text after it.
        after: String,
        /// The beginning of what fills it.
        begun: String,
    },
}

impl Prompt {
    /// The gap between a prompt of text and `after`.
    fn followed_by(self, after: &str) -> Result<Self> {
        match self {
            Prompt::Text(before) => Ok(Prompt::Gap { before, after: after.to_owned(), begun: String::new() }),
            _ => Err(ApiError::unsupported("suffix", "'suffix' is only supported with prompts of text.")),
        }
    }
}

/// Parses a body as JSON.
pub fn json(body: &[u8]) -> Result<Value> {
    if let Err(error) = std::str::from_utf8(body) {
        return Err(ApiError::bad_request(format!(
            "The request body is not UTF-8, from byte {} on.",
            error.valid_up_to()
        )));
    }
    serde_json::from_slice(body)
        .map_err(|error| ApiError::bad_request(format!("The request body is not valid JSON: {error}.")))
}

impl ChatRequest {
    /// The same request with other messages.
    pub fn with_messages(&self, messages: Vec<Value>) -> Self {
        let ChatRequest { params, images, seen, tools, extra, .. } = self;
        let (params, images, seen) = (params.clone(), images.clone(), seen.clone());
        let (tools, extra) = (tools.clone(), extra.clone());
        ChatRequest { params, messages, images, seen, tools, extra, ..*self }
    }

    /// Parses and checks a body.
    pub fn parse(body: &[u8]) -> Result<Self> {
        let json = json(body)?;
        let fields = Fields::of(&json, "", &CHAT)?;
        let mut params = generation_params(&fields)?;
        check_max_tokens(&params)?;
        params.logprobs = match (fields.flag("logprobs"), fields.count("top_logprobs")) {
            (true, top) => Some(top.unwrap_or(0)),
            (false, None | Some(0)) => None,
            (false, Some(_)) => {
                let message = "The 'top_logprobs' parameter is only allowed when 'logprobs' is true.";
                return Err(ApiError::invalid_field("top_logprobs", "invalid_value", message));
            }
        };
        let (messages, images) = messages::read(&fields)?;
        let offered = OfferedTools::of_chat(&fields)?;
        let chat = ChatRequest {
            continues: continues(&fields, &messages)?,
            messages,
            images,
            tools: offered.requested()?,
            separate_reasoning: fields.string("reasoning_format") != Some("none"),
            extra: extra(&fields, None),
            ..ChatRequest::default()
        };
        params.notes = offered.notes.into_iter().chain(fields.unknown()).collect();
        Ok(ChatRequest { params, ..chat })
    }
}

impl CompletionRequest {
    /// Parses and checks a body.
    pub fn parse(body: &[u8]) -> Result<Self> {
        let json = json(body)?;
        let fields = Fields::of(&json, "", &COMPLETION)?;
        let mut params = generation_params(&fields)?;
        params.echo = fields.flag("echo");
        check_max_tokens(&params)?;
        if fields.count("best_of").is_some_and(|best| best != params.choices) {
            return Err(ApiError::unsupported("best_of", "'best_of' is not supported unless it equals 'n'."));
        }
        params.logprobs = fields.count("logprobs");
        let mut prompts = parse_prompts("prompt", fields.required("prompt")?)?;
        if let Some(suffix) = fields.string("suffix").filter(|suffix| !suffix.is_empty()) {
            if params.echo {
                return Err(ApiError::unsupported("echo", "'echo' is not supported with 'suffix'."));
            }
            prompts = prompts.into_iter().map(|prompt| prompt.followed_by(suffix)).collect::<Result<_>>()?;
        }
        params.notes = fields.unknown().collect();
        let answers = prompts.len() * params.choices;
        if answers > CHOICES {
            let message = format!("This server gives at most {CHOICES} answers per request, not {answers}.");
            return Err(ApiError::unsupported("prompt", message));
        }
        Ok(CompletionRequest { params, prompts })
    }
}

/// The body of `POST /engine`.
pub static ROUTING: Object = Object {
    name: "RoutingChange",
    groups: &[&[
        MODEL,
        field("lambda", Kind::Number(0.0, 100.0), "the λ of the strategy in use; either this or `routing`"),
        field("routing", Kind::Text, "a strategy, as `--routing` has it"),
    ]],
};

/// Parses the body of `POST /engine`.
pub fn parse_routing(body: &[u8]) -> Result<RoutingChange> {
    let json = json(body)?;
    let fields = Fields::of(&json, "", &ROUTING)?;
    match (fields.string("routing"), fields.number("lambda")) {
        (Some(spec), None) => Ok(RoutingChange::Spec(spec.to_owned())),
        (None, Some(lambda)) => Ok(RoutingChange::Lambda(lambda)),
        (None, None) => Err(ApiError::bad_request(
            "Missing required parameter: give 'lambda' (a number) or 'routing' (a strategy).",
        )),
        (Some(_), Some(_)) => Err(ApiError::bad_request("Give either 'lambda' or 'routing', not both.")),
    }
}

/// The body of `POST /slots/{id}`.
pub static SLOT: Object = Object {
    name: "SlotRequest",
    groups: &[&[MODEL, field("filename", Kind::Text, "a file in `--session-dir`, needed to save and to restore")]],
};

/// The file in the body of `POST /slots/{id}`.
pub fn slot_file(body: &[u8]) -> Result<String> {
    let json = json(body)?;
    Fields::of(&json, "", &SLOT)?.required_string("filename").map(str::to_owned)
}

/// Whether the answer continues the last message, by the parameter of vLLM and transformers.
fn continues(fields: &Fields, messages: &[Value]) -> Result<bool> {
    const FIELD: &str = "continue_final_message";
    if !fields.flag(FIELD) {
        return Ok(false);
    }
    if messages.last().is_some_and(|last| last["role"] == "assistant") {
        Ok(true)
    } else {
        let message = format!("'{FIELD}' needs a last message with the role 'assistant'.");
        Err(ApiError::invalid_field(FIELD, "invalid_value", message))
    }
}

/// A text, token ids, or a list of either.
fn parse_prompts(field: &str, value: &Value) -> Result<Vec<Prompt>> {
    let one = |value: &Value| match value {
        Value::String(text) => Some(Prompt::Text(text.clone())),
        value => ids(value).map(Prompt::Tokens),
    };
    let all = match value {
        Value::Array(list) if matches!(list.first(), Some(Value::String(_) | Value::Array(_))) => {
            list.iter().map(one).collect()
        }
        value => one(value).map(|prompt| vec![prompt]),
    };
    all.ok_or_else(|| wrong_type(field, "a string, an array of token ids, or an array of either", value))
}

/// Token ids, as the table has checked them.
fn ids(value: &Value) -> Option<Vec<u32>> {
    let id = |value| u32::try_from(fields::whole(value)?).ok();
    value.as_array()?.iter().map(id).collect()
}

#[cfg(test)]
mod tests;
