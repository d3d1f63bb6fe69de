//! Keys of a config that would change the result and that an architecture does not have are refused by name.

use std::sync::Arc;

use larder_model::ComputeContext;
use larder_runtime::{ModelOptions, OpenModel};
use serde_json::{Value, json};

use crate::support::reference::with_config;
use crate::support::{fixture, golden_models, larder, larder_ok, larder_refuses};

/// The error of opening the golden model of `name` with another config; `None` if it loads.
fn refusal(name: &str, change: impl FnOnce(&mut Value)) -> Option<String> {
    let dir = with_config(&fixture("golden").join(name), "config.json");
    let file = dir.path().join("config.json");
    let mut config = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    change(&mut config);
    std::fs::write(file, config.to_string()).unwrap();
    let compute = Arc::new(ComputeContext::new(1, false).unwrap());
    match OpenModel::open(dir.path(), &ModelOptions::default()) {
        Err(e) => Some(format!("{e:#}")),
        Ok(model) => model.decoder(&compute).err().map(|e| format!("{e:#}")),
    }
}

#[test]
fn keys_that_no_architecture_knows_are_refused() {
    for folder in golden_models() {
        let name = folder.file_name().unwrap().to_str().unwrap();
        let said = refusal(name, |config| config["attention_flavour"] = 2.into()).expect(name);
        assert!(said.contains("attention_flavour is not supported"), "{name}: {said}");
    }
}

#[test]
fn values_that_an_architecture_does_not_have_are_refused() {
    let cases = [
        ("afmoe", "score_func", json!("softmax")),
        ("afmoe", "route_norm", json!(false)),
        ("afmoe", "n_group", json!(2)),
        ("bailing_moe", "norm_softmax", json!(true)),
        ("bailing_moe_v2", "score_function", json!("softmax")),
        ("bailing_moe_v2", "use_rmsnorm", json!(false)),
        ("bailing_moe_v2", "topk_method", json!("greedy")),
        ("deepseek_v4", "n_shared_experts", json!(2)),
        ("deepseek_v4", "norm_topk_prob", json!(false)),
        ("deepseek_v4", "topk_method", json!("greedy")),
        ("dots1", "scoring_func", json!("softmax")),
        ("dots1", "use_sliding_window", json!(false)),
        ("exaone_moe", "scoring_func", json!("softmax")),
        ("flex_olmo", "clip_qkv", json!(0.5)),
        ("flex_olmo", "sliding_window", json!(4)),
        ("gemma4_text", "enable_moe_block", json!(false)),
        ("gemma4_text", "use_bidirectional_attention", json!("all")),
        ("hunyuan_v1_moe", "use_qk_norm", json!(false)),
        ("hunyuan_v1_moe", "use_mixed_mlp_moe", json!(false)),
        ("hunyuan_v1_moe", "norm_topk_prob", json!(false)),
        ("hunyuan_v1_moe", "use_cla", json!(true)),
        ("hunyuan_v1_moe", "use_mla", json!(true)),
        ("hunyuan_v1_moe", "num_shared_expert", json!([2, 2])),
        ("hunyuan_v1_moe", "moe_intermediate_size", json!(16)),
        ("hunyuan_v1_moe", "moe_topk", json!([2, 1])),
        ("hunyuan_v1_moe", "moe_topk", json!([2])),
        ("hunyuan_v1_moe", "num_experts", json!([0, 0])),
        ("hunyuan_v1_moe", "moe_layer_num_skipped", json!(1)),
        ("hunyuan_v1_moe", "norm_type", json!("layer")),
        ("hunyuan_v1_moe", "attention_head_dim", json!(16)),
        ("granitemoehybrid", "position_embedding_type", json!("alibi")),
        ("granitemoehybrid", "layer_types", json!(["mamba"])),
        ("granitemoehybrid", "layer_types", json!(["mamba", "attention", "moe"])),
        ("granitemoehybrid", "mamba_d_head", json!(7)),
        ("granitemoehybrid", "mamba_n_groups", json!(3)),
        ("granitemoehybrid", "time_step_limit", json!([2.0, 1.0])),
        ("hy_v3", "qk_norm", json!(false)),
        ("hy_v3", "moe_router_use_sigmoid", json!(false)),
        ("jamba", "attn_layer_offset", json!(3)),
        ("jamba", "expert_layer_period", json!(0)),
        ("jamba", "mamba_dt_rank", json!("some")),
        ("jamba", "mamba_inner_layernorms", json!(false)),
        ("laguna", "gating", json!("per-layer")),
        ("laguna", "num_attention_heads_per_layer", json!([3])),
        ("llama_moe", "gate_use_softmax", json!(false)),
        ("llama_moe", "gate_type", json!("SwitchBalancedGate")),
        ("llama_moe", "gate_network", json!("three")),
        ("llama_moe", "size_experts", json!([[8, 24, 16, 16, 16, 16], [16, 16, 16, 16, 16, 16]])),
        ("llama_moe", "score_scale_factor", json!([1.0])),
        ("minimax_m2", "scoring_func", json!("softmax")),
        ("minimax_m2", "shared_intermediate_size", json!(8)),
        ("mixtral", "num_experts_per_tok", json!(null)),
        ("mixtral", "use_qk_norm", json!(true)),
        ("nemotron_h", "hybrid_override_pattern", json!("ME*X-E")),
        ("nemotron_h", "hybrid_override_pattern", json!("")),
        ("nemotron_h", "hybrid_override_pattern", json!("MM*-")),
        ("nemotron_h", "layers_block_type", json!(["mamba", "experts"])),
        ("nemotron_h", "n_groups", json!(4)),
        ("nemotron_h", "ssm_state_size", json!(1u64 << 40)),
        ("mimo_v2_flash", "n_shared_experts", json!(1)),
        ("mimo_v2_flash", "layernorm_epsilon", json!(1e-3)),
        ("mimo_v2_flash", "attention_projection_layout", json!("fused_qkv")),
        ("mimo_v2_flash", "swa_num_key_value_heads", json!(3)),
        ("mimo_v2_flash", "hybrid_layer_pattern", json!([1])),
        ("mimo_v2_flash", "scoring_func", json!("softmax")),
        ("qwen3_5_moe", "attn_output_gate", json!(false)),
        ("qwen3_5_moe", "norm_topk_prob", json!(false)),
        ("qwen3_5_moe", "n_shared_experts", json!(0)),
        ("qwen3_moe", "moe_router_dtype", json!("bfloat16")),
        ("qwen3_moe", "shared_expert_intermediate_size", json!(8)),
        ("qwen3_moe", "use_qk_norm", json!(false)),
        ("qwen4_exp", "attn_output_gate", json!(false)),
        ("qwen4_exp", "output_gate_type", json!("gelu")),
        ("qwen4_exp", "hc_count", json!(1)),
        ("qwen4_exp", "hc_count", json!(65)),
        ("qwen4_exp", "ple_layer_ids", json!([2])),
        ("qwen4_exp", "ple_layer_ids", json!([0, 1])),
        ("qwen4_exp", "ple_embed_dim", json!(25)),
        ("qwen4_exp", "ngram_size", json!(65)),
        ("qwen4_exp", "ngram_vocab_size_base", json!(4_000_000_000u32)),
        ("qwen4_exp", "ngram_vocab_size_base", json!(1e18 as u64)),
        ("qwen4_exp", "eos_token_id", json!(null)),
        ("qwen4_exp", "indexer_n_heads", json!(null)),
        ("qwen4_exp", "indexer_kv_heads", json!(2)),
        ("qwen4_exp", "indexer_budget", json!(13)),
        ("qwen4_exp", "indexer_head_dim", json!(2)),
        ("solar_open", "partial_rotary_factor", json!(0.5)),
        ("solar_open", "first_k_dense_replace", json!(1)),
        ("step3p5", "moe_router_activation", json!("softmax")),
        ("step3p5", "use_head_wise_attn_gate", json!(false)),
        ("step3p5", "attention_other_setting", json!({"head_dim": 4})),
        ("step3p5", "num_sliding_attention_heads", json!(0)),
        ("step3p5", "layer_types", json!(["full_attention"])),
        ("step3p5", "sliding_window", json!(null)),
        ("step3p5", "swiglu_limits", json!([0.5, -1.0, 0.5])),
        ("step3p5", "swiglu_limits_shared", json!([0.5])),
        ("step3p5", "moe_layers_enum", json!("1,x")),
        ("step3p5", "partial_rotary_factors", json!([])),
        ("switch_transformers", "router_dtype", json!("bfloat16")),
        ("switch_transformers", "is_gated_act", json!(true)),
        ("switch_transformers", "decoder_start_token_id", json!(100_000)),
        ("switch_transformers", "relative_attention_num_buckets", json!(2)),
    ];
    for (name, key, value) in cases {
        let said = refusal(name, |config| config[key] = value.clone());
        assert!(said.as_ref().is_some_and(|said| said.contains(key)), "{name} with {key} {value}: {said:?}");
    }
}

#[test]
fn keys_that_state_what_an_architecture_does_anyway_pass() {
    let cases = [
        ("deepseek_v4", "topk_method", json!("noaux_tc")),
        ("deepseek_v4", "norm_topk_prob", json!(true)),
        ("glm_moe_dsa", "index_share_for_mtp_iteration", json!(true)),
        ("glm_moe_dsa", "moe_router_dtype", json!("float32")),
        ("mixtral", "norm_topk_prob", json!(true)),
        ("mixtral", "use_qk_norm", json!(false)),
        ("qwen3_moe", "shared_expert_intermediate_size", json!(0)),
        ("qwen3_moe", "use_qk_norm", json!(true)),
        ("qwen3_moe", "scoring_func", json!("softmax")),
    ];
    for (name, key, value) in cases {
        assert_eq!(refusal(name, |config| config[key] = value.clone()), None, "{name} with {key} {value}");
    }
}

#[test]
fn the_type_is_judged_before_any_key() {
    let said = refusal("mixtral", |config| {
        config["model_type"] = "odd".into();
        config["num_experts_per_tok"] = Value::Null;
        *config = json!({ "logit_scale": 2, "text_config": config.take() });
    });
    let said = said.unwrap();
    assert!(said.contains("model_type 'odd' is not supported") && !said.contains("logit_scale"), "{said}");
}

#[test]
fn a_model_may_have_the_names_of_its_checkpoint() {
    for kind in ["qwen3_8_flash_next", "qwen3_8_flash_next_text"] {
        assert_eq!(refusal("qwen4_exp", |config| config["model_type"] = kind.into()), None, "{kind}");
    }
}

#[test]
fn biases_of_attention_are_read_where_a_key_says_so() {
    let said = refusal("nemotron_h", |config| config["attention_bias"] = true.into()).unwrap();
    assert!(said.contains("mixer.q_proj.bias"), "{said}");
}

#[test]
fn refused_keys_are_ignored_by_name_and_a_store_remembers_it() {
    let dir = with_config(&fixture("golden/qwen3_moe"), "config.json");
    let stores = tempfile::tempdir().unwrap();
    let (model, store) = (dir.path().to_str().unwrap(), stores.path().join("store"));
    let (plain, file) = (fixture("golden/qwen3_moe"), dir.path().join("config.json"));
    let (plain, store) = (plain.to_str().unwrap(), store.to_str().unwrap());
    let mut config: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    config["attention_flavour"] = "sour".into();
    config["use_qk_norm"] = false.into();
    std::fs::write(&file, config.to_string()).unwrap();
    let said = larder_refuses(&["inspect", model]);
    for part in [
        "attention_flavour is not supported (\"sour\": might change attention)",
        "use_qk_norm is not supported (false: only true)",
    ] {
        assert!(said.contains(part), "{said}");
    }
    let both = ["--ignore-config", "use_qk_norm,attention_flavour"];
    assert!(said.ends_with(&both.join(" ")), "{said}");
    assert!(larder_refuses(&["inspect", model, both[0], "use_qk_norm"]).contains("--ignore-config attention_flavour"));
    let said = larder_refuses(&["inspect", model, both[0], "attention_flavour,rope_theta"]);
    assert!(said.contains("--ignore-config names 'rope_theta', which is not refused"), "{said}");
    larder_ok(&["convert", model, store, both[0], both[1]]);
    let run = |args: &[&str]| {
        let output = larder(&[&["run", "-p", "a", "-n", "4", "--temperature", "0"], args].concat());
        assert!(output.status.success());
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let note = "note: ignores use_qk_norm, attention_flavour of config.json, as asked";
    for args in [&["-m", model, both[0], both[1]][..], &["-m", store], &["-m", store, both[0], both[1]]] {
        let (text, said) = run(args);
        assert_eq!((text, said.matches(note).count()), (run(&["-m", plain]).0, 1), "{args:?}: {said}");
    }
}

#[test]
fn a_base_that_no_number_holds_is_refused() {
    for alpha in [-2.0, 1e300] {
        let scaling = json!({"type": "dynamic", "alpha": alpha});
        let said = refusal("hunyuan_v1_moe", |config| config["rope_scaling"] = scaling).unwrap();
        assert!(said.contains("rope_scaling.alpha"), "{said}");
    }
}

#[test]
fn latent_heads_need_not_divide_the_hidden_size() {
    for name in ["deepseek_v3", "glm4_moe_lite", "mistral4"] {
        let heads = |config: &mut Value| {
            config["num_attention_heads"] = 3.into();
            config["num_key_value_heads"] = 3.into();
        };
        let said = refusal(name, heads).expect("the tensors are of two heads");
        assert!(!said.contains("multiple") && said.contains("self_attn."), "{name}: {said}");
    }
}

#[test]
fn a_method_of_quantisation_is_refused_also_below_the_config_of_the_text() {
    let said = refusal("qwen3_moe", |config| {
        config["quantization_config"] = json!({ "quant_method": "hqq", "bits": 4 });
        *config = json!({ "model_type": "qwen3_vl_moe", "text_config": config.take() });
        config["text_config"]["model_type"] = "qwen3_vl_moe_text".into();
    });
    assert!(said.as_ref().is_some_and(|said| said.contains("'hqq', which is not supported")), "{said:?}");
}
