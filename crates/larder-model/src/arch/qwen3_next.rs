//! Qwen3-Next: linear attention in most layers, gated softmax attention in the others, a gated shared expert.
//!
//! ```text
//! x += gated_delta_net(rms(x))              linear attention; three of four layers
//! x += sigmoid(gate) · attention(rms(x))    the others: QK norm per head, RoPE on a quarter of each head, output gate
//! x += Σ_k weight · expert(y) + sigmoid(gate(y)) · shared(y)      y = rms(x); softmax, top k
//! x += mlp(rms(x))                          instead, in dense layers
//! ```

use larder_core::{ExpertNames, Gate};

use super::common::{AttentionBias, Basics, Defaults, layer_types, sparse_layers};
use super::qwen2_moe::with_shared;
use crate::config::{Config, config_error};
use crate::error::Result;
use crate::nn::{
    Attention, DeltaForm, DeltaShape, GatedDeltaNet, InputProducts, Mixer, OutputGate, Rope, RotarySections,
};
use crate::ops::{Activation, DeltaHeads, GateFunction, Rotary};
use crate::stack::{Ffn, Stack};
use crate::weights::{RowGroups, WeightLoader};

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    let split = config.flag_or("split_qkvz", false)?;
    let form = if split { DeltaForm::SplitGates } else { DeltaForm::Grouped };
    let ffn = |config: &mut Config, layers| {
        let experts = config.size(&["num_experts", "num_local_experts"])?;
        let top_k = config.size_or(&["num_experts_per_tok"], 10)?;
        Ok(FfnParts {
            gate: Gate::softmax(experts, top_k, config.flag_or("norm_topk_prob", true)?).checked()?,
            sparse: sparse_layers(config, layers)?,
            dense_width: config.size_or(&["intermediate_size"], 5632)?,
            inter: config.size(&["moe_intermediate_size"])?,
            shared_width: config.size(&["shared_expert_intermediate_size"])?,
        })
    };
    build_with(config, weights, form, None, ffn)
}

/// The parts behind the mixers.
pub struct FfnParts {
    pub gate: Gate,
    /// Layers with experts.
    pub sparse: Vec<usize>,
    /// Width of the MLP of the other layers.
    pub dense_width: usize,
    /// Width of an expert.
    pub inter: usize,
    pub shared_width: usize,
}

/// The architecture, with the form in which the delta rule's matmuls are stored, the sections of a head if positions
/// in images have three dimensions, and the keys of the other parts, which are read for the number of layers.
pub fn build_with(
    config: &mut Config,
    weights: &mut WeightLoader,
    form: DeltaForm,
    sections: Option<RotarySections>,
    ffn: impl FnOnce(&mut Config, usize) -> Result<FfnParts>,
) -> Result<Stack> {
    let defaults = Defaults { eps: 1e-6, kv_heads: Some(2), head_dim: Some(256), ..Defaults::COMMON };
    let basics = Basics { norms_less_one: true, ..Basics::parse(config, "rms_norm_eps", defaults)? };
    if basics.act != Activation::Silu {
        return Err(config_error("hidden_act must be silu for this model"));
    }
    let share = Some(0.25);
    let (rope, rotary) = match sections {
        None => Rope::parse(config, basics.head_dim, 1e4, basics.context, share)?,
        Some(own) => Rope::parse_with_sections(config, basics.head_dim, 1e4, basics.context, share, own)?,
    };
    config.only("attn_output_gate", true);
    let linear = linear_layers(config, basics.layers)?;
    let delta = delta_shape(config, form)?;
    let bias = AttentionBias::all(config.flag_or("attention_bias", false)?);
    let FfnParts { gate, sparse, dense_width, inter, shared_width } = ffn(config, basics.layers)?;

    let (experts, top_k) = (gate.experts, gate.top_k);
    let geometry = basics.geometry(sparse.clone(), experts, top_k, inter)?;
    let names = ExpertNames::separate("model.layers.{l}.mlp.experts", "gate_proj", "up_proj", "down_proj");
    basics.stack(weights, rope, geometry, names, |weights, layer| {
        let prefix = format!("model.layers.{layer}");
        let mixer: Box<dyn Mixer> = if linear[layer] {
            Box::new(GatedDeltaNet::new(weights, &format!("{prefix}.linear_attn"), basics.hidden, delta, basics.eps)?)
        } else {
            Box::new(attention(&basics, weights, &format!("{prefix}.self_attn"), bias, rotary)?)
        };
        let ffn = if sparse.contains(&layer) {
            Ffn::moe(with_shared(&basics, weights, layer, gate.clone(), shared_width)?)
        } else {
            Ffn::dense(basics.mlp(weights, &format!("{prefix}.mlp"), dense_width, false)?)
        };
        basics.layer_of(weights, &prefix, mixer, ffn)
    })
}

/// Softmax attention whose query projection also yields an output gate.
pub fn attention(
    basics: &Basics,
    weights: &mut WeightLoader,
    prefix: &str,
    bias: AttentionBias,
    rotary: Rotary,
) -> Result<Attention> {
    let (hidden, rows) = (basics.hidden, 2 * basics.heads * basics.head_dim);
    let [queries, gates] = RowGroups::consecutive(2 * basics.head_dim, [basics.head_dim; 2]);
    let [q, gate] =
        weights.linear_parts(&format!("{prefix}.q_proj"), rows, hidden, bias.qkv, [&[queries], &[gates]])?;
    let [k, v] = ["k_proj", "v_proj"]
        .map(|name| weights.linear(&format!("{prefix}.{name}"), basics.kv_heads * basics.head_dim, hidden, bias.qkv));
    let inputs = InputProducts::Apart { q, k: k?, v: Some(v?) };
    let plain = basics.attention_with(weights, inputs, &format!("{prefix}.o_proj"), bias, rotary)?;
    let output_gate = OutputGate::Product(gate, GateFunction::Sigmoid);
    Ok(Attention { norm: basics.qk_norm(weights, prefix)?, output_gate, ..plain })
}

/// Sizes of the delta rule.
pub fn delta_shape(config: &mut Config, form: DeltaForm) -> Result<DeltaShape> {
    let heads = DeltaHeads {
        k_heads: config.size_or(&["linear_num_key_heads"], 16)?,
        v_heads: config.size_or(&["linear_num_value_heads"], 32)?,
        k_dim: config.size_or(&["linear_key_head_dim"], 128)?,
        v_dim: config.size_or(&["linear_value_head_dim"], 128)?,
        tiled: config.flag_or("tiled_value_heads", false)?,
    };
    if !heads.v_heads.is_multiple_of(heads.k_heads) {
        let DeltaHeads { k_heads, v_heads, .. } = heads;
        return Err(config_error(format!(
            "linear_num_value_heads {v_heads} is not a multiple of linear_num_key_heads {k_heads}"
        )));
    }
    Ok(DeltaShape { heads, conv: config.size_or(&["linear_conv_kernel_dim"], 4)?, form, gate: GateFunction::Silu })
}

fn linear_layers(config: &mut Config, layers: usize) -> Result<Vec<bool>> {
    let every = config.size_or(&["full_attention_interval"], 4)?;
    let types = layer_types(config, layers, &["linear_attention", "full_attention"])?;
    Ok((0..layers)
        .map(|layer| match &types {
            Some(types) => types[layer] == "linear_attention",
            None => !(layer + 1).is_multiple_of(every),
        })
        .collect())
}
