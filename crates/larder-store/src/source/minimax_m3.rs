//! Names of MiniMax-M3's tensors: those that transformers gives its model of text alone, and those of published files.

use serde_json::Value;

/// Ending of the names of matrices with the rows of gate, then those of up.
pub const JOINED: &str = ".gate_up_proj.weight";

/// Endings of the two halves.
pub const APART: [&str; 2] = [".gate_proj.weight", ".up_proj.weight"];

/// Parts of names, and those of published files.
const PUBLISHED: [(&str, &str); 5] = [
    (".mlp.gate.e_score_correction_bias", ".block_sparse_moe.e_score_correction_bias"),
    (".mlp.gate.weight", ".block_sparse_moe.gate.weight"),
    (".mlp.experts.", ".block_sparse_moe.experts."),
    (".mlp.shared_experts.", ".block_sparse_moe.shared_experts."),
    (".self_attn.indexer.", ".self_attn.index_"),
];

/// Whether `model_type` of a config is that of the model.
pub fn is_model_type(model_type: &Value) -> bool {
    ["minimax_m3", "minimax_m3_vl", "minimax_m3_vl_text"].iter().any(|known| *model_type == *known)
}

/// The published name of the tensor `stored`, if it has another one.
pub fn published_name(stored: &str) -> Option<String> {
    let (own, published) = PUBLISHED.iter().find(|(own, _)| stored.contains(own))?;
    Some(stored.replacen(own, published, 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_layers_become_published_ones() {
        for (stored, published) in [
            ("self_attn.indexer.q_proj.weight", Some("self_attn.index_q_proj.weight")),
            ("mlp.experts.gate_up_proj", Some("block_sparse_moe.experts.gate_up_proj")),
            ("mlp.gate.weight", Some("block_sparse_moe.gate.weight")),
            ("mlp.gate.e_score_correction_bias", Some("block_sparse_moe.e_score_correction_bias")),
            ("mlp.shared_experts.up_proj.weight", Some("block_sparse_moe.shared_experts.up_proj.weight")),
            ("mlp.gate_proj.weight", None),
            ("block_sparse_moe.experts.0.w1.weight", None),
            ("self_attn.index_q_proj.weight", None),
        ] {
            let layer = |name: &str| format!("model.layers.3.{name}");
            assert_eq!(published_name(&layer(stored)), published.map(layer));
        }
        assert!(is_model_type(&"minimax_m3_vl_text".into()) && !is_model_type(&"minimax_m2".into()));
    }
}
