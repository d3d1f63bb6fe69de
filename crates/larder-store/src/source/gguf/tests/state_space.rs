//! Tests of the configs of models with state-space layers.

use serde_json::json;

use super::GgufBuilder;
use super::architectures::{config, has, layer_with};

/// Layers of `arch`, of which those with heads of keys have attention; the first has `parts`.
fn layers(arch: &str, key_heads: &[i32], parts: &[&str]) -> GgufBuilder {
    let last = format!("blk.{}.attn_norm.weight", key_heads.len() - 1);
    layer_with(arch, parts, key_heads.len() as u32, Some(2))
        .ints(&format!("{arch}.attention.head_count_kv"), key_heads)
        .uint(&format!("{arch}.ssm.conv_kernel"), 4)
        .uint(&format!("{arch}.ssm.state_size"), 8)
        .uint(&format!("{arch}.ssm.group_count"), 2)
        .uint(&format!("{arch}.ssm.time_step_rank"), 4)
        .uint(&format!("{arch}.ssm.inner_size"), 16)
        .counting(&last, &[8], 0)
}

fn refusal(file: GgufBuilder) -> String {
    file.open().err().expect("an error").message
}

#[test]
fn granite_hybrid_rotates_if_the_file_says_so() {
    let file = || layers("granitehybrid", &[0, 1, 0], &["ssm_conv1d.bias"]);
    let plain = file().entry("granitehybrid.rope.scaling.finetuned", 7, &[0]);
    has(
        &config(&plain),
        json!({
            "model_type": "granitemoehybrid", "layer_types": ["mamba", "attention", "mamba"], "num_key_value_heads": 1,
            "position_embedding_type": "nope", "mamba_n_heads": 4, "mamba_d_head": 4, "mamba_expand": 2,
            "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_conv_bias": true,
        }),
    );
    has(&config(&file()), json!({ "position_embedding_type": "rope" }));
}

#[test]
fn sizes_of_mamba_must_fit_together() {
    let odd = |inner: u32, heads: u32| {
        let mut file = layers("granitehybrid", &[0, 1], &[]);
        let is = |entry: &[u8], key: &[u8]| entry.windows(key.len()).any(|part| part == key);
        file.entries.retain(|entry| !is(entry, b"inner_size") && !is(entry, b"time_step_rank"));
        refusal(file.uint("granitehybrid.ssm.inner_size", inner).uint("granitehybrid.ssm.time_step_rank", heads))
    };
    assert!(odd(16, 0).contains("ssm.inner_size of whole heads") && odd(16, 5).contains("whole heads"));
    assert!(odd(12, 4).contains("ssm.inner_size of whole widths") && odd(0, 4).contains("whole"));
}

#[test]
fn layers_of_jamba_recur_with_a_period() {
    let sparse = |file: GgufBuilder, layer: u32| file.counting(&format!("blk.{layer}.ffn_gate_inp.weight"), &[8, 4], 0);
    let file = sparse(sparse(layers("jamba", &[0, 0, 2, 0], &[]), 1), 3);
    has(
        &config(&file),
        json!({
            "model_type": "jamba", "attn_layer_period": 5, "attn_layer_offset": 2, "expert_layer_period": 2,
            "expert_layer_offset": 1, "mamba_expand": 2, "mamba_dt_rank": 4, "mamba_conv_bias": false,
            "num_key_value_heads": 2, "rope_theta": null, "intermediate_size": 12,
        }),
    );
    let error = refusal(layers("jamba", &[2, 0, 2, 2], &["ssm_d"]));
    assert!(error.contains("has layers with attention that do not recur regularly"), "{error}");
}

#[test]
fn the_tensors_of_a_layer_of_nemotron_h_tell_its_type() {
    let file = || {
        layers("nemotron_h_moe", &[0, 2, 0, 0], &["ffn_gate_inp.weight"])
            .uint("nemotron_h_moe.attention.key_length", 16)
            .uint("nemotron_h_moe.expert_shared_feed_forward_length", 6)
            .counting("blk.1.attn_q.weight", &[8, 32], 0)
            .counting("blk.2.ssm_in.weight", &[8, 52], 0)
    };
    let dense = file().counting("blk.3.ffn_up.weight", &[8, 10], 0).counting("blk.3.ffn_up.bias", &[10], 0);
    has(
        &config(&dense),
        json!({
            "model_type": "nemotron_h", "layers_block_type": ["moe", "attention", "mamba", "mlp"], "head_dim": 16,
            "intermediate_size": 10, "mlp_bias": true, "layer_norm_epsilon": 1e-6, "rms_norm_eps": null,
            "mamba_num_heads": 4, "mamba_head_dim": 4, "n_groups": 2, "use_conv_bias": false, "time_step_min": 0.0,
            "moe_latent_size": null, "moe_shared_expert_intermediate_size": 6, "norm_topk_prob": false,
        }),
    );
    let latent = dense.uint("nemotron_h_moe.moe_latent_size", 4);
    has(&config(&latent), json!({ "moe_latent_size": 4 }));
    assert!(refusal(file()).contains("layers of known types"));
}
