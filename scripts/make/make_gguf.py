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

import make_golden
from golden import sets, tokens

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
    "minimax_m2": {
        **sets.SMALL, "head_dim": 12, "rotary_dim": 8, "intermediate_size": 24, "num_local_experts": 6,
        "num_experts_per_tok": 2, "attn_type_list": [1, 1],
    },
    "hy_v3": {
        **sets.SMALL, "num_hidden_layers": 3, "head_dim": 12, "intermediate_size": 40, "moe_intermediate_size": 16,
        "num_experts": 6, "num_experts_per_tok": 2, "num_shared_experts": 2,
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
         "minimax_m2": 304_000, "hy_v3": 305_000}

# Names of architectures where llama.cpp knows another spelling than transformers, and pre-tokenizers of the tiny tokenizers.
SPELLINGS = {"PhimoeForCausalLM": "PhiMoEForCausalLM"}
PRE_TOKENIZERS = {"phimoe": "gpt-2", "qwen3_next": "qwen2", "llama4_text": "qwen2", "gpt_oss": "qwen2",
                  "qwen3_5_moe_text": "qwen35", "minimax_m2": "minimax-m2", "hy_v3": "qwen2"}


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
    if model_type == "phimoe":
        model.set_vocab = base.TextModel._set_vocab_gpt2
    if model_type in ("qwen3_next", "qwen3_5_moe_text"):
        model.no_mtp = not has_prediction_block(folder)
    types = base.gguf.LlamaFileType
    file_type = {"float32": types.ALL_F32, "bfloat16": types.MOSTLY_BF16}[config["torch_dtype"]]
    with torch.inference_mode():
        model(folder, file_type, out, model_name=out.stem).write()


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
                make_golden.build(sets.Spec(name, name, "representable in GGUF", config, seed=SEEDS[name]), folder)
                if name in ("qwen3_next", "qwen3_5_moe"):
                    add_prediction_block(folder)
                write(args.llama, folder, out / f"tiny-{name.replace('_', '-')}-f32.gguf")
    if "gpt_oss".startswith(args.only):
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "gpt_oss"
            shutil.copytree(QUANTISED, folder)
            add_tokenizer(folder, "gpt_oss")
            write(args.llama, folder, out / "tiny-gpt-oss-mxfp4.gguf")


if __name__ == "__main__":
    main()
