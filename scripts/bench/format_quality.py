#!/usr/bin/env python3
"""Measures what each number format of the experts costs the demo model in quality, and prints a Markdown table.

Needs Python 3.10 or newer, numpy, safetensors, and larder (default: target/release/larder).

    python scripts/bench/format_quality.py [--larder LARDER] [--tokens N] [--text FILE] [KIND …]

The demo model's rows have 192 and 128 values, which are not whole blocks of 256. So a checkpoint in f32 is made of the
shipped store (models/demo, in q8_0) whose hidden and inner sizes are filled up with zeros to 256, and its three heads with one
that is zero; norm weights and epsilon are scaled so that it computes the same. Its experts are converted to each format, the
resident weights stay f32. Perplexity is on models/demo/held-out.txt in chunks of 512 tokens; KL is the mean divergence of the
next token's distribution from that of the f32 experts, over the first chunks. With --text, an importance matrix is measured on
that file, and each format is written with it as well.
"""

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts" / "check"))
import read_store  # noqa: E402

DEMO = ROOT / "models" / "demo"
KINDS = (
    "f32 bf16 q8_0 q6_k q5_k q5_1 q5_0 q4_1 q4_k iq4_nl q4_0 iq4_xs mxfp4 q3_k iq3_s iq3_xxs q2_k iq2_s iq2_xs iq2_xxs"
).split()
SIZE, CHUNK, KL_CHUNKS = 256, 512, 8


def run(*args, text=None):
    result = subprocess.run([str(a) for a in args], input=text, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(map(str, args))}: {result.stderr}")
    return result.stdout


def resident_of(store):
    """The resident weights as f32, by name."""
    path = store / "resident.safetensors"
    file = path.read_bytes()
    tensors, metadata, _ = read_store.header_of(file, path)
    for name, description in metadata.items():
        kind, shape, *order, _ = description.split()
        shape = [int(size) for size in shape.split("x")]
        _, _, begin, _ = tensors[name]
        rows, cols = (1, *shape) if len(shape) == 1 else shape
        data = file[begin:begin + rows * read_store.row_bytes(kind, cols)]
        yield name, read_store.values_of(data, kind, rows, cols, *(order or ["rows"])).reshape(shape)


def experts_of(store, manifest):
    """The matrices of all experts as f32, by name."""
    files, geometry = manifest["experts"], manifest["geometry"]
    for row, layer in enumerate(geometry["moe_layers"]):
        for expert in range(geometry["experts"]):
            path = store / "experts" / f"L{layer:03}" / f"E{expert:03}.safetensors"
            data, parts = read_store.read_shard(path, manifest, files, row, expert)
            for name, kind, rows, cols, offset in parts:
                part = data[offset:][:rows * read_store.row_bytes(kind, cols)]
                values = read_store.values_of(part, kind, rows, cols, files["layout"])
                yield f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight", values


def padded(name, values, hidden):
    """Filled up with zeros, norm weights scaled."""
    if values.ndim == 1:
        values = values * math.sqrt(hidden / SIZE)
    grow = [0] * values.ndim
    if ".experts." in name or "self_attn" in name:
        grow = [SIZE - size for size in values.shape]
    else:
        grow[-1] = SIZE - hidden
    return np.pad(values.astype(np.float32), [(0, more) for more in grow])


def make_checkpoint(folder):
    """The demo model in f32."""
    manifest = json.loads((DEMO / "larder.json").read_text())
    config, checkpoint = manifest["config"], folder / "checkpoint"
    hidden = config["hidden_size"]
    checkpoint.mkdir()
    tensors = dict(resident_of(DEMO)) | dict(experts_of(DEMO, manifest))
    tensors = {name: padded(name, values, hidden) for name, values in tensors.items()}
    save_file(tensors, checkpoint / "model.safetensors")
    config |= {
        "hidden_size": SIZE,
        "intermediate_size": SIZE,
        "num_attention_heads": SIZE * config["num_attention_heads"] // hidden,
        "num_key_value_heads": SIZE * config["num_key_value_heads"] // hidden,
        "rms_norm_eps": config["rms_norm_eps"] * hidden / SIZE,
    }
    (checkpoint / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO / name, checkpoint / name)
    return checkpoint


def distributions(larder, store, folder):
    """Logarithms of the next token's probabilities, for the first chunks of the text."""
    ids = json.loads(run(larder, "tokenize", "-m", store, "-", text=(DEMO / "held-out.txt").read_text()))["ids"]
    found = []
    for chunk in range(KL_CHUNKS):
        (folder / "ids.json").write_text(json.dumps(ids[chunk * CHUNK:][:CHUNK]))
        out = folder / "logits.safetensors"
        run(larder, "logits", "-m", store, "--tokens", folder / "ids.json", "--out", out, "--force", "--cache=all")
        logits = load_file(out)["full_logits"].astype(np.float64)
        found.append(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True))
    return np.concatenate(found)


class Measured:
    """Quality beside that of the first store that was measured."""

    def __init__(self, larder, folder, tokens=None):
        self.larder, self.folder = larder, folder
        self.limit = ["--tokens", tokens] if tokens else []
        self.reference = self.base = None

    def __call__(self, store):
        """Perplexity, its rise in percent, and KL."""
        flags = ["-m", store, "--chunk", CHUNK, "--cache=all", "--json", *self.limit]
        perplexity = json.loads(run(self.larder, "eval", "ppl", DEMO / "held-out.txt", *flags))["perplexity"]
        logs = distributions(self.larder, store, self.folder)
        if self.reference is None:
            self.reference, self.base = logs, perplexity
        kl = (np.exp(self.reference) * (self.reference - logs)).sum(-1).mean()
        return perplexity, 100 * (perplexity / self.base - 1), kl


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--larder", default=ROOT / "target" / "release" / "larder")
    parser.add_argument("--tokens", type=int, help="use only the first N tokens for perplexity")
    parser.add_argument("--text", type=Path, help="text for an importance matrix")
    parser.add_argument("kinds", nargs="*", metavar="KIND")
    args = parser.parse_args()
    more = " with imatrix | | KL |" if args.text else ""
    print(f"| experts | bits per value | perplexity | | KL |{more}\n|---|---:|---:|---:|---:|{'---:|---:|---:|' if more else ''}")
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        checkpoint, measure = make_checkpoint(folder), Measured(args.larder, folder, args.tokens)
        imatrix = folder / "imatrix.gguf"
        if args.text:
            run(args.larder, "imatrix", args.text, "-m", checkpoint, "--chunk", CHUNK, "-o", imatrix)
        for kind in dict.fromkeys(["f32", *(args.kinds or KINDS)]):
            values, size = read_store.BLOCKS[kind]
            cells = [kind, f"{8 * size / values:g}"]
            for weighed in [[], ["--imatrix", imatrix]][: 2 if args.text and kind not in ("f32", "bf16") else 1]:
                store = folder / "made"
                run(args.larder, "convert", checkpoint, store, "--experts", kind, *weighed)
                perplexity, more, kl = measure(store)
                cells += [f"{perplexity:.2f}", f"{more:+.2f} %", f"{kl:.5f}"]
                shutil.rmtree(store)
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
