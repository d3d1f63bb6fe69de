#!/usr/bin/env python3
"""Compares the logits of larder with those of llama.cpp and with exact ones, on files in every number format.

Needs Python 3.10 or newer, gguf 0.19, numpy, safetensors, a C compiler, larder, and llama.cpp: its headers, and a build with
libllama and llama-quantize, for example of the PyPI source package llama-cpp-python.

    python scripts/check/compare_logits.py --llama-source FOLDER --llama-build FOLDER [--kinds q4_k,mxfp4] [--models demo-256]

Models: the demo model, filled up with zeros to a hidden size of 256 and experts of width 256 and 224, written as F32 and
quantised by llama-quantize --pure (mxfp4: as MXFP4_MOE), on a book that it was not trained on; and random weights of
make_shape.py with experts of the same two widths on random tokens. Rows of 224 values are not whole blocks of 256, so down
matrices (in random weights all matrices) take a format with blocks of 32 there. For each kind:

* exact: the file dequantised by the Python package gguf; `larder logits -o exact -o kv=f32`. All others are compared with it.
* larder -o exact: the same flags on the file itself, for the first four texts. Must be within 1e-3 for every logit.
* larder: without -o exact, so activations are rounded to eight bits and keys and values to f16.
* llama.cpp: with its defaults, which also round both.

Prints a Markdown table of the mean KL divergence from the exact distribution of the next token, with its standard error.
Rounding seldom changes which experts a token gets, but then its KL is a hundred times as large: the means of few tokens
say little, and the ratio of medians leaves these tokens out. Fails if larder's mean is more than 1.1 times llama.cpp's
by more than two standard errors.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "scripts" / "bench"), str(ROOT / "scripts" / "make")]
import format_quality  # noqa: E402
import make_shape  # noqa: E402

KINDS = "q8_0 q6_k q5_k q5_1 q5_0 q4_k q4_1 iq4_nl q4_0 iq4_xs mxfp4 q3_k q2_k".split()
# Names of llama-quantize, where they are not the kind's own.
QUANTISED = {"mxfp4": "MXFP4_MOE", **{f"q{bits}_k": f"Q{bits}_K_S" for bits in (2, 3, 4, 5)}}
HIDDEN, WIDTHS = 256, (256, 224)
MOST, FACTOR = 1e-3, 1.1


def run(*command, text=None):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, input=text)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed: {done.stderr[-2000:]}")
    return done.stdout


class Program:
    """larder and llama.cpp, which write logits [tokens, vocabulary]."""

    def __init__(self, args, folder):
        source, build = args.llama_source, args.llama_build / "bin"
        self.larder, self.folder, self.threads = args.larder, folder, args.threads
        self.llama, self.quantise = folder / "llama_logits", build / "llama-quantize"
        paths = [f"-I{source}/include", f"-I{source}/ggml/include", f"-L{build}", f"-Wl,-rpath,{build}"]
        libraries = ["-lllama", "-lggml", "-lggml-base"]
        run("cc", "-O2", ROOT / "scripts" / "check" / "llama_logits.c", "-o", self.llama, *paths, *libraries)

    def by_larder(self, model, text, *flags):
        ids, out = self.folder / "ids.json", self.folder / "logits.safetensors"
        ids.write_text(json.dumps(text))
        flags = ["--tokens", ids, "--out", out, "--force", "--cache=all", "--threads", self.threads, *flags]
        run(self.larder, "logits", "-ono-store", "-m", model, *flags)
        return load_file(out)["full_logits"]

    def by_llama(self, model, text):
        ids, out = self.folder / "ids.txt", self.folder / "logits.f32"
        ids.write_text(" ".join(map(str, text)))
        run(self.llama, model, ids, out, self.threads)
        return np.fromfile(out, np.float32).reshape(len(text), -1)


class Random:
    """Random weights in the format itself."""

    def __init__(self, width, tokens):
        self.name = f"tiny-olmoe-{width}"
        self.shape = make_shape.SHAPES[self.name]
        rng = np.random.Generator(np.random.SFC64(20261122))
        self.texts = rng.integers(0, self.shape.vocab, (tokens // 2048, 2048)).tolist()

    def write(self, programs, kind, out):
        maker = ROOT / "scripts" / "make" / "make_shape.py"
        run(sys.executable, maker, self.name, "--kind", kind, "--out", out)


class Demo:
    """The demo model, quantised by llama.cpp."""

    def __init__(self, width, tokens, programs):
        self.name, self.width = f"demo-{width}", width
        self.plain = programs.folder / f"{self.name}.f32.gguf"
        text = (format_quality.DEMO / "held-out.txt").read_text()
        ids = json.loads(run(programs.larder, "tokenize", "-m", format_quality.DEMO, "-", text=text))["ids"]
        self.texts = [ids[start : start + 512] for start in range(0, min(tokens, len(ids)) - 511, 512)]
        with tempfile.TemporaryDirectory() as folder:
            self.write_plain(*format_quality.demo_store(programs.larder, Path(folder)))

    def write_plain(self, store, manifest):
        config = manifest["config"]
        shape = make_shape.Shape(
            "olmoe", config["num_hidden_layers"], HIDDEN, *[HIDDEN * config["num_attention_heads"] // config["hidden_size"]] * 2,
            config["hidden_size"] // config["num_attention_heads"], self.width, config["num_experts"],
            config["num_experts_per_tok"], config["vocab_size"], config["max_position_embeddings"],
            config["rope_parameters"]["rope_theta"], config["rms_norm_eps"] * config["hidden_size"] / HIDDEN, "olmo",
        )  # fmt: skip
        writer = gguf.GGUFWriter(self.plain, shape.arch)
        make_shape.metadata(writer, self.name, shape, 0, np.random.Generator(np.random.SFC64(0)))
        for name, values in self.tensors(store, manifest, shape):
            writer.add_tensor(name, values)
        finish(writer)

    def tensors(self, store, manifest, shape):
        """Filled up with zeros to whole heads; norm weights scaled as the mean over more values needs."""
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.OLMOE, shape.layers)
        stacked = {}
        for name, values in format_quality.experts_of(store, manifest):
            layer, part = name.split(".")[2], name.split(".")[6]
            size = (HIDDEN, self.width) if part == "down_proj" else (self.width, HIDDEN)
            stacked.setdefault(f"model.layers.{layer}.mlp.experts.{part}.weight", []).append(filled(values, size))
        resident = dict(format_quality.resident_of(store))
        for name, values in resident.items():
            rows = HIDDEN if ".self_attn." in name else values.shape[0]
            if values.ndim == 1:
                resident[name] = filled(values * np.sqrt(len(values) / HIDDEN), (HIDDEN,))
            else:
                resident[name] = filled(values, (rows, HIDDEN))
        resident["lm_head.weight"] = resident["model.embed_tokens.weight"]  # tied, but llama.cpp wants both
        for name, values in [*resident.items(), *((name, np.stack(parts)) for name, parts in stacked.items())]:
            yield names.get_name(name, try_suffixes=(".weight",)), values

    def write(self, programs, kind, out):
        pure = [] if kind == "mxfp4" else ["--pure"]
        run(programs.quantise, *pure, self.plain, out, QUANTISED.get(kind, kind.upper()))


def filled(values, size):
    return np.pad(values.astype(np.float32), [(0, want - have) for want, have in zip(size, values.shape, strict=True)])


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def dequantise(source, out):
    """A copy of a GGUF file with all tensors in F32; returns the formats of the matrices in it."""
    reader = gguf.GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(out, arch)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            sub = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub)
    kinds = []
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, values.reshape([int(size) for size in tensor.shape[::-1]]))
        kinds.append(tensor.tensor_type)
    finish(writer)
    return sorted({kind.name.lower() for kind in kinds} - {"f32"})


def logs(logits):
    logits = logits.astype(np.float64)
    return logits - np.logaddexp.reduce(logits, -1, keepdims=True)


def divergence(exact, other):
    exact, other = logs(exact), logs(other)
    return (np.exp(exact) * (exact - other)).sum(-1)


def error(values):
    """Standard error of their mean."""
    return values.std() / np.sqrt(len(values))


def compare(programs, model, kind):
    """Formats in the file, largest error of -o exact, and KL of larder and llama.cpp, each for one token after the other."""
    file, plain = programs.folder / "model.gguf", programs.folder / "plain.gguf"
    model.write(programs, kind, file)
    kinds = dequantise(file, plain)
    worst, ours, theirs = 0.0, [], []
    for number, text in enumerate(model.texts):
        exact = programs.by_larder(plain, text, "-oexact", "-o", "kv=f32")
        if number < 4:
            same = programs.by_larder(file, text, "-oexact", "-o", "kv=f32")
            worst = max(worst, float(np.abs(same - exact).max()))
        ours.append(divergence(exact, programs.by_larder(file, text)))
        theirs.append(divergence(exact, programs.by_llama(file, text)))
    return kinds, worst, np.concatenate(ours), np.concatenate(theirs)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-source", type=Path, required=True, help="llama.cpp, for its headers")
    parser.add_argument("--llama-build", type=Path, required=True, help="folder with bin/libllama.so and bin/llama-quantize")
    parser.add_argument("--larder", default=ROOT / "target" / "release" / "larder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kinds", default=",".join(KINDS), help="number formats, separated by commas (default: all)")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens for each model (default: %(default)s)")
    parser.add_argument("--models", help="demo-256, demo-224, tiny-olmoe-256, tiny-olmoe-224 (default: all)")
    args = parser.parse_args()
    kinds = args.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"unknown kinds: {', '.join(sorted(unknown))}; known are {', '.join(KINDS)}")
    if args.tokens < 2048:
        parser.error("--tokens must be at least 2048")
    bad = []
    print("| model | format | in the file | largest error of -o exact | KL of larder | llama.cpp | ratio | of medians |")
    print("|---|---|---|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        programs = Program(args, Path(folder))
        makers = {f"demo-{w}": lambda w=w: Demo(w, args.tokens, programs) for w in WIDTHS} | {
            f"tiny-olmoe-{w}": lambda w=w: Random(w, args.tokens) for w in WIDTHS
        }
        names = args.models.split(",") if args.models else list(makers)
        if unknown := set(names) - set(makers):
            parser.error(f"unknown models: {', '.join(sorted(unknown))}; known are {', '.join(makers)}")
        for name in names:
            model = makers[name]()
            for kind in kinds:
                found, worst, ours, theirs = compare(programs, model, kind)
                means = [f"{kl.mean():.2e} ± {error(kl):.0e}" for kl in (ours, theirs)]
                ratios = [f"{f(ours) / f(theirs):.2f}" for f in (np.mean, np.median)]
                print("| " + " | ".join([name, kind, ", ".join(found), f"{worst:.1e}", *means, *ratios]) + " |", flush=True)
                more = ours - FACTOR * theirs
                if worst > MOST or more.mean() > 2 * error(more):
                    bad.append(f"{name} {kind}")
    if bad:
        sys.exit(f"outside the limits: {', '.join(bad)}")


if __name__ == "__main__":
    main()
