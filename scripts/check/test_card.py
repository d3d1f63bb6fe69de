#!/usr/bin/env python3
"""Compares larder on a GPU with larder on the CPU: logits of tiny models and greedy text of the demo model, bit for bit.

    cargo build --release --features cuda
    scripts/check/test_card.py [MODEL ...]

For each tiny model of tests/golden: logits with every expert in memory on the CPU, and on the GPU with every expert in device
memory, with two slots per layer there and one in main memory, and with two there and none in main memory. For the demo model:
the greedy text through tiers of five sizes. Models whose attention a device does not compute are listed as refused. Exits with 1
if anything differs. Needs only Python and a GPU.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOKENS = [1, 5, 9, 2, 7, 3, 11, 4]
LOGITS_TIERS = [
    [],
    ["--vram-experts", "2", "--cache-experts", "1"],
    ["--vram-experts", "2", "--cache-mem", "0"],
]
TEXT_TIERS = [
    ["--vram-experts", "32"],
    ["--vram-experts", "4", "--cache-experts", "6"],
    ["--vram-experts", "2", "--cache-mem", "0"],
    ["--vram-mem", "6M", "--cache-mem", "2M", "--cache-scope", "global", "--eviction", "learned"],
    ["--vram-experts", "3", "--cache-experts", "8", "--prefetch", "2", "--reader", "pread"],
]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="names of folders in tests/golden, or `demo` (default: all)")
    parser.add_argument("--larder", default="target/release/larder", help="the command (%(default)s)")
    parser.add_argument("--device", default="cuda", help="value of --device (%(default)s)")
    parser.add_argument("--jobs", type=int, default=4, help="models at a time (%(default)s)")
    return parser.parse_args()


class Failure(Exception):
    """The last line that larder wrote about an error."""


def larder(args, *flags):
    done = subprocess.run([args.larder, *map(str, flags)], capture_output=True, text=True)
    if done.returncode != 0:
        raise Failure((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    return done.stdout


def logits(args, folder, golden):
    """Compares the logits of one tiny model; returns a sentence."""
    store, tokens = folder / golden.name, folder / "tokens.json"
    larder(args, "convert", golden, store)

    def of(name, flags):
        out = folder / f"{golden.name}-{name}"
        base = ["logits", "-m", store, "--tokens", tokens, "--out", out, "--generate", 4, "--chunk", 3]
        larder(args, *base, *flags)
        return out.read_bytes()

    wanted = of("cpu", ["--preload"])
    for at, tiers in enumerate(LOGITS_TIERS):
        if of(f"gpu-{at}", ["--device", args.device, *tiers]) != wanted:
            raise Failure(f"logits differ from the CPU's with {' '.join(tiers) or 'all experts in device memory'}")
    return f"logits of {len(LOGITS_TIERS)} sizes of tiers equal the CPU's"


def text(args, demo):
    """Compares the greedy text of the demo model; returns a sentence."""

    def of(flags):
        found = larder(args, "run", "-m", demo, "-p", "The old man looked", "-n", 48, "--temperature", 0, "--json", *flags)
        return json.loads(found)

    wanted, computed = of(["--preload"])["ids"], []
    for tiers in TEXT_TIERS:
        found = of(["--device", args.device, *tiers])
        if found["ids"] != wanted:
            raise Failure(f"the text differs from the CPU's with {' '.join(tiers)}")
        computed.append(found["decode"]["tiers"]["gpu_computed"])
    if not all(computed):
        raise Failure(f"no expert was computed on the GPU: {computed}")
    return f"text of {len(TEXT_TIERS)} sizes of tiers equals the CPU's; experts computed on the GPU: {computed}"


def main():
    args = arguments()
    goldens = sorted(path.parent for path in (ROOT / "tests/golden").glob("*/config.json"))
    names = args.models or ["demo", *(golden.name for golden in goldens)]
    failures = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as jobs:
        folder = Path(folder)
        (folder / "tokens.json").write_text(json.dumps(TOKENS))

        def check(name):
            if name == "demo":
                return text(args, ROOT / "models/demo")
            return logits(args, folder, ROOT / "tests/golden" / name)

        for name, job in [(name, jobs.submit(check, name)) for name in names]:
            try:
                print(f"ok      {name}: {job.result()}", flush=True)
            except Failure as e:
                refused = str(e).endswith("cannot run on a device; leave --device out")
                failures += not refused
                print(f"{'refused' if refused else 'FAILED '} {name}: {e}", flush=True)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
