//! Settings of generation that several APIs share.

use larder_engine::Sampling;
use serde_json::{Map, Value};

use super::fields::{Fields, wrong_type};
use super::table::{Field, Kind, Object, TEXTS, field};
use super::{CHOICES, GenerationParams, Result, context, format};
use crate::error::ApiError;

/// Limit of the tokens in `logit_bias`.
const BIASES: usize = 1024;
/// Limit of stop strings.
const STOPS_MAX: usize = 64;

/// The field that names the model.
pub const MODEL: Field =
    field("model", Kind::Text, "chooses among several; the only one answers to any name, unless `--strict-model`");

/// A limit of tokens; -1 stands for none.
pub const LIMIT: Kind = Kind::Integer(-1, u32::MAX as i128);
pub const STOPS: Kind = Kind::Either(&[Kind::Text, TEXTS]);
pub const SEED: Field =
    field("seed", Kind::Integer(i64::MIN as i128, u64::MAX as i128), "without it each answer is drawn anew");

/// Sampling settings of all APIs.
pub const SAMPLING: &[Field] = &[
    field("temperature", Kind::Number(0.0, 2.0), "0 takes the likeliest token"),
    field("top_p", Kind::Number(0.0, 1.0), "draws from the likeliest tokens of this probability together"),
    field("top_k", LIMIT, "draws from as many of the likeliest tokens; 0 and -1 from all"),
    field(
        "min_p",
        Kind::Number(0.0, 1.0),
        "draws from tokens of at least this share of the likeliest one's probability",
    ),
    field("frequency_penalty", Kind::Number(-2.0, 2.0), "by how often a token occurs in the answer"),
    field("presence_penalty", Kind::Number(-2.0, 2.0), "for tokens that occur in the answer"),
    SEED,
];

pub const REPETITION_PENALTY: Field =
    field("repetition_penalty", Kind::Number(0.01, 100.0), "for tokens that occur in prompt or answer");

/// The other name of the penalty, in llama.cpp's and Ollama's servers.
pub const REPEAT_PENALTY: Field =
    field("repeat_penalty", Kind::Number(0.01, 100.0), "the same as `repetition_penalty`");

pub const STREAM: Field =
    field("stream", Kind::Flag(false), "the answer comes as it is generated, in server-sent events");
/// The name that llama.cpp's server has for it.
pub const RETURN_PROGRESS: Field = field(
    "return_progress",
    Kind::Flag(false),
    "a stream tells in `prompt_progress` how much of the prompt is computed",
);
pub const TEMPLATE_KWARGS: Field = field("chat_template_kwargs", Kind::Map, "variables for the chat template");
pub const EFFORT: Field = field("reasoning_effort", Kind::Text, "passed to the chat template");

static STREAM_OPTIONS: Object = Object {
    name: "StreamOptions",
    groups: &[&[field("include_usage", Kind::Flag(false), "a stream ends with the usage")]],
};

/// Settings of OpenAI's chats and completions, and of llama.cpp's server.
pub const GENERATION: &[Field] = &[
    MODEL,
    field("max_tokens", LIMIT, "limit of the answer; -1 fills the context, 0 only with `echo`"),
    field("max_completion_tokens", LIMIT, "the same; precedes `max_tokens`"),
    field("n_predict", LIMIT, "the same, if neither of them is given"),
    REPETITION_PENALTY,
    REPEAT_PENALTY,
    field("stop", STOPS, "up to 64 texts that end the answer"),
    field("logit_bias", Kind::Map, "up to 1,024 token ids with -100 to 100 each"),
    field(
        "n",
        Kind::Integer(1, CHOICES as i128),
        "answers to each prompt, 1 if missing; with several prompts at most 64 together",
    ),
    STREAM,
    field("stream_options", Kind::Object(&STREAM_OPTIONS), "more about the stream"),
    RETURN_PROGRESS,
    field("ignore_eos", Kind::Flag(false), "the answer goes on after a token that ends it"),
    context::CONTEXT_FULL,
    field("n_keep", LIMIT, "tokens at the beginning of the prompt that shifts keep; -1 for all"),
];

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

/// The parameters that all APIs have: those of `fields`, and those of sampling, which may be in an object of their own.
/// Of the `penalties`, names of the same, the first that is given counts.
pub fn shared_params(fields: &Fields, sampling: &Fields, penalties: &[&str]) -> GenerationParams {
    GenerationParams {
        choices: 1,
        model: model(fields),
        sampling: sampling_params(sampling, penalties),
        // Any 64-bit integer, signed or unsigned.
        seed: sampling.integer("seed").map(|seed| seed as u64),
        stream: fields.flag("stream"),
        context_full: context::context_full(fields),
        ..GenerationParams::default()
    }
}

pub fn generation_params(fields: &Fields) -> Result<GenerationParams> {
    let options = fields.object("stream_options")?;
    // Other names are those of llama.cpp's server.
    let limits = ["max_completion_tokens", "max_tokens", "n_predict"].map(|field| fields.count(field));
    Ok(GenerationParams {
        choices: fields.count("n").unwrap_or(1),
        max_tokens: limits.into_iter().flatten().next(),
        logit_bias: logit_bias(fields)?,
        stop: stop_strings(fields, "stop")?,
        include_usage: options.is_some_and(|options| options.flag("include_usage")),
        return_progress: fields.flag("return_progress"),
        ignore_eos: fields.flag("ignore_eos"),
        keep: fields.count("n_keep"),
        format: format::requested_format(fields)?,
        ..shared_params(fields, fields, &["repetition_penalty", "repeat_penalty"])
    })
}

pub fn model(fields: &Fields) -> Option<String> {
    fields.string("model").map(str::to_owned)
}

fn sampling_params(fields: &Fields, penalties: &[&str]) -> SamplingParams {
    SamplingParams {
        temperature: fields.number("temperature"),
        top_p: fields.number("top_p"),
        top_k: fields.integer("top_k").map(|k| usize::try_from(k).unwrap_or(0)),
        min_p: fields.number("min_p"),
        repetition_penalty: penalties.iter().find_map(|field| fields.number(field)),
        frequency_penalty: fields.number("frequency_penalty"),
        presence_penalty: fields.number("presence_penalty"),
    }
}

/// No token is generated only where the prompt is the answer.
pub fn check_max_tokens(params: &GenerationParams) -> Result<()> {
    if params.max_tokens != Some(0) || params.echo {
        return Ok(());
    }
    let message = "Invalid value for 'max_tokens': 0 is only allowed with 'echo'.";
    Err(ApiError::invalid_field("max_tokens", "invalid_value", message))
}

/// OpenAI's form: token ids as keys.
pub fn logit_bias(fields: &Fields) -> Result<Vec<(u32, f32)>> {
    let Some(value) = fields.get("logit_bias") else { return Ok(vec![]) };
    let wrong = || wrong_type("logit_bias", "an object of token ids with a bias from -100 to 100 each", value);
    let map = value.as_object().ok_or_else(wrong)?;
    if map.len() > BIASES {
        let message =
            format!("Invalid value for 'logit_bias': expected at most {BIASES} tokens, but got {}.", map.len());
        return Err(ApiError::invalid_field("logit_bias", "invalid_value", message));
    }
    let pair = |(id, bias): (&String, &Value)| {
        let bias = bias.as_f64().filter(|bias| (-100.0..=100.0).contains(bias));
        Ok((id.parse().map_err(|_| wrong())?, bias.ok_or_else(wrong)? as f32))
    };
    map.iter().map(pair).collect()
}

/// The stop strings of a field.
pub fn stop_strings(fields: &Fields, field: &str) -> Result<Vec<String>> {
    let name = fields.name(field);
    let stops: Vec<String> = match fields.get(field) {
        Some(Value::String(stop)) => vec![stop.clone()],
        _ => fields.array(field).iter().filter_map(Value::as_str).map(str::to_owned).collect(),
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

/// Variables that some chat templates read beside the messages. Some APIs have the effort in an object of their own,
/// where `nested` is from.
pub fn extra(fields: &Fields, nested: Option<&str>) -> Map<String, Value> {
    let mut extra = fields.get("chat_template_kwargs").and_then(Value::as_object).cloned().unwrap_or_default();
    if let Some(effort) = fields.string("reasoning_effort").or(nested) {
        extra.entry("reasoning_effort").or_insert(effort.into());
    }
    extra
}
