//! MiMo-V2-Flash: two types of layers with heads, rope and sinks of their own, values narrower than keys.
//!
//! ```text
//! x += attention(rms(x))                    values scaled; full attention, or sliding windows with sinks and more keys
//! x += mlp(rms(x))                          dense layers, usually the first
//! x += Σ_k weight · expert(rms(x))          the others: gate of DeepSeek-V3
//! ```

use larder_core::ExpertNames;

use super::common::{AttentionBias, Basics, Defaults, layer_types, mlp_layer_types};
use super::deepseek_v3::{GateDefaults, parse_gate, with_bias};
use crate::config::{Config, config_error};
use crate::error::Result;
use crate::kv::AttentionMask;
use crate::nn::{Attention, Rope, RopeType};
use crate::ops::Rotary;
use crate::stack::{Ffn, Stack};
use crate::weights::WeightLoader;

/// Types of layers, in the order of the ropes.
const TYPES: [&str; 2] = ["full_attention", "sliding_attention"];

/// What the layers of one type have in common.
struct LayerType {
    shape: Basics,
    rotary: Rotary,
    mask: AttentionMask,
    sinks: bool,
}

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    let defaults = Defaults { eps: 1e-5, kv_heads: Some(4), head_dim: Some(192), tied: false };
    let basics = Basics::parse(config, "rms_norm_eps", defaults)?;
    check_fixed(config, &basics)?;
    let (types, ropes) = parse_types(config, &basics)?;
    let sliding = listed(config, &basics, "hybrid_layer_pattern", |l| l > 0 && !(l + 1).is_multiple_of(6))?;
    let sliding = match layer_types(config, basics.layers, &TYPES)? {
        Some(names) => names.into_iter().map(|name| name == TYPES[1]).collect(),
        None => sliding,
    };
    let by_list = listed(config, &basics, "moe_layer_freq", |layer| layer > 0)?;
    let by_list = (0..basics.layers).filter(|layer| by_list[*layer]).collect();
    let sparse = mlp_layer_types(config, basics.layers)?.unwrap_or(by_list);
    let bias = AttentionBias { qkv: config.flag_or("attention_bias", false)?, o: false };
    let absent = if config.contains("attention_value_scale") { 1.0 } else { 0.707 };
    let value_scale = config.number_or("attention_value_scale", absent)?;
    let gate = parse_gate(config, GateDefaults { groups: 1, keep: 1, scale: 1.0, renorm: true })?;
    let dense_width = config.size_or(&["intermediate_size"], 16384)?;
    let inter = config.size_or(&["moe_intermediate_size"], 2048)?;

    let geometry = basics.geometry(sparse.clone(), gate.experts, gate.top_k, inter)?;
    let names = ExpertNames::separate("model.layers.{l}.mlp.experts", "gate_proj", "up_proj", "down_proj");
    let stack = basics.stack(weights, ropes[0].clone(), geometry, names, |weights, layer| {
        let prefix = format!("model.layers.{layer}");
        let (own, mlp) = (format!("{prefix}.self_attn"), format!("{prefix}.mlp"));
        let LayerType { shape, rotary, mask, sinks } = &types[usize::from(sliding[layer])];
        let attention = shape.attention(weights, &own, bias, *rotary)?;
        let sinks =
            if *sinks { Some(weights.vector(&format!("{own}.attention_sink_bias"), &[shape.heads])?) } else { None };
        let attention = Attention { mask: *mask, sinks, value_scale, ..attention };
        let ffn = if sparse.contains(&layer) {
            let gate = with_bias(weights, &mlp, &gate)?;
            Ffn::moe(basics.moe(weights, layer, &format!("{mlp}.gate"), gate)?)
        } else {
            Ffn::dense(basics.mlp(weights, &mlp, dense_width, false)?)
        };
        basics.layer(weights, &prefix, attention, ffn)
    })?;
    Ok(Stack { ropes, ..stack })
}

/// The types of layers, and their ropes.
fn parse_types(config: &mut Config, basics: &Basics) -> Result<([LayerType; 2], Vec<Rope>)> {
    let value_dim = config.size_or(&["v_head_dim"], 128)?;
    let full = Basics { value_dim: Some(value_dim), ..basics.clone() };
    let sliding = Basics {
        heads: config.size_or(&["swa_num_attention_heads"], full.heads)?,
        kv_heads: config.size_or(&["swa_num_key_value_heads"], 2 * full.kv_heads)?,
        head_dim: config.size_or(&["swa_head_dim"], full.head_dim)?,
        value_dim: Some(config.size_or(&["swa_v_head_dim"], value_dim)?),
        ..basics.clone()
    };
    if !sliding.heads.is_multiple_of(sliding.kv_heads) {
        let Basics { heads, kv_heads, .. } = sliding;
        let what = format!("swa_num_attention_heads {heads} is not a multiple of swa_num_key_value_heads {kv_heads}");
        return Err(config_error(what));
    }
    let partial = config.number_or("partial_rotary_factor", 0.334)?;
    let thetas = [config.number_or("rope_theta", 5e6)?, config.number_or("swa_rope_theta", 1e4)?];
    let rope = |name, prefix, head_dim, theta| RopeType {
        name,
        prefix,
        older: None,
        head_dim,
        theta,
        partial,
        amplitude: None,
    };
    let kinds = [
        rope(TYPES[0], "rope_parameters.full_attention.", full.head_dim, thetas[0]),
        rope(TYPES[1], "rope_parameters.sliding_attention.", sliding.head_dim, thetas[1]),
    ];
    let (ropes, rotaries): (Vec<_>, Vec<_>) = Rope::parse_types(config, &kinds, basics.context)?.into_iter().unzip();
    // The older key counts the positions before a query's own.
    let width = config.size_or(&["sliding_window"], 129)?;
    let width = config.opt_size(&["sliding_window_size"])?.map_or(width, |before| before + 1);
    let of = |shape, rotary, mask, sinks| LayerType { shape, rotary, mask, sinks };
    let types = [
        of(full, rotaries[0], AttentionMask::Causal, config.flag_or("add_full_attention_sink_bias", false)?),
        of(
            sliding,
            rotaries[1],
            AttentionMask::SlidingWindow(width),
            config.flag_or("add_swa_attention_sink_bias", true)?,
        ),
    ];
    Ok((types, ropes))
}

/// For each layer, whether the list `name` has a number other than 0; by `default` where the config has no list.
fn listed(config: &mut Config, basics: &Basics, name: &str, default: fn(usize) -> bool) -> Result<Vec<bool>> {
    match config.opt_counts(name)? {
        None => Ok((0..basics.layers).map(default).collect()),
        Some(list) if list.len() == basics.layers => Ok(list.into_iter().map(|n| n != 0).collect()),
        Some(list) => Err(config_error(format!("{name} has {} entries for {} layers", list.len(), basics.layers))),
    }
}

/// Keys of other forms of the model.
fn check_fixed(config: &mut Config, basics: &Basics) -> Result<()> {
    if config.number_or("layernorm_epsilon", basics.eps)? != basics.eps {
        return Err(config_error("layernorm_epsilon and rms_norm_eps differ; remove one of them"));
    }
    config.only("attention_projection_layout", "split");
    config.ignore(&["attention_chunk_size"]); // the reference has no use for it
    Ok(())
}
