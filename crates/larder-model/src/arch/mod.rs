//! The architectures, one file per `model_type`. To add one, copy the nearest file and add its row to [`ARCHS`].
//!
//! Each file has a `build` that reads the config's keys in one go and then requests the weights layer by layer. The
//! head of the file shows the shape of one block: `x [tokens, hidden]` flows from top to bottom, `+=` is the residual
//! addition.

use std::borrow::Cow;

use serde_json::Value;

use crate::config::{Config, config_error};
use crate::error::{ModelError, Result};
use crate::stack::Stack;
use crate::weights::WeightLoader;

pub use mtp::{check_mtp, mtp_layers};
pub use stated::stated;

mod afmoe;
mod bailing_hybrid;
mod bailing_moe;
mod common;
mod deepseek_family;
mod deepseek_v2;
mod deepseek_v3;
mod deepseek_v32;
mod deepseek_v4;
mod dots1;
mod ernie4_5_moe;
mod exaone_moe;
mod flex_olmo;
mod gemma4_text;
mod glm4_moe;
mod glm4_moe_lite;
mod glm5_next;
mod glm_moe_dsa;
mod gpt_oss;
mod granitemoe;
mod granitemoehybrid;
mod granitemoeshared;
mod hunyuan_v1_moe;
mod hy_v3;
mod jamba;
mod kimi_linear;
mod laguna;
mod lfm2_moe;
mod llama4_text;
mod llama_moe;
mod mellum;
mod mimo_v2_flash;
mod minimax_m2;
mod minimax_m3_vl;
mod mistral4;
mod mixtral;
mod mtp;
mod nemotron_h;
mod olmoe;
mod phimoe;
mod qwen2_moe;
mod qwen3_5_moe;
mod qwen3_moe;
mod qwen3_next;
mod qwen4_exp;
mod smallthinker;
mod solar_open;
mod stated;
mod step3p5;
mod switch_transformers;
mod zaya;

/// One architecture: a row of [`ARCHS`].
pub struct Arch {
    /// The `model_type` in a config.
    pub model_type: &'static str,
    /// Reads the config's keys and requests the tensors that they call for.
    pub build: fn(&mut Config, &mut WeightLoader) -> Result<Stack>,
}

const ARCHS: &[Arch] = &[
    Arch { model_type: "afmoe", build: afmoe::build },
    Arch { model_type: "bailing_hybrid", build: bailing_hybrid::build },
    Arch { model_type: "bailing_moe", build: bailing_moe::build },
    Arch { model_type: "bailing_moe_v2", build: bailing_moe::build_second },
    Arch { model_type: "deepseek_v2", build: deepseek_v2::build },
    Arch { model_type: "deepseek_v3", build: deepseek_v3::build },
    Arch { model_type: "deepseek_v32", build: deepseek_v32::build },
    Arch { model_type: "deepseek_v4", build: deepseek_v4::build },
    Arch { model_type: "dots1", build: dots1::build },
    Arch { model_type: "ernie4_5_moe", build: ernie4_5_moe::build },
    Arch { model_type: "exaone_moe", build: exaone_moe::build },
    Arch { model_type: "flex_olmo", build: flex_olmo::build },
    Arch { model_type: "gemma4_text", build: gemma4_text::build },
    Arch { model_type: "glm4_moe", build: glm4_moe::build },
    Arch { model_type: "glm4_moe_lite", build: glm4_moe_lite::build },
    Arch { model_type: "glm5_next", build: glm5_next::build },
    Arch { model_type: "glm_moe_dsa", build: glm_moe_dsa::build },
    Arch { model_type: "gpt_oss", build: gpt_oss::build },
    Arch { model_type: "granitemoe", build: granitemoe::build },
    Arch { model_type: "granitemoehybrid", build: granitemoehybrid::build },
    Arch { model_type: "granitemoeshared", build: granitemoeshared::build },
    Arch { model_type: "hunyuan_v1_moe", build: hunyuan_v1_moe::build },
    Arch { model_type: "hy_v3", build: hy_v3::build },
    Arch { model_type: "jamba", build: jamba::build },
    Arch { model_type: "kimi_linear", build: kimi_linear::build },
    Arch { model_type: "laguna", build: laguna::build },
    Arch { model_type: "lfm2_moe", build: lfm2_moe::build },
    Arch { model_type: "llama4_text", build: llama4_text::build },
    Arch { model_type: "llama_moe", build: llama_moe::build },
    Arch { model_type: "mellum", build: mellum::build },
    Arch { model_type: "mimo_v2_flash", build: mimo_v2_flash::build },
    Arch { model_type: "minimax_m2", build: minimax_m2::build },
    Arch { model_type: "minimax_m3_vl", build: minimax_m3_vl::build },
    Arch { model_type: "mistral4", build: mistral4::build },
    Arch { model_type: "mixtral", build: mixtral::build },
    Arch { model_type: "nemotron_h", build: nemotron_h::build },
    Arch { model_type: "olmoe", build: olmoe::build },
    Arch { model_type: "phimoe", build: phimoe::build },
    Arch { model_type: "qwen2_moe", build: qwen2_moe::build },
    Arch { model_type: "qwen3_5_moe", build: qwen3_5_moe::build },
    Arch { model_type: "qwen3_moe", build: qwen3_moe::build },
    Arch { model_type: "qwen3_next", build: qwen3_next::build },
    Arch { model_type: "qwen4_exp", build: qwen4_exp::build },
    Arch { model_type: "smallthinker", build: smallthinker::build },
    Arch { model_type: "solar_open", build: solar_open::build },
    Arch { model_type: "step3p5", build: step3p5::build },
    Arch { model_type: "switch_transformers", build: switch_transformers::build },
    Arch { model_type: "zaya", build: zaya::build },
];

/// Another `model_type` of an architecture: a row of [`ALIASES`].
struct Alias {
    model_type: &'static str,
    /// The `model_type` in [`ARCHS`].
    of: &'static str,
    /// Flags that it has where its config does not say.
    defaults: &'static [(&'static str, bool)],
    /// Flags that it has whatever its config says.
    fixed: &'static [(&'static str, bool)],
}

/// The text parts of multimodal models, and models that differ from an architecture in flags only.
const ALIASES: &[Alias] = &[
    Alias { model_type: "deepseek_ref", of: "deepseek_v4", defaults: &[], fixed: &[] },
    Alias { model_type: "glm4v_moe_text", of: "glm4_moe", defaults: &[("attention_bias", true)], fixed: &[] },
    Alias { model_type: "glm5_next_text", of: "glm5_next", defaults: &[], fixed: &[] },
    Alias { model_type: "kimi_k2", of: "deepseek_v3", defaults: &[], fixed: &[] },
    Alias { model_type: "minimax_m3", of: "minimax_m3_vl", defaults: &[], fixed: &[] },
    Alias { model_type: "minimax_m3_vl_text", of: "minimax_m3_vl", defaults: &[], fixed: &[] },
    Alias { model_type: "qwen3_5_moe_text", of: "qwen3_5_moe", defaults: &[], fixed: &[] },
    Alias { model_type: "qwen3_8_flash_next", of: "qwen4_exp", defaults: &[], fixed: &[] },
    Alias { model_type: "qwen3_8_flash_next_text", of: "qwen4_exp", defaults: &[], fixed: &[] },
    Alias { model_type: "qwen4_exp_text", of: "qwen4_exp", defaults: &[], fixed: &[] },
    Alias {
        model_type: "qwen3_omni_moe_text",
        of: "qwen3_moe",
        defaults: &[("norm_topk_prob", true)],
        fixed: &[("takes_images", true)],
    },
    Alias {
        model_type: "qwen3_vl_moe_text",
        of: "qwen3_moe",
        defaults: &[],
        fixed: &[("norm_topk_prob", true), ("use_sliding_window", false), ("takes_images", true)],
    },
    Alias { model_type: "step3p7", of: "step3p5", defaults: &[], fixed: &[] },
];

/// The `model_type` of every supported architecture.
pub fn model_types() -> impl Iterator<Item = &'static str> {
    ARCHS.iter().map(|a| a.model_type)
}

/// The architecture of a `model_type`.
pub fn find(model_type: &str) -> Result<&'static Arch> {
    let own = alias(model_type).map_or(model_type, |alias| alias.of);
    ARCHS.iter().find(|a| a.model_type == own).ok_or_else(|| unknown(model_type))
}

fn alias(model_type: &str) -> Option<&'static Alias> {
    ALIASES.iter().find(|alias| alias.model_type == model_type)
}

/// `config` with the flags in which its `model_type` differs from the architecture that it is.
pub fn with_defaults(config: Cow<Value>) -> Cow<Value> {
    let Some(alias) = config["model_type"].as_str().and_then(alias) else { return config };
    let mut config = config.into_owned();
    for (key, value) in alias.defaults {
        let given = &mut config[*key];
        *given = if given.is_null() { Value::Bool(*value) } else { given.take() };
    }
    alias.fixed.iter().for_each(|(key, value)| config[*key] = Value::Bool(*value));
    Cow::Owned(config)
}

fn unknown(model_type: &str) -> ModelError {
    let known: Vec<_> = model_types().collect();
    let aliases = ALIASES.iter().map(|alias| alias.model_type);
    let nearest = known.iter().copied().chain(aliases).min_by_key(|name| edits(model_type, name));
    let nearest = nearest.expect("there are architectures");
    let known = known.join(", ");
    let shown: String = model_type.chars().take(NAME_CHARS_MAX).collect();
    config_error(format!("model_type '{shown}' is not supported; the nearest name is {nearest}; supported are {known}"))
}

/// Characters of a name that are compared and shown.
const NAME_CHARS_MAX: usize = 60;

/// The number of characters to insert, delete or replace to make one name of the other.
fn edits(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.chars().count()).collect();
    for (i, x) in a.chars().take(NAME_CHARS_MAX).enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.chars().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.chars().count()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_type_is_refused_with_the_nearest_known_one() {
        let refusal = |name: &str| find(name).err().expect("refused").to_string();
        let message = refusal("qwen3moe");
        assert!(message.contains("'qwen3moe' is not supported; the nearest name is qwen3_moe; supported"), "{message}");
        assert!(message.contains("afmoe, bailing_hybrid, bailing_moe, bailing_moe_v2,"), "{message}");
        assert!(refusal(&"x".repeat(1 << 20)).len() < 1000);
        assert_eq!((edits("", "abc"), edits("abc", ""), edits("abcd", "xbd")), (3, 3, 2));
    }

    #[test]
    fn aliases_name_architectures() {
        for alias in ALIASES {
            assert_eq!(find(alias.model_type).unwrap().model_type, alias.of);
            assert!(model_types().all(|known| known != alias.model_type));
        }
    }

    #[test]
    fn aliases_have_flags_of_their_own() {
        let flags = |config: Value| with_defaults(Cow::Owned(config)).into_owned();
        let omni = flags(serde_json::json!({"model_type": "qwen3_omni_moe_text", "norm_topk_prob": false}));
        assert_eq!((&omni["norm_topk_prob"], &omni["takes_images"]), (&Value::Bool(false), &Value::Bool(true)));
        assert_eq!(flags(serde_json::json!({"model_type": "glm4v_moe_text"}))["attention_bias"], true);
        let vl = flags(serde_json::json!({"model_type": "qwen3_vl_moe_text", "norm_topk_prob": false}));
        assert_eq!((&vl["norm_topk_prob"], &vl["use_sliding_window"]), (&Value::Bool(true), &Value::Bool(false)));
    }
}
