//! DeepSeek-V2: latent attention, dense layers first, then softmax-gated experts beside shared ones.
//!
//! ```text
//! x += latent_attention(rms(x))             MLA: one latent vector per token in the KV cache; RoPE on a part of heads
//! x += mlp(rms(x))                          first layers
//! x += Σ_k weight · expert(y) + shared(y)   the others: y = rms(x); softmax, top k, optionally within the best groups
//! ```

use larder_core::{ExpertGroups, ExpertNames, Gate, GroupRank, Renorm, Weighting};

use super::common::{Basics, Defaults, mlp_layer_types};
use super::deepseek_v32::Indexers;
use crate::config::{Config, config_error};
use crate::error::Result;
use crate::nn::{AttentionTemperature, LatentAttention, LatentShape, Moe, Rope, Rotary, SharedExpert, attention_scale};
use crate::stack::{Ffn, Stack};
use crate::weights::WeightLoader;

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    let family = Family {
        latent: LatentDefaults::COMMON,
        ffn: FfnDefaults { dense_layers: 0, shared_experts: 2, typed: false },
        rope: |config, basics, shape| {
            let (rope, rotary) = Rope::parse(config, shape.rope, 1e4, basics.context, None)?;
            Ok((rope, Rotary { interleaved: true, ..rotary }))
        },
        gate: parse_gate,
        layer_gate: |_, _, gate| Ok(gate.clone()),
        temperature: None,
        indexers: |_, _, _| Ok(None),
    };
    build_with(config, weights, family)
}

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
    /// Rank of the query's low-rank product.
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

fn parse_gate(config: &mut Config) -> Result<Gate> {
    let experts = config.size(&["n_routed_experts", "num_experts", "num_local_experts"])?;
    let top_k = config.size(&["num_experts_per_tok"])?;
    let scale = config.number_or("routed_scaling_factor", 1.0)? as f32;
    let (count, keep) = (config.opt_size(&["n_group"])?, config.opt_size(&["topk_group"])?);
    config.ignore(&["norm_topk_prob"]); // the reference never normalises
    let groups = match (config.opt_text("topk_method")?.unwrap_or("greedy"), count, keep) {
        ("greedy", ..) => None,
        ("group_limited_greedy", Some(count), Some(keep)) => {
            Some(ExpertGroups { count, keep, rank: GroupRank::Best, masked: 0.0 })
        }
        ("group_limited_greedy", ..) => {
            return Err(config_error("topk_method group_limited_greedy needs n_group and topk_group"));
        }
        (other, ..) => {
            return Err(config_error(format!(
                "topk_method '{other}' is not supported for deepseek_v2; greedy and group_limited_greedy are"
            )));
        }
    };
    let weighting = Weighting::Score { renorm: Renorm::No, scale };
    Ok(Gate { groups, weighting, ..Gate::softmax(experts, top_k, false) }.checked()?)
}
