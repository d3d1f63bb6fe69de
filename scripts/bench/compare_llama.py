#!/usr/bin/env python3
"""Measures larder beside llama.cpp with one GGUF file, equal memory limits and equal threads, in alternating runs.

Needs Python 3.10 or newer, root (for memory cgroups and to drop the page cache), a larder store of the same file, and
llama-bench, built for example from the PyPI source package llama-cpp-python.

    python scripts/bench/compare_llama.py --gguf FILE --store STORE --llama-bench PROGRAM --limits 2.5GiB,1.5GiB \\
        [--tokens 32] [--rounds 3] [--readahead 128,1024,8192] [--threads 2] > benches/runs/NAME.json

A limit of 0 means none. Each round runs larder once and llama.cpp once per readahead, so that a drift of the machine's
speed affects both. Before each run the page cache is dropped. Prints one JSON object with the machine, the command, every
raw row and the medians; progress goes to standard error.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

GROUPS = {"v1": Path("/sys/fs/cgroup/memory"), "v2": Path("/sys/fs/cgroup")}


def size(text):
    number, unit = re.fullmatch(r"([\d.]+)\s*([A-Za-z]*)", text).groups()
    factor = {"": 1, "g": 10**9, "gb": 10**9, "gib": 2**30, "m": 10**6, "mb": 10**6, "mib": 2**20}[unit.lower()]
    return int(float(number) * factor)


def block_device(path):
    """The sysfs folder of the disk that holds a path."""
    device = os.stat(path).st_dev
    node = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    return node if (node / "queue").exists() else node.parent


class Group:
    """A memory cgroup with a limit, version 1 or 2."""

    def __init__(self, limit):
        self.version = "v2" if (GROUPS["v2"] / "cgroup.controllers").exists() else "v1"
        self.path = GROUPS[self.version] / f"compare_{os.getpid()}"
        self.path.mkdir()
        if limit:
            name = "memory.max" if self.version == "v2" else "memory.limit_in_bytes"
            (self.path / name).write_text(str(limit))

    def peak(self):
        name = "memory.peak" if self.version == "v2" else "memory.max_usage_in_bytes"
        return int((self.path / name).read_text())

    def run(self, command, env):
        join = f'echo $$ > {self.path}/cgroup.procs; exec "$@"'
        start = time.monotonic()
        done = subprocess.run(["sh", "-c", join, "sh", *command], capture_output=True, text=True, env=env)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
        return done.stdout, time.monotonic() - start

    def close(self):
        time.sleep(0.3)
        self.path.rmdir()


def read_bytes(device):
    return int((device / "stat").read_text().split()[2]) * 512


def measured(command, limit, device, env):
    """Runs a command under a memory limit with a cold page cache; measures wall time, bytes read from disk and peak memory."""
    subprocess.run(["sync"], check=True)
    Path("/proc/sys/vm/drop_caches").write_text("3")
    group = Group(limit)
    before = read_bytes(device)
    out, wall = group.run(command, env)
    row = {"wall_seconds": round(wall, 2), "disk_bytes": read_bytes(device) - before, "peak_bytes": group.peak()}
    group.close()
    return out, row


def larder(args, limit, device):
    command = [args.larder, "bench", "-m", args.store, "-p", "1", "-n", str(args.tokens), "--repeats", "2", "--first-token", "off"]
    command += ["--threads", str(args.threads), "--json", *args.larder_flags.split()]
    out, row = measured(command, limit, device, os.environ)
    found = json.loads(out)
    decode = found["series"][0]["runs"][1]["decode"]
    first = found["series"][0]["runs"][0]["decode"]
    limits, cache = found["limits"], decode["cache"]
    least = limits["bytes_touched_per_token"] * decode["tokens"] / limits["memory_bytes_per_second"]
    if cache:
        least = max(least, cache["demand_bytes"] / limits["ssd_bytes_per_second"])
    return row | {
        "tokens_per_second": decode["tokens"] / decode["seconds"],
        "tokens_per_second_cold": first["tokens"] / first["seconds"],
        "share_of_limit": least / decode["seconds"],
        "decode": decode,
        "limits": limits,
        "plan": found["plan"],
    }


def llama(args, limit, device, readahead):
    queue = device / "queue" / "read_ahead_kb"
    usual = queue.read_text()
    env = dict(os.environ, OMP_PROC_BIND="true", OMP_PLACES="cores")
    command = [args.llama_bench, "-m", args.gguf, "-t", str(args.threads), "-p", "0", "-n", str(args.llama_tokens)]
    try:
        queue.write_text(str(readahead))
        out, row = measured([*command, "-r", "1", "-o", "jsonl", "-lm", "mmap", "--repack", "0"], limit, device, env)
    finally:
        queue.write_text(usual)
    return row | {"readahead_kb": readahead, "tokens_per_second": json.loads(out.splitlines()[-1])["avg_ts"]}


def cpu():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def main():
    parser = argparse.ArgumentParser(description="Measures larder beside llama.cpp.")
    parser.add_argument("--gguf", required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--llama-bench", required=True)
    parser.add_argument("--larder", default=str(Path(__file__).parent.parent.parent / "target/release/larder"))
    parser.add_argument("--larder-flags", default="")
    parser.add_argument("--limits", default="0")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--llama-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--readahead", default="128,1024,8192")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    device = block_device(args.store)
    usual = int((device / "queue" / "read_ahead_kb").read_text())
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"cpu": cpu(), "threads": os.cpu_count(), "kernel": platform.release(), "readahead_kb": usual},
        "command": f"compare_llama.py --gguf {Path(args.gguf).name} --limits {args.limits} --tokens {args.tokens} "
        f"--llama-tokens {args.llama_tokens} --rounds {args.rounds} --readahead {args.readahead} "
        f"--threads {args.threads} --larder-flags='{args.larder_flags}'",
        "limits": [],
    }
    for limit in map(size, args.limits.split(",")):
        rows = {"larder": [], "llama.cpp": []}
        for number in range(args.rounds):
            rows["larder"].append(larder(args, limit, device))
            for readahead in map(int, args.readahead.split(",")):
                rows["llama.cpp"].append(llama(args, limit, device, readahead))
            print(f"limit {limit}: round {number + 1} of {args.rounds}", file=sys.stderr)
        ours = statistics.median(r["tokens_per_second"] for r in rows["larder"])
        theirs = {}
        for row in rows["llama.cpp"]:
            theirs.setdefault(row["readahead_kb"], []).append(row["tokens_per_second"])
        theirs = {readahead: statistics.median(rates) for readahead, rates in theirs.items()}
        best = max(theirs.values())
        summary = {
            "larder": ours,
            "llama.cpp": theirs,
            "times_the_best": ours / best,
            "times_as_the_machine_has_it": ours / theirs[usual] if usual in theirs else None,
            "share_of_limit": statistics.median(r["share_of_limit"] for r in rows["larder"]),
        }
        print(json.dumps(summary), file=sys.stderr)
        found["limits"].append({"limit_bytes": limit, "summary": summary, "rows": rows})
    json.dump(found, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
