#!/usr/bin/env python3
"""Measures a model on a GPU with tiers of several sizes and prints a Markdown table.

    cargo build --release --features cuda
    scripts/bench/bench_gpu.py STORE [STORE...] > table.md

For each store: GPU slots for 12.5, 25, 50 and 100 % of the experts, with no slots in main memory and with slots for the
rest, original and cache-aware routing, and LRU beside the learned policy if the store has weights for it. Every cell
is a `larder bench`, which measures the limits of the GPU, the links to it, memory and the SSD in the same run; the value is
the median of the repeats without the first. Needs only Python.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

SHARES = [0.125, 0.25, 0.5, 1.0]
ROUTINGS = ["original", "prior:lambda=0.15", "prior:lambda=0.5"]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stores", nargs="+", type=Path)
    parser.add_argument("--larder", default="target/release/larder", help="the command (%(default)s)")
    parser.add_argument("--device", default="cuda", help="value of --device (%(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate (%(default)s)")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt (%(default)s)")
    parser.add_argument("--repeats", type=int, default=4, help="runs of each cell; the first is cold and not counted (%(default)s)")
    return parser.parse_args()


def cells(experts, learned):
    """The settings: share of the experts on the GPU, slots per layer on the GPU and in main memory, routing, policy."""
    for share in SHARES:
        device = max(1, round(share * experts))
        for host in sorted({0, experts - device}):
            for routing in ROUTINGS if device < experts else ROUTINGS[:1]:
                for eviction in ["lru", "learned"] if learned and device < experts else ["lru"]:
                    yield share, device, host, routing, eviction


def measure(args, store, device, host, routing, eviction):
    """Runs `larder bench`: tokens/s of prefill and decode, share of the slowest link's bound, its name, hits."""
    flags = ["--device", args.device, "--vram", f"{device}x", "--routing", routing, "-o", f"eviction={eviction}"]
    flags += ["--cache", f"{host}x"] if host else ["--cache", "0"]
    sizes = ["-p", str(args.prompt), "-n", str(args.tokens), "-r", str(args.repeats), "--first-token", "off"]
    command = [args.larder, "bench", "-m", str(store), "--json", *sizes, *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        return None, done.stderr.strip().splitlines()[-1]
    found = json.loads(done.stdout)
    runs = found["series"][0]["runs"]
    runs = runs[1:] or runs
    rate = lambda phase: statistics.median(run[phase]["tokens"] / run[phase]["seconds"] for run in runs)
    middle = sorted(runs, key=lambda run: run["decode"]["seconds"])[(len(runs) - 1) // 2]
    link, least = max(middle["decode_seconds_at_least"].items(), key=lambda item: item[1])
    tiers = middle["decode"]["tiers"]
    wanted = sum(tiers[name] for name in ["gpu_hits", "memory_hits", "in_flight_hits", "misses"])
    return found["limits"], {
        "prompt": rate("prompt"),
        "written": rate("decode"),
        "share": least / middle["decode"]["seconds"],
        "link": link,
        "gpu": tiers["gpu_hits"] / wanted,
        "memory": tiers["memory_hits"] / wanted,
        "there": tiers["gpu_computed"] / max(1, tiers["gpu_computed"] + tiers["processor_computed"]),
    }


def table(args, store):
    manifest = json.loads((store / "larder.json").read_text())
    experts = manifest["geometry"]["experts"]
    learned = (store / "evictor.safetensors").exists()
    print(f"\n### {store.name}\n")
    print("| on the GPU | in memory | routing | eviction | prefill/s | decode/s | of the bound | GPU hits | memory hits "
          "| computed on the GPU |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    limits = None
    for share, device, host, routing, eviction in cells(experts, learned):
        found, row = measure(args, store, device, host, routing, eviction)
        name = f"| {100 * share:g} % | {host or 'none'} | `{routing}` | {eviction} "
        if found is None:
            print(f"{name}| {row} | | | | | |", flush=True)
            continue
        limits = found
        percent = [f"{100 * row[key]:.0f} %" for key in ["share", "gpu", "memory", "there"]]
        print(f"{name}| {row['prompt']:.1f} | {row['written']:.2f} | {percent[0]} ({row['link']}) | {percent[1]} "
              f"| {percent[2]} | {percent[3]} |", flush=True)
    if limits:
        gpu, per_second = limits["gpu"], lambda rate: f"{rate / 1e9:.1f} GB/s" if rate else "unknown"
        print(f"\nVRAM {per_second(gpu['vram_bytes_per_second'])}, to the GPU {per_second(gpu['to_gpu_bytes_per_second'])}, "
              f"back {per_second(gpu['from_gpu_bytes_per_second'])}, memory {per_second(limits['memory_bytes_per_second'])}, "
              f"SSD {per_second(limits['ssd_bytes_per_second'])}.")


def main():
    args = arguments()
    for store in args.stores:
        if not (store / "larder.json").exists():
            sys.exit(f"{store}: is not a store; `larder convert MODEL {store}` makes one")
        table(args, store)


if __name__ == "__main__":
    main()
