//! Keys of a config that are refused. They are gathered, and refused together.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;

use larder_core::printable;
use serde_json::Value;

use super::config_error;
use crate::error::ModelError;

/// The keys that a config and the objects in it have been refused for.
pub type Refusals = Rc<RefCell<Vec<Refusal>>>;

/// Refusals that a message has; there are more only in files that are no configs.
const SHOWN: usize = 40;

/// Characters of a key or a value that a message has.
const CHARS: usize = 60;

/// Words in keys, and what such keys are usually about; the first that fits counts.
const SUBJECTS: [(&[&str], &str); 9] = [
    (&["quant", "dtype", "bits"], "number formats"),
    (&["rope", "rotary", "position", "theta"], "positions"),
    (&["expert", "moe", "router", "topk", "top_k"], "the choice of experts"),
    (&["attn", "attention", "window", "head", "kv", "index"], "attention"),
    (&["mamba", "ssm", "conv", "linear", "delta"], "recurrent layers"),
    (&["norm", "eps"], "norms"),
    (&["act", "glu", "mlp", "intermediate"], "MLPs"),
    (&["scale", "scaling", "multiplier", "softcap", "logit"], "factors on hidden states or logits"),
    (&["layer", "block"], "the layers"),
];

/// A key that is refused, with its value and the reason.
#[derive(Clone, Debug)]
pub struct Refusal {
    /// The key below the config of the text decoder, with those of the objects around it.
    pub key: String,
    value: String,
    why: String,
}

impl Refusal {
    /// A key with this value, for this reason.
    pub fn new(key: impl Into<String>, value: &Value, why: impl Into<String>) -> Self {
        Refusal { key: key.into(), value: shown(&value.to_string()), why: why.into() }
    }

    /// A key that is not known, with this value.
    pub fn unknown(key: impl Into<String>, value: &Value) -> Self {
        let key = key.into();
        let subject = SUBJECTS.iter().find(|(words, _)| words.iter().any(|word| key.contains(word)));
        let why = format!("might change {}", subject.map_or("the result", |(_, subject)| subject));
        Refusal::new(key, value, why)
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} is not supported ({}: {})", shown(&self.key), self.value, self.why)
    }
}

/// The beginning of a text of a config.
pub fn shown(text: &str) -> String {
    let text = printable(text);
    match text.char_indices().nth(CHARS) {
        Some((cut, _)) => format!("{}…", &text[..cut]),
        None => text,
    }
}

/// The error about all keys that are refused, of which there is at least one.
pub fn refused(all: &[Refusal]) -> ModelError {
    let list = all.iter().take(SHOWN).map(Refusal::to_string).collect::<Vec<_>>().join("; ");
    let keys = all.iter().take(SHOWN).map(|refusal| shown(&refusal.key)).collect::<Vec<_>>().join(",");
    let more = match all.len().saturating_sub(SHOWN) {
        0 => String::new(),
        more => format!("; and {more} more keys"),
    };
    config_error(format!("{list}{more}. To go on as if they were absent: --ignore-config {keys}"))
}
