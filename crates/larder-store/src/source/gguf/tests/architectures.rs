//! Tests of the config of each architecture, where it differs from that of Mixtral.

use serde_json::{Value, json};

use super::builder::{F32, GgufBuilder, Q8_0};
use crate::source::Source;

/// One layer of `arch` with an embedding, experts, and the tensors `parts`.
pub(super) fn layer(arch: &str, parts: &[&str]) -> GgufBuilder {
    layer_with(arch, parts, 1, Some(2))
}

/// The first of `blocks` layers of `arch` with an embedding, experts, and the tensors `parts`; with `heads` query
/// heads, if they are the same in all layers.
pub(super) fn layer_with(arch: &str, parts: &[&str], blocks: u32, heads: Option<u32>) -> GgufBuilder {
    let mut file = GgufBuilder::new()
        .text("general.architecture", arch)
        .uint(&format!("{arch}.block_count"), blocks)
        .uint(&format!("{arch}.context_length"), 64)
        .uint(&format!("{arch}.embedding_length"), 8)
        .uint(&format!("{arch}.feed_forward_length"), 12)
        .uint(&format!("{arch}.expert_feed_forward_length"), 4)
        .uint(&format!("{arch}.expert_count"), 4)
        .uint(&format!("{arch}.expert_used_count"), 2)
        .float(&format!("{arch}.attention.layer_norm_rms_epsilon"), 1e-6)
        .counting("token_embd.weight", &[8, 5], 0)
        .counting("blk.0.ffn_gate_exps.weight", &[8, 4, 4], 0);
    if let Some(heads) = heads {
        file = file.uint(&format!("{arch}.attention.head_count"), heads);
    }
    for part in parts {
        file = file.counting(&format!("blk.0.{part}"), &[8], 0);
    }
    file
}

pub(super) fn config(file: &GgufBuilder) -> Value {
    file.open().unwrap().config().clone()
}

/// Asserts that `config` has these keys with these values; null stands for a missing key.
pub(super) fn has(config: &Value, wanted: Value) {
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
fn qwen3_vl_has_sections_of_positions() {
    let file = layer("qwen3vlmoe", &[]).uint("qwen3vlmoe.attention.key_length", 16);
    has(&config(&file), json!({ "model_type": "qwen3_vl_moe_text", "head_dim": 16, "rope_scaling": null }));
    let sections = file.ints("qwen3vlmoe.rope.dimension_sections", &[4, 2, 2, 0]);
    let scaling = json!({ "rope_type": "default", "mrope_section": [4, 2, 2] });
    has(&config(&sections), json!({ "rope_scaling": scaling }));
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

#[test]
fn phimoe_has_the_divisors_of_its_tensors_in_the_config() {
    let floats = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let plain = layer("phimoe", &["attn_q.bias", "attn_norm.bias"])
        .uint("phimoe.attention.sliding_window", 64)
        .text("phimoe.rope.scaling.type", "longrope")
        .float("phimoe.rope.scaling.attn_factor", 1.19)
        .uint("phimoe.rope.scaling.original_context_length", 16);
    let error = plain.open().err().unwrap().message;
    assert!(error.contains("uses the RoPE scaling 'longrope'"), "{error}");
    let long = plain.tensor("rope_factors_long.weight", &[2], F32, &floats(&[1.3, 32.0]));
    assert!(long.open().err().unwrap().message.contains("only one of the tensors"));
    let both = long.clone().tensor("rope_factors_short.weight", &[2], F32, &floats(&[1.0, 1.02]));
    has(
        &config(&both),
        json!({
            "model_type": "phimoe", "sliding_window": 64, "attention_bias": true, "lm_head_bias": false,
            "rope_scaling": {
                "rope_type": "longrope", "short_factor": [1.0, 1.02], "long_factor": [1.3, 32.0],
                "short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122,
                "original_max_position_embeddings": 16,
            },
        }),
    );
    assert!(!both.open().unwrap().names().iter().any(|name| name.contains("rope")), "the config has these values");
    let what = |file: GgufBuilder| file.open().err().unwrap().message;
    assert!(what(both.float("phimoe.rope.scaling.factor", 2.0)).contains("both by a factor and by tensors"));
    let other =
        |dims: &[u64], kind, bytes: &[u8]| what(long.clone().tensor("rope_factors_short.weight", dims, kind, bytes));
    assert!(other(&[2], F32, &floats(&[1.0, f32::NAN])).contains("values in the tensor 'rope_factors_short.weight'"));
    assert!(other(&[2], F32, &floats(&[1.0, 0.0])).contains("that are not positive"));
    assert!(other(&[32], Q8_0, &[0; 34]).contains("32 values in q8_0; RoPE needs at most 4096 in f32"));
    assert!(other(&[8192], F32, &[0; 4 * 8192]).contains("8192 values in f32"));
}

fn qwen3_next() -> GgufBuilder {
    layer("qwen3next", &[])
        .uint("qwen3next.attention.key_length", 16)
        .uint("qwen3next.rope.dimension_count", 4)
        .uint("qwen3next.ssm.conv_kernel", 4)
        .uint("qwen3next.ssm.state_size", 8)
        .uint("qwen3next.ssm.group_count", 2)
        .uint("qwen3next.ssm.time_step_rank", 4)
        .uint("qwen3next.ssm.inner_size", 48)
}

#[test]
fn qwen3_next_has_the_heads_of_its_delta_rule() {
    let file = qwen3_next().counting("blk.0.attn_qkv.weight", &[8, 80], 0).counting("blk.0.ssm_ba.weight", &[8, 8], 0);
    has(
        &config(&file),
        json!({
            "model_type": "qwen3_next", "partial_rotary_factor": 0.25, "norm_topk_prob": true, "split_qkvz": true,
            "layer_types": ["linear_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 8, "linear_value_head_dim": 12, "shared_expert_intermediate_size": 12,
            "use_sliding_window": null,
        }),
    );
    let older = qwen3_next().counting("blk.0.ssm_in.weight", &[8, 128], 0);
    has(&config(&older), json!({ "split_qkvz": null }));
    let listed = qwen3_next().list("qwen3next.attention.recurrent_layers", 7, 2, &[0, 1]);
    has(&config(&listed), json!({ "layer_types": ["full_attention"] }));
    has(
        &config(&qwen3_next().uint("qwen3next.full_attention_interval", 1)),
        json!({ "layer_types": ["full_attention"] }),
    );
    let what = |file: GgufBuilder| file.open().err().unwrap().message;
    assert!(what(qwen3_next().uint("qwen3next.full_attention_interval", 0)).contains("0 as its interval of layers"));
    let mut headless = qwen3_next();
    headless.entries.retain(|entry| !entry.windows(9).any(|w| w == b"time_step"));
    assert!(what(headless.uint("qwen3next.ssm.time_step_rank", 0)).contains("ssm.inner_size of whole heads"));
}

#[test]
fn llama4_has_the_chunks_and_the_temperature_of_the_published_models() {
    let file = || layer("llama4", &[]).uint("llama4.interleave_moe_layer_step", 1);
    has(
        &config(&file()),
        json!({
            "model_type": "llama4_text", "intermediate_size": 4, "intermediate_size_mlp": 12, "use_qk_norm": true,
            "attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1, "rope_scaling": null,
        }),
    );
    let divided = config(&file().counting("rope_freqs.weight", &[2], 1));
    let divisors = json!([1.0, 2.0]);
    has(
        &divided["rope_scaling"],
        json!({ "short_factor": divisors, "long_factor": divisors, "short_mscale": 1.0, "long_mscale": 1.0 }),
    );
    assert_eq!(divided["rope_scaling"]["original_max_position_embeddings"], divided["max_position_embeddings"]);
    let dense = file().uint("llama4.attention.sliding_window", 0);
    assert!(dense.open().err().unwrap().message.contains("full attention in all layers"));
    let mut maverick = file();
    maverick.entries.retain(|entry| !entry.windows(12).any(|w| w == b"expert_count"));
    has(&config(&maverick.uint("llama4.expert_count", 128)), json!({ "use_qk_norm": false }));
}

#[test]
fn values_that_the_converter_changed_are_those_of_the_hub() {
    use larder_core::Tensors;
    let bytes = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let logs = [-0.7f32, 0.0, 0.4, 2.7];
    let file = qwen3_next().tensor("blk.0.attn_norm.weight", &[2], F32, &bytes(&[1.25, 0.5])).tensor(
        "blk.0.ssm_a",
        &[4],
        F32,
        &bytes(&logs.map(|w| -w.exp())),
    );
    let source = file.open().unwrap();
    let mut norm = [0; 8];
    source.read("model.layers.0.input_layernorm.weight", 0, &mut norm).unwrap();
    assert_eq!(norm.to_vec(), bytes(&[0.25, -0.5]));
    // A read of any range gives the bytes of that range.
    for (from, len) in [(0, 1), (3, 2), (5, 3), (7, 1), (2, 6)] {
        let mut part = vec![0; len];
        source.read("model.layers.0.input_layernorm.weight", from, &mut part).unwrap();
        assert_eq!(part, norm[from..from + len]);
    }
    let mut decay = [0; 16];
    source.read("model.layers.0.linear_attn.A_log", 0, &mut decay).unwrap();
    for (got, want) in decay.as_chunks::<4>().0.iter().zip(logs) {
        assert!((f32::from_le_bytes(*got) - want).abs() < 3e-7);
    }
    let quantised = qwen3_next().tensor("blk.0.attn_norm.weight", &[32], Q8_0, &[0; 34]);
    let error = quantised.open().err().unwrap().message;
    assert_eq!(error, "has the tensor 'blk.0.attn_norm.weight' in q8_0; it must be in f32");
}

/// A layer of Gemma 4 with full attention whose keys serve as values, and RoPE that turns `divisors`.
fn gemma4(divisors: &[f32]) -> GgufBuilder {
    let bytes: Vec<u8> = divisors.iter().flat_map(|by| by.to_le_bytes()).collect();
    layer("gemma4", &["attn_k.weight", "ffn_down_exps.scale", "layer_output_scale.weight"])
        .uint("gemma4.attention.head_count_kv", 1)
        .uint("gemma4.attention.key_length", 8)
        .uint("gemma4.attention.value_length", 8)
        .uint("gemma4.attention.key_length_swa", 4)
        .uint("gemma4.attention.sliding_window", 16)
        .flags("gemma4.attention.sliding_window_pattern", &[false])
        .tensor("rope_freqs.weight", &[divisors.len() as u64], F32, &bytes)
}

#[test]
fn gemma_4_has_heads_by_layer_and_rope_for_some_pairs() {
    let source = gemma4(&[1.0, 1e30, 1e30, 1e30]).open().unwrap();
    let names = source.names();
    for name in ["model.layers.0.router.per_expert_scale", "model.layers.0.layer_scalar"] {
        assert!(names.contains(&name), "{name}");
    }
    has(
        source.config(),
        json!({
            "model_type": "gemma4_text", "hidden_act": null, "rope_scaling": null, "head_dim": 4,
            "per_layer_config": { "0": { "head_dim": 8, "num_key_value_heads": 1 } }, "attention_k_eq_v": true,
            "layer_types": ["full_attention"], "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
            "rope_parameters": {
                "sliding_attention": { "rope_type": "default", "rope_theta": 10000.0 },
                "full_attention": { "rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": 0.25 },
            },
        }),
    );
    for divisors in [&[1.0, 2.0, 1e30, 1e30][..], &[1.0, 1e30], &[1e30; 4]] {
        let error = gemma4(divisors).open().err().unwrap().message;
        assert!(error.contains("divisors in 'rope_freqs.weight'"), "{error}");
    }
}

#[test]
fn a_scale_of_experts_is_unknown_where_the_architecture_has_none() {
    let error = layer("qwen3moe", &["ffn_down_exps.scale"]).open().err().unwrap().message;
    assert!(error.contains("'blk.0.ffn_down_exps.scale', which is unknown"), "{error}");
}

fn latent(arch: &str, parts: &[&str]) -> GgufBuilder {
    layer(arch, parts)
        .uint(&format!("{arch}.attention.kv_lora_rank"), 4)
        .uint(&format!("{arch}.attention.key_length"), 6)
        .uint(&format!("{arch}.attention.value_length"), 4)
        .uint(&format!("{arch}.attention.key_length_mla"), 6)
        .uint(&format!("{arch}.attention.value_length_mla"), 5)
        .uint(&format!("{arch}.rope.dimension_count"), 2)
        .uint(&format!("{arch}.expert_shared_count"), 1)
}

#[test]
fn a_bias_for_the_choice_stands_for_sigmoid_scores() {
    let old = config(&latent("deepseek2", &["exp_probs_b.bias"]));
    has(
        &old,
        json!({ "model_type": "deepseek_v3", "scoring_func": "sigmoid", "qk_nope_head_dim": 4, "v_head_dim": 5 }),
    );
    has(&config(&latent("deepseek2", &[])), json!({ "model_type": "deepseek_v2", "scoring_func": "softmax" }));
}

#[test]
fn mistral_4_scales_queries_by_position() {
    let rope = |file: GgufBuilder| config(&file)["rope_parameters"].clone();
    let given = json!({
        "rope_type": "default", "rope_theta": 10000.0, "original_max_position_embeddings": 8192,
        "llama_4_scaling_beta": 0.1,
    });
    assert_eq!(rope(latent("mistral4", &[])), given);
    let file = latent("mistral4", &[])
        .text("mistral4.rope.scaling.type", "yarn")
        .float("mistral4.rope.scaling.factor", 4.0)
        .uint("mistral4.rope.scaling.original_context_length", 16)
        .float("mistral4.rope.scaling.yarn_log_multiplier", 0.1)
        .float("mistral4.attention.temperature_scale", 0.5);
    let wanted = json!({
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0,
        "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
    });
    assert_eq!(rope(file.clone()), wanted);
    assert!(file.uint("mistral4.attention.temperature_length", 8).open().is_err());
    // Files that were converted from Mistral's own format have the same parts under another name.
    let other = latent("deepseek2", &[]).float("deepseek2.attention.temperature_scale", 0.5);
    has(&config(&other), json!({ "model_type": "mistral4" }));
}

#[test]
fn a_shared_expert_makes_another_granite() {
    has(&config(&layer("granitemoe", &[])), json!({ "model_type": "granitemoe", "split_shared_mlp": null }));
    let shared = layer("granitemoe", &["ffn_up_shexp.weight"]).uint("granitemoe.expert_shared_feed_forward_length", 6);
    has(
        &config(&shared),
        json!({ "model_type": "granitemoeshared", "shared_intermediate_size": 6, "split_shared_mlp": true }),
    );
}

#[test]
fn sliding_layers_are_counted() {
    let file = layer("exaone-moe", &[])
        .uint("exaone-moe.attention.sliding_window", 16)
        .uint("exaone-moe.expert_gating_func", 2);
    has(&config(&file), json!({ "model_type": "exaone_moe", "layer_types": ["sliding_attention"], "n_group": 1 }));
    let none = file.flags("exaone-moe.attention.sliding_window_pattern", &[]);
    assert!(none.open().err().unwrap().message.contains("has 0 entries"));
}

#[test]
fn ling_has_its_queries_keys_and_values_apart_or_in_one_product() {
    let shared = |arch: &str| layer(arch, &[]).uint(&format!("{arch}.expert_shared_count"), 2);
    let first = shared("bailingmoe").entry("bailingmoe.expert_weights_norm", 7, &[1]);
    has(
        &config(&first),
        json!({ "model_type": "bailing_moe", "split_qkv": true, "norm_topk_prob": true, "num_shared_experts": 2 }),
    );
    let scaled = first.float("bailingmoe.expert_weights_scale", 2.5);
    assert!(scaled.open().err().unwrap().message.contains("scales the weights of its experts"));
    let second = shared("bailingmoe2")
        .uint("bailingmoe2.expert_gating_func", 2)
        .uint("bailingmoe2.rope.dimension_count", 2)
        .float("bailingmoe2.expert_weights_scale", 2.5);
    assert!(second.open().err().unwrap().message.contains("does not normalise"));
    has(
        &config(&second.entry("bailingmoe2.expert_weights_norm", 7, &[1])),
        json!({
            "model_type": "bailing_moe_v2", "split_qkv": null, "partial_rotary_factor": 0.5, "n_group": 1,
            "routed_scaling_factor": 2.5, "head_dim": 4,
        }),
    );
}

#[test]
fn indexers_are_in_the_layers_that_the_file_lists_or_has_them_in() {
    let file = |arch: &str, parts: &[&str]| {
        let sizes = [("head_count", 3), ("key_length", 4), ("top_k", 5)];
        sizes.iter().fold(latent(arch, parts), |file, (key, value)| {
            file.uint(&format!("{arch}.attention.indexer.{key}"), *value)
        })
    };
    let sizes = json!({ "model_type": "deepseek_v32", "index_n_heads": 3, "index_head_dim": 4, "index_topk": 5 });
    has(&config(&file("deepseek32", &[])), sizes);
    let types = |file: GgufBuilder| config(&file)["indexer_types"].clone();
    assert_eq!(types(file("glm-dsa", &["indexer.attn_k.weight"])), json!(["full"]));
    assert_eq!(types(file("glm-dsa", &[])), json!(["shared"]));
    assert_eq!(types(file("glm-dsa", &[]).flags("glm-dsa.attention.indexer.types", &[true])), json!(["full"]));
    assert!(file("glm-dsa", &[]).flags("glm-dsa.attention.indexer.types", &[]).open().is_err());
}
