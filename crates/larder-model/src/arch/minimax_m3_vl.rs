//! MiniMax-M3, its model of text: grouped-query attention to blocks of positions that indexers choose, shared experts.
//!
//! ```text
//! x += attention(rms(x))                    QK norm per head, RoPE on a part of each head; in sparse layers an indexer head
//!                                           chooses blocks of positions for each head of keys
//! x += mlp(rms(x))                          dense layers; clamped SwiGLU everywhere
//! x += scale · Σ_k weight · expert(y) + shared(y)    the others: y = rms(x); top k of sigmoid + bias, weights from the
//!                                           sigmoid, renormalised
//! ```

use larder_core::{ExpertNames, Gate, Renorm, Score, Weighting};

use super::common::{AttentionBias, Basics, Defaults, layer_types, mlp_layer_types};
use crate::config::{Config, config_error};
use crate::error::Result;
use crate::nn::{Attention, AttentionIndexer, HeadIndexer, HeadIndexerShape, Moe, Rope, SharedExpert};
use crate::ops::{Activation, Rotary};
use crate::stack::{Ffn, Stack};
use crate::weights::WeightLoader;

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    let defaults = Defaults { eps: 1e-6, kv_heads: Some(4), head_dim: Some(128), ..Defaults::COMMON };
    let act = Activation::ClampedSwiglu {
        alpha: config.number_or("swiglu_alpha", 1.702)? as f32,
        limit: config.positive_or("swiglu_limit", 7.0)? as f32,
    };
    check_fixed(config);
    let basics = Basics { act, norms_less_one: true, ..Basics::parse(config, "rms_norm_eps", defaults)? };
    let (rope, rotary) = Rope::parse(config, basics.head_dim, 5e6, basics.context, Some(1.0))?;
    let sparse = Sparse::parse(config, &basics, rotary)?;
    let ffn = FfnParts::parse(config, &basics)?;

    let geometry = basics.geometry(ffn.sparse.clone(), ffn.gate.experts, ffn.gate.top_k, ffn.inter)?;
    let names = ExpertNames::separate("model.layers.{l}.block_sparse_moe.experts", "w1", "w3", "w2");
    basics.stack(weights, rope, geometry, names, |weights, layer| {
        let prefix = format!("model.layers.{layer}");
        let own = format!("{prefix}.self_attn");
        let attention = basics.attention(weights, &own, AttentionBias::NONE, rotary)?;
        let norm = basics.qk_norm(weights, &own)?;
        let indexer = if sparse.layers[layer] {
            let indexer = HeadIndexer::new(weights, &format!("{own}.index_"), sparse.shape, basics.eps, rotary)?;
            Some(Box::new(AttentionIndexer::Heads(indexer)))
        } else {
            None
        };
        let attention = Attention { norm, indexer, ..attention };
        let ffn = ffn.of(&basics, weights, layer)?;
        basics.layer(weights, &prefix, attention, ffn)
    })
}

/// Keys for which the reference knows one value each.
fn check_fixed(config: &mut Config) {
    config.only("qk_norm_type", "per_head");
    config.only("use_gemma_norm", true);
    config.only("n_shared_experts", 1);
    config.ignore(&["rotary_dim"]); // the reference reads the share of a head instead
}

/// The sparse attention of a model.
struct Sparse {
    shape: HeadIndexerShape,
    /// For each layer whether it has an indexer.
    layers: Vec<bool>,
}

/// Keys of the sparse attention, as transformers has them and in published configs, and their defaults.
const KEYS: [(&str, &str, usize); 5] = [
    ("index_n_heads", "sparse_num_index_heads", 4),
    ("index_head_dim", "sparse_index_dim", 128),
    ("index_block_size", "sparse_block_size", 128),
    ("index_topk_blocks", "sparse_topk_blocks", 16),
    ("index_local_blocks", "sparse_local_block", 1),
];

impl Sparse {
    fn parse(config: &mut Config, basics: &Basics, rotary: Rotary) -> Result<Self> {
        let mut sizes = [0; KEYS.len()];
        for (size, (key, _, default)) in sizes.iter_mut().zip(KEYS) {
            *size = config.count_or(&[key], default)?;
        }
        let types = layer_types(config, basics.layers, &["full_attention", "minimax_m3_sparse"])?;
        let mut layers = types.map(|types| types.into_iter().map(|kind| kind == "minimax_m3_sparse").collect());
        // Published configs have these keys in an object of their own, which goes before the others.
        if let Some(mut own) = config.opt_object("sparse_attention_config", "sparse_attention_config.")? {
            for (size, (_, key, _)) in sizes.iter_mut().zip(KEYS) {
                *size = own.opt_count(&[key])?.unwrap_or(*size);
            }
            let flags = own.opt_counts("sparse_attention_freq")?;
            layers = layers.or(flags.map(|flags| flags.into_iter().map(|flag| flag != 0).collect()));
            check_sparse(own);
        }
        let layers = layers.unwrap_or_else(|| vec![false; basics.layers]);
        let [heads, width, block, top_k, local] = sizes;
        let shape = HeadIndexerShape { hidden: basics.hidden, heads, width, block, top_k, local };
        check_sizes(shape, basics, rotary)?;
        if layers.len() == basics.layers {
            Ok(Sparse { shape, layers })
        } else {
            Err(config_error(format!("sparse_attention_freq must have a flag for each of {} layers", basics.layers)))
        }
    }
}

/// Keys of the sparse attention for which the reference knows one value each.
fn check_sparse(mut own: Config) {
    own.only("use_sparse_attention", true);
    own.only("sparse_score_type", "max");
    own.ignore(&["sparse_disable_index_value"]); // the reference knows no values of indexers
    own.finish();
}

/// Checks that the heads of indexers and of attention go together.
fn check_sizes(shape: HeadIndexerShape, basics: &Basics, rotary: Rotary) -> Result<()> {
    let HeadIndexerShape { heads, width, block, top_k, .. } = shape;
    if [heads, width, block, top_k].contains(&0) {
        return Err(config_error("the sizes of sparse attention must be at least 1"));
    }
    let together = heads.is_multiple_of(basics.kv_heads) || basics.kv_heads.is_multiple_of(heads);
    if !basics.heads.is_multiple_of(heads) || !together {
        return Err(config_error(format!(
            "{heads} heads of indexers do not divide {} heads of queries and {} of keys evenly",
            basics.heads, basics.kv_heads
        )));
    }
    if width < rotary.dim {
        return Err(config_error(format!("index_head_dim {width} is less than the {} values that rotate", rotary.dim)));
    }
    Ok(())
}

/// The feed-forward parts of a model.
struct FfnParts {
    sparse: Vec<usize>,
    gate: Gate,
    inter: usize,
    dense: usize,
    shared: usize,
    /// Factor on the sum of the routed experts.
    factor: f64,
}

impl FfnParts {
    fn parse(config: &mut Config, basics: &Basics) -> Result<Self> {
        let flags = config.opt_counts("moe_layer_freq")?;
        if flags.as_ref().is_some_and(|flags| flags.len() != basics.layers) {
            return Err(config_error(format!("moe_layer_freq must have a flag for each of {} layers", basics.layers)));
        }
        let flagged = flags.map(|flags| (0..basics.layers).filter(|layer| flags[*layer] != 0).collect());
        let typed = mlp_layer_types(config, basics.layers)?;
        let experts = config.size_or(&["num_local_experts", "num_experts"], 128)?;
        let top_k = config.size_or(&["num_experts_per_tok"], 4)?;
        let weighting = Weighting::Score { renorm: Renorm::Sum { plus: 0.0 }, scale: 1.0 };
        let inter = config.size_or(&["intermediate_size"], 3072)?;
        let sparse: Vec<usize> = typed.or(flagged).unwrap_or_else(|| (0..basics.layers).collect());
        config.only("moe_intermediate_size", inter);
        config.only("first_k_dense_replace", sparse.first().copied());
        Ok(FfnParts {
            sparse,
            gate: Gate { score: Score::Sigmoid, weighting, ..Gate::softmax(experts, top_k, true) }.checked()?,
            inter,
            dense: config.size_or(&["dense_intermediate_size"], 12288)?,
            shared: config.size_or(&["shared_intermediate_size"], 3072)?,
            factor: config.number_or("routed_scaling_factor", 2.0)?,
        })
    }

    fn of(&self, basics: &Basics, weights: &mut WeightLoader, layer: usize) -> Result<Ffn> {
        let prefix = format!("model.layers.{layer}");
        if !self.sparse.contains(&layer) {
            return Ok(Ffn::dense(basics.mlp(weights, &format!("{prefix}.mlp"), self.dense, false)?));
        }
        let own = format!("{prefix}.block_sparse_moe");
        let bias = weights.vector(&format!("{own}.e_score_correction_bias"), &[self.gate.experts])?;
        let gate = Gate { bias: Some(bias), ..self.gate.clone() };
        let moe = basics.moe(weights, layer, &format!("{own}.gate"), gate)?;
        let mlp = basics.mlp(weights, &format!("{own}.shared_experts"), self.shared, false)?;
        Ok(Ffn::moe(Moe { shared: Some(SharedExpert { mlp, gate: None }), factor: self.factor, ..moe }))
    }
}
