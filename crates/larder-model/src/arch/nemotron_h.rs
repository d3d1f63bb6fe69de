//! Nemotron-H: layers of one part each, most of them Mamba 2, the others attention, experts or a dense MLP.
//!
//! ```text
//! x += mamba2(rms(x))                       layers of type M
//! x += attention(rms(x))                    *: grouped queries, no positions
//! x += Σ_k weight · expert(y) + shared(y)   E: y = rms(x); gate of DeepSeek-V3
//! x += mlp(rms(x))                          -
//! ```
//!
//! Experts and MLPs have two matrices, `down · relu(up · y)²`. With a latent size, the input of the experts is
//! projected down to it, and their sum up again.

use larder_core::{ExpertNames, Gate, Geometry, TensorSlice};

use super::common::{AttentionBias, Basics, Defaults};
use super::deepseek_v3::{GateDefaults, parse_gate_of, with_bias};
use crate::config::{Config, config_error};
use crate::error::Result;
use crate::nn::{LatentExperts, Mamba2, Mamba2Shape, Mixer, Mlp, Moe, Rope, SharedExpert};
use crate::ops::{Activation, Rotary};
use crate::stack::{Branch, Ffn, Layer, Stack};
use crate::weights::WeightLoader;

/// The types of layers, each with its letter in a pattern and its names in a list.
const TYPES: [(LayerType, char, [&str; 2]); 4] = [
    (LayerType::Mamba, 'M', ["linear_attention", "mamba"]),
    (LayerType::Attention, '*', ["full_attention", "attention"]),
    (LayerType::Experts, 'E', ["moe", "moe"]),
    (LayerType::Dense, '-', ["mlp", "mlp"]),
];

/// What a layer has.
#[derive(Clone, Copy, PartialEq)]
enum LayerType {
    Mamba,
    Attention,
    Experts,
    Dense,
}

/// The parts of layers.
struct Parts {
    mamba: Mamba2Shape,
    gate: Gate,
    /// Width of a dense MLP.
    dense_width: usize,
    /// Width of an expert.
    inter: usize,
    shared_width: usize,
    /// Width of what experts read and yield, if it is not that of the residual stream.
    latent: Option<usize>,
    /// The biases of attention, of which the reference knows only the key.
    attention_bias: AttentionBias,
    /// Whether MLPs and the projections around the experts have biases.
    bias: bool,
}

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    let types = layer_types(config)?;
    let defaults = Defaults { kv_heads: Some(8), head_dim: Some(128), ..Defaults::COMMON };
    let basics = Basics::parse_with(config, types.len(), "layer_norm_epsilon", defaults)?;
    let act = Activation::named(config.opt_text("mlp_hidden_act")?.unwrap_or("relu2"))?;
    // The output head has weights of its own, whatever the config says.
    let basics = Basics { act, tied: false, ..basics };
    let parts = Parts::parse(config, basics.eps)?;
    ignore_others(config);

    let sparse = (0..types.len()).filter(|layer| types[*layer] == LayerType::Experts).collect();
    let geometry = basics.geometry(sparse, parts.gate.experts, parts.gate.top_k, parts.inter)?;
    let geometry = Geometry { hidden: parts.latent.unwrap_or(basics.hidden), ..geometry };
    let part = |name: &str| TensorSlice::whole(format!("model.layers.{{l}}.mixer.experts.{{e}}.{name}.weight"));
    let names = ExpertNames { matrices: ["up_proj", "down_proj"].map(part).into(), bias: None };
    basics.stack(weights, None::<Rope>, geometry, names, |weights, layer| {
        let prefix = format!("model.layers.{layer}");
        let norm = basics.norm(weights, &format!("{prefix}.norm"), basics.hidden)?;
        let own = format!("{prefix}.mixer");
        let mixer = |mixer: Box<dyn Mixer>, norm| Layer {
            mixer: Some(Branch::new(norm, mixer)),
            ffn: None,
            scale: 1.0,
            begins_next: false,
        };
        let ffn = |ffn, norm| Layer { mixer: None, ffn: Some(Branch::new(norm, ffn)), scale: 1.0, begins_next: false };
        Ok(match types[layer] {
            LayerType::Mamba => mixer(Box::new(Mamba2::new(weights, &own, basics.hidden, parts.mamba)?), norm),
            LayerType::Attention => {
                let attention = basics.attention(weights, &own, parts.attention_bias, None::<Rotary>)?;
                mixer(Box::new(attention), norm)
            }
            LayerType::Experts => ffn(Ffn::moe(parts.moe(&basics, weights, layer, &own)?), norm),
            LayerType::Dense => ffn(Ffn::dense(parts.mlp(&basics, weights, &own, parts.dense_width)?), norm),
        })
    })
}

impl Parts {
    fn parse(config: &mut Config, eps: f64) -> Result<Self> {
        let experts = config.size_or(&["n_routed_experts", "num_local_experts"], 8)?;
        let top_k = config.size_or(&["num_experts_per_tok"], 2)?;
        let gate = GateDefaults { groups: 1, keep: 1, scale: 1.0, renorm: true };
        let shortest = if config.is_set("mamba_dt_min") { "mamba_dt_min" } else { "time_step_min" };
        let shortest = config.number_or(shortest, 0.001)?;
        let bias_of_conv = if config.is_set("mamba_conv_bias") { "mamba_conv_bias" } else { "use_conv_bias" };
        Ok(Parts {
            mamba: Mamba2Shape {
                heads: config.size_or(&["mamba_num_heads"], 128)?,
                head_dim: config.size_or(&["mamba_head_dim"], 64)?,
                groups: config.size_or(&["mamba_n_groups", "n_groups"], 8)?,
                state: config.size_or(&["ssm_state_size"], 128)?,
                conv: config.size_or(&["mamba_d_conv", "conv_kernel"], 4)?,
                conv_bias: config.flag_or(bias_of_conv, true)?,
                bias: config.flag_or("use_bias", false)?,
                act: Activation::named(config.opt_text("mamba_hidden_act")?.unwrap_or("silu"))?,
                dt_limits: [shortest as f32, f32::INFINITY],
                eps,
            }
            .checked("n_groups")?,
            gate: parse_gate_of(config, experts, top_k, gate)?,
            dense_width: config.size_or(&["intermediate_size"], 21504)?,
            inter: config.size_or(&["moe_intermediate_size"], 7688)?,
            shared_width: config.size_or(&["moe_shared_expert_intermediate_size"], 7688)?,
            latent: config.opt_size(&["moe_latent_size"])?,
            attention_bias: AttentionBias::all(config.flag_or("attention_bias", false)?),
            bias: config.flag_or("mlp_bias", false)?,
        })
    }

    fn moe(&self, basics: &Basics, weights: &mut WeightLoader, layer: usize, prefix: &str) -> Result<Moe> {
        let gate = with_bias(weights, prefix, &self.gate)?;
        let moe = basics.moe(weights, layer, &format!("{prefix}.gate"), gate)?;
        let mut project = |name: &str, rows, cols| weights.linear(&format!("{prefix}.{name}"), rows, cols, self.bias);
        let latent = match self.latent {
            Some(width) => Some(LatentExperts {
                down: project("fc1_latent_proj", width, basics.hidden)?,
                up: project("fc2_latent_proj", basics.hidden, width)?,
            }),
            None => None,
        };
        let mlp = self.mlp(basics, weights, &format!("{prefix}.shared_experts"), self.shared_width)?;
        Ok(Moe { latent, shared: Some(SharedExpert { mlp, gate: None }), ..moe })
    }

    fn mlp(&self, basics: &Basics, weights: &mut WeightLoader, prefix: &str, inter: usize) -> Result<Mlp> {
        Mlp::ungated(weights, prefix, ["up_proj", "down_proj"], (basics.hidden, inter), basics.act, self.bias)
    }
}

/// The types of layers, of a list or of the letters of a pattern. They are the layers, whatever the config says of
/// their number.
fn layer_types(config: &mut Config) -> Result<Vec<LayerType>> {
    const PATTERN: &str = "hybrid_override_pattern";
    let list = if config.is_set("layer_types") { "layer_types" } else { "layers_block_type" };
    let (names, pattern) = (config.opt_texts(list)?, config.opt_text(PATTERN)?);
    config.ignore(&["num_hidden_layers"]);
    let unknown = |key: &str, name: &str| config_error(format!("{key} has the type '{name}', which is not supported"));
    let types: Vec<LayerType> = match (names, pattern) {
        (Some(names), _) => {
            let named = |name: &&str| TYPES.iter().find(|(_, _, names)| names.contains(name)).map(|(own, ..)| *own);
            names.iter().map(|name| named(name).ok_or_else(|| unknown(list, name))).collect::<Result<_>>()?
        }
        (None, Some(pattern)) => {
            let lettered = |letter| TYPES.iter().find(|(_, own, _)| *own == letter).map(|(own, ..)| *own);
            let types =
                pattern.chars().map(|letter| lettered(letter).ok_or_else(|| unknown(PATTERN, &letter.to_string())));
            types.collect::<Result<_>>()?
        }
        (None, None) => vec![LayerType::Mamba, LayerType::Experts, LayerType::Attention, LayerType::Dense],
    };
    if types.contains(&LayerType::Experts) {
        Ok(types)
    } else {
        Err(config_error(format!("no layer of {list} or {PATTERN} has experts, which larder needs")))
    }
}

fn ignore_others(config: &mut Config) {
    config.ignore(&[
        "chunk_size",
        "expand", // the width is that of the heads
        "mamba_chunk_size",
        "mamba_dt_init_floor", // of training, as the next two
        "mamba_dt_limit",
        "mamba_dt_max",
        "mamba_expand",
        "mamba_proj_bias", // not read by the reference
        "mamba_ssm_cache_dtype",
        "moe_shared_expert_overlap",
        "n_shared_experts", // the shared expert has a width of its own
        "norm_eps",
        "partial_rotary_factor", // there are no rotations
        "rescale_prenorm_residual",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "sliding_window", // not read by the reference
        "time_step_floor",
        "time_step_limit",
        "time_step_max",
    ]);
}
