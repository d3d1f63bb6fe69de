//! ZAYA1: compressed convolutional attention, routers that are MLPs and may choose no expert, scaled residual
//! additions.
//!
//! ```text
//! x  = (embedding + b) · s                  factors and biases are those of a channel
//! x  = (attention(rms(x)) + b) · s + (x + b) · s          CCA; full attention or sliding windows
//! x  = (weight · expert(rms(x)) + b) · s + (x + b) · s    one expert or none; router states go from layer to layer
//! ```

use larder_core::{ExpertNames, Gate, LayerIdx, Score};

use super::common::{AttentionBias, Basics, Defaults, TypedLayers, layer_types};
use crate::config::{Config, config_error};
use crate::error::Result;
use crate::kv::AttentionMask;
use crate::nn::{
    Attention, CcaInputs, CcaShape, InputProducts, MlpRouter, MlpRouterShape, Moe, MoeRouter, Rope, RopeType,
    ScaledConnection,
};
use crate::stack::{Branch, Ffn, Layer, Stack};
use crate::weights::ScaledRows;
use crate::weights::WeightLoader;

/// Types of layers, in the order of the ropes.
const TYPES: [&str; 2] = ["hybrid", "hybrid_sliding"];

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    let defaults = Defaults { eps: 1e-5, kv_heads: Some(2), head_dim: Some(128), tied: true };
    let basics = Basics::parse(config, "rms_norm_eps", defaults)?;
    let basics = Basics { head_bias: config.flag_or("lm_head_bias", false)?, ..basics };
    let TypedLayers { layers, ropes } = parse_layers(config, &basics)?;
    let experts = config.size_or(&["num_experts"], 16)?;
    config.only("num_experts_per_tok", 1);
    let inter = config.size_or(&["moe_intermediate_size"], 2048)?;
    let width = config.size_or(&["router_hidden_size"], 256)?;
    let Basics { hidden, heads, kv_heads, head_dim, eps, .. } = basics;
    let taps = [config.size_or(&["cca_time0"], 2)?, config.size_or(&["cca_time1"], 2)?];
    let bias = config.flag_or("attention_bias", false)?;
    let convolved = CcaShape { hidden, heads, kv_heads, head_dim, taps, bias };

    let geometry = basics.geometry((0..basics.layers).collect(), experts, 1, inter)?;
    let names = ExpertNames::separate("model.layers.{l}.mlp.experts", "gate_proj", "up_proj", "down_proj");
    let stack = basics.stack(weights, None::<Rope>, geometry, names, |weights, layer| {
        let prefix = format!("model.layers.{layer}");
        let own = format!("{prefix}.self_attn");
        let (mask, rotary) = layers[layer];
        let inputs = InputProducts::Cca(Box::new(CcaInputs::load(weights, &own, convolved)?));
        let output = format!("{own}.o_proj");
        let attention = basics.attention_with(weights, inputs, &output, AttentionBias::all(bias), rotary)?;
        let shape = MlpRouterShape { hidden, width, experts, eps, carried: layer > 0 };
        let ffn = Ffn::moe(moe(weights, &basics, layer, shape)?);
        let plain = basics.layer(weights, &prefix, Attention { mask, ..attention }, ffn)?;
        scaled(weights, &prefix, plain, hidden)
    })?;
    let scale = weights.vector("model.input_hidden_states_scale", &[hidden])?;
    let bias = weights.vector("model.input_hidden_states_bias", &[hidden])?;
    Ok(Stack { ropes, embed: Box::new(ScaledRows::new(stack.embed, bias, scale)), ..stack })
}

/// Router and experts of a layer. The gate reads probabilities.
fn moe(weights: &mut WeightLoader, basics: &Basics, layer: usize, shape: MlpRouterShape) -> Result<Moe> {
    let router = MlpRouter::load(weights, &format!("model.layers.{layer}.mlp.gate"), shape)?;
    let gate = Gate { score: Score::Raw, ..Gate::softmax(shape.experts, 1, false).checked()? };
    let gate = Gate { bias: Some(router.expert_bias()), ..gate };
    Ok(Moe::new(LayerIdx(layer as u16), MoeRouter::Mlp(Box::new(router)), gate, basics.act))
}

/// The same layer with scaled residual additions.
fn scaled(weights: &mut WeightLoader, prefix: &str, plain: Layer, hidden: usize) -> Result<Layer> {
    let mut connection = |part| ScaledConnection::load(weights, &format!("{prefix}.{part}_residual_scale"), hidden);
    let (mixer, ffn) = (connection("post_attention")?, connection("post_mlp")?);
    Ok(Layer {
        mixer: plain.mixer.map(|branch: Branch<_>| branch.connected(mixer)),
        ffn: plain.ffn.map(|branch| branch.connected(ffn)),
        ..plain
    })
}

/// Mask and rotation of each layer, and the ropes of the types.
fn parse_layers(config: &mut Config, basics: &Basics) -> Result<TypedLayers> {
    // The reference reads rope_parameters only.
    config.ignore(&["rope_theta", "rope_scaling", "partial_rotary_factor"]);
    let partial = if config.is_set("rope_parameters") { 1.0 } else { 0.5 };
    let head_dim = basics.head_dim;
    let rope = |name, prefix, theta| RopeType { name, prefix, older: None, head_dim, theta, partial, amplitude: None };
    let kinds =
        [rope(TYPES[0], "rope_parameters.hybrid.", 5e6), rope(TYPES[1], "rope_parameters.hybrid_sliding.", 1e4)];
    let (ropes, rotaries): (Vec<_>, Vec<_>) = Rope::parse_types(config, &kinds, basics.context)?.into_iter().unzip();
    let types = layer_types(config, basics.layers, &TYPES)?.unwrap_or_else(|| vec![TYPES[0]; basics.layers]);
    let window = config.opt_size(&["sliding_window"])?;
    let layer = |kind: &str| match (kind == TYPES[1], window) {
        (false, _) => Ok((AttentionMask::Causal, rotaries[0])),
        (true, Some(window)) => Ok((AttentionMask::SlidingWindow(window), rotaries[1])),
        (true, None) => {
            Err(config_error("sliding_window is missing, but layer_types names layers with hybrid_sliding"))
        }
    };
    Ok(TypedLayers { layers: types.into_iter().map(layer).collect::<Result<_>>()?, ropes })
}
