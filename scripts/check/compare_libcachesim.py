#!/usr/bin/env python3
"""Compares misses and speed of larder's eviction policies with libCacheSim's, request by request on one stream.

Needs Python 3.10 or newer and, from PyPI: libcachesim>=0.3.5. And the larder command, built with --release.

    python scripts/check/compare_libcachesim.py [--larder target/release/larder] [--sizes 40,96,...] [TRACE ...]

A trace is flattened first: every expert of every layer becomes one object of size 1, and every request a step of its
own, so that both programs get equal requests in equal order. Without a trace, one is made by `larder lab synth`.
Prints a line for each policy and size: misses of both, then millions of requests per second of both (the best of a few
rounds, without reading of files) and their ratio. Exits with 1 if any misses differ.
"""

import argparse
import csv
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import libcachesim

POLICIES = {
    "lru": libcachesim.LRU,
    "lfu": libcachesim.LFU,
    "fifo": libcachesim.FIFO,
    "arc": libcachesim.ARC,
    "lecar": libcachesim.LeCaR,
    "s3fifo": libcachesim.S3FIFO,
    "belady": libcachesim.Belady,
}
# A table of 2^16 buckets holds every expert of any model and does not slow libCacheSim down.
HASH_POWER = 16
ROUNDS = 3


def larder(command, *args):
    """Runs `larder lab` and returns its output; exits with its error if it fails."""
    done = subprocess.run([command, "lab", *map(str, args)], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr.strip())
    return done.stdout


def flatten(command, trace, folder):
    """The trace as a single layer in which each step wants one expert."""
    wide, narrow, flat = folder / "wide.csv", folder / "narrow.csv", folder / "flat.safetensors"
    larder(command, "export", trace, "-o", wide, "--force")
    with open(wide, newline="") as source:
        choices = [(int(row["layer"]), int(row["expert"])) for row in csv.DictReader(source)]
    experts = 1 + max(expert for _, expert in choices)
    with open(narrow, "w", newline="") as target:
        target.write("token,layer,expert\n")
        target.writelines(f"{i},0,{layer * experts + expert}\n" for i, (layer, expert) in enumerate(choices))
    objects = experts * (1 + max(layer for layer, _ in choices))
    larder(command, "import", narrow, "-o", flat, "--force", "--experts", objects)
    return flat, len(choices), objects


def theirs(policy, stream, size, count):
    """libCacheSim's misses and best requests per second.

    Runs in a separate process, because LeCaR uses one random sequence for all caches of a process.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(simulate, (policy, stream, size, count))


def simulate(policy, stream, size, count):
    best, misses = 0.0, None
    for _ in range(ROUNDS):
        reader = libcachesim.TraceReader(str(stream), libcachesim.TraceType.ORACLE_GENERAL_TRACE)
        cache = POLICIES[policy](cache_size=size, hashpower=HASH_POWER, reader=reader)
        begin = time.perf_counter()
        miss_ratio, _ = cache.process_trace(reader)
        best = max(best, count / (time.perf_counter() - begin))
        misses = round(miss_ratio * count) if misses is None else misses
    return misses, best


def ours(command, policy, flat, size):
    """larder's misses and best requests per second."""
    args = ("replay", flat, "--eviction", policy, "--cache", f"{size}x", "--json")
    rounds = [json.loads(larder(command, *args)) for _ in range(ROUNDS)]
    return rounds[0]["misses"], max(r["requests_per_second"] for r in rounds)


def compare(command, trace, sizes, folder):
    """Prints the comparison of one trace and returns the number of policies and sizes that differ."""
    flat, count, objects = flatten(command, trace, folder)
    stream = folder / "flat.oracleGeneral"
    larder(command, "export", flat, "-o", stream, "--force", "--to", "oracle-general")
    sizes = sizes or sorted({max(1, objects * eighth // 8) for eighth in range(1, 8)})
    print(f"\n{trace}: {count} requests of {objects} objects")
    print(f"{'policy':<8}{'size':>6}{'larder':>10}{'libcachesim':>13}{'difference':>12}{'M/s':>8}{'M/s':>8}{'ratio':>7}")
    differ = 0
    for policy in POLICIES:
        for size in sizes:
            (our, our_rate), (their, their_rate) = ours(command, policy, flat, size), theirs(policy, stream, size, count)
            differ += our != their
            print(
                f"{policy:<8}{size:>6}{our:>10}{their:>13}{our - their:>+12}"
                f"{our_rate / 1e6:>8.1f}{their_rate / 1e6:>8.1f}{our_rate / their_rate:>7.1f}",
                flush=True,
            )
    return differ


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--larder", default="target/release/larder")
    parser.add_argument("--sizes", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("traces", nargs="*", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        traces = args.traces
        if not traces:
            traces = [folder / "drawn.safetensors"]
            larder(args.larder, "synth", "-o", traces[0], "--force")
        differ = sum(compare(args.larder, trace, args.sizes, folder) for trace in traces)
    print(f"\n{differ} of them differ" if differ else "\nall equal")
    sys.exit(1 if differ else 0)


if __name__ == "__main__":
    main()
