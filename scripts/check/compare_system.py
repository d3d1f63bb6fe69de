#!/usr/bin/env python3
"""Compares larder for another system, run here by Wine or an emulator, with larder for this one: files, logits, text and answers.

    cargo build --release
    scripts/check/cross.sh build --for windows
    scripts/check/compare_system.py --other "wine target/x86_64-pc-windows-gnu/release/larder.exe"

For each tiny model of tests/golden: the stores that both make have the same bytes; on the other system the logits with all experts in
memory have the bytes of those with the fewest slots; its greedy tokens are this system's, and its logits within 1e-5 of them (the
last bit of an exponential is the C library's). For the demo model: the greedy text through caches of several sizes. A conversion that is killed in the
middle is completed by the next call, with the same bytes. `serve` answers over HTTP with the text of this system's `run`. Exits with 1
if anything differs. Needs only Python.
"""

import argparse
import array
import filecmp
import json
import os
import shlex
import signal
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from test_card import TOKENS, mixed_checkpoint

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "The old man looked at the door, and"
CACHES = [["--cache=all"], ["--cache", "16x"], ["--cache", "4x"], ["--cache", "3M", "-o", "scope=global"]]
KILLS = 3
TOLERANCE = 1e-5


class Failure(Exception):
    """A difference, or the last line that larder wrote about an error."""


def run(command, *flags):
    done = subprocess.run([*command, *map(str, flags)], capture_output=True, text=True, cwd=ROOT)
    if done.returncode != 0:
        raise Failure((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    return done.stdout


def files(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


def same_files(one, other):
    """Fails if two folders differ in the names or bytes of their files."""
    if files(one) != files(other):
        raise Failure(f"{one.name}: the files are {sorted(set(files(one)) ^ set(files(other)))[:4]} apart")
    _, wrong, errors = filecmp.cmpfiles(one, other, map(str, files(one)), shallow=False)
    if wrong or errors:
        raise Failure(f"{one.name}: the bytes of {(wrong + errors)[:4]} differ")


def golden(args, folder, source):
    """Compares stores and logits of a tiny model; returns a sentence."""
    tokens = folder / "tokens.json"
    stores = [folder / f"{source.name}-{name}" for name in ("own", "other")]
    for command, store in zip((args.own, args.other), stores):
        run(command, "convert", source, store)
    same_files(*stores)

    def logits(command, store, name, flags):
        out = folder / f"{source.name}-{name}.logits"
        run(command, "logits", "-m", store, "--tokens", tokens, "--out", out, "--generate", 4, "-o", "prefill-tokens=3", *flags)
        return out.read_bytes()

    resident = logits(args.other, stores[1], "resident", ["--cache=all"])
    if streamed(lambda flags: logits(args.other, stores[1], "streamed", flags), stores[1]) != resident:
        raise Failure("streamed logits differ from resident ones")
    wanted, found = tensors(logits(args.own, stores[0], "wanted", ["--cache=all"])), tensors(resident)
    if found["generated_ids"] != wanted["generated_ids"]:
        raise Failure(f"the tokens are {found['generated_ids']} and not {wanted['generated_ids']}")
    names = ["full_logits", "decode_logits"]
    apart = max(abs(one - other) for name in names for one, other in zip(wanted[name], found[name], strict=True))
    if not apart <= TOLERANCE:
        raise Failure(f"logits differ by {apart}")
    return f"stores and tokens are equal, streamed logits are the resident ones, {apart:.1e} from this system's"


def streamed(logits, store):
    """The logits with no slots, or with the fewest that the model can run with."""
    try:
        return logits(["--cache", "0"])
    except Failure:
        return logits(["--cache", f"{json.loads((store / 'larder.json').read_text())['geometry']['top_k']}x"])


def tensors(data):
    """The tensors of a safetensors file that have the types of logits and tokens, as arrays."""
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    codes = {"F32": "f", "I32": "i"}
    found = {}
    for name, tensor in header.items():
        start, end = tensor["data_offsets"]
        if tensor["dtype"] in codes:
            found[name] = array.array(codes[tensor["dtype"]], data[8 + length + start : 8 + length + end])
    return found


def demo(args):
    """Compares the greedy text of the demo model; returns a sentence."""
    model, hits = ROOT / "models/demo", []

    def text(command, flags):
        found = json.loads(run(command, "run", "-m", model, "-p", PROMPT, "-n", 60, "--temperature", 0, "--json", *flags))
        return found["ids"], (found["decode"]["cache"] or {"hit_rate": 1.0})["hit_rate"]

    wanted, _ = text(args.own, ["--cache=all"])
    for flags in CACHES:
        found, rate = text(args.other, flags)
        hits.append(round(rate, 2))
        if found != wanted:
            raise Failure(f"the text differs with {' '.join(flags)}")
    return f"the text of {len(CACHES)} sizes of the cache is equal; hit rates {hits}"


def resumed(args, folder):
    """Kills conversions in the middle and goes on; returns a sentence."""
    source = folder / "mixed"
    flags = mixed_checkpoint(source)
    whole, target = folder / "whole", folder / "resumed"
    run(args.own, "convert", source, whole, *flags)
    shards = []
    for _ in range(KILLS):
        process = subprocess.Popen([*args.other, "convert", source, target, *map(str, flags)], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd=ROOT)
        at_least = (shards[-1] if shards else 0) + 3
        done = lambda: sum(1 for path in target.rglob("*.safetensors") if path.parent.name.startswith("L"))
        while done() < at_least and process.poll() is None:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
        shards.append(done())
    if (target / "larder.json").exists():
        raise Failure(f"the conversion was complete before it was killed: {shards} shards")
    run(args.other, "convert", source, target, *flags)
    same_files(whole, target)
    return f"a conversion that was killed with {shards} of 30 shards was completed with the same bytes"


def served(args):
    """Asks the server for a completion; returns a sentence."""
    wanted = json.loads(run(args.own, "run", "-m", ROOT / "models/demo", "-p", PROMPT, "-n", 40, "--temperature", 0, "--json"))["text"]
    command = [*args.other, "serve", "-m", str(ROOT / "models/demo"), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    try:
        address = next((word for line in server.stdout for word in line.split() if word.startswith("http://")), None)
        if address is None:
            raise Failure("the server did not start")
        body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0}
        request = urllib.request.Request(f"{address.rstrip('/')}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as reply:
            found = json.load(reply)["choices"][0]["text"]
    finally:
        server.kill()
        server.wait()
    if found != wanted:
        raise Failure(f"the server's text differs: {found!r}")
    return "the server's text is that of run"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", required=True, type=shlex.split, help="the command for the other system, with what runs it")
    parser.add_argument("--own", default="target/release/larder", type=shlex.split, help="the command for this system (%(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="models at a time (%(default)s)")
    args = parser.parse_args()
    os.environ["LARDER_HOT_SET"] = "off"
    failures = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as jobs:
        folder = Path(folder)
        (folder / "tokens.json").write_text(json.dumps(TOKENS))
        checks = {"demo": lambda: demo(args), "resume": lambda: resumed(args, folder), "serve": lambda: served(args)}
        for config in sorted((ROOT / "tests/golden").glob("*/config.json")):
            checks[config.parent.name] = lambda source=config.parent: golden(args, folder, source)
        for name, job in [(name, jobs.submit(check)) for name, check in checks.items()]:
            try:
                print(f"ok      {name}: {job.result()}", flush=True)
            except Failure as e:
                failures += 1
                print(f"FAILED  {name}: {e}", flush=True)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
