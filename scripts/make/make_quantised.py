#!/usr/bin/env python3
"""Writes tiny checkpoints in quantised forms of the hub, with the results of transformers on the numbers that they hold.

    python scripts/make/make_quantised.py                    tests/fixtures/quantised/deepseek_v4_fp8

Needs what make_golden.py needs. A DeepSeek-V4 as it is published: experts in FP4, matrices of attention and shared experts in FP8 with
a scale per block of 16 by 16, names without prefix; with a tensor of the layer for multi-token prediction, which is not used.
"""

import json
import shutil
from pathlib import Path

import make_golden
import safetensors.torch as st
import torch
from golden import deepseek_v4, sets
from golden.bases import DROP

FIXTURE = Path(__file__).parent.parent.parent / "tests" / "fixtures" / "quantised" / "deepseek_v4_fp8"
BLOCK = 16
CONFIG = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 16, "q_lora_rank": 24,
    "qk_rope_head_dim": 8, "moe_intermediate_size": 32, "n_routed_experts": 6, "num_experts_per_tok": 2,
    "compress_ratios": [0, 4, 4], "compress_rate_hca": DROP, "hc_sinkhorn_iters": 6, "sliding_window": 8,
    "o_lora_rank": 12, "index_head_dim": 16, "index_topk": 3,
}


def rounded(model):
    deepseek_v4.round_experts(model)
    deepseek_v4.round_matrices(model, BLOCK)


def name_method(file):
    """Gives a config the keys by which it names its formats."""
    config = json.loads(file.read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "activation_scheme": "dynamic",
                                     "weight_block_size": [BLOCK, BLOCK]}
    config["expert_dtype"] = "fp4"
    make_golden.write_json(file, config)


def main():
    torch.set_num_threads(1)
    shutil.rmtree(FIXTURE, ignore_errors=True)
    spec = sets.Spec("deepseek_v4_fp8", "deepseek_v4", "FP4 experts, FP8 matrices", CONFIG, dtype="bfloat16", seed=335_000,
                     rounded=rounded)
    make_golden.build(spec, FIXTURE)
    deepseek_v4.pack(FIXTURE, BLOCK)
    weights = st.load_file(FIXTURE / "model.safetensors")
    weights["mtp.0.enorm.weight"] = torch.ones(32, dtype=torch.bfloat16)
    st.save_file(weights, FIXTURE / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "config.transformers5.json"):
        name_method(FIXTURE / name)
    print(f"{FIXTURE}: {sum(file.stat().st_size for file in FIXTURE.iterdir())} bytes")


if __name__ == "__main__":
    main()
