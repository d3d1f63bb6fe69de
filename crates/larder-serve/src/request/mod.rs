//! Request bodies, parsed from untrusted bytes.

mod anthropic;
mod context;
mod dialogue;
mod embeddings;
mod fields;
mod format;
mod infill;
mod mathml;
mod messages;
mod ollama;
mod parts;
mod responses;
mod tokens;
mod tools;
mod unsupported;

use larder_engine::Sampling;
use larder_text::ContextFull;
use serde_json::{Map, Value};

use crate::engine::RoutingChange;
use crate::error::{ApiError, excerpt};
pub use embeddings::{EmbeddingRequest, EmbeddingStyle};
use fields::{Fields, whole, wrong_type};
pub use format::RequestedFormat;
pub use mathml::MathmlRequest;
pub use ollama::{OllamaGenerateRequest, OllamaLoadRequest, shown_model};
pub use responses::ResponsesRequest;
pub use tokens::{DetokenizeRequest, TokenizeRequest};
use tools::OfferedTools;
pub use tools::{Namespaces, RequestedTools, ToolChoice};

type Result<T> = std::result::Result<T, ApiError>;

/// Limit of `top_logprobs`.
const TOP_LOGPROBS: u64 = 20;
/// Limit of the answers to one request: `n` times the number of prompts.
const CHOICES: u64 = 64;
/// Limit of the tokens in `logit_bias`.
const BIASES: usize = 1024;
/// Limit of stop strings.
const STOPS_MAX: usize = 64;

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

/// Sampling parameters; `None` means the model's default.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct SamplingParams {
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<usize>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    presence_penalty: Option<f32>,
}

/// The body of `/v1/chat/completions`.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct ChatRequest {
    /// Generation parameters.
    pub params: GenerationParams,
    /// The messages as chat templates read them.
    pub messages: Vec<Value>,
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
        let ChatRequest { params, tools, extra, .. } = self;
        let (params, tools, extra) = (params.clone(), tools.clone(), extra.clone());
        ChatRequest { params, messages, tools, extra, ..*self }
    }

    /// Parses and checks a body.
    pub fn parse(body: &[u8]) -> Result<Self> {
        let json = json(body)?;
        let fields = Fields::of(&json, "")?;
        let mut params = generation_params(&fields)?;
        check_max_tokens(&params)?;
        let wanted = fields.boolean("logprobs")?.unwrap_or(false);
        params.logprobs = match (wanted, fields.integer("top_logprobs", 0..=TOP_LOGPROBS)?) {
            (true, top) => Some(top.unwrap_or(0) as usize),
            (false, None | Some(0)) => None,
            (false, Some(_)) => {
                let message = "The 'top_logprobs' parameter is only allowed when 'logprobs' is true.";
                return Err(ApiError::invalid_field("top_logprobs", "invalid_value", message));
            }
        };
        let messages = messages::read(fields.required("messages")?)?;
        let offered = OfferedTools::of_chat(&fields)?;
        let chat = ChatRequest {
            continues: continues(&fields, &messages)?,
            messages,
            tools: offered.requested()?,
            separate_reasoning: separate_reasoning(&fields)?,
            extra: extra(&fields)?,
            ..ChatRequest::default()
        };
        params.notes = offered.notes.into_iter().chain(unsupported::unknown(&fields)).collect();
        Ok(ChatRequest { params, ..chat })
    }
}

impl CompletionRequest {
    /// Parses and checks a body.
    pub fn parse(body: &[u8]) -> Result<Self> {
        let json = json(body)?;
        let fields = Fields::of(&json, "")?;
        let mut params = generation_params(&fields)?;
        params.echo = fields.boolean("echo")?.unwrap_or(false);
        check_max_tokens(&params)?;
        if fields.integer("best_of", 1..=CHOICES)?.is_some_and(|best| best != params.choices as u64) {
            return Err(ApiError::unsupported("best_of", "'best_of' is not supported unless it equals 'n'."));
        }
        params.logprobs = fields.integer("logprobs", 0..=TOP_LOGPROBS)?.map(|n| n as usize);
        let mut prompts = parse_prompts("prompt", fields.required("prompt")?)?;
        if let Some(suffix) = fields.string("suffix")?.filter(|suffix| !suffix.is_empty()) {
            if params.echo {
                return Err(ApiError::unsupported("echo", "'echo' is not supported with 'suffix'."));
            }
            prompts = prompts.into_iter().map(|prompt| prompt.followed_by(suffix)).collect::<Result<_>>()?;
        }
        params.notes = unsupported::unknown(&fields).collect();
        let answers = prompts.len() as u64 * params.choices as u64;
        if answers > CHOICES {
            let message = format!("This server gives at most {CHOICES} answers per request, not {answers}.");
            return Err(ApiError::unsupported("prompt", message));
        }
        Ok(CompletionRequest { params, prompts })
    }
}

impl SamplingParams {
    /// All sampling settings, with `defaults` for those that the request does not give.
    pub fn or_defaults(&self, defaults: Sampling) -> Sampling {
        Sampling {
            temperature: self.temperature.unwrap_or(defaults.temperature),
            top_k: self.top_k.unwrap_or(defaults.top_k),
            // OpenAI allows 0, which leaves only the likeliest token.
            top_p: self.top_p.unwrap_or(defaults.top_p).max(f32::MIN_POSITIVE),
            min_p: self.min_p.unwrap_or(defaults.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(defaults.repetition_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(defaults.frequency_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(defaults.presence_penalty),
        }
    }
}

/// Parses the body of `POST /engine`.
pub fn parse_routing(body: &[u8]) -> Result<RoutingChange> {
    let json = json(body)?;
    let fields = Fields::of(&json, "")?;
    match (fields.string("routing")?, fields.number("lambda", 0.0..=100.0)?) {
        (Some(spec), None) => Ok(RoutingChange::Spec(spec.to_owned())),
        (None, Some(lambda)) => Ok(RoutingChange::Lambda(lambda)),
        (None, None) => Err(ApiError::bad_request(
            "Missing required parameter: give 'lambda' (a number) or 'routing' (a strategy).",
        )),
        (Some(_), Some(_)) => Err(ApiError::bad_request("Give either 'lambda' or 'routing', not both.")),
    }
}

fn generation_params(fields: &Fields) -> Result<GenerationParams> {
    unsupported::refuse(fields)?;
    let stream = fields.boolean("stream")?.unwrap_or(false);
    let options = fields.object("stream_options")?;
    let include_usage = options.map_or(Ok(None), |options| options.boolean("include_usage"))?.unwrap_or(false);
    let (newer, older) = (max_tokens(fields, "max_completion_tokens")?, max_tokens(fields, "max_tokens")?);
    let penalty = fields.number("repeat_penalty", 0.01..=100.0)?;
    let sampling = sampling_params(fields)?;
    Ok(GenerationParams {
        choices: fields.integer("n", 1..=CHOICES)?.unwrap_or(1) as usize,
        model: fields.string("model")?.map(str::to_owned),
        // Other names are those of llama.cpp's server.
        max_tokens: newer.or(older).or(max_tokens(fields, "n_predict")?),
        sampling: SamplingParams { repetition_penalty: sampling.repetition_penalty.or(penalty), ..sampling },
        seed: seed(fields)?,
        logit_bias: logit_bias(fields)?,
        stop: stop_strings(fields, "stop")?,
        stream,
        include_usage,
        logprobs: None,
        ignore_eos: fields.boolean("ignore_eos")?.unwrap_or(false),
        echo: false,
        context_full: context::context_full(fields)?,
        keep: context::keep(fields, "n_keep")?,
        format: format::requested_format(fields)?,
        notes: vec![],
    })
}

fn sampling_params(fields: &Fields) -> Result<SamplingParams> {
    Ok(SamplingParams {
        temperature: fields.number("temperature", 0.0..=2.0)?,
        top_p: fields.number("top_p", 0.0..=1.0)?,
        top_k: top_k(fields)?,
        min_p: fields.number("min_p", 0.0..=1.0)?,
        repetition_penalty: fields.number("repetition_penalty", 0.01..=100.0)?,
        frequency_penalty: fields.number("frequency_penalty", -2.0..=2.0)?,
        presence_penalty: fields.number("presence_penalty", -2.0..=2.0)?,
    })
}

/// The most tokens to draw from; 0 and -1 stand for all.
fn top_k(fields: &Fields) -> Result<Option<usize>> {
    if fields.is_minus_one("top_k") {
        return Ok(Some(0));
    }
    Ok(fields.integer("top_k", 0..=u32::MAX.into())?.map(|k| k as usize))
}

/// A limit of tokens; -1 stands for none, as in llama.cpp's server.
fn max_tokens(fields: &Fields, field: &str) -> Result<Option<usize>> {
    if fields.is_minus_one(field) {
        return Ok(Some(usize::MAX));
    }
    Ok(fields.integer(field, 0..=u32::MAX.into())?.map(|n| n as usize))
}

/// No token is generated only where the prompt is the answer.
fn check_max_tokens(params: &GenerationParams) -> Result<()> {
    if params.max_tokens != Some(0) || params.echo {
        return Ok(());
    }
    let message = "Invalid value for 'max_tokens': 0 is only allowed with 'echo'.";
    Err(ApiError::invalid_field("max_tokens", "invalid_value", message))
}

/// OpenAI's form: token ids as keys.
fn logit_bias(fields: &Fields) -> Result<Vec<(u32, f32)>> {
    let Some(value) = fields.get("logit_bias") else { return Ok(vec![]) };
    let wrong = |value| wrong_type("logit_bias", "an object of token ids with a bias from -100 to 100 each", value);
    let Value::Object(map) = value else { return Err(wrong(value)) };
    if map.len() > BIASES {
        let message =
            format!("Invalid value for 'logit_bias': expected at most {BIASES} tokens, but got {}.", map.len());
        return Err(ApiError::invalid_field("logit_bias", "invalid_value", message));
    }
    let pair = |(id, bias): (&String, &Value)| {
        let bias = bias.as_f64().filter(|bias| (-100.0..=100.0).contains(bias));
        Ok((id.parse().map_err(|_| wrong(value))?, bias.ok_or_else(|| wrong(value))? as f32))
    };
    map.iter().map(pair).collect()
}

/// Any 64-bit integer, signed or unsigned.
fn seed(fields: &Fields) -> Result<Option<u64>> {
    let Some(value) = fields.get("seed") else { return Ok(None) };
    let seed = whole(value).filter(|seed| (i64::MIN.into()..=u64::MAX.into()).contains(seed));
    seed.map(|seed| Some(seed as u64)).ok_or_else(|| wrong_type("seed", "an integer", value))
}

/// The stop strings of a field.
fn stop_strings(fields: &Fields, field: &str) -> Result<Vec<String>> {
    let Some(value) = fields.get(field) else { return Ok(vec![]) };
    let name = fields.name(field);
    let wrong = || wrong_type(&name, "a string or an array of strings", value);
    let stops: Vec<String> = match value {
        Value::String(stop) => vec![stop.clone()],
        Value::Array(list) => {
            list.iter().map(|stop| stop.as_str().map(str::to_owned)).collect::<Option<_>>().ok_or_else(wrong)?
        }
        _ => return Err(wrong()),
    };
    let message = match (stops.len(), stops.iter().any(String::is_empty)) {
        (n, _) if n > STOPS_MAX => {
            format!("Invalid value for '{name}': expected at most {STOPS_MAX} strings, but got {n} instead.")
        }
        (_, true) => format!("Invalid value for '{name}': a stop string must not be empty."),
        _ => return Ok(stops),
    };
    Err(ApiError::invalid_field(name, "invalid_value", message))
}

fn reject_unless_empty(fields: &Fields, field: &str, why: &str) -> Result<()> {
    match fields.get(field) {
        None => Ok(()),
        Some(Value::Object(map)) if map.is_empty() => Ok(()),
        Some(Value::Array(list)) if list.is_empty() => Ok(()),
        Some(Value::String(text)) if text.is_empty() => Ok(()),
        Some(_) => Err(ApiError::unsupported(fields.name(field), why)),
    }
}

/// Whether reasoning has a field of its own, by the parameter of llama.cpp's server.
fn separate_reasoning(fields: &Fields) -> Result<bool> {
    match fields.string("reasoning_format")? {
        None | Some("auto" | "deepseek") => Ok(true),
        Some("none") => Ok(false),
        Some(other) => {
            let message = format!(
                "Invalid value for 'reasoning_format': '{}' is not one of auto, deepseek, none.",
                excerpt(other)
            );
            Err(ApiError::invalid_field("reasoning_format", "invalid_value", message))
        }
    }
}

/// Variables that some chat templates read beside the messages.
fn extra(fields: &Fields) -> Result<Map<String, Value>> {
    let mut extra = match fields.get("chat_template_kwargs") {
        None => Map::new(),
        Some(Value::Object(map)) => map.clone(),
        Some(other) => return Err(wrong_type("chat_template_kwargs", "an object", other)),
    };
    if let Some(effort) = fields.string("reasoning_effort")? {
        extra.entry("reasoning_effort").or_insert(effort.into());
    }
    Ok(extra)
}

/// Whether the answer continues the last message, by the parameter of vLLM and transformers.
fn continues(fields: &Fields, messages: &[Value]) -> Result<bool> {
    const FIELD: &str = "continue_final_message";
    if fields.boolean(FIELD)? != Some(true) {
        return Ok(false);
    }
    // With it, clients say that no new answer is to begin.
    fields.boolean("add_generation_prompt")?;
    match messages.last().is_some_and(|last| last["role"] == "assistant") {
        true => Ok(true),
        false => {
            let message = format!("'{FIELD}' needs a last message with the role 'assistant'.");
            Err(ApiError::invalid_field(FIELD, "invalid_value", message))
        }
    }
}

/// A text, token ids, or a list of either.
fn parse_prompts(field: &str, value: &Value) -> Result<Vec<Prompt>> {
    let wrong = || wrong_type(field, "a string, an array of token ids, or an array of either", value);
    let ids = |list: &[Value]| list.iter().map(id).collect::<Option<_>>().map(Prompt::Tokens);
    let one = |value: &Value| match value {
        Value::String(text) => Some(Prompt::Text(text.clone())),
        Value::Array(list) => ids(list),
        _ => None,
    };
    match value {
        Value::Array(list) if matches!(list.first(), Some(Value::String(_) | Value::Array(_))) => {
            list.iter().map(one).collect::<Option<_>>().ok_or_else(wrong)
        }
        value => one(value).map(|prompt| vec![prompt]).ok_or_else(wrong),
    }
}

fn id(value: &Value) -> Option<u32> {
    u32::try_from(whole(value)?).ok()
}

#[cfg(test)]
mod tests;
