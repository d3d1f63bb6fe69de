//! Parts of all models of the DeepSeek family: latent attention, dense layers first, experts beside shared ones,
//! indexers of sparse attention.

use larder_core::{ExpertNames, Gate};

use super::common::{Basics, Defaults, mlp_layer_types};
use crate::config::Config;
use crate::error::Result;
use crate::nn::{
    AttentionTemperature, Indexer, IndexerShape, LatentAttention, LatentShape, Moe, Rope, RowChoice, SharedExpert,
    attention_scale,
};
use crate::ops::Rotary;
use crate::stack::{Ffn, Stack};
use crate::weights::WeightLoader;

/// The parts in which the models with DeepSeek's latent attention differ.
pub struct Family {
    /// Defaults of latent attention.
    pub latent: LatentDefaults,
    /// Defaults of the feed-forward parts.
    pub ffn: FfnDefaults,
    /// Reads the rotation.
    pub rope: fn(&mut Config, &Basics, &LatentShape) -> Result<(Rope, Rotary)>,
    /// Reads the gate.
    pub gate: fn(&mut Config) -> Result<Gate>,
    /// The gate of the layer whose feed-forward part is below a prefix.
    pub layer_gate: fn(&mut WeightLoader, &str, &Gate) -> Result<Gate>,
    /// Scaling of queries with the position.
    pub temperature: Option<AttentionTemperature>,
    /// Reads the indexers of sparse attention.
    pub indexers: fn(&mut Config, &Basics, &LatentShape) -> Result<Option<Indexers>>,
}

/// Defaults of an architecture for keys that a config does not have.
#[derive(Clone, Copy)]
pub struct LatentDefaults {
    /// Rank of the query's low-rank projection.
    pub q_rank: Option<usize>,
    /// Width of a head's unrotated part.
    pub nope: usize,
    /// Width of a head's rotated part.
    pub rope: usize,
    /// Width of a head's value.
    pub value: usize,
    /// Epsilon of the norms.
    pub eps: f64,
}

impl LatentDefaults {
    /// The defaults of most architectures.
    pub const COMMON: LatentDefaults = LatentDefaults { q_rank: None, nope: 128, rope: 64, value: 128, eps: 1e-6 };
}

/// A model of the family.
pub fn build_with(config: &mut Config, weights: &mut WeightLoader, family: Family) -> Result<Stack> {
    // Heads have widths of their own; the hidden size need not be a multiple of their number.
    let eps = family.latent.eps;
    let basics = Basics::parse(config, "rms_norm_eps", Defaults { eps, head_dim: Some(1), ..Defaults::COMMON })?;
    let shape = latent_shape(config, &basics, &family.latent)?;
    let (rope, rotary) = (family.rope)(config, &basics, &shape)?;
    let indexers = (family.indexers)(config, &basics, &shape)?;
    let scale = attention_scale(shape.nope + shape.rope, &rope);
    let bias = config.flag_or("attention_bias", false)?;
    let mlp_bias = config.flag_or("mlp_bias", false)?;
    let gate = (family.gate)(config)?;
    let parts = FfnParts::parse(config, basics.layers, family.ffn)?;

    let geometry = basics.geometry(parts.sparse.clone(), gate.experts, gate.top_k, parts.inter)?;
    let names = ExpertNames::separate("model.layers.{l}.mlp.experts", "gate_proj", "up_proj", "down_proj");
    basics.stack(weights, rope, geometry, names, |weights, layer| {
        let prefix = format!("model.layers.{layer}");
        let attention = format!("{prefix}.self_attn");
        let mixer = LatentAttention::new(weights, &attention, shape, bias, rotary, scale)?;
        let mixer = mixer.with_temperature(family.temperature);
        let mixer = match &indexers {
            Some(indexers) => mixer.with_choice(indexers.choice(weights, &attention, layer, Some(rotary))?),
            None => mixer,
        };
        let ffn = parts.ffn(&basics, weights, layer, &gate, family.layer_gate, mlp_bias)?;
        basics.layer(weights, &prefix, mixer, ffn)
    })
}

/// Heads and widths of latent attention.
pub fn latent_shape(config: &mut Config, basics: &Basics, defaults: &LatentDefaults) -> Result<LatentShape> {
    config.ignore(&["qk_head_dim"]); // always the sum of its parts
    let q_rank = defaults.q_rank.filter(|_| !config.contains("q_lora_rank"));
    Ok(LatentShape {
        hidden: basics.hidden,
        heads: basics.heads,
        q_rank: config.opt_size(&["q_lora_rank"])?.or(q_rank),
        kv_rank: config.size_or(&["kv_lora_rank"], 512)?,
        nope: config.size_or(&["qk_nope_head_dim"], defaults.nope)?,
        rope: config.count_or(&["qk_rope_head_dim"], defaults.rope)?,
        value: config.size_or(&["v_head_dim"], defaults.value)?,
        split_kv_b: config.flag_or("split_kv_b", false)?,
        norm_eps: 1e-6,
        output: "o_proj",
    })
}

/// The feed-forward parts of the DeepSeek family and GLM: dense layers first, then experts with shared experts.
pub struct FfnParts {
    /// Layers with experts.
    pub sparse: Vec<usize>,
    /// Width of the MLP of a dense layer.
    pub dense_width: usize,
    /// Width of an expert.
    pub inter: usize,
    /// Number of shared experts; they are computed as one MLP of their joint width.
    pub shared_experts: usize,
    /// Name of a feed-forward part with experts; that of others is `mlp`.
    pub name: &'static str,
}

/// Defaults of an architecture for keys that a config does not have.
#[derive(Clone, Copy)]
pub struct FfnDefaults {
    /// Number of dense layers.
    pub dense_layers: usize,
    /// Number of shared experts.
    pub shared_experts: usize,
    /// Whether `mlp_layer_types` of the config decides which layers are dense.
    pub typed: bool,
}

impl FfnParts {
    /// Reads the config's keys, for a model of `layers` layers.
    pub fn parse(config: &mut Config, layers: usize, defaults: FfnDefaults) -> Result<Self> {
        config.only("moe_layer_freq", 1);
        let dense_layers = config.count_or(&["first_k_dense_replace"], defaults.dense_layers)?;
        let typed = if defaults.typed { mlp_layer_types(config, layers)? } else { None };
        Ok(FfnParts {
            sparse: typed.unwrap_or_else(|| (dense_layers..layers).collect()),
            dense_width: config.size(&["intermediate_size"])?,
            inter: config.size(&["moe_intermediate_size"])?,
            shared_experts: config.count_or(&["n_shared_experts", "num_shared_experts"], defaults.shared_experts)?,
            name: "mlp",
        })
    }

    /// The feed-forward part of a layer; `layer_gate` completes the gate, for the part's prefix.
    pub fn ffn(
        &self,
        basics: &Basics,
        weights: &mut WeightLoader,
        layer: usize,
        gate: &Gate,
        layer_gate: impl FnOnce(&mut WeightLoader, &str, &Gate) -> Result<Gate>,
        bias: bool,
    ) -> Result<Ffn> {
        if !basics.has_experts(&self.sparse, layer) {
            let prefix = format!("model.layers.{layer}.mlp");
            return Ok(Ffn::dense(basics.mlp(weights, &prefix, self.dense_width, bias)?));
        }
        let gate = layer_gate(weights, &format!("model.layers.{layer}.{}", self.name), gate)?;
        Ok(Ffn::moe(self.moe(basics, weights, layer, gate, bias)?))
    }

    /// Router, experts and shared experts of a layer.
    fn moe(&self, basics: &Basics, weights: &mut WeightLoader, layer: usize, gate: Gate, bias: bool) -> Result<Moe> {
        let prefix = format!("model.layers.{layer}.{}", self.name);
        let moe = basics.moe(weights, layer, &format!("{prefix}.gate"), gate)?;
        let shared = match self.shared_experts {
            0 => None,
            n => {
                let mlp = basics.mlp(weights, &format!("{prefix}.shared_experts"), self.inter * n, bias)?;
                Some(SharedExpert { mlp, gate: None })
            }
        };
        Ok(Moe { shared, ..moe })
    }
}

/// The indexers of a model, and which layers have one.
pub struct Indexers {
    /// Sizes of each.
    pub shape: IndexerShape,
    /// Whether queries and keys are rotated in adjacent pairs instead of in halves.
    pub interleaved: bool,
    /// For each layer whether it has an indexer; else it uses the choice of the layer before.
    pub own: Vec<bool>,
}

impl Indexers {
    /// The choice of rows of a layer whose attention is below `prefix`.
    pub fn choice(
        &self,
        weights: &mut WeightLoader,
        prefix: &str,
        layer: usize,
        rotary: Option<Rotary>,
    ) -> Result<RowChoice> {
        if !self.own[layer] {
            return Ok(RowChoice::Shared(self.shape.positions()));
        }
        let rotary = rotary.map(|rotary| Rotary { interleaved: self.interleaved, ..rotary });
        Ok(RowChoice::Indexed(Box::new(Indexer::new(weights, &format!("{prefix}.indexer"), self.shape, rotary)?)))
    }
}
