#!/usr/bin/env python3
"""Compares larder on a GPU with larder on the CPU: logits and texts of tiny models and texts of the demo model, bit for bit.

    cargo build --release --features cuda
    scripts/check/test_card.py [MODEL ...]

For each tiny model of tests/golden: logits with every expert in memory on the CPU, and on the GPU with every expert in device
memory, with two slots per layer there and one in main memory, with two there and none in main memory, and with the keys and values of
one layer there and of the others in main memory; and a text of 32 tokens, greedy and drawn, with all experts in device memory, so that its
launches become graphs and its steps run ahead. Logits also for a random
model whose experts have another number format in each matrix and layer (`mixed`). For the demo model: the greedy text through
tiers of six sizes, and drawn texts. Exits with 1 if anything differs. Needs only Python and a GPU.
"""

import argparse
import json
import random
import struct
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOKENS = [1, 5, 9, 2, 7, 3, 11, 4]
LOGITS_TIERS = [
    [],
    ["--vram", "2x", "--cache", "1x"],
    ["--vram", "2x", "--cache", "0"],
    ["-o", "vram-kv=1"],
]
# Formats of gate, up and down, a layer each: all that can be written.
MIXED = [
    ("q4_k", "q4_k", "q6_k"),
    ("q5_k", "q4_k", "q8_0"),
    ("q4_0", "q8_0", "f16"),
    ("q6_k", "bf16", "q5_k"),
    ("q8_0", "q4_0", "q4_k"),
    ("mxfp4", "iq4_nl", "mxfp4"),
    ("q2_k", "q3_k", "iq4_xs"),
    ("q4_1", "q5_0", "q5_1"),
    ("iq3_xxs", "iq2_xs", "iq2_s"),
    ("iq2_xxs", "iq3_s", "iq3_xxs"),
]
MIXED_HIDDEN, MIXED_INTER, MIXED_EXPERTS, MIXED_VOCABULARY = 256, 512, 6, 288
TEXT_TIERS = [
    ["--vram", "32x"],
    ["--vram", "4x", "--cache", "6x"],
    ["--vram", "2x", "--cache", "0"],
    ["--vram", "14M", "--cache", "2M", "-o", "scope=global", "-o", "eviction=learned"],
    ["--vram", "3x", "--cache", "8x", "-o", "prefetch=2", "-o", "reader=pread"],
    ["--vram", "32x", "-o", "vram-kv=3"],
    ["--vram", "32x", "-o", "kv=q8_0"],
]
# How tokens are chosen: the best, with a penalty, drawn among the best, among all, with the best of a share.
CHOICES = [
    ["--temperature", "0", "--repetition-penalty", "1"],
    ["--temperature", "0", "--repetition-penalty", "1.2"],
    ["--temperature", "0.8", "--top-k", "20", "--seed", "5"],
    ["--temperature", "0.9", "--top-k", "0", "--seed", "6"],
    ["--temperature", "0.7", "--top-k", "0", "--top-p", "0.9", "--seed", "7"],
]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="names of folders in tests/golden, `demo` or `mixed` (default: all)")
    parser.add_argument("--larder", default="target/release/larder", help="the command (%(default)s)")
    parser.add_argument("--device", default="cuda", help="value of --device (%(default)s)")
    parser.add_argument("--jobs", type=int, default=4, help="models at a time (%(default)s)")
    return parser.parse_args()


def mixed_checkpoint(folder):
    """Writes a random OLMoE checkpoint whose rows are whole blocks of every format, and the number formats for `--mix`."""
    numbers = random.Random(0)
    hidden, inter = MIXED_HIDDEN, MIXED_INTER
    weights, ones = {}, lambda n: b"\x80\x3f" * n
    # The upper byte of a bf16: sign and exponent, for values from 2^-7 to 2^-5; the lower one is any.
    upper = bytes([0x3C, 0xBC][i % 2] for i in range(256))

    def matrix(name, rows, cols):
        values = bytearray(2 * rows * cols)
        values[0::2], values[1::2] = numbers.randbytes(rows * cols), numbers.randbytes(rows * cols).translate(upper)
        weights[name] = ([rows, cols], bytes(values))

    matrix("model.embed_tokens.weight", MIXED_VOCABULARY, hidden)
    matrix("lm_head.weight", MIXED_VOCABULARY, hidden)
    weights["model.norm.weight"] = ([hidden], ones(hidden))
    for layer in range(len(MIXED)):
        at = f"model.layers.{layer}"
        for norm in ["input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"]:
            weights[f"{at}.{norm}.weight"] = ([hidden], ones(hidden))
        for name in "qkvo":
            matrix(f"{at}.self_attn.{name}_proj.weight", hidden, hidden)
        matrix(f"{at}.mlp.gate.weight", MIXED_EXPERTS, hidden)
        for expert in range(MIXED_EXPERTS):
            for name, rows, cols in [("gate", inter, hidden), ("up", inter, hidden), ("down", hidden, inter)]:
                matrix(f"{at}.mlp.experts.{expert}.{name}_proj.weight", rows, cols)
    header, end = {}, 0
    for name, (shape, data) in weights.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header).encode()
    folder.mkdir()
    blob = struct.pack("<Q", len(text)) + text + b"".join(data for _, data in weights.values())
    (folder / "model.safetensors").write_bytes(blob)
    config = {
        "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "vocab_size": MIXED_VOCABULARY,
        "hidden_size": hidden, "intermediate_size": inter, "num_hidden_layers": len(MIXED), "num_attention_heads": 8,
        "num_key_value_heads": 8, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "num_experts": MIXED_EXPERTS, "num_experts_per_tok": 3, "norm_topk_prob": False, "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    names = ["gate", "up", "down"]
    rows = [f"layers.{i}.experts.{n} {f}" for i, formats in enumerate(MIXED) for n, f in zip(names, formats)]
    mix = folder.with_name("mix.txt")
    mix.write_text("\n".join(rows) + "\n")
    return ["--mix", mix, "--resident", "q8_0"]


class Failure(Exception):
    """The last line that larder wrote about an error."""


def larder(args, *flags):
    done = subprocess.run([args.larder, *map(str, flags)], capture_output=True, text=True)
    if done.returncode != 0:
        raise Failure((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    return done.stdout


def logits(args, folder, golden, flags=()):
    """Compares the logits of one tiny model, converted with these flags; returns a sentence."""
    store, tokens = folder / f"{golden.name}-store", folder / "tokens.json"
    larder(args, "convert", golden, store, *flags)

    def of(name, flags):
        out = folder / f"{golden.name}-{name}"
        base = ["logits", "-m", store, "--tokens", tokens, "--out", out, "--generate", 4, "-o", "prefill-tokens=3"]
        larder(args, *base, *flags)
        return out.read_bytes()

    wanted = of("cpu", ["--cache=all"])
    for at, tiers in enumerate(LOGITS_TIERS):
        if of(f"gpu-{at}", ["--device", args.device, *tiers]) != wanted:
            raise Failure(f"logits differ from the CPU's with {' '.join(tiers) or 'all experts in device memory'}")
    found = f"logits of {len(LOGITS_TIERS)} sizes of tiers equal the CPU's"
    if not (golden / "tokenizer.json").exists():
        return found
    work = [drawn(args, store, "a b a b a b", 32, CHOICES[at]) for at in (0, 2)]
    ahead, graphs = (sum(part) for part in zip(*work))
    return f"{found}, and so do texts: {ahead} steps ran ahead, {graphs} graphs were launched"


def drawn(args, model, prompt, tokens, choice):
    """Compares a text that is chosen so; returns the steps that ran ahead and the graphs that were launched."""
    base = ["run", "-m", model, "-p", prompt, "-n", tokens, "--ignore-eos", "--speculate", "off", "--json", *choice]
    wanted, found = (json.loads(larder(args, *base, *place)) for place in (["--cache=all"], ["--device", args.device]))
    if found["ids"] != wanted["ids"]:
        raise Failure(f"the text differs from the CPU's with {' '.join(choice)}")
    return found["ahead"]["steps"], found["decode"]["tiers"]["graphs"]


def text(args, demo):
    """Compares the greedy text of the demo model; returns a sentence."""

    def of(flags):
        found = larder(args, "run", "-m", demo, "-p", "The old man looked", "-n", 48, "--temperature", 0, "--json", *flags)
        return json.loads(found)

    wanted, computed = {}, []
    for tiers in TEXT_TIERS:
        rounding = ("-o", "kv=q8_0") if "kv=q8_0" in tiers else ()
        if rounding not in wanted:
            wanted[rounding] = of(["--cache=all", *rounding])["ids"]
        found = of(["--device", args.device, *tiers])
        if found["ids"] != wanted[rounding]:
            raise Failure(f"the text differs from the CPU's with {' '.join(tiers)}")
        computed.append(found["decode"]["tiers"]["gpu_computed"])
    if not all(computed):
        raise Failure(f"no expert was computed on the GPU: {computed}")
    work = [drawn(args, demo, "The old man looked", 120, choice) for choice in CHOICES]
    if not all(ahead > 0 for ahead, _ in work):
        raise Failure(f"no step ran ahead: {work}")
    sizes = f"{len(TEXT_TIERS)} sizes of tiers and {len(CHOICES)} ways of choosing"
    return f"texts of {sizes} equal the CPU's; experts computed on the GPU: {computed}; steps that ran ahead, and graphs: {work}"


def main():
    args = arguments()
    goldens = sorted(path.parent for path in (ROOT / "tests/golden").glob("*/config.json"))
    names = args.models or ["demo", "mixed", *(golden.name for golden in goldens)]
    failures = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as jobs:
        folder = Path(folder)
        (folder / "tokens.json").write_text(json.dumps(TOKENS))

        def check(name):
            if name == "demo":
                return text(args, ROOT / "models/demo")
            if name == "mixed":
                return logits(args, folder, folder / name, mixed_checkpoint(folder / name))
            return logits(args, folder, ROOT / "tests/golden" / name)

        for name, job in [(name, jobs.submit(check, name)) for name in names]:
            try:
                print(f"ok      {name}: {job.result()}", flush=True)
            except Failure as e:
                failures += 1
                print(f"FAILED  {name}: {e}", flush=True)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
