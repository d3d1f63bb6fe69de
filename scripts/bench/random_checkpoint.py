#!/usr/bin/env python3
"""Writes a checkpoint with random weights in the shape of a published model, cut to a few layers, to measure how fast it decodes.

    random_checkpoint.py nemotron-3-nano DIR
    random_checkpoint.py kimi-linear DIR
    random_checkpoint.py qwen3-next DIR

Widths are those of the model; layers and experts are fewer, so that the file is small: a token uses as many experts as in the model.
Needs the Python packages of scripts/make/make_golden.py. The store is made by `larder convert DIR STORE --experts q4_0 --resident q4_0`.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

GOLDEN = Path(__file__).parent.parent.parent / "tests" / "golden"

SHAPES = {
    # Two groups of the model's pattern: state-space layers, experts, one layer of attention.
    "nemotron-3-nano": ("nemotron_h", {
        "model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "vocab_size": 131072, "hidden_size": 2688,
        "num_hidden_layers": 8, "hybrid_override_pattern": "MEM*EMEM", "num_attention_heads": 32, "num_key_value_heads": 2,
        "head_dim": 128, "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
        "conv_kernel": 4, "n_routed_experts": 32, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 2.5, "max_position_embeddings": 262144, "tie_word_embeddings": False,
    }),
    # Three layers of linear attention and one of attention, with a sixteenth of the experts.
    "qwen3-next": ("qwen3_next", {
        "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "vocab_size": 151936, "hidden_size": 2048,
        "num_hidden_layers": 4, "full_attention_interval": 4, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 256, "partial_rotary_factor": 0.25, "rope_theta": 1e7, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "intermediate_size": 5120, "moe_intermediate_size": 512, "num_experts": 32,
        "num_experts_per_tok": 10, "shared_expert_intermediate_size": 512, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "max_position_embeddings": 262144, "tie_word_embeddings": False, "hidden_act": "silu",
    }),
    # A dense layer and five with experts, one of which has latent attention.
    "kimi-linear": ("kimi_linear", {
        "model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"], "vocab_size": 163840,
        "hidden_size": 2304, "num_hidden_layers": 6, "num_attention_heads": 32, "num_key_value_heads": 32,
        "head_dim": 72, "intermediate_size": 9216, "moe_intermediate_size": 1024, "num_experts": 32,
        "num_experts_per_token": 8, "num_shared_experts": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "mla_use_nope": True, "num_expert_group": 1, "topk_group": 1, "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid", "routed_scaling_factor": 2.446, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144, "tie_word_embeddings": False, "hidden_act": "silu",
        "linear_attn_config": {"kda_layers": [1, 2, 3, 5, 6], "full_attn_layers": [4], "num_heads": 32, "head_dim": 128,
                               "short_conv_kernel_size": 4},
    }),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    golden, config = SHAPES[args.shape]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "config.json").write_text(json.dumps(config, indent=2))
    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.out), dtype=torch.bfloat16)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.dim() > 1 and tensor.is_floating_point():
                tensor.normal_(0.0, tensor.shape[-1] ** -0.5)
    model.save_pretrained(args.out, max_shard_size="4GB")
    (args.out / "config.json").write_text(json.dumps(config, indent=2))
    # Any text is a row of known tokens; the vocabulary has more rows than this tokenizer uses.
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(GOLDEN / golden / name, args.out / name)


if __name__ == "__main__":
    sys.exit(main())
