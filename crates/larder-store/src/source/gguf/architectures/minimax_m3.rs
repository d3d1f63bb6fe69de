//! Config and tensor names of MiniMax-M3.

use serde_json::json;

use crate::error::Result;
use crate::source::gguf::hyperparameters::{Hyperparameters, Keys, SIGMOID_SCORES, keys, share};
use crate::source::gguf::remap::{
    Remap::{OnePlus, Same},
    Rename,
};

/// Tensors of a layer that other architectures do not have, or under other names.
pub(super) const MINIMAX_M3: &[Rename] = &[
    ("indexer.q_proj.weight", "self_attn.index_q_proj.weight", Same),
    ("indexer.k_proj.weight", "self_attn.index_k_proj.weight", Same),
    ("indexer.q_norm.weight", "self_attn.index_q_norm.weight", OnePlus),
    ("indexer.k_norm.weight", "self_attn.index_k_norm.weight", OnePlus),
    ("ffn_gate_shexp.weight", "block_sparse_moe.shared_experts.gate_proj.weight", Same),
    ("ffn_up_shexp.weight", "block_sparse_moe.shared_experts.up_proj.weight", Same),
    ("ffn_down_shexp.weight", "block_sparse_moe.shared_experts.down_proj.weight", Same),
];

/// Files do not say which layers are sparse: those with an indexer.
pub(super) fn minimax_m3(hp: &Hyperparameters) -> Result<Keys> {
    hp.scores_are(SIGMOID_SCORES)?;
    let (layers, dense, head_dim) = (hp.layers()?, hp.uint_or("leading_dense_block_count", 0)?, hp.head_dim()?);
    let attention = |layer: u64| match hp.has(&format!("model.layers.{layer}.self_attn.index_q_proj.weight")) {
        true => "minimax_m3_sparse",
        false => "full_attention",
    };
    let width = hp.uint("expert_feed_forward_length")?;
    let shared = hp.rows(&format!("model.layers.{dense}.block_sparse_moe.shared_experts.up_proj.weight"));
    Ok(keys(json!({
        "model_type": "minimax_m3_vl",
        "head_dim": head_dim,
        "partial_rotary_factor": share(hp.uint_or("rope.dimension_count", head_dim)?, head_dim),
        "intermediate_size": width,
        "dense_intermediate_size": hp.uint("feed_forward_length")?,
        "shared_intermediate_size": shared.map_or(width, |rows| rows as u64),
        "num_local_experts": hp.uint("expert_count")?,
        "num_experts_per_tok": hp.uint("expert_used_count")?,
        "routed_scaling_factor": hp.scale()?,
        "mlp_layer_types": (0..layers).map(|layer| if layer < dense { "dense" } else { "sparse" }).collect::<Vec<_>>(),
        "layer_types": (0..layers).map(attention).collect::<Vec<_>>(),
        "index_n_heads": hp.uint("attention.indexer.head_count")?,
        "index_head_dim": hp.uint("attention.indexer.key_length")?,
        "index_block_size": hp.uint("attention.indexer.block_size")?,
        "index_topk_blocks": hp.uint("attention.indexer.top_k")?,
        "index_local_blocks": hp.uint("attention.indexer.local_blocks")?,
    })))
}
