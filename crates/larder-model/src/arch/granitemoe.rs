//! Granite-MoE: constant factors on embedding, attention, residual and logits; gate and up of all experts in one
//! tensor.
//!
//! ```text
//! x  = embedding · factor
//! x += factor · attention(rms(x))           grouped queries, RoPE, scores times attention_multiplier
//! x += factor · Σ_k weight · expert(rms(x)) top k of the logits, softmax over the chosen
//! logits = head(rms(x)) / logits_scaling
//! ```

use larder_core::{ExpertNames, Gate, PerMatrix, RowPick, Score, TensorSlice, Weighting};

use super::common::{AttentionBias, Basics, Defaults};
use crate::config::Config;
use crate::error::Result;
use crate::nn::{Attention, Mamba2, Mamba2Shape, Mixer, Mlp, MlpNames, Rope, SharedExpert};
use crate::stack::{Factors, Ffn, Stack};
use crate::weights::WeightLoader;

/// Names of a shared expert whose gate and up are apart, as GGUF files have them (`split_shared_mlp`).
const SPLIT_SHARED: MlpNames = MlpNames { gate: "gate_proj", up: "up_proj", down: "output_linear" };

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    build_with(config, weights, Relative::default())
}

/// What distinguishes a relative of Granite-MoE.
pub struct Relative {
    /// Width of the shared expert of every layer; there is none if it is 0.
    pub shared_width: usize,
    /// Whether attention has rotary positions.
    pub rotates: bool,
    /// For each layer, whether it has Mamba 2 in place of attention.
    pub mamba: Option<(Vec<bool>, Mamba2Shape)>,
}

impl Default for Relative {
    fn default() -> Self {
        Relative { shared_width: 0, rotates: true, mamba: None }
    }
}

/// Granite-MoE, or its relative.
pub fn build_with(config: &mut Config, weights: &mut WeightLoader, relative: Relative) -> Result<Stack> {
    let Relative { shared_width, rotates, mamba } = relative;
    let basics = Basics::parse(config, "rms_norm_eps", Defaults { eps: 1e-6, ..Defaults::COMMON })?;
    let (rope, rotary) = if rotates {
        Some(Rope::parse(config, basics.head_dim, 1e4, basics.context, None)?).unzip()
    } else {
        config.ignore(&["rope_parameters", "rope_scaling", "rope_theta"]);
        (None, None)
    };
    let bias = AttentionBias::all(config.flag_or("attention_bias", false)?);
    let scale = config.number_or("attention_multiplier", 1.0)?;
    let factors = Factors {
        embedding: config.number_or("embedding_multiplier", 1.0)?,
        residual: config.number_or("residual_multiplier", 1.0)?,
        logits: 1.0 / config.positive_or("logits_scaling", 1.0)?,
        ..Factors::default()
    };
    let experts = config.size_or(&["num_local_experts", "num_experts"], 8)?;
    let top_k = config.size_or(&["num_experts_per_tok"], 2)?;
    let weighting = Weighting::SoftmaxOfChosen;
    let gate = Gate { score: Score::Raw, weighting, ..Gate::softmax(experts, top_k, false) }.checked()?;
    let inter = config.size(&["intermediate_size"])?;
    let split = shared_width > 0 && config.flag_or("split_shared_mlp", false)?;

    let geometry = basics.geometry((0..basics.layers).collect(), experts, top_k, inter)?;
    let piece = |name: &str, pick| {
        TensorSlice::stacked(format!("model.layers.{{l}}.block_sparse_moe.{name}.weight"), false, pick)
    };
    let names = ExpertNames {
        matrices: PerMatrix {
            gate: Some(piece("input_linear", RowPick::FirstHalf)),
            up: piece("input_linear", RowPick::SecondHalf),
            down: piece("output_linear", RowPick::All),
        },
        bias: None,
    };
    let stack = basics.stack(weights, rope, geometry, names, |weights, layer| {
        let prefix = format!("model.layers.{layer}");
        let mixer: Box<dyn Mixer> = match mamba.as_ref().filter(|(layers, _)| layers[layer]) {
            Some((_, shape)) => Box::new(Mamba2::new(weights, &format!("{prefix}.mamba"), basics.hidden, *shape)?),
            None => {
                let attention = basics.attention(weights, &format!("{prefix}.self_attn"), bias, rotary)?;
                Box::new(Attention { scale, ..attention })
            }
        };
        let mut moe = basics.moe(weights, layer, &format!("{prefix}.block_sparse_moe.router.layer"), gate.clone())?;
        if shared_width > 0 {
            let size = (basics.hidden, shared_width);
            let own = format!("{prefix}.shared_mlp");
            let mlp = if split {
                Mlp::new(weights, &own, &SPLIT_SHARED, size, basics.act, false)?
            } else {
                Mlp::joined(weights, &own, ["input_linear", "output_linear"], size, basics.act)?
            };
            moe.shared = Some(SharedExpert { mlp, gate: None });
        }
        basics.layer_of(weights, &prefix, mixer, Ffn::moe(moe))
    })?;
    Ok(Stack { factors, ..stack })
}
