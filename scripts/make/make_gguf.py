#!/usr/bin/env python3
"""Writes tiny GGUF files with llama.cpp's own converter, together with the results of transformers on the checkpoints.

    python scripts/make/make_gguf.py --llama DIR                               the fixtures in tests/fixtures/gguf
    python scripts/make/make_gguf.py --llama DIR --checkpoint FOLDER --out F   any checkpoint folder with a reference

DIR holds llama.cpp's sources (MIT): its `conversion/` and `gguf-py/` run as they are, except for the vocabulary. The tiny
tokenizers are unknown to it, so this script names their pre-tokenizer; Phi's real tokenizer is SentencePiece, the tiny one is
not. Needs what make_golden.py needs, and from PyPI: sentencepiece protobuf pyyaml requests.

Beside each file lies a .safetensors: `ids` (prompt and greedy text), `generated_ids` (the greedy text), and `full_logits`, what
transformers computes for `ids` in float32 on the checkpoint. The new checkpoints are made as the golden models are, with
configs that GGUF can express: it has no keys for Phi's mscales, for Llama 4's chunks and temperature, and for biases of Qwen3-Next.
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import safetensors.torch as st
import torch
from safetensors import safe_open
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

import make_golden
from golden import bases, deepseek_v4, sets, tokens
from golden.bases import DROP

ROOT = Path(__file__).parent.parent.parent
FIXTURES = ROOT / "tests" / "fixtures" / "gguf"
QUANTISED = ROOT / "tests" / "fixtures" / "quantised" / "gpt_oss_mxfp4"

CONFIGS = {
    "phimoe": {
        **sets.SMALL, "intermediate_size": 24, "num_local_experts": 6, "original_max_position_embeddings": 8,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.1, 1.4, 2.0], "long_factor": [1.0, 2.0, 4.0, 9.0],
                         "short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122,
                         "original_max_position_embeddings": 8},
    },
    "qwen3_next": {
        **sets.SMALL, "num_hidden_layers": 3, "head_dim": 8, "partial_rotary_factor": 0.5, "intermediate_size": 40,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_value_head_dim": 8,
    },
    "qwen3_5_moe": {
        **sets.SMALL, "num_hidden_layers": 3, "head_dim": 8, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
        "linear_value_head_dim": 8,
        "rope_parameters": {"mrope_interleaved": True, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5,
                            "rope_theta": 10000, "rope_type": "default"},
    },
    "qwen4_exp": {
        **sets.SMALL, "head_dim": 8, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24,
        "num_experts": 6, "num_experts_per_tok": 2, "layer_types": ["linear_attention", "full_attention"],
        "full_attention_interval": 2, "linear_key_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
        "linear_value_head_dim": 8, "output_gate_type": "sigmoid", "hc_count": 2, "hc_lowrank": 10, "ple_layer_ids": [1], "ple_embed_dim": 32,
        "heads_per_ngram": 2, "ngram_vocab_size_base": 60, "split_ngram_parts": 2, "indexer_budget": 12,
        "indexer_compress_ratio": 3,
        "rope_parameters": {"mrope_interleaved": True, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5,
                            "rope_theta": 10000, "rope_type": "default"},
    },
    "minimax_m2": {
        **sets.SMALL, "head_dim": 12, "rotary_dim": 8, "intermediate_size": 24, "num_local_experts": 6,
        "num_experts_per_tok": 2, "attn_type_list": [1, 1],
    },
    "hy_v3": {
        **sets.SMALL, "num_hidden_layers": 3, "head_dim": 12, "intermediate_size": 40, "moe_intermediate_size": 16,
        "num_experts": 6, "num_experts_per_tok": 2, "num_shared_experts": 2,
    },
    "gemma4_text": {
        **sets.SMALL, "num_hidden_layers": 3, "num_key_value_heads": 4, "head_dim": 8, "global_head_dim": 16,
        "num_global_key_value_heads": 2, "intermediate_size": 24, "moe_intermediate_size": 12, "num_experts": 5,
        "sliding_window": 5, "final_logit_softcapping": 4.0,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 10000.0}},
    },
    "glm4_moe_lite": {
        **sets.SMALL_MLA, "num_hidden_layers": 3, "q_lora_rank": 10, "moe_intermediate_size": 16, "n_routed_experts": 6,
        "num_experts_per_tok": 2, "n_shared_experts": 2, "rms_norm_eps": 1e-6, "scoring_func": "sigmoid",
        "num_nextn_predict_layers": 1,
    },
    "mistral4": {
        **sets.SMALL_MLA, "q_lora_rank": 10, "moe_intermediate_size": 16, "n_routed_experts": 6,
        "num_experts_per_tok": 2, "n_shared_experts": 2, "routed_scaling_factor": 1.7,
        "rope_parameters": {**bases.MISTRAL4_ROPE, "original_max_position_embeddings": 8192,
                            "max_position_embeddings": 1048576},
    },
    "dots1": {
        **sets.SMALL, "num_key_value_heads": 4, "num_hidden_layers": 3, "head_dim": 12, "intermediate_size": 40,
        "moe_intermediate_size": 16, "n_routed_experts": 6, "num_experts_per_tok": 2, "scoring_func": "sigmoid",
    },
    "exaone_moe": {
        **sets.SMALL, "num_hidden_layers": 3, "head_dim": 12, "intermediate_size": 40, "moe_intermediate_size": 16,
        "num_experts": 6, "num_experts_per_tok": 2, "num_shared_experts": 2, "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window_pattern": DROP,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "solar_open": {
        **sets.SMALL, "head_dim": 12, "intermediate_size": 40, "moe_intermediate_size": 16, "n_routed_experts": 6,
        "num_experts_per_tok": 2, "n_shared_experts": 2, "routed_scaling_factor": 1.5,
    },
    "smallthinker": {
        **sets.SMALL, "num_hidden_layers": 5, "head_dim": 12, "moe_ffn_hidden_size": 16, "moe_num_primary_experts": 6,
        "moe_num_active_primary_experts": 2, "rope_layout": [0, 1, 1, 1, 0],
        "sliding_window_layout": [0, 1, 1, 1, 0], "sliding_window_size": 4096,
    },
    "granitemoeshared": {
        **sets.SMALL, "intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 3,
        "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0, "attention_multiplier": 0.25,
        "shared_intermediate_size": 20,
    },
    "granitemoehybrid": {
        **sets.SMALL, "num_hidden_layers": 3, "intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 3,
        "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0, "attention_multiplier": 0.25,
        "shared_intermediate_size": 20, "layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 4,
        "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 12,
    },
    "jamba": {
        **sets.SMALL, "num_hidden_layers": 4, "intermediate_size": 24, "num_experts": 5, "attn_layer_period": 3,
        "attn_layer_offset": 1, "expert_layer_offset": 0, "mamba_d_state": 12, "mamba_dt_rank": 3,
    },
    "nemotron_h": {
        **sets.SMALL, "hybrid_override_pattern": "MEM*E", "num_hidden_layers": 5, "head_dim": 12, "ssm_state_size": 12,
        "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 4, "n_routed_experts": 6, "moe_intermediate_size": 20,
        "moe_shared_expert_intermediate_size": 24, "moe_latent_size": 24, "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.5, "time_step_min": 1e-6, "intermediate_size": 40,
    },
    "hunyuan_v1_moe": {
        **sets.SMALL, "head_dim": 12, "intermediate_size": 24, "moe_intermediate_size": [24, 24], "num_experts": 6,
        "moe_topk": [2, 2], "num_shared_expert": [1, 1], "rope_scaling": None,
    },
    "mellum": {
        **sets.SMALL, "num_hidden_layers": 3, "head_dim": 12, "moe_intermediate_size": 16, "num_experts": 6,
        "num_experts_per_tok": 2, "sliding_window": 5, "mlp_layer_types": ["sparse"] * 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0,
                               "original_max_position_embeddings": 32},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0}},
    },
    "afmoe": {
        **sets.SMALL, "num_hidden_layers": 5, "head_dim": 12, "intermediate_size": 40, "moe_intermediate_size": 16,
        "num_experts": 6, "num_experts_per_tok": 2, "num_shared_experts": 2, "sliding_window": 5, "layer_types": DROP,
    },
    "laguna": {
        **sets.SMALL, "num_hidden_layers": 5, "head_dim": 8, "num_attention_heads_per_layer": [4, 2, 6, 2, 4],
        "intermediate_size": 40, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 20, "num_experts": 6,
        "num_experts_per_tok": 2, "sliding_window": 5, "mlp_layer_types": ["dense"] + ["sparse"] * 4,
        "layer_types": ["full_attention"] + ["sliding_attention"] * 3 + ["full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 8.0, "partial_rotary_factor": 0.5,
                               "original_max_position_embeddings": 32},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}},
    },
    "mimo_v2_flash": {
        **sets.SMALL, "num_hidden_layers": 4, "head_dim": 12, "v_head_dim": 8, "swa_head_dim": 12, "swa_v_head_dim": 8,
        "intermediate_size": 40, "moe_intermediate_size": 16, "n_routed_experts": 6, "num_experts_per_tok": 2,
        "sliding_window": 5, "sliding_window_size": 4,
    },
    "step3p5": {
        **sets.SMALL, "num_key_value_heads": DROP, "num_hidden_layers": 4, "head_dim": 8, "intermediate_size": 40,
        "moe_intermediate_size": 16, "moe_num_experts": 6, "moe_top_k": 2, "share_expert_dims": 20,
        "share_expert_dim": 20, "sliding_window": 5,
        "attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 2, "head_dim": 8},
    },
    "bailing_moe": {
        **sets.SMALL, "head_dim": 12, "intermediate_size": 40, "moe_intermediate_size": 16, "num_experts": 6,
        "num_experts_per_tok": 2, "norm_head": True,
    },
    "bailing_moe_v2": {
        **sets.SMALL, "num_hidden_layers": 3, "head_dim": 8, "intermediate_size": 40, "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2,
    },
    "deepseek_v32": {
        **sets.SMALL_MLA, "num_hidden_layers": 3, "q_lora_rank": 10, "moe_intermediate_size": 16, "n_routed_experts": 6,
        "num_experts_per_tok": 2, "n_shared_experts": 2, "n_group": 2, "topk_group": 1, "index_n_heads": 4,
        "index_head_dim": 64, "index_topk": 6, "max_position_embeddings": 4096,
        "rope_scaling": {"type": "yarn", "factor": 8, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
                         "mscale_all_dim": 1.0, "original_max_position_embeddings": 32},
    },
    "deepseek_v4": {
        "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16, "q_lora_rank": 32,
        "qk_rope_head_dim": 8, "moe_intermediate_size": 32, "n_routed_experts": 6, "num_experts_per_tok": 2,
        "compress_ratios": [0, 4, 128, 4], "compress_rate_hca": DROP, "hc_sinkhorn_iters": 6, "swiglu_limit": 0.5,
        "sliding_window": 8, "o_lora_rank": 16, "index_head_dim": 64, "index_topk": 3,
        "rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 32, "beta_slow": 1,
                         "original_max_position_embeddings": 64},
    },
    "glm_moe_dsa": {
        **sets.SMALL_MLA, "num_hidden_layers": 4, "q_lora_rank": 10, "moe_intermediate_size": 16, "n_routed_experts": 6,
        "num_experts_per_tok": 2, "n_shared_experts": 2, "index_n_heads": 4, "index_head_dim": 64, "index_topk": 6,
        "indexer_types": ["full", "shared", "full", "shared"],
    },
    "kimi_linear": {
        **sets.SMALL_MLA, "num_hidden_layers": 4, "moe_intermediate_size": 16, "num_experts": 6,
        "num_experts_per_token": 2, "num_shared_experts": 2,
        "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1, 3, 4], "head_dim": 12, "num_heads": 2,
                               "short_conv_kernel_size": 3},
    },
    "bailing_hybrid": {
        **sets.SMALL_MLA, "num_hidden_layers": 4, "head_dim": 12, "moe_intermediate_size": 16, "num_experts": 6,
        "num_experts_per_token": 2, "num_experts_per_tok": 2, "num_shared_experts": 2, "num_expert_group": DROP,
        "n_group": 3, "topk_group": 2, "layer_group_size": 2, "short_conv_kernel_size": 3,
        "kda_lower_bound": -3.0, "score_function": "sigmoid", "norm_topk_prob": True, "moe_shared_expert_intermediate_size": 32,
        "no_kda_lora": True, "gated_attention_proj_granularity_type": "head_wise",
    },
    "glm5_next": {
        **sets.SMALL_MLA, "num_hidden_layers": 4, "q_lora_rank": 10, "qk_rope_head_dim": 0, "moe_intermediate_size": 16,
        "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 2, "first_k_dense_replace": 1,
        "index_topk": 8, "index_kpool": 4, "index_n_heads": 4, "index_head_dim": 64, "swiglu_limit": 1.0,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        "linear_attn_config": {"head_dim": 12, "num_heads": 2, "short_conv_kernel_size": 3, "gate_lower_bound": -3.0},
    },
    "minimax_m3_vl": {
        **sets.SMALL, "num_hidden_layers": 3, "head_dim": 12, "rotary_dim": 6, "intermediate_size": 16,
        "dense_intermediate_size": 40, "shared_intermediate_size": 16, "num_local_experts": 6,
        "num_experts_per_tok": 2, "moe_layer_freq": [0, 1, 1],
        "sparse_attention_config": {
            "sparse_index_dim": 8, "sparse_num_index_heads": 2, "sparse_topk_blocks": 2, "sparse_block_size": 4,
            "sparse_local_block": 1, "sparse_attention_freq": [0, 1, 1]},
    },
    "llama4_text": {
        **sets.SMALL, "num_hidden_layers": 4, "head_dim": 12, "intermediate_size": 24, "intermediate_size_mlp": 40,
        "num_local_experts": 5, "num_experts_per_tok": 2, "interleave_moe_layer_step": 2, "attention_chunk_size": 8192,
        "floor_scale": 8192,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 32},
    },
}
SEEDS = {"phimoe": 300_000, "qwen3_next": 301_000, "llama4_text": 302_000, "qwen3_5_moe": 303_000,
         "minimax_m2": 304_000, "hy_v3": 305_000,
         "gemma4_text": 306_000, "glm4_moe_lite": 307_000, "mistral4": 308_000, "dots1": 309_000, "exaone_moe": 310_000,
         "solar_open": 311_000, "granitemoeshared": 312_000, "smallthinker": 313_000, "hunyuan_v1_moe": 314_000,
         "mellum": 315_000, "afmoe": 316_000, "laguna": 317_000, "mimo_v2_flash": 318_000, "step3p5": 319_000,
         "bailing_moe": 320_000, "bailing_moe_v2": 321_000, "deepseek_v32": 322_000, "glm_moe_dsa": 323_000,
         "kimi_linear": 324_000, "bailing_hybrid": 325_000, "glm5_next": 326_000, "minimax_m3_vl": 327_000,
         "granitemoehybrid": 330_000, "jamba": 331_000, "nemotron_h": 332_000, "qwen4_exp": 333_000, "deepseek_v4": 334_000}
# Further settings of a spec: an entry of 128 tokens and some beyond, in the numbers of the published model.
MORE = {"deepseek_v4": {"prompt": 130, "rounded": deepseek_v4.round_experts}}

# Names of architectures where llama.cpp knows another spelling than transformers, and pre-tokenizers of the tiny tokenizers.
SPELLINGS = {"PhimoeForCausalLM": "PhiMoEForCausalLM", "Mistral4ForCausalLM": "Mistral3ForConditionalGeneration",
             "BailingHybridForCausalLM": "BailingMoeV3ForCausalLM",
             "MiniMaxM3VLForCausalLM": "MiniMaxM3SparseForCausalLM",
             "Glm5NextForCausalLM": "Glm5NextForConditionalGeneration"}
PRE_TOKENIZERS = {"phimoe": "gpt-2", "qwen3_next": "qwen2", "llama4_text": "qwen2", "gpt_oss": "qwen2",
                  "qwen3_5_moe_text": "qwen35", "minimax_m2": "minimax-m2", "hy_v3": "qwen2",
                  "glm4_moe_lite": "qwen2", "mistral4": "gpt-2", "dots1": "qwen2", "exaone_moe": "qwen2",
                  "solar_open": "solar-open", "granitemoeshared": "qwen2", "smallthinker": "qwen2",
                  "hunyuan_v1_moe": "hunyuan", "mellum": "qwen2", "afmoe": "qwen2", "laguna": "qwen2",
                  "mimo_v2_flash": "qwen2", "step3p5": "qwen2", "bailing_moe": "qwen2", "bailing_moe_v2": "qwen2",
                  "granitemoehybrid": "qwen2", "jamba": "gpt-2", "nemotron_h": "qwen2", "deepseek_v32": "gpt-2",
                  "glm_moe_dsa": "qwen2", "kimi_linear": "qwen2", "bailing_hybrid": "qwen2", "glm5_next_text": "qwen2",
                  "minimax_m3_vl_text": "minimax-m2", "qwen4_exp_text": "qwen35", "deepseek_v4": "gpt-2"}


def load_converter(llama):
    """llama.cpp's conversion package; its own gguf package goes before an installed one."""
    sys.path[:0] = [str(llama / "gguf-py"), str(llama)]
    import conversion
    from conversion import base

    return conversion, base


def convert(llama, folder, out):
    """Runs llama.cpp's converter on a checkpoint folder; matrices keep their number format."""
    conversion, base = load_converter(llama)
    config = json.loads((folder / "config.json").read_text())
    (architecture,), model_type = config["architectures"], config["model_type"]
    model = conversion.get_model_class(SPELLINGS.get(architecture, architecture))
    base.TextModel.get_vocab_base_pre = lambda self, tokenizer: PRE_TOKENIZERS[model_type]
    if model_type in ("phimoe", "deepseek_v32", "deepseek_v4", "glm4_moe_lite", "glm5_next_text", "glm_moe_dsa", "solar_open",
                      "hunyuan_v1_moe", "jamba"):
        model.set_vocab = base.TextModel._set_vocab_gpt2
    if model_type == "mimo_v2_flash":
        model.no_mtp = True
    if model_type in ("qwen3_next", "qwen3_5_moe_text"):
        model.no_mtp = not has_prediction_block(folder)
    types = base.gguf.LlamaFileType
    file_type = {"float32": types.ALL_F32, "bfloat16": types.MOSTLY_BF16}[config["torch_dtype"]]
    # Transformers renames or lacks keys of these configs, which the converter reads as they are on the hub.
    raw = ("mimo_v2_flash", "step3p5", "bailing_moe", "bailing_moe_v2", "kimi_linear", "bailing_hybrid",
           "deepseek_v4", "glm5_next_text", "minimax_m3_vl_text", "granitemoehybrid", "jamba", "nemotron_h", "qwen4_exp_text")
    hparams = config if model_type in raw else None
    with torch.inference_mode():
        model(folder, file_type, out, model_name=out.stem, hparams=hparams).write()


def has_prediction_block(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return any(name.startswith("mtp.") for name in file.keys())


def add_tokenizer(folder, model_type):
    """Gives a checkpoint without tokenizer a tiny one, which the converter pads to the size of the vocabulary."""
    family = tokens.family_of(model_type)
    tok = tokens.train(family, sets.Spec.vocab)
    (folder / "tokenizer.json").write_text(tok.to_str(pretty=False), encoding="utf-8")
    make_golden.write_json(folder / "tokenizer_config.json", tokens.tokenizer_config(family, tok))


def add_prediction_block(folder):
    """Adds a block for multi-token prediction to a Qwen3-Next or Qwen3.5: a copy of layer 1 and the parts around it."""
    file = folder / "model.safetensors"
    weights = st.load_file(file)
    layer, hidden = "model.layers.1.", weights["model.norm.weight"].shape[0]
    block = {f"mtp.layers.0.{name.removeprefix(layer)}": w for name, w in weights.items() if name.startswith(layer)}
    block["mtp.fc.weight"] = torch.ones(hidden, 2 * hidden)
    for norm in ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"]:
        block[f"mtp.{norm}.weight"] = torch.zeros(hidden)
    st.save_file(weights | {name: w.clone() for name, w in block.items()}, file, metadata={"format": "pt"})


def add_prediction_layer(folder):
    """Adds a block for multi-token prediction to a GLM-4.7-Flash: a copy of the last layer, and the parts around it."""
    file = folder / "model.safetensors"
    weights = st.load_file(file)
    hidden = weights["model.norm.weight"].shape[0]
    last = max(int(name.split(".")[2]) for name in weights if name.startswith("model.layers."))
    layer, block = f"model.layers.{last}.", f"model.layers.{last + 1}."
    copy = {block + name.removeprefix(layer): w.clone() for name, w in weights.items() if name.startswith(layer)}
    copy[block + "eh_proj.weight"] = torch.ones(hidden, 2 * hidden)
    for norm in ["enorm", "hnorm", "shared_head.norm"]:
        copy[f"{block}{norm}.weight"] = torch.ones(hidden)
    st.save_file(weights | copy, file, metadata={"format": "pt"})


def publish_minimax_m3(folder):
    """Gives the tensors of a MiniMax-M3 the names and forms that they have on the hub."""
    file = folder / "model.safetensors"
    published = {}
    for name, w in st.load_file(file).items():
        name = name.replace(".mlp.gate.e_score", ".block_sparse_moe.e_score").replace(".indexer.", ".index_")
        for part in ("gate.", "experts.", "shared_experts."):
            name = name.replace(f".mlp.{part}", f".block_sparse_moe.{part}")
        if name.endswith("experts.gate_up_proj"):
            for i, (gate, up) in enumerate(both.chunk(2) for both in w):
                published |= {name.replace("gate_up_proj", f"{i}.w1.weight"): gate, name.replace("gate_up_proj", f"{i}.w3.weight"): up}
        elif name.endswith("experts.down_proj"):
            published |= {name.replace("down_proj", f"{i}.w2.weight"): down for i, down in enumerate(w)}
        elif name.endswith("gate_up_proj.weight"):
            gate, up = w.chunk(2)
            published |= {name.replace("gate_up_proj", "gate_proj"): gate, name.replace("gate_up_proj", "up_proj"): up}
        else:
            published[name] = w
    st.save_file({name: w.contiguous() for name, w in published.items()}, file, metadata={"format": "pt"})


def add_gemma_tokenizer(folder):
    """Gives a checkpoint a tokenizer of Gemma's kind: merges over the whole text, spaces as U+2581, bytes for the rest."""
    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn|>", "<|channel>"]
    single = ["\u2581", "\n", *"aehinorst"]
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("i", "n"), ("e", "r"), ("\n", "\n"), ("\n\n", "\n"),
              ("\u2581", "\u2581"), ("a", "n"), ("s", "t"), ("\u2581", "in")]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    names = specials + bytes_ + single + ["".join(pair) for pair in merges]
    names += [f"<unused{i}>" for i in range(sets.Spec.vocab - len(names))]
    vocab = {name: i for i, name in enumerate(names)}
    tok = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tok.normalizer = normalizers.Replace(" ", "\u2581")
    tok.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tok.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tok.add_special_tokens(specials)
    tok.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", vocab["<bos>"])])
    (folder / "tokenizer.json").write_text(tok.to_str(pretty=False), encoding="utf-8")
    roles = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
    make_golden.write_json(folder / "tokenizer_config.json", {**roles, "tokenizer_class": "PreTrainedTokenizerFast"})
    texts = [*tokens.CASES, "the  rain in the\n\n\n\n\ntin <turn|>\n\n inn"]
    return [[text, tok.encode(text).ids] for text in texts]


def write_results(folder, out):
    results = st.load_file(folder / "reference.safetensors")
    wanted = {"ids": "full_ids", "generated_ids": "generated_ids", "full_logits": "full_logits"}
    st.save_file({name: results[known].contiguous() for name, known in wanted.items()}, out.with_suffix(".safetensors"))


def write(llama, folder, out):
    convert(llama, folder, out)
    write_results(folder, out)
    print(f"{out}: {out.stat().st_size} bytes", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", type=Path, required=True, help="llama.cpp's sources")
    parser.add_argument("--checkpoint", type=Path, help="a checkpoint folder with reference.safetensors")
    parser.add_argument("--out", type=Path, help="the GGUF file to write (with --checkpoint), or the folder")
    parser.add_argument("--only", default="", help="only fixtures with this prefix")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.checkpoint:
        write(args.llama, args.checkpoint, args.out)
        return
    out = args.out or FIXTURES
    for name, config in CONFIGS.items():
        if name.startswith(args.only):
            with tempfile.TemporaryDirectory() as scratch:
                folder = Path(scratch) / name
                spec = sets.Spec(name, name, "representable in GGUF", config, seed=SEEDS[name], **MORE.get(name, {}))
                make_golden.build(spec, folder)
                file = out / f"tiny-{name.replace('_', '-')}-{'mxfp4' if spec.rounded else 'f32'}.gguf"
                if name in ("qwen3_next", "qwen3_5_moe"):
                    add_prediction_block(folder)
                if name == "glm4_moe_lite":
                    add_prediction_layer(folder)
                if name == "deepseek_v4":
                    deepseek_v4.pack(folder)
                if name == "minimax_m3_vl":
                    publish_minimax_m3(folder)
                if name == "gemma4_text":
                    make_golden.write_json(file.with_suffix(".tokens.json"), add_gemma_tokenizer(folder))
                write(args.llama, folder, file)
    if "gpt_oss".startswith(args.only):
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "gpt_oss"
            shutil.copytree(QUANTISED, folder)
            add_tokenizer(folder, "gpt_oss")
            write(args.llama, folder, out / "tiny-gpt-oss-mxfp4.gguf")


if __name__ == "__main__":
    main()
