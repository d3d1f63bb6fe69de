#!/usr/bin/env python3
"""Compares convert --bits with llama.cpp's own mixtures of equal size on the demo model, and prints a Markdown table.

Needs Python 3.10 or newer, numpy, safetensors, gguf 0.19, larder (default: target/release/larder), and llama.cpp's
llama-quantize.

    python scripts/bench/mixture_quality.py --llama-quantize PROGRAM --text FILE [--larder LARDER] [TYPE …]

The checkpoint is that of format_quality.py, as a GGUF file in f32. `larder imatrix` measures an importance matrix on FILE, which
both programs use; `convert --bits` measures its formats on FILE as well. Perplexity and KL are on models/demo/held-out.txt, on
which nothing is chosen, and all stores are run by larder. Bits are those of all matrices but the routers, which llama.cpp keeps
in f32, and larder does too.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file


from format_quality import CHUNK, DEMO, ROOT, Measured, make_checkpoint, run

TYPES = "IQ2_XXS IQ2_XS IQ2_S IQ2_M Q2_K_S Q2_K IQ3_XXS IQ3_XS Q3_K_S IQ3_S IQ3_M Q3_K_M Q3_K_L IQ4_XS Q4_K_S Q4_K_M Q5_K_M Q6_K".split()
NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate": "ffn_gate_inp",
}


def write_gguf(checkpoint, path):
    """The checkpoint as a GGUF file in f32, with an output head of its own, which llama.cpp wants."""
    config, tensors = json.loads((checkpoint / "config.json").read_text()), load_file(checkpoint / "model.safetensors")
    writer = gguf.GGUFWriter(path, "olmoe")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_vocab_size(config["vocab_size"])
    add_tokenizer(writer, checkpoint)
    embedding = tensors["model.embed_tokens.weight"]
    writer.add_tensor("token_embd.weight", embedding)
    writer.add_tensor("output.weight", tensors.get("lm_head.weight", embedding))
    writer.add_tensor("output_norm.weight", tensors["model.norm.weight"])
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for hub, name in NAMES.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", tensors[f"{prefix}.{hub}.weight"])
        for part in ("gate", "up", "down"):
            experts = [tensors[f"{prefix}.mlp.experts.{e}.{part}_proj.weight"] for e in range(config["num_experts"])]
            writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", np.stack(experts))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer, checkpoint):
    model = json.loads((checkpoint / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    special = gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([special if token.startswith("<|") else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)


def bits_of(path):
    """Mean bits of the weights of all matrices but the routers."""
    tensors = [t for t in gguf.GGUFReader(path).tensors if len(t.shape) > 1 and "gate_inp" not in t.name]
    return 8 * sum(t.n_bytes for t in tensors) / sum(t.n_elements for t in tensors)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--larder", default=ROOT / "target" / "release" / "larder")
    parser.add_argument("--llama-quantize", required=True)
    parser.add_argument("--text", type=Path, required=True, help="text for the importance matrix and for --bits")
    parser.add_argument("--text-tokens", type=int, default=2048, help="tokens of it for --bits")
    parser.add_argument("types", nargs="*", metavar="TYPE")
    args = parser.parse_args()
    larder = args.larder
    print("| llama.cpp's type | bits | perplexity | | KL | --bits | perplexity | | KL | KL ÷ KL |\n" + "|---" + "|---:" * 9 + "|")
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        checkpoint, measure = make_checkpoint(larder, folder), Measured(larder, folder)
        whole, imatrix, theirs = folder / "f32.gguf", folder / "imatrix.gguf", folder / "theirs.gguf"
        write_gguf(checkpoint, whole)
        run(larder, "imatrix", args.text, "-m", whole, "--chunk", CHUNK, "-o", imatrix)
        run(larder, "convert", whole, folder / "f32")
        measure(folder / "f32")
        for name in args.types or TYPES:
            subprocess.run(
                [args.llama_quantize, "--imatrix", imatrix, whole, theirs, name, "2"], check=True, capture_output=True
            )
            bits, cells, found = bits_of(theirs), [name], []
            ours = ["--bits", f"{bits:.4f}", "--text", args.text, "--text-tokens", args.text_tokens, "--imatrix", imatrix]
            for source, flags in [(theirs, []), (whole, ours)]:
                store = folder / "made"
                report = json.loads(run(larder, "convert", source, store, "--json", *flags))
                perplexity, more, kl = measure(store)
                shown = report["formats"]["bits"] if report.get("formats") else bits
                cells += [f"{shown:.3f}", f"{perplexity:.2f}", f"{more:+.2f} %", f"{kl:.5f}"]
                found.append(kl)
                shutil.rmtree(store)
            print("| " + " | ".join(cells) + f" | {found[1] / found[0]:.3f} |", flush=True)


if __name__ == "__main__":
    main()
