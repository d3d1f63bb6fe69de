//! Fields of all APIs that would change an answer and are not supported, and fields without effect. The former are
//! refused by name unless they have a value that changes nothing.

use super::neutral::Neutral::{self, Empty, Numbers, Text};
use super::table::{Field, Kind, field};

/// With what clients of llama.cpp's and other servers send to OpenAI's routes.
pub const UNSUPPORTED: &[Field] = &[
    refused("functions", Empty, "use 'tools'"),
    refused("function_call", Empty, "use 'tools'"),
    refused("audio", Empty, ""),
    refused("modalities", Text, ""),
    refused("web_search_options", Empty, ""),
    refused("prediction", Empty, ""),
    refused("typical_p", Numbers(&[1.0]), ""),
    refused("mirostat", Numbers(&[0.0]), ""),
    refused("dynatemp_range", Numbers(&[0.0]), ""),
    refused("top_n_sigma", Numbers(&[0.0, -1.0]), ""),
    refused("xtc_probability", Numbers(&[0.0]), ""),
    refused("dry_multiplier", Numbers(&[0.0]), ""),
    refused("min_tokens", Numbers(&[0.0]), ""),
    refused("length_penalty", Numbers(&[1.0]), ""),
    refused("use_beam_search", Numbers(&[0.0]), ""),
    refused("lora", Empty, ""),
    refused("samplers", Empty, ""),
    refused("tfs_z", Numbers(&[1.0]), ""),
    refused("bad_words", Empty, ""),
    refused("stop_token_ids", Empty, ""),
    refused("truncate_prompt_tokens", Empty, ""),
    refused("guided_json", Empty, ""),
    refused("guided_regex", Empty, ""),
    refused("guided_choice", Empty, ""),
    refused("guided_grammar", Empty, ""),
    refused("structured_outputs", Empty, ""),
];

/// What clients send all the time.
pub const IGNORED: &[Field] = &[
    unread("betas", "ignored"),
    unread("cache_control", "ignored"),
    unread("cache_prompt", "ignored: the prefix cache changes no answer"),
    unread("client_metadata", "ignored"),
    unread("id_slot", "ignored: prompts find their slots"),
    unread("include", "ignored"),
    unread("keep_alive", "ignored"),
    unread("prompt_cache_key", "ignored: the prefix cache finds prompts by their tokens"),
    unread("prompt_cache_retention", "ignored"),
    unread("return_tokens", "ignored"),
    unread("safety_identifier", "ignored"),
    unread("service_tier", "ignored"),
    unread("skip_special_tokens", "ignored: special tokens are not part of answers"),
    unread("store", "ignored: nothing is stored"),
    unread("timings_per_token", "ignored"),
    unread("verbosity", "ignored: give it as `chat_template_kwargs` to templates that know it"),
];

/// Fields of which OpenAI's Responses repeat the values.
pub const METADATA: &[Field] = &[unread("metadata", "ignored"), unread("user", "ignored")];

/// A field that is refused unless it is neutral, and what to do instead.
pub const fn refused(name: &'static str, neutral: Neutral, why: &'static str) -> Field {
    field(name, Kind::Refused(neutral), why)
}

/// A field that no parser reads.
pub const fn unread(name: &'static str, about: &'static str) -> Field {
    field(name, Kind::Unread, about)
}
