//! Tests of whole files: names, shapes, row order and configs.

use std::path::Path;

use larder_core::{ExpertId, LayerIdx, NumberFormat, RowPick, Tensors};
use serde_json::json;

use super::builder::{GgufBuilder, Q8_0, mixtral};
use crate::source::{Source, gguf::Gguf};

fn floats(source: &Gguf, name: &str) -> Vec<f32> {
    let mut bytes = vec![0; source.meta(name).unwrap().bytes];
    source.read(name, 0, &mut bytes).unwrap();
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn fixture(name: &str) -> Gguf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/gguf");
    Gguf::open(&folder.join(name)).unwrap()
}

#[test]
fn rows_of_queries_and_keys_are_deinterleaved_into_halves() {
    let source = mixtral(true).open().unwrap();
    let query = "model.layers.0.self_attn.q_proj.weight";
    let firsts: Vec<f32> = floats(&source, query).chunks(8).map(|row| row[0]).collect();
    // Two heads of four rows: 0, 2, 1, 3 of each.
    assert_eq!(firsts, [100.0, 116.0, 108.0, 124.0, 132.0, 148.0, 140.0, 156.0]);
    let keys: Vec<f32> = floats(&source, "model.layers.0.self_attn.k_proj.weight").chunks(8).map(|r| r[0]).collect();
    assert_eq!(keys, [200.0, 216.0, 208.0, 224.0]);
    assert_eq!(floats(&source, "model.layers.0.self_attn.v_proj.weight")[8], 308.0);
    // A read of any range gives the bytes of that range.
    let mut whole = vec![0; 256];
    source.read(query, 0, &mut whole).unwrap();
    for (from, len) in [(0, 1), (31, 2), (5, 100), (64, 192), (255, 1)] {
        let mut part = vec![0; len];
        source.read(query, from, &mut part).unwrap();
        assert_eq!(part, whole[from..from + len]);
    }
}

#[test]
fn quantised_rows_are_permuted_as_whole_rows() {
    let rows: Vec<u8> = (0..4).flat_map(|row| [row; 34]).collect();
    let file = GgufBuilder::new()
        .text("general.architecture", "llama")
        .uint("llama.block_count", 1)
        .uint("llama.context_length", 64)
        .uint("llama.embedding_length", 32)
        .uint("llama.feed_forward_length", 4)
        .uint("llama.attention.head_count", 1)
        .uint("llama.attention.key_length", 4)
        .uint("llama.expert_count", 1)
        .uint("llama.expert_used_count", 1)
        .float("llama.attention.layer_norm_rms_epsilon", 1e-5)
        .counting("token_embd.weight", &[32, 2], 0)
        .tensor("blk.0.attn_q.weight", &[32, 4], Q8_0, &rows)
        .counting("blk.0.ffn_gate_exps.weight", &[32, 4, 1], 0);
    let source = file.open().unwrap();
    let mut read = vec![0; 4 * 34];
    source.read("model.layers.0.self_attn.q_proj.weight", 0, &mut read).unwrap();
    assert_eq!(read.chunks(34).map(|row| row[0]).collect::<Vec<_>>(), [0, 2, 1, 3]);
}

#[test]
fn mixtral_gets_the_config_of_the_hub_and_keeps_its_expert_names() {
    let source = mixtral(true).open().unwrap();
    assert_eq!(
        source.config(),
        &json!({
            "vocab_size": 5, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 1, "hidden_act": "silu", "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0, "tie_word_embeddings": true, "model_type": "mixtral", "intermediate_size": 4,
            "num_local_experts": 2, "num_experts_per_tok": 1,
        })
    );
    let experts = source.expert_names().unwrap();
    let gate = experts.matrices.gate.unwrap();
    assert!(gate.stacked && gate.pick == RowPick::All && experts.bias.is_none());
    let down = experts.matrices.down.tensor_name(LayerIdx(0), ExpertId(1));
    assert_eq!(source.meta(&down).unwrap().shape, [2, 8, 4]);
    assert!(source.names().contains(&down.as_str()));
}

#[test]
fn old_files_with_a_tensor_per_expert_are_read() {
    let source = mixtral(false).open().unwrap();
    let experts = source.expert_names().unwrap();
    assert!(!experts.matrices.up.stacked);
    assert_eq!(floats(&source, &experts.matrices.up.tensor_name(LayerIdx(0), ExpertId(1)))[0], 700.0);
}

#[test]
fn gate_and_up_can_be_one_tensor() {
    let file = mixtral(true).counting("blk.0.ffn_gate_up_exps.weight", &[8, 8, 2], 0);
    let experts = file.open().unwrap().expert_names().unwrap();
    let gate = experts.matrices.gate.unwrap();
    assert_eq!(gate.name, "blk.{l}.ffn_gate_up_exps.weight");
    assert_eq!((gate.pick, experts.matrices.up.pick), (RowPick::FirstHalf, RowPick::SecondHalf));
}

#[test]
fn unsupported_models_are_refused_with_a_reason() {
    let what = |file: GgufBuilder| file.open().err().unwrap().message;
    assert!(
        what(mixtral(true).counting("blk.0.attn_q.bias", &[8], 0)).contains("'blk.0.attn_q.bias', which is unknown")
    );
    assert!(what(mixtral(true).texts("tokenizer.ggml.tokens", &["a"])).contains("has 1 tokens, but 5 rows"));
    let bare = |arch| GgufBuilder::new().text("general.architecture", arch).uint(&format!("{arch}.block_count"), 1);
    assert!(what(GgufBuilder::new()).contains("no metadata 'general.architecture'"));
    assert!(
        what(bare("gpt2"))
            .contains("has the architecture 'gpt2', which is not supported; supported are llama, qwen2moe,")
    );
    assert!(what(bare("llama")).contains("has no experts"));
    assert!(what(mixtral(true).uint("split.count", 3)).contains("one of 3 parts"));
    assert!(what(mixtral(true).counting("rope_freqs.weight", &[4], 0)).contains("'rope_freqs.weight'"));
    assert!(what(mixtral(true).uint("llama.rope.dimension_count", 2)).contains("applies RoPE to 2 of 4 values"));
    let linear = mixtral(true).float("llama.rope.scaling.factor", 4.0);
    assert_eq!(linear.open().unwrap().config()["rope_scaling"], json!({ "rope_type": "linear", "factor": 4.0 }));
    let odd = mixtral(true).text("llama.rope.scaling.type", "spiral");
    assert!(what(odd).contains("uses the RoPE scaling 'spiral'"));
}

#[test]
fn missing_layers_are_refused() {
    for blocks in [2, u32::MAX] {
        let file = GgufBuilder::new()
            .text("general.architecture", "gpt-oss")
            .uint("gpt-oss.block_count", blocks)
            .counting("blk.0.ffn_gate_exps.weight", &[8, 4, 2], 0);
        let error = file.open().err().unwrap().message;
        assert_eq!(error, format!("says it has {blocks} layers, but its last block is blk.0"));
    }
    // Lists with an entry per layer would take all memory.
    let file = GgufBuilder::new()
        .text("general.architecture", "gpt-oss")
        .uint("gpt-oss.block_count", 4_000_000_001)
        .counting("blk.4000000000.ffn_gate_exps.weight", &[8, 4, 2], 0);
    assert_eq!(file.open().err().unwrap().message, "says it has 4000000001 layers, but has only 1 tensors");
}

#[test]
fn heads_that_do_not_divide_the_rows_are_refused() {
    for heads in [0, 3, 8] {
        let file = GgufBuilder::new()
            .text("general.architecture", "llama")
            .uint("llama.block_count", 1)
            .uint("llama.attention.head_count", heads)
            .counting("blk.0.attn_q.weight", &[8, 8], 0)
            .counting("blk.0.ffn_gate_exps.weight", &[8, 4, 2], 0);
        let error = file.open().err().unwrap().message;
        assert!(error.contains(&format!("divided evenly among {heads} heads")), "{error}");
    }
}

#[test]
fn the_fixtures_have_the_tensors_of_their_architectures() {
    let rows = [
        ("tiny-gpt-oss-96-mxfp4.gguf", "gpt_oss", NumberFormat::Q8_0, "model.layers.1.self_attn.sinks"),
        ("tiny-mixtral-q4_0.gguf", "mixtral", NumberFormat::Q4_0, "model.layers.1.block_sparse_moe.gate.weight"),
        ("tiny-olmoe-q4_0.gguf", "olmoe", NumberFormat::Q4_0, "model.layers.1.self_attn.q_norm.weight"),
        ("tiny-qwen2moe-q8_0.gguf", "qwen2_moe", NumberFormat::Q8_0, "model.layers.0.self_attn.k_proj.bias"),
        ("tiny-qwen3moe-q4_k.gguf", "qwen3_moe", NumberFormat::Q4K, "model.layers.0.self_attn.k_norm.weight"),
        ("tiny-phimoe-f32.gguf", "phimoe", NumberFormat::F32, "model.layers.1.post_attention_layernorm.bias"),
        ("tiny-qwen3-next-f32.gguf", "qwen3_next", NumberFormat::F32, "model.layers.2.linear_attn.in_proj_z.weight"),
        ("tiny-llama4-text-f32.gguf", "llama4_text", NumberFormat::F32, "model.layers.1.feed_forward.router.weight"),
        (
            "tiny-qwen3-5-moe-f32.gguf",
            "qwen3_5_moe_text",
            NumberFormat::F32,
            "model.layers.2.linear_attn.in_proj_b.weight",
        ),
        (
            "tiny-minimax-m2-f32.gguf",
            "minimax_m2",
            NumberFormat::F32,
            "model.layers.1.block_sparse_moe.e_score_correction_bias",
        ),
        ("tiny-hy-v3-f32.gguf", "hy_v3", NumberFormat::F32, "model.layers.2.mlp.expert_bias"),
        ("tiny-gemma4-text-f32.gguf", "gemma4_text", NumberFormat::F32, "model.layers.2.router.per_expert_scale"),
        ("tiny-glm4-moe-lite-f32.gguf", "deepseek_v3", NumberFormat::F32, "model.layers.2.self_attn.v_b_proj.weight"),
        ("tiny-mistral4-f32.gguf", "mistral4", NumberFormat::F32, "model.layers.0.self_attn.k_b_proj.weight"),
        (
            "tiny-deepseek-v32-f32.gguf",
            "deepseek_v32",
            NumberFormat::F32,
            "model.layers.2.self_attn.indexer.k_norm.bias",
        ),
        ("tiny-glm-moe-dsa-f32.gguf", "glm_moe_dsa", NumberFormat::F32, "model.layers.2.self_attn.indexer.wq_b.weight"),
        (
            "tiny-minimax-m3-vl-f32.gguf",
            "minimax_m3_vl",
            NumberFormat::F32,
            "model.layers.2.self_attn.index_k_norm.weight",
        ),
        ("tiny-dots1-f32.gguf", "dots1", NumberFormat::F32, "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("tiny-exaone-moe-f32.gguf", "exaone_moe", NumberFormat::F32, "model.layers.1.mlp.e_score_correction_bias"),
        ("tiny-solar-open-f32.gguf", "glm4_moe", NumberFormat::F32, "model.layers.0.mlp.gate.e_score_correction_bias"),
        (
            "tiny-granitemoeshared-f32.gguf",
            "granitemoeshared",
            NumberFormat::F32,
            "model.layers.1.shared_mlp.output_linear.weight",
        ),
        ("tiny-granitemoehybrid-f32.gguf", "granitemoehybrid", NumberFormat::F32, "model.layers.2.mamba.conv1d.weight"),
        ("tiny-jamba-f32.gguf", "jamba", NumberFormat::F32, "model.layers.3.mamba.dt_layernorm.weight"),
        (
            "tiny-nemotron-h-f32.gguf",
            "nemotron_h",
            NumberFormat::F32,
            "model.layers.1.mixer.gate.e_score_correction_bias",
        ),
        (
            "tiny-smallthinker-f32.gguf",
            "smallthinker",
            NumberFormat::F32,
            "model.layers.4.block_sparse_moe.primary_router.weight",
        ),
        ("tiny-mellum-f32.gguf", "mellum", NumberFormat::F32, "model.layers.1.self_attn.q_norm.weight"),
        ("tiny-afmoe-f32.gguf", "afmoe", NumberFormat::F32, "model.layers.4.post_mlp_layernorm.weight"),
        ("tiny-laguna-f32.gguf", "laguna", NumberFormat::F32, "model.layers.4.mlp.experts.e_score_correction_bias"),
        (
            "tiny-mimo-v2-flash-f32.gguf",
            "mimo_v2_flash",
            NumberFormat::F32,
            "model.layers.2.self_attn.attention_sink_bias",
        ),
        ("tiny-step3p5-f32.gguf", "step3p5", NumberFormat::F32, "model.layers.3.share_expert.down_proj.weight"),
        ("tiny-gpt-oss-mxfp4.gguf", "gpt_oss", NumberFormat::Bf16, "model.layers.3.self_attn.sinks"),
    ];
    for (file, model_type, kind, own) in rows {
        let source = fixture(file);
        assert_eq!(source.config()["model_type"], model_type);
        assert_eq!(source.meta("model.embed_tokens.weight").unwrap().kind, kind, "{file}");
        assert!(source.meta(own).is_some(), "{file} has no {own}");
        assert_eq!(source.meta("lm_head.weight").is_none(), source.config()["tie_word_embeddings"] == true);
        for name in source.names() {
            let mut bytes = vec![0; source.meta(name).unwrap().bytes];
            source.read(name, 0, &mut bytes).unwrap();
        }
        for sidecar in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
            assert!(source.sidecar(sidecar).unwrap().is_some(), "{file} has no {sidecar}");
        }
    }
    let shared = fixture("tiny-qwen2moe-q8_0.gguf");
    assert_eq!(shared.meta("model.layers.0.mlp.shared_expert_gate.weight").unwrap().shape, [1, 96]);
    assert_eq!(shared.config()["norm_topk_prob"], false);
    assert_eq!(fixture("tiny-qwen3moe-q4_k.gguf").config()["norm_topk_prob"], true);
}

#[test]
fn the_fingerprint_depends_on_the_header() {
    let print = |file: &GgufBuilder| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        std::fs::write(&path, file.bytes()).unwrap();
        Gguf::open(&path).unwrap().fingerprint()
    };
    let file = mixtral(true).uint("general.note", 1);
    assert_eq!(print(&file), print(&file.clone()));
    assert_ne!(print(&file), print(&mixtral(true).uint("general.note", 2)));
}
