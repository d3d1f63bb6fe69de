#!/usr/bin/env python3
"""Measures larder beside llama.cpp in every number format, with all experts in memory, in alternating runs.

Needs Python 3.10 or newer, gguf 0.19, numpy, safetensors, larder, and llama-bench, built for example from the PyPI source
package llama-cpp-python. Disk: one GGUF file and its store at a time.

    python scripts/bench/compare_kinds.py --llama-bench PROGRAM [--shape olmoe-1b-7b] [--kinds q4_k,mxfp4] [--layers N] \\
        [--rounds 3] [--prompt 512] [--tokens 32] [--depth 512] [--threads 2] >> benches/runs/NAME.jsonl

For each kind make_shape.py writes a GGUF file with random weights, larder converts it, and each round runs `larder bench
--cache all` on the store and llama-bench on the file, both with pinned threads, a KV cache in f16, and no limit of memory.
larder decodes after the prompt; llama-bench does so from an empty context, or with --depth after so many tokens. Both files
are removed before the next kind. Prints a line of JSON per kind: tokens/s of both (median, smallest, largest), their ratios,
the memory rate that larder measured in the same runs and its share of that, peak memory of the whole command (larder's has
0.5 GB for measuring that rate), and each round's numbers.
Progress goes to standard error.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from compare_llama import cpu

ROOT = Path(__file__).resolve().parent.parent.parent
KINDS = "q4_0 q4_1 q5_0 q5_1 q8_0 iq4_nl mxfp4 q2_k q3_k q4_k q5_k q6_k iq4_xs iq3_xxs iq3_s iq2_xxs iq2_xs iq2_s iq1_s iq1_m tq1_0 tq2_0".split()


def run(command, **env):
    """Standard output of a command, and its peak memory in bytes."""
    command = [str(part) for part in command]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = subprocess.Popen(command, stdout=out, stderr=err, env=os.environ | env)
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0), err.seek(0)
        if child.returncode:
            sys.exit(f"{' '.join(command)} failed: {err.read()[-2000:]}")
        return out.read(), used.ru_maxrss * 1024


def larder(args, store):
    flags = ["-p", args.prompt, "-n", args.tokens, "-r", 1, "--threads", args.threads, "-opin", "-o", "kv=f16"]
    out, peak = run([args.larder, "bench", "-m", store, "--cache=all", "--json", *flags])
    found = json.loads(out)
    measured, limits = found["series"][0]["runs"][0], found["limits"]
    rate = {part: measured[part]["tokens"] / measured[part]["seconds"] for part in ("prompt", "decode")}
    memory = limits["memory_bytes_per_second"]
    touched = limits["bytes_touched_per_token"]
    share = rate["decode"] * touched / memory
    return rate | {"memory_bytes_per_second": memory, "bytes_per_token": touched, "share_of_memory": share, "peak_bytes": peak}


def llama(args, gguf):
    """Rates in tokens/s; with a depth, of a run for the prompt and one for decoding."""
    command = [args.llama_bench, "-m", gguf, "-t", args.threads, "-fa", "on", "-r", 1, "-lm", "none", "-o", "json"]
    sizes = [["-p", args.prompt, "-n", args.tokens]]
    if args.depth:
        sizes = [["-p", args.prompt, "-n", 0], ["-p", 0, "-n", args.tokens, "-d", args.depth]]
    rates, peaks = {}, []
    for size in sizes:
        out, peak = run([*command, *size], OMP_PROC_BIND="true", OMP_PLACES="cores")
        peaks.append(peak)
        rates |= {"prompt" if row["n_prompt"] else "decode": row["avg_ts"] for row in json.loads(out)}
    return rates | {"peak_bytes": max(peaks)}


def spread(values):
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def summary(rounds):
    found = {key: spread([row[key] for row in rounds]) for key in rounds[0] if key not in ("peak_bytes", "bytes_per_token")}
    return found | {"peak_bytes": max(row["peak_bytes"] for row in rounds)}


def compare(args, kind, folder):
    gguf, store = folder / "model.gguf", folder / "store"
    note = lambda text: print(f"{kind}: {text}", file=sys.stderr, flush=True)
    note("making the file")
    layers = ["--layers", args.layers] if args.layers else []
    maker = ROOT / "scripts" / "make" / "make_shape.py"
    run([sys.executable, maker, args.shape, "--kind", kind, "--out", gguf, *layers])
    note("converting")
    run([args.larder, "convert", gguf, store])
    os.sync()
    rows = {"larder": [], "llama.cpp": []}
    for number in range(args.rounds):
        rows["larder"].append(larder(args, store))
        rows["llama.cpp"].append(llama(args, gguf))
        ours, theirs = rows["larder"][-1], rows["llama.cpp"][-1]
        each = [f"{part} {ours[part]:.2f} and {theirs[part]:.2f}" for part in ("prompt", "decode")]
        note(f"round {number + 1} of {args.rounds}: {', '.join(each)} tokens/s")
    found = {name: summary(rounds) for name, rounds in rows.items()}
    ours, theirs = found["larder"], found["llama.cpp"]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"cpu": cpu(), "threads": args.threads},
        "shape": args.shape,
        "layers": args.layers,
        "kind": kind,
        "gguf_bytes": gguf.stat().st_size,
        "prompt_tokens": args.prompt,
        "decode_tokens": args.tokens,
        "llama_depth": args.depth,
        "bytes_per_token": rows["larder"][0]["bytes_per_token"],
        **found,
        "ratio": {part: ours[part]["median"] / theirs[part]["median"] for part in ("prompt", "decode")},
        "rounds": rows,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-bench", required=True)
    parser.add_argument("--larder", default=ROOT / "target" / "release" / "larder")
    parser.add_argument("--shape", default="olmoe-1b-7b", help="a shape of make_shape.py (default: %(default)s)")
    parser.add_argument("--kinds", default=",".join(KINDS), help="number formats, separated by commas (default: all)")
    parser.add_argument("--layers", type=int, help="only the first N layers of the shape (default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--depth", type=int, default=0, help="tokens before those that llama-bench decodes (default: 0)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where the files are made (default: the folder for temporary files)")
    args = parser.parse_args()
    kinds = args.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"unknown kinds: {', '.join(sorted(unknown))}; known are {', '.join(KINDS)}")
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    for kind in kinds:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            print(json.dumps(compare(args, kind, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
