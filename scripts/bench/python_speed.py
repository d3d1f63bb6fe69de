#!/usr/bin/env python3
"""Tokens per second of the Python package and of the command, on one store, in turns.

    python scripts/bench/python_speed.py [--store DIR] [--cache-experts N] [--tokens N] [--rounds N] [--larder FILE]

Needs the package `larder` and a build of the command (target/release/larder). Both decode greedily behind the same prompt, in a fresh
process with an empty cache in each round. Prints the rates of each round, their medians, and the ratio.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import larder

PROMPT = "The old man looked at the door, and"


def of_command(args):
    """Decoded tokens per second, by the command's own clock."""
    line = [args.larder, "run", "-m", args.store, "-p", PROMPT, "--temperature", "0", "--ignore-eos", "--json", "--speculate", "off"]
    line += ["--cache", f"{args.cache_experts}x", "--max-tokens", str(args.tokens), "--context", str(args.context)]
    report = json.loads(subprocess.run(line, capture_output=True, text=True, check=True).stdout)
    return (len(report["ids"]) - 1) / report["decode_seconds"]


def of_package(args):
    """The same of the package, from the first piece to the last as Python receives them."""
    options = dict(cache=f"{args.cache_experts}x", context=args.context, speculate="off")
    with larder.load(args.store, **options) as model:
        stream = model.generate(PROMPT, temperature=0, ignore_eos=True, max_tokens=args.tokens)
        next(stream)
        begin = time.perf_counter()
        count = sum(len(piece.tokens) for piece in stream)
        return count / (time.perf_counter() - begin)


def in_fresh_process(line):
    """The rate of the package in a process of its own, as each run of the command has one."""
    return float(subprocess.run([sys.executable, __file__, *line, "--once"], capture_output=True, text=True, check=True).stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root = Path(__file__).resolve().parents[2]
    parser.add_argument("--store", default=str(root / "models/demo"))
    parser.add_argument("--larder", default=str(root / "target/release/larder"))
    parser.add_argument("--cache-experts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=450)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--once", action="store_true", help="only decode once with the package, in this process")
    args = parser.parse_args()
    if args.once:
        print(of_package(args))
        return
    command, package = [], []
    for turn in range(args.rounds):
        if turn % 2:
            package.append(in_fresh_process(sys.argv[1:]))
            command.append(of_command(args))
        else:
            command.append(of_command(args))
            package.append(in_fresh_process(sys.argv[1:]))
        print(f"round {turn + 1}: command {command[-1]:.1f}, package {package[-1]:.1f} tokens/s")
    of_both = statistics.median(command), statistics.median(package)
    print(f"median of {args.rounds}: command {of_both[0]:.1f}, package {of_both[1]:.1f} tokens/s, ratio {of_both[1] / of_both[0]:.3f}")


if __name__ == "__main__":
    main()
