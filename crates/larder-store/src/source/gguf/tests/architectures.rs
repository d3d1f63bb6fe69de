//! Tests of the config of each architecture, where it differs from that of Mixtral.

use serde_json::{Value, json};

use super::builder::{GgufBuilder, Q8_0};

/// One layer of `arch` with an embedding, experts, and the tensors `parts`.
fn layer(arch: &str, parts: &[&str]) -> GgufBuilder {
    let mut file = GgufBuilder::new()
        .text("general.architecture", arch)
        .uint(&format!("{arch}.block_count"), 1)
        .uint(&format!("{arch}.context_length"), 64)
        .uint(&format!("{arch}.embedding_length"), 8)
        .uint(&format!("{arch}.feed_forward_length"), 12)
        .uint(&format!("{arch}.expert_feed_forward_length"), 4)
        .uint(&format!("{arch}.attention.head_count"), 2)
        .uint(&format!("{arch}.expert_count"), 4)
        .uint(&format!("{arch}.expert_used_count"), 2)
        .float(&format!("{arch}.attention.layer_norm_rms_epsilon"), 1e-6)
        .counting("token_embd.weight", &[8, 5], 0)
        .counting("blk.0.ffn_gate_exps.weight", &[8, 4, 4], 0);
    for part in parts {
        file = file.counting(&format!("blk.0.{part}"), &[8], 0);
    }
    file
}

fn config(file: &GgufBuilder) -> Value {
    use crate::source::Source;
    file.open().unwrap().config().clone()
}

/// Asserts that `config` has these keys with these values; null stands for a missing key.
fn has(config: &Value, wanted: Value) {
    for (key, value) in wanted.as_object().unwrap() {
        assert_eq!(config.get(key).unwrap_or(&Value::Null), value, "{key} of {config}");
    }
}

#[test]
fn qwen2_and_qwen3_differ_in_normalised_weights() {
    let config2 = config(&layer("qwen2moe", &["attn_q.bias"]));
    has(
        &config2,
        json!({
            "model_type": "qwen2_moe", "norm_topk_prob": false, "moe_intermediate_size": 4, "intermediate_size": 12,
            "shared_expert_intermediate_size": 12, "qkv_bias": true, "mlp_only_layers": [],
        }),
    );
    let file = layer("qwen3moe", &[]).uint("qwen3moe.attention.key_length", 16);
    has(&config(&file), json!({ "model_type": "qwen3_moe", "norm_topk_prob": true, "head_dim": 16 }));
}

#[test]
fn olmoe_clips_if_the_metadata_say_so() {
    has(&config(&layer("olmoe", &[])), json!({ "clip_qkv": null, "norm_topk_prob": false, "intermediate_size": 4 }));
    let clipped = layer("olmoe", &[]).float("olmoe.attention.clamp_kqv", 8.0);
    has(&config(&clipped), json!({ "clip_qkv": 8.0 }));
}

#[test]
fn gpt_oss_has_sliding_layers_and_yarn_without_truncation() {
    let file = layer("gpt-oss", &[])
        .uint("gpt-oss.attention.sliding_window", 16)
        .text("gpt-oss.rope.scaling.type", "yarn")
        .float("gpt-oss.rope.scaling.factor", 32.0)
        .uint("gpt-oss.rope.scaling.original_context_length", 4096);
    has(
        &config(&file),
        json!({
            "model_type": "gpt_oss", "layer_types": ["sliding_attention"], "sliding_window": 16, "num_local_experts": 4,
            "rope_scaling": {
                "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": false,
            },
        }),
    );
}

#[test]
fn glm_ignores_blocks_for_multi_token_prediction() {
    let file = layer("glm4moe", &["attn_q_norm.weight"])
        .counting("blk.1.nextn.eh_proj.weight", &[8], 0)
        .uint("glm4moe.nextn_predict_layers", 1)
        .uint("glm4moe.attention.key_length", 8)
        .uint("glm4moe.rope.dimension_count", 4)
        .uint("glm4moe.expert_shared_count", 1);
    let error = file.open().err().unwrap().message;
    assert!(error.contains("no decoder layer is left"), "{error}");
    let mut two = file;
    // The same file with a count of two blocks.
    two.entries.remove(1);
    let two = two.uint("glm4moe.block_count", 2);
    has(
        &config(&two),
        json!({
            "num_hidden_layers": 1, "partial_rotary_factor": 0.5, "use_qk_norm": true, "attention_bias": false,
            "n_routed_experts": 4, "n_group": 1, "routed_scaling_factor": 1.0,
        }),
    );
    use crate::source::Source;
    assert_eq!(two.open().unwrap().notes(), ["a tensor for multi-token prediction is not used"]);
    let softmax = two.uint("glm4moe.expert_gating_func", 1);
    assert!(softmax.open().err().unwrap().message.contains("gating function 1"));
}

#[test]
fn granite_multipliers_default_to_one() {
    let file = layer("granitemoe", &[]).float("granitemoe.embedding_scale", 12.0);
    let file = file.float("granitemoe.logit_scale", 6.0);
    has(
        &config(&file),
        json!({
            "attention_multiplier": 0.5, "embedding_multiplier": 12.0, "residual_multiplier": 1.0, "logits_scaling": 6.0,
        }),
    );
}

#[test]
fn deepseek_version_follows_from_the_gating_function() {
    let file = layer("deepseek2", &["attn_kv_b.weight", "attn_k_b.weight"])
        .uint("deepseek2.attention.key_length", 24)
        .uint("deepseek2.attention.value_length", 16)
        .uint("deepseek2.attention.kv_lora_rank", 32)
        .uint("deepseek2.attention.head_count_kv", 1)
        .uint("deepseek2.rope.dimension_count", 8)
        .uint("deepseek2.expert_shared_count", 2)
        .text("deepseek2.rope.scaling.type", "yarn")
        .float("deepseek2.rope.scaling.factor", 40.0)
        .float("deepseek2.rope.scaling.yarn_log_multiplier", 0.0707);
    let second = config(&file);
    has(
        &second,
        json!({
            "model_type": "deepseek_v2", "topk_method": "greedy", "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
            "v_head_dim": 16, "num_key_value_heads": 2, "q_lora_rank": null, "norm_topk_prob": false,
        }),
    );
    has(&second["rope_scaling"], json!({ "mscale": 0.707, "mscale_all_dim": 0.707 }));
    assert!(second.get("split_kv_b").is_none(), "the whole kv_b_proj is preferred to its halves");
    let third = file.uint("deepseek2.expert_gating_func", 2).uint("deepseek2.attention.q_lora_rank", 24);
    has(&config(&third), json!({ "model_type": "deepseek_v3", "topk_method": "noaux_tc", "q_lora_rank": 24 }));
}

#[test]
fn the_halves_of_kv_b_keep_their_form_and_format() {
    use larder_core::{NumberFormat, Tensors};
    let file = layer("deepseek2", &[])
        .uint("deepseek2.attention.key_length", 40)
        .uint("deepseek2.attention.value_length", 32)
        .uint("deepseek2.attention.key_length_mla", 40)
        .uint("deepseek2.attention.value_length_mla", 3)
        .uint("deepseek2.attention.kv_lora_rank", 32)
        .uint("deepseek2.rope.dimension_count", 8)
        .uint("deepseek2.expert_shared_count", 2)
        .tensor("blk.0.attn_k_b.weight", &[32, 32, 2], Q8_0, &[1; 2 * 32 * 34])
        .counting("blk.0.attn_v_b.weight", &[32, 3, 2], 0);
    has(&config(&file), json!({ "split_kv_b": true, "qk_nope_head_dim": 32, "v_head_dim": 3 }));
    let source = file.open().unwrap();
    let keys = source.meta("model.layers.0.self_attn.k_b_proj.weight").unwrap();
    assert_eq!((keys.kind, &keys.shape[..]), (NumberFormat::Q8_0, &[2, 32, 32][..]));
    assert_eq!(source.meta("model.layers.0.self_attn.v_b_proj.weight").unwrap().shape, [2, 3, 32]);
}

#[test]
fn ernie_ends_at_the_last_layer() {
    let ernie = config(&layer("ernie4_5-moe", &["exp_probs_b.bias"]));
    has(&ernie, json!({ "moe_layer_start_index": 0, "moe_layer_end_index": 0, "moe_layer_interval": 1, "moe_k": 2 }));
}

#[test]
fn lfm_layer_types_follow_from_the_head_counts() {
    let file = layer("lfm2moe", &[])
        .ints("lfm2moe.attention.head_count_kv", &[0])
        .uint("lfm2moe.shortconv.l_cache", 3)
        .counting("blk.0.shortconv.conv.weight", &[3, 8], 0);
    has(
        &config(&file),
        json!({ "layer_types": ["conv"], "norm_eps": 1e-6, "rms_norm_eps": null, "conv_L_cache": 3, "use_expert_bias": true }),
    );
    use larder_core::Tensors;
    let source = file.open().unwrap();
    assert_eq!(source.meta("model.layers.0.conv.conv.weight").unwrap().shape, [8, 1, 3]);
}
