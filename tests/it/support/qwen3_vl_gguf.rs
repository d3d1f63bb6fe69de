//! GGUF files of Qwen3-VL-MoE that are made of checkpoints, without their tokenizer and their image tower.

use std::path::Path;

use larder_core::{ExpertId, LayerIdx};
use larder_store::{Assembler, ExpertSource, Source, decode_floats, open_source};
use serde_json::Value;

use super::checkpoint::NamedTensor;
use super::gguf::{entry, file, text};

/// Names of a layer's tensors in a checkpoint and in GGUF.
const LAYER: [(&str, &str); 9] = [
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("mlp.gate", "ffn_gate_inp"),
];

/// Writes the text part of the checkpoint in `folder` as a GGUF file in f32.
pub fn write_qwen3_vl(folder: &Path, path: &Path) {
    let source = open_source(folder).unwrap();
    let config = source.config()["text_config"].clone();
    std::fs::write(path, file(&entries(&config), &tensors(source.as_ref(), &config))).unwrap();
}

fn entries(config: &Value) -> Vec<Vec<u8>> {
    let size = |key: &str| config[key].as_u64().unwrap() as u32;
    let uints = [
        ("block_count", size("num_hidden_layers")),
        ("context_length", size("max_position_embeddings")),
        ("embedding_length", size("hidden_size")),
        ("feed_forward_length", size("intermediate_size")),
        ("attention.head_count", size("num_attention_heads")),
        ("attention.head_count_kv", size("num_key_value_heads")),
        ("attention.key_length", size("head_dim")),
        ("attention.value_length", size("head_dim")),
        ("expert_count", size("num_local_experts")),
        ("expert_used_count", size("num_experts_per_tok")),
        ("expert_feed_forward_length", size("moe_intermediate_size")),
    ];
    let rope = &config["rope_parameters"];
    let floats =
        [("attention.layer_norm_rms_epsilon", &config["rms_norm_eps"]), ("rope.freq_base", &rope["rope_theta"])];
    let sections = rope["mrope_section"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as i32);
    let sections: Vec<i32> = sections.chain([0]).collect();
    let mut list = [&5u32.to_le_bytes()[..], &(sections.len() as u64).to_le_bytes()].concat();
    list.extend(sections.iter().flat_map(|n| n.to_le_bytes()));
    let named = |key: &str| format!("qwen3vlmoe.{key}");
    let mut all =
        vec![entry("general.architecture", 8, &text("qwen3vlmoe")), entry(&named("rope.dimension_sections"), 9, &list)];
    all.extend(uints.map(|(key, value)| entry(&named(key), 4, &value.to_le_bytes())));
    all.extend(floats.map(|(key, value)| entry(&named(key), 6, &(value.as_f64().unwrap() as f32).to_le_bytes())));
    all
}

fn tensors(source: &dyn Source, config: &Value) -> Vec<NamedTensor> {
    let read = |name: &str, own: String| {
        let meta = source.meta(name).unwrap_or_else(|| panic!("{name}"));
        let (mut bytes, mut values) = (vec![0; meta.bytes], vec![0.0; meta.shape.iter().product()]);
        source.read(name, 0, &mut bytes).unwrap();
        decode_floats(meta.kind, &bytes, &mut values);
        NamedTensor::f32(own, &meta.shape, &values)
    };
    let outer = [("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output")];
    let mut all: Vec<_> =
        outer.map(|(hub, own)| read(&format!("{hub}.weight"), format!("{own}.weight"))).into_iter().collect();
    for layer in 0..config["num_hidden_layers"].as_u64().unwrap() as usize {
        let of_layer = LAYER
            .map(|(hub, own)| read(&format!("model.layers.{layer}.{hub}.weight"), format!("blk.{layer}.{own}.weight")));
        all.extend(of_layer);
        all.extend(experts(source, layer, config["num_local_experts"].as_u64().unwrap() as usize));
    }
    all
}

/// The matrices of all experts of a layer, each kind in one tensor.
fn experts(source: &dyn Source, layer: usize, experts: usize) -> Vec<NamedTensor> {
    let blueprint = larder_runtime::blueprint_of(source).unwrap();
    let assembler = Assembler::new(source, &blueprint, None).unwrap();
    let layer_index = LayerIdx(layer as u16);
    let layout = assembler.layout(layer_index);
    let parts = layout.parts().map(|(part, stored)| {
        let mut all = Vec::new();
        for expert in 0..experts {
            let (mut bytes, mut values) = (vec![0; layout.bytes], vec![0.0; stored.rows * stored.cols]);
            assembler.read_expert(layer_index, ExpertId(expert as u16), &mut bytes).unwrap();
            decode_floats(stored.kind, &bytes[stored.offset..][..stored.bytes], &mut values);
            all.extend(values);
        }
        NamedTensor::f32(format!("blk.{layer}.ffn_{part}_exps.weight"), &[experts, stored.rows, stored.cols], &all)
    });
    parts.collect()
}
