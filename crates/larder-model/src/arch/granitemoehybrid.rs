//! Granite-MoE hybrid (Granite 4 H): Granite-MoE with a shared expert, with Mamba 2 in most layers, and attention that
//! need not know positions.
//!
//! ```text
//! x += factor · mamba2(rms(x))              layers of type mamba
//! x += factor · attention(rms(x))           the others; RoPE only if the config asks for it
//! x += factor · (Σ_k weight · expert(y) + shared(y))  y = rms(x); the rest as Granite-MoE
//! ```

use super::granitemoe::{Relative, build_with};
use crate::config::{Config, config_error};
use crate::error::Result;
use crate::nn::Mamba2Shape;
use crate::ops::Activation;
use crate::stack::Stack;
use crate::weights::WeightLoader;

/// Names of the type of layers with Mamba 2, the newer first.
const MAMBA: [&str; 2] = ["linear_attention", "mamba"];

/// Names of the type of layers with attention.
const ATTENTION: [&str; 2] = ["full_attention", "attention"];

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    let rotates = match config.opt_text("position_embedding_type")? {
        Some("rope") => true,
        None | Some("nope") => false,
        Some(other) => {
            return Err(config_error(format!("position_embedding_type '{other}' is not supported; rope and nope are")));
        }
    };
    let relative = Relative {
        shared_width: config.size_or(&["shared_intermediate_size"], 1024)?,
        rotates,
        mamba: Some((mamba_layers(config)?, mamba_shape(config)?)),
    };
    config.ignore(&["mamba_chunk_size", "normalization_function"]);
    build_with(config, weights, relative)
}

/// For each layer, whether it has Mamba 2.
fn mamba_layers(config: &mut Config) -> Result<Vec<bool>> {
    let layers = config.size(&["num_hidden_layers"])?;
    let key = if config.is_set("layer_types") { "layer_types" } else { "layers_block_type" };
    let Some(types) = config.opt_texts(key)? else { return Ok(vec![true; layers]) };
    if types.len() != layers {
        return Err(config_error(format!("{key} has {} entries for {layers} layers", types.len())));
    }
    let is_mamba = |name: &str| match name {
        name if MAMBA.contains(&name) => Ok(true),
        name if ATTENTION.contains(&name) => Ok(false),
        other => Err(config_error(format!("{key} has the type '{other}'; supported are mamba and attention"))),
    };
    types.into_iter().map(is_mamba).collect()
}

fn mamba_shape(config: &mut Config) -> Result<Mamba2Shape> {
    let inner = config.size_or(&["mamba_expand"], 2)? * config.size(&["hidden_size"])?;
    let heads = config.size_or(&["mamba_n_heads"], 128)?;
    let head_dim = config.opt_size_or_auto(&["mamba_d_head"])?.unwrap_or(inner / heads);
    if heads * head_dim != inner {
        return Err(config_error(format!(
            "mamba_n_heads {heads} with mamba_d_head {head_dim} are not mamba_expand · hidden_size, {inner}"
        )));
    }
    let limits = config.opt_limits("time_step_limit")?.unwrap_or([0.0, f64::INFINITY]);
    let shape = Mamba2Shape {
        heads,
        head_dim,
        groups: config.size_or(&["mamba_n_groups"], 1)?,
        state: config.size_or(&["mamba_d_state"], 256)?,
        conv: config.size_or(&["mamba_d_conv"], 4)?,
        conv_bias: config.flag_or("mamba_conv_bias", true)?,
        bias: config.flag_or("mamba_proj_bias", false)?,
        act: Activation::named(config.opt_text("hidden_act")?.unwrap_or("silu"))?,
        dt_limits: limits.map(|limit| limit as f32),
        eps: config.positive_or("rms_norm_eps", 1e-6)?,
    };
    shape.checked("mamba_n_groups")
}
