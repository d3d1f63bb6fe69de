//! Tests of configs of architectures with two types of layers.

use serde_json::json;

use super::{
    architectures::{config, has, layer, layer_with},
    builder::{F32, GgufBuilder},
};

/// A layer for each entry of `sliding`, those with 1 with a window of `width` positions, and `heads` query heads each.
fn layers(arch: &str, parts: &[&str], sliding: &[i32], width: u32, heads: &[i32]) -> GgufBuilder {
    let file = layer_with(arch, parts, sliding.len() as u32, None)
        .ints(&format!("{arch}.attention.head_count"), heads)
        .uint(&format!("{arch}.attention.sliding_window"), width)
        .uint(&format!("{arch}.attention.key_length"), 8)
        .float(&format!("{arch}.rope.freq_base"), 5000.0)
        .float(&format!("{arch}.rope.freq_base_swa"), 500.0)
        .ints(&format!("{arch}.attention.sliding_window_pattern"), sliding)
        .uint(&format!("{arch}.expert_gating_func"), 2)
        .uint(&format!("{arch}.expert_shared_feed_forward_length"), 6);
    (1..sliding.len()).fold(file, |file, i| file.counting(&format!("blk.{i}.ffn_gate_exps.weight"), &[8, 4, 4], 0))
}

fn error(file: &GgufBuilder) -> String {
    file.open().err().expect("refused").message
}

#[test]
fn only_layers_with_full_attention_have_scaled_ropes() {
    let scaled = |width| {
        layers("mellum", &[], &[0, 1], width, &[2, 2])
            .text("mellum.rope.scaling.type", "yarn")
            .float("mellum.rope.scaling.factor", 4.0)
            .uint("mellum.rope.scaling.original_context_length", 16)
            .float("mellum.rope.scaling.yarn_attn_factor", 1.25)
    };
    let full = json!({
        "rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 16,
        "attention_factor": 1.25, "partial_rotary_factor": 1.0,
    });
    let sliding = json!({ "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0 });
    has(
        &config(&scaled(5)),
        json!({
            "model_type": "mellum", "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5,
            "rope_parameters": { "full_attention": full, "sliding_attention": sliding }, "rope_scaling": null,
            "rope_theta": null, "head_dim": 8,
        }),
    );
    has(&config(&scaled(0)), json!({ "layer_types": ["full_attention", "full_attention"], "sliding_window": null }));
}

#[test]
fn laguna_has_its_heads_by_layer_and_gates_by_the_width_of_their_product() {
    let gate = |rows, heads: &[i32]| {
        layers("laguna", &[], &[0, 1], 5, heads)
            .uint("laguna.attention.head_count_kv", 1)
            .uint("laguna.rope.dimension_count", 4)
            .counting("blk.0.attn_gate.weight", &[8, rows], 0)
    };
    let per_head = config(&gate(2, &[2, 3]));
    has(
        &per_head,
        json!({
            "gating": "per-head", "num_attention_heads_per_layer": [2, 3], "num_attention_heads": 3,
            "num_key_value_heads": 1, "shared_expert_intermediate_size": 6,
        }),
    );
    assert_eq!(per_head["rope_parameters"]["full_attention"]["partial_rotary_factor"], 0.5);
    has(&config(&gate(16, &[2, 3])), json!({ "gating": "per-element" }));
    assert!(error(&gate(2, &[2])).contains("laguna.attention.head_count"));
}

#[test]
fn mimo_has_heads_and_sinks_by_the_type_of_a_layer() {
    let model = |sliding: &[i32], kv_heads: &[i32]| {
        layers("mimo2", &["attn_q.bias"], sliding, 5, &vec![2; sliding.len()])
            .ints("mimo2.attention.head_count_kv", kv_heads)
            .uint("mimo2.attention.value_length", 4)
            .counting("blk.0.ffn_gate.weight", &[8, 12], 0)
            .counting("blk.1.attn_sinks.weight", &[2], 0)
    };
    has(
        &config(&model(&[0, 1], &[1, 2])),
        json!({
            "num_key_value_heads": 1, "swa_num_key_value_heads": 2, "head_dim": 8, "v_head_dim": 4,
            "attention_value_scale": 1.0, "add_full_attention_sink_bias": false, "add_swa_attention_sink_bias": true,
            "mlp_layer_types": ["dense", "sparse"], "attention_bias": true,
        }),
    );
    let mixed = model(&[0, 1, 1], &[1, 2, 1]);
    assert!(error(&mixed).contains("layers of one type with different numbers of key and value heads"));
}

#[test]
fn step_rotates_half_of_a_head_in_layers_with_full_attention() {
    let file = layers("step35", &[], &[0, 1], 5, &[2, 3])
        .ints("step35.attention.head_count_kv", &[1, 1])
        .floats("step35.swiglu_clamp_exp", &[0.0, 7.0])
        .tensor("rope_freqs.weight", &[4], F32, &[1.0f32, 2.0, 1.0, 1.0].map(f32::to_le_bytes).concat());
    let step = config(&file);
    has(
        &step,
        json!({
            "model_type": "step3p5", "swiglu_limits": [0.0, 7.0], "swiglu_limits_shared": null, "num_key_value_heads": 1,
            "per_layer_config": { "0": { "num_attention_heads": 2 }, "1": { "num_attention_heads": 3 } },
        }),
    );
    let full = &step["rope_parameters"]["full_attention"];
    has(full, json!({ "partial_rotary_factor": 0.5, "rope_type": "longrope", "short_factor": [1.0, 2.0] }));
    let sliding = json!({ "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0 });
    assert_eq!(step["rope_parameters"]["sliding_attention"], sliding);
    assert!(error(&file.entry("step35.expert_weights_norm", 7, &[0])).contains("does not normalise"));
}

#[test]
fn afmoe_scales_its_embeddings_always() {
    let file = layer("afmoe", &[])
        .uint("afmoe.attention.sliding_window", 5)
        .uint("afmoe.expert_shared_count", 1)
        .float("afmoe.expert_weights_scale", 2.5);
    has(&config(&file), json!({ "mup_enabled": true, "route_scale": 2.5, "layer_types": ["sliding_attention"] }));
    let two = file.float("afmoe.rope.freq_base", 5000.0).float("afmoe.rope.freq_base_swa", 500.0);
    assert!(error(&two).contains("RoPE base of its own"));
}
