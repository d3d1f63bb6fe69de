//! GGUF files of GLM-4-MoE that are made of checkpoints.

use std::path::Path;

use safetensors::Dtype;
use serde_json::Value;

use super::checkpoint::NamedTensor;

const F32: u32 = 0;
const ALIGN: usize = 32;

/// Names of a layer's tensors in a checkpoint and in GGUF.
const LAYER: [(&str, &str); 16] = [
    ("input_layernorm.weight", "attn_norm.weight"),
    ("post_attention_layernorm.weight", "post_attention_norm.weight"),
    ("self_attn.q_proj.weight", "attn_q.weight"),
    ("self_attn.k_proj.weight", "attn_k.weight"),
    ("self_attn.v_proj.weight", "attn_v.weight"),
    ("self_attn.o_proj.weight", "attn_output.weight"),
    ("mlp.gate.weight", "ffn_gate_inp.weight"),
    ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias"),
    ("mlp.shared_experts.gate_proj.weight", "ffn_gate_shexp.weight"),
    ("mlp.shared_experts.up_proj.weight", "ffn_up_shexp.weight"),
    ("mlp.shared_experts.down_proj.weight", "ffn_down_shexp.weight"),
    ("mlp.gate_proj.weight", "ffn_gate.weight"),
    ("mlp.up_proj.weight", "ffn_up.weight"),
    ("mlp.down_proj.weight", "ffn_down.weight"),
    ("eh_proj.weight", "nextn.eh_proj.weight"),
    ("shared_head.norm.weight", "nextn.shared_head_norm.weight"),
];

/// Writes a checkpoint with this config, the last of whose layers is for multi-token prediction, as a GGUF file in f32.
pub fn write_glm(path: &Path, config: &Value, tensors: &[NamedTensor]) {
    let size = |key: &str| config[key].as_u64().unwrap() as u32;
    let layers = size("num_hidden_layers");
    let uints = [
        ("block_count", layers + 1),
        ("nextn_predict_layers", 1),
        ("context_length", size("max_position_embeddings")),
        ("embedding_length", size("hidden_size")),
        ("feed_forward_length", size("intermediate_size")),
        ("attention.head_count", size("num_attention_heads")),
        ("attention.head_count_kv", size("num_key_value_heads")),
        ("attention.key_length", size("head_dim")),
        ("attention.value_length", size("head_dim")),
        ("rope.dimension_count", size("head_dim") / 4),
        ("expert_count", size("n_routed_experts")),
        ("expert_used_count", size("num_experts_per_tok")),
        ("expert_shared_count", size("n_shared_experts")),
        ("expert_feed_forward_length", size("moe_intermediate_size")),
        ("leading_dense_block_count", size("first_k_dense_replace")),
        ("expert_group_count", size("n_group")),
        ("expert_group_used_count", size("topk_group")),
        ("expert_gating_func", 2),
    ];
    let float = |key: &str| config[key].as_f64().unwrap() as f32;
    let floats = [
        ("attention.layer_norm_rms_epsilon", float("rms_norm_eps")),
        ("rope.freq_base", float("rope_theta")),
        ("expert_weights_scale", float("routed_scaling_factor")),
    ];
    let mut entries = vec![entry("general.architecture", 8, &text("glm4moe"))];
    entries.extend(uints.map(|(key, value)| entry(&format!("glm4moe.{key}"), 4, &value.to_le_bytes())));
    entries.extend(floats.map(|(key, value)| entry(&format!("glm4moe.{key}"), 6, &value.to_le_bytes())));
    std::fs::write(path, file(&entries, &renamed(tensors, size("n_routed_experts"), layers))).unwrap();
}

/// A text as it stands in a file.
pub fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

/// An entry of the metadata: a value of the type with this number.
pub fn entry(key: &str, kind: u32, value: &[u8]) -> Vec<u8> {
    [&text(key)[..], &kind.to_le_bytes(), value].concat()
}

/// The tensors under their names in GGUF, the experts of a layer in one.
fn renamed(tensors: &[NamedTensor], experts: u32, layers: u32) -> Vec<NamedTensor> {
    let find = |name: &str| tensors.iter().find(|tensor| tensor.name == name);
    let mut all = Vec::new();
    let mut add = |name: String, tensor: &NamedTensor| {
        all.push(NamedTensor::f32(name, &tensor.shape, &tensor.values()));
    };
    for (hub, own) in [("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output")] {
        find(&format!("{hub}.weight")).into_iter().for_each(|tensor| add(format!("{own}.weight"), tensor));
    }
    for layer in 0..=layers {
        let prefix = format!("model.layers.{layer}");
        let norms = [("enorm.weight", "nextn.enorm.weight"), ("hnorm.weight", "nextn.hnorm.weight")];
        for (hub, own) in LAYER.into_iter().chain(norms) {
            find(&format!("{prefix}.{hub}")).into_iter().for_each(|tensor| add(format!("blk.{layer}.{own}"), tensor));
        }
        for part in ["gate", "up", "down"] {
            let of = |expert| find(&format!("{prefix}.mlp.experts.{expert}.{part}_proj.weight"));
            let Some(first) = of(0) else { continue };
            let values: Vec<f32> = (0..experts).flat_map(|expert| of(expert).unwrap().values()).collect();
            let shape = [&[experts as usize], &first.shape[..]].concat();
            add(format!("blk.{layer}.ffn_{part}_exps.weight"), &NamedTensor::f32("", &shape, &values));
        }
    }
    all
}

/// A file with these entries and tensors, which are in f32.
pub fn file(entries: &[Vec<u8>], tensors: &[NamedTensor]) -> Vec<u8> {
    let (mut infos, mut data) = (Vec::new(), Vec::new());
    for tensor in tensors {
        assert_eq!(tensor.dtype, Dtype::F32);
        data.resize(data.len().next_multiple_of(ALIGN), 0);
        infos.extend(text(&tensor.name));
        infos.extend((tensor.shape.len() as u32).to_le_bytes());
        infos.extend(tensor.shape.iter().rev().flat_map(|size| (*size as u64).to_le_bytes()));
        infos.extend(F32.to_le_bytes());
        infos.extend((data.len() as u64).to_le_bytes());
        data.extend_from_slice(&tensor.data);
    }
    let counts = [tensors.len() as u64, entries.len() as u64].map(u64::to_le_bytes).concat();
    let mut out = [&b"GGUF"[..], &3u32.to_le_bytes(), &counts, &entries.concat(), &infos].concat();
    out.resize(out.len().next_multiple_of(ALIGN), 0);
    out.extend(data);
    out
}
