//! Tensor names of Qwen4 (experimental), and its hyperparameters from the metadata of a GGUF file.

use serde_json::json;

use super::gated_delta::gated_delta;
use crate::error::{Result, StoreError, StoreErrorKind};
use crate::source::gguf::hyperparameters::{Hyperparameters, Keys, keys};
use crate::source::gguf::remap::{
    Remap::{AsChannels, OnePlus, Same},
    Rename,
};

/// The table of n-grams, of which a file has at most one.
const TABLE: &str = "model.ngram_embedding.weight";

pub(super) const QWEN4_OUTER: &[Rename] = &[
    ("token_embd.weight", "model.embed_tokens.weight", Same),
    ("output.weight", "lm_head.weight", Same),
    ("output_hc_norm.weight", "model.hyper_connection_mixer.hc_norm.weight", OnePlus),
    ("output_hc_down.weight", "model.hyper_connection_mixer.input_mix_weight_down.weight", Same),
    ("output_hc_up.weight", "model.hyper_connection_mixer.input_mix_weight_up.weight", Same),
    // The hub has the table below the layer that uses it.
    ("per_layer_token_embd.weight", "model.ngram_embedding.weight", Same),
];

pub(super) const QWEN4_PARTS: &[Rename] = &[
    ("hc_attn_norm.weight", "attn_hyper_connection.hc_norm.weight", OnePlus),
    ("hc_attn_down.weight", "attn_hyper_connection.input_mix_weight_down.weight", Same),
    ("hc_attn_up.weight", "attn_hyper_connection.input_mix_weight_up.weight", Same),
    ("hc_attn_inject.weight", "attn_hyper_connection.block_inject_weight.weight", Same),
    ("hc_ffn_norm.weight", "mlp_hyper_connection.hc_norm.weight", OnePlus),
    ("hc_ffn_down.weight", "mlp_hyper_connection.input_mix_weight_down.weight", Same),
    ("hc_ffn_up.weight", "mlp_hyper_connection.input_mix_weight_up.weight", Same),
    ("hc_ffn_inject.weight", "mlp_hyper_connection.block_inject_weight.weight", Same),
    ("ple_key.weight", "ple.key_proj.weight", Same),
    ("ple_value.weight", "ple.value_proj.weight", Same),
    ("ple_norm_key.weight", "ple.norm_key.weight", OnePlus),
    ("ple_norm_query.weight", "ple.norm_query.weight", OnePlus),
    ("ple_norm_conv.weight", "ple.norm_conv.weight", OnePlus),
    ("ple_conv1d.weight", "ple.conv1d.weight", AsChannels),
    // The hub has both in one.
    ("indexer.q_proj.weight", "self_attn.indexer.q_proj.weight", Same),
    ("indexer.k_proj.weight", "self_attn.indexer.k_proj.weight", Same),
    ("indexer.q_norm.weight", "self_attn.indexer.q_layernorm.weight", OnePlus),
    ("indexer.k_norm.weight", "self_attn.indexer.k_layernorm.weight", OnePlus),
];

pub(super) fn qwen4_exp(hp: &Hyperparameters) -> Result<Keys> {
    let width = hp.expert_width()?;
    let mut own = gated_delta(hp)?;
    own.extend(keys(json!({
        "model_type": "qwen4_exp_text",
        "num_experts": hp.uint("expert_count")?,
        "num_experts_per_tok": hp.uint("expert_used_count")?,
        "norm_topk_prob": hp.flag_or("expert_weights_norm", true)?,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": hp.uint_or("expert_shared_feed_forward_length", width)?,
        "tiled_value_heads": true,
        "output_gate_type": "sigmoid",
        "hc_count": hp.uint("hyper_connection.count")?,
        "hc_lowrank": hp.uint("hyper_connection.low_rank")?,
        "indexer_n_heads": hp.uint("attention.indexer.head_count")?,
        "indexer_kv_heads": 1,
        "indexer_head_dim": hp.uint("attention.indexer.key_length")?,
        "indexer_budget": hp.uint("attention.indexer.top_k")?,
        "indexer_compress_ratio": block_tokens(hp)?,
        "split_index_qk": true,
    })));
    let layers = hp.metadata.ints(&hp.key("ple.layers")?)?.unwrap_or_default();
    if !layers.is_empty() {
        own.extend(ngrams(hp, layers)?);
    }
    Ok(own)
}

/// The tokens of a block of the indexer, which all layers with one have in common.
fn block_tokens(hp: &Hyperparameters) -> Result<i64> {
    let key = hp.key("attention.compress_ratios")?;
    let all = hp.metadata.need(&key, hp.metadata.ints(&key)?)?;
    let mut ratios = all.iter().copied().filter(|ratio| *ratio != 0);
    let first = ratios.next().unwrap_or(1);
    match ratios.find(|ratio| *ratio != first) {
        None => Ok(first),
        Some(other) => Err(hp.unsupported(format!(
            "has blocks of {first} and of {other} tokens in '{key}', of which only one size is supported"
        ))),
    }
}

/// The keys of the table of n-grams of the layers at these indices.
fn ngrams(hp: &Hyperparameters, layers: &[i64]) -> Result<Keys> {
    let missing =
        || StoreError::new(StoreErrorKind::Missing, hp.metadata.path(), "has no tensor 'per_layer_token_embd'");
    let rows = hp.rows(TABLE).ok_or_else(missing)?;
    let (longest, heads) = (hp.uint("ple.ngram_size")?, hp.uint("ple.heads_per_ngram")?);
    let ints = |key: &str| {
        let key = hp.key(key)?;
        hp.metadata.need(&key, hp.metadata.ints(&key)?)
    };
    let rows_of_token = longest.saturating_sub(1).saturating_mul(heads);
    Ok(keys(json!({
        "ple_layer_ids": layers.iter().map(|layer| layer.saturating_add(1)).collect::<Vec<_>>(),
        "ple_embed_dim": hp.uint("embedding_length_per_layer_input")?.saturating_mul(rows_of_token),
        "ple_conv_kernel_size": hp.uint("ple.conv_kernel")?,
        "ngram_size": longest,
        "heads_per_ngram": heads,
        "eos_token_id": hp.uint("ple.eos_token_id")?,
        "ngram_table_rows": rows,
        "ngram_multipliers": ints("ple.layer_multipliers")?,
        "ngram_heads_offsets": ints("ple.head_offsets")?,
        "ngram_heads_vocab_sizes": ints("ple.head_vocab_sizes")?,
    })))
}
