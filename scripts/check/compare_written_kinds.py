#!/usr/bin/env python3
"""Compares the logits of larder with those of llama.cpp on files of every type that llama-quantize writes.

Needs Python 3.10 or newer, gguf 0.19, numpy, safetensors, a C compiler, larder, and llama.cpp: its headers, and a build with
libllama and llama-quantize.

    python scripts/check/compare_written_kinds.py --llama-source FOLDER --llama-build FOLDER [--types Q4_K_M,IQ1_S] [--models split-256]

The types are those that llama-quantize names in its help, and the experts in NVFP4, which it writes for single tensors. Models: random
weights in F32, with split and with fused gate and up matrices, and widths of 256, 512 and 224 (whose rows are no whole blocks of 256).
Every expert gets every token, so that no rounding changes the choice. The importance matrix has random values above zero.

larder converts each file with --experts keep. Both round activations to eight bits, but not in the same blocks, so that their
logits differ. For each file and type the table has, relative to the spread of the logits (root mean square):

* larder: its logits less those of llama.cpp;
* rounding: those of `larder logits -o exact -o kv=f32` less those of llama.cpp, which is what rounding alone costs there.

Fails if the first is more than --most, or than twice the second and above a tenth of --most, or if larder refuses a file. Some types
have no fallback for rows that are not whole blocks: llama-quantize does not write them, and the table says so.
"""

import argparse
import dataclasses
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
from compare_logits import Program, finish, make_shape

TOKENS = 48
SEED = 20261126
SPLIT = make_shape.Shape("olmoe", 2, 256, 8, 8, 32, 256, 4, 4, 512, 512, 1e4, 1e-5, "olmo")
MODELS = {
    "split-256": SPLIT,
    "split-512": make_shape.Shape(
        "qwen2moe", 2, 512, 8, 4, 64, 512, 4, 4, 512, 512, 1e6, 1e-6, "qwen2", shared=512, dense=512
    ),
    "split-224": dataclasses.replace(SPLIT, inter=224),
    "fused-512": make_shape.Shape(
        "deepseek2", 3, 256, 4, 4, 96, 512, 4, 4, 512, 512, 1e6, 1e-5, "glm4", shared=512, dense=512,
        latent=make_shape.Latent(query_rank=256, rank=256, rotated=32, value=64, dense_layers=1, scale=1.8),
    ),
}
# What llama-quantize has no name for: its arguments.
OTHERS = {"NVFP4 experts": ["--tensor-type", "ffn_.*_exps=nvfp4", "Q8_0"]}


def types_of(quantise):
    """The names that llama-quantize has for types, without its aliases."""
    told = subprocess.run([quantise, "--help"], capture_output=True, text=True).stdout
    rows = re.findall(r"^ *\d+ +or +(\w+) +: +(.*)$", told, re.MULTILINE)
    return [name for name, what in rows if not what.startswith("alias")]


def values_of(name, dims, rng):
    """Random values of a tensor, with which hidden states keep their size."""
    if name.endswith("norm.weight"):
        return 1 + 0.1 * rng.standard_normal(dims)
    std = 1.0 if name.startswith("token_embd") else 1 / np.sqrt(dims[-1])
    return std * rng.standard_normal(dims)


def write_plain(name, shape, out):
    """Writes a model in F32, and beside it an importance matrix."""
    rng = np.random.Generator(np.random.SFC64(SEED))
    maker = make_shape.Maker(shape, make_shape.MIXES["q8_0"], SEED, 0)
    tensors = {tensor: values_of(tensor, dims, rng).astype(np.float32) for tensor, dims, _ in maker.tensors()}
    if name.startswith("fused"):
        dense = shape.latent.dense_layers if shape.latent else 0
        for layer in range(dense, shape.layers):
            parts = [tensors.pop(f"blk.{layer}.ffn_{part}_exps.weight") for part in ("gate", "up")]
            tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = np.concatenate(parts, 1)
    writer = gguf.GGUFWriter(out, shape.arch)
    make_shape.metadata(writer, name, shape, 0, np.random.Generator(np.random.SFC64(0)))
    for tensor, values in tensors.items():
        writer.add_tensor(tensor, values)
    finish(writer)
    write_importance(tensors, rng, out.with_suffix(".imatrix"))


def write_importance(tensors, rng, out):
    writer = gguf.GGUFWriter(out, "imatrix")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["random"])
    writer.add_uint32("imatrix.chunk_count", 1)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name, values in tensors.items():
        if values.ndim > 1:
            count = values.shape[0] if values.ndim == 3 else 1
            writer.add_tensor(f"{name}.in_sum2", rng.uniform(0.5, 2, (count, values.shape[-1])).astype(np.float32))
            writer.add_tensor(f"{name}.counts", np.ones((count, 1), np.float32))
    finish(writer)


class NotWritten(Exception):
    """llama-quantize cannot write a type for these shapes."""


def quantise(programs, plain, kind, out):
    """Has llama-quantize write a type; returns the formats that it says it converts to."""
    how = OTHERS.get(kind, [kind])
    command = [programs.quantise, "--imatrix", plain.with_suffix(".imatrix"), *how[:-1], plain, out, how[-1]]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    told = done.stdout + done.stderr
    if done.returncode:
        raise NotWritten(", ".join(re.findall(r"no tensor type fallback.*|failed to quantize: .*", told)[:1]))
    return sorted(set(re.findall(r"converting to (\w+)", told)))


def distance(a, b):
    """Root mean square of the difference, relative to the spread of `b`."""
    return float(np.sqrt(np.mean((a.astype(np.float64) - b) ** 2)) / b.std())


def compare(programs, plain, kind, ids):
    """Formats in the file, and the distances of larder and of larder -o exact from llama.cpp."""
    file, store = programs.folder / "model.gguf", programs.folder / "store"
    subprocess.run(["rm", "-rf", store], check=True)
    kinds = quantise(programs, plain, kind, file)
    command = [programs.larder, "convert", file, store, "--experts", "keep"]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"larder convert: {done.stderr.strip()}")
    theirs = programs.by_llama(file, ids)
    ours, exact = programs.by_larder(store, ids), programs.by_larder(store, ids, "-oexact", "-o", "kv=f32")
    return kinds, distance(ours, theirs), distance(exact, theirs)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-source", type=Path, required=True, help="llama.cpp, for its headers")
    parser.add_argument("--llama-build", type=Path, required=True, help="folder with bin/libllama.so and bin/llama-quantize")
    parser.add_argument("--larder", default=Path(__file__).resolve().parent.parent.parent / "target" / "release" / "larder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--types", help="types of llama-quantize, separated by commas (default: all)")
    parser.add_argument("--models", default=",".join(MODELS), help="default: %(default)s")
    parser.add_argument("--most", type=float, default=0.05, help="largest distance (default: %(default)s)")
    args = parser.parse_args()
    good, bad = 0, []
    with tempfile.TemporaryDirectory() as folder:
        programs = Program(args, Path(folder))
        types = args.types.split(",") if args.types else [*types_of(programs.quantise), *OTHERS]
        ids = np.random.Generator(np.random.SFC64(1)).integers(0, SPLIT.vocab, TOKENS).tolist()
        print("| model | type | in the file | larder | rounding |\n|---|---|---|---:|---:|")
        for name in args.models.split(","):
            plain = programs.folder / f"{name}.gguf"
            write_plain(name, MODELS[name], plain)
            for kind in types:
                try:
                    kinds, ours, exact = compare(programs, plain, kind, ids)
                except NotWritten as error:
                    print(f"| {name} | {kind} | not written: {error} | | |", flush=True)
                    continue
                except ValueError as error:
                    bad.append(f"{name} {kind}: {error}")
                    continue
                print(f"| {name} | {kind} | {', '.join(kinds)} | {ours:.1e} | {exact:.1e} |", flush=True)
                if ours > args.most or ours > max(2 * exact, args.most / 10):
                    bad.append(f"{name} {kind}: {ours:.2e} off")
                else:
                    good += 1
    print(f"\n{good} of {good + len(bad)} files agree")
    if bad:
        sys.exit("\n".join(bad))


if __name__ == "__main__":
    main()
