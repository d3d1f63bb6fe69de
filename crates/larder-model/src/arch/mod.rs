//! The architectures, one file per `model_type`. To add one, copy the nearest file and add its row to [`ARCHS`].
//!
//! Each file has a `build` that reads the config's keys in one go and then requests the weights layer by layer. The
//! head of the file shows the shape of one block: `x [tokens, hidden]` flows from top to bottom, `+=` is the residual
//! addition.

use crate::config::{Config, config_error};
use crate::error::Result;
use crate::stack::Stack;
use crate::weights::WeightLoader;

mod common;
mod deepseek_v2;
mod deepseek_v3;
mod ernie4_5_moe;
mod glm4_moe;
mod gpt_oss;
mod granitemoe;
mod lfm2_moe;
mod llama4_text;
mod mixtral;
mod olmoe;
mod phimoe;
mod qwen2_moe;
mod qwen3_moe;
mod qwen3_next;

/// One architecture: a row of [`ARCHS`].
pub struct Arch {
    /// The `model_type` in a config.
    pub model_type: &'static str,
    /// Reads the config's keys and requests the tensors that they call for.
    pub build: fn(&mut Config, &mut WeightLoader) -> Result<Stack>,
}

const ARCHS: &[Arch] = &[
    Arch { model_type: "deepseek_v2", build: deepseek_v2::build },
    Arch { model_type: "deepseek_v3", build: deepseek_v3::build },
    Arch { model_type: "ernie4_5_moe", build: ernie4_5_moe::build },
    Arch { model_type: "glm4_moe", build: glm4_moe::build },
    Arch { model_type: "gpt_oss", build: gpt_oss::build },
    Arch { model_type: "granitemoe", build: granitemoe::build },
    Arch { model_type: "lfm2_moe", build: lfm2_moe::build },
    Arch { model_type: "llama4_text", build: llama4_text::build },
    Arch { model_type: "mixtral", build: mixtral::build },
    Arch { model_type: "olmoe", build: olmoe::build },
    Arch { model_type: "phimoe", build: phimoe::build },
    Arch { model_type: "qwen2_moe", build: qwen2_moe::build },
    Arch { model_type: "qwen3_moe", build: qwen3_moe::build },
    Arch { model_type: "qwen3_next", build: qwen3_next::build },
];

/// The `model_type` of every supported architecture.
pub fn model_types() -> impl Iterator<Item = &'static str> {
    ARCHS.iter().map(|a| a.model_type)
}

/// The architecture of a `model_type`.
pub fn find(model_type: &str) -> Result<&'static Arch> {
    ARCHS.iter().find(|a| a.model_type == model_type).ok_or_else(|| {
        let known: Vec<_> = model_types().collect();
        config_error(format!("model_type '{model_type}' is not supported; supported are {}", known.join(", ")))
    })
}
