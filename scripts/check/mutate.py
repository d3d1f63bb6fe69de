#!/usr/bin/env python3
"""Mutates files of every kind that larder reads, and runs the command that reads them: it must end by itself within ten seconds of
processor time and 1 GiB of memory, with exit code 0, 1 or 2, and an error is one sentence.

    scripts/check/mutate.py [--larder PATH] [--count N] [--seed N] [--kind NAME]

Needs Python 3.10 and, to compute again the checksums that a stranger can compute as well, xxhash from PyPI; Linux. Prints a line per
finding, keeps the mutated files of it, and ends with the counts per kind; exit code 1 if there are findings.
"""

import argparse
import collections
import json
import os
import random
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from xxhash import xxh3_128_hexdigest

ROOT = Path(__file__).resolve().parents[2]
CPU_SECONDS = 10
# What is typed into a chat.
TYPED = b"/lambda 0.25\n/lambda\n/set lambda 7\n/quit\n"
MEMORY = 1 << 30
NUMBERS = [0, -1, 1, 2, 7, 255, 65535, 2**31 - 1, 2**32, 2**53 + 1, 2**63 - 1, 2**64, 10**30, -0.0, 1e-320, 1e308, 0.5, 1.5]
TEXTS = ["", " ", "\0", "\x1b[2J", "x" * 5000, "../../etc", "/", "(a+)+$", "Ġ", "▁", "{{", "{% for i in range(9) %}", "f32", "q9_9", "-1"]


def nodes(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield from nodes(child, path + (key,))


def at(value, path):
    for key in path:
        value = value[key]
    return value


def mutate_json(value, rng):
    """One to three edits of random nodes."""
    for _ in range(rng.randint(1, 3)):
        paths = list(nodes(value))
        path = rng.choice(paths)
        if not path:
            continue
        parent, key, old = at(value, path[:-1]), path[-1], at(value, path)
        edit = rng.randrange(8)
        if edit == 0:
            del parent[key]
        elif edit == 1:
            parent[key] = json.loads(json.dumps(at(value, rng.choice(paths))))
        elif edit == 2 and isinstance(parent, list):
            parent.extend([old] * rng.choice([1, 10, 1000]))
        elif edit == 3 and isinstance(parent, dict):
            parent[rng.choice(TEXTS)] = parent.pop(key)
        elif edit == 4:
            deep = old
            for _ in range(rng.choice([1, 5, 120, 500])):
                deep = [deep]
            parent[key] = deep
        elif isinstance(old, (int, float)) and not isinstance(old, bool) and rng.random() < 0.6:
            parent[key] = rng.choice([old + 1, old - 1, -old, old * 2, old * 1000, *NUMBERS])
        else:
            parent[key] = rng.choice([*NUMBERS, *TEXTS, None, True, False, [], {}])
    return value


def mutate_bytes(data, rng):
    """One to four edits; the first bytes, where headers are, get half of them."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        if not data:
            data = bytearray(rng.randbytes(rng.randint(1, 64)))
        reach = min(len(data), 2048) if rng.random() < 0.5 else len(data)
        place, size = rng.randrange(reach), rng.choice([1, 1, 4, 8, 64, 4096])
        edit = rng.randrange(8)
        if edit <= 1:
            data[place] ^= 1 << rng.randrange(8)
        elif edit == 2:
            data[place : place + size] = rng.randbytes(size)
        elif edit == 3:
            data[place : place + size] = bytes([rng.choice([0, 255])]) * size
        elif edit == 4:
            del data[place:]
        elif edit == 5:
            other = rng.randrange(len(data))
            data[place : place + size] = data[other : other + size]
        elif edit == 6:
            del data[place : place + size]
        else:
            number = rng.choice([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, len(data), len(data) * 2])
            data[place : place + 8] = struct.pack("<Q", number)
    return bytes(data)


def mutate_safetensors(data, rng):
    """Edits the header as JSON and keeps its length right, or edits bytes."""
    if rng.random() < 0.5 or len(data) < 8:
        return mutate_bytes(data, rng)
    length = struct.unpack("<Q", data[:8])[0]
    header = json.dumps(mutate_json(json.loads(data[8 : 8 + length]), rng)).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


def mutate_text(data, rng):
    lines = data.decode().split("\n")
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(lines))
        edit = rng.randrange(4)
        if edit == 0:
            lines[place] = lines[place].replace("=", rng.choice(["==", "= [", ": ", "= 99999999999999999999"]), 1)
        elif edit == 1:
            lines.insert(place, rng.choice(lines))
        elif edit == 2:
            lines[place] += rng.choice(TEXTS)
        else:
            lines[place] = mutate_bytes(lines[place].encode(), rng).decode(errors="replace")
    return "\n".join(lines).encode(errors="replace")


def mutate_file(path, rng):
    data = path.read_bytes()
    if path.suffix == ".json" and rng.random() < 0.7:
        text = json.dumps(mutate_json(json.loads(data), rng), ensure_ascii=False)
        return text.encode(errors="replace")
    if path.suffix == ".safetensors":
        return mutate_safetensors(data, rng)
    if path.suffix in (".toml", ".txt", ".jinja") and rng.random() < 0.7:
        return mutate_text(data, rng)
    return mutate_bytes(data, rng)


def reseal(store):
    """Computes again the checksums of a store of format 2 over the files that are copied and over the manifest."""
    path = store / "larder.json"
    try:
        manifest = json.loads(path.read_bytes())
        for sidecar in manifest["sidecars"]:
            data = (store / sidecar["name"]).read_bytes()
            sidecar.update(bytes=len(data), checksum=xxh3_128_hexdigest(data))
        data = (store / "resident.safetensors").read_bytes()
        header = data[: 8 + struct.unpack("<Q", data[:8])[0]]
        manifest["resident"] = {"bytes": len(data), "header_checksum": xxh3_128_hexdigest(header)}
    except (ValueError, KeyError, TypeError, AttributeError, OSError, struct.error):
        return
    if manifest.pop("checksum", None) is not None:
        body = json.dumps(manifest, indent=2, ensure_ascii=False).removesuffix("\n}").encode(errors="replace")
        path.write_bytes(body + b',\n  "checksum": "' + xxh3_128_hexdigest(body).encode() + b'"\n}\n')


def reseal_sidecar(path):
    """Seals a sidecar that was changed, for the store of its seal."""
    seal = path.with_name(path.name + ".seal")
    if seal.exists():
        data = path.read_bytes()
        fields = {"store": json.loads(seal.read_bytes())["store"], "bytes": len(data), "content": xxh3_128_hexdigest(data)}
        body = json.dumps(fields, indent=2).removesuffix("\n}").encode()
        seal.write_bytes(body + b',\n  "checksum": "' + xxh3_128_hexdigest(body).encode() + b'"\n}\n')


class Kind:
    """A sample (a file or a folder), the files of it that are mutated, and the commands that read it."""

    def __init__(self, name, sample, files, *commands):
        self.name, self.sample, self.files, self.commands = name, sample, files, commands


def kinds(larder, base):
    """The samples; stores and placements are made by larder itself."""
    tests, kinds = ROOT / "tests", []
    run = ["run", "-m", "@", "-p", "Hi there", "-n", "3", "--seed", "1", "--cache", "4x"]
    tokens = base / "tokens.json"
    tokens.write_text("[1, 2, 3, 4]")
    for model in [*sorted((tests / "golden").iterdir()), tests / "fixtures/quantised/gpt_oss_mxfp4"]:
        if not model.is_dir():
            continue
        files = [f.name for f in sorted(model.iterdir()) if not f.name.startswith("reference")] + ["config.json"]
        kinds.append(Kind("checkpoint", model, files, ["inspect", "@"], ["convert", "@", "&/store"], run[:-2]))
    store = base / "store"
    subprocess.run([larder, "convert", tests / "golden/olmoe", store], check=True, capture_output=True)
    files = ["larder.json", "larder.json", "resident.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "experts"]
    kinds += 6 * [Kind("store", store, files, run, ["verify", "@"], ["plan", "-m", "@"])]
    for old in ["mixed", "uniform"]:
        kinds += 2 * [Kind("store", tests / "stores" / old, files, run, ["verify", "@"], ["plan", "-m", "@"])]
    demo = ROOT / "models/demo"
    learned = [*run[:-2], "--cache", "4x", "-o", "eviction=learned"]
    calibrated = [*run, "--routing", "prior:lambda=0.3,delta=calibrated"]
    chat = ["chat", "-m", "@", "--cache", "4x", "--context", "64"]
    for files, command in [(["quality.json", "quality.json.seal"], chat), (["evictor.safetensors", "evictor.safetensors.seal"], learned), (["quality.json", "quality.json.seal"], calibrated), (["larder.toml", "chat_template.jinja"], run)]:
        kinds += 2 * [Kind("files beside a store", demo, files, command)]
    for gguf in sorted((tests / "fixtures/gguf").glob("*.gguf")):
        kinds += 2 * [Kind("GGUF", gguf, None, ["inspect", "@"], ["logits", "-m", "@", "-ono-store", "--tokens", str(tokens), "--out", "&/out"], ["convert", "@", "&/store"])]
    trace = tests / "traces/gpt-oss-slice.safetensors"
    kinds += 3 * [Kind("trace", trace, None, ["lab", "replay", "@", "-o", "eviction=lfu"], ["lab", "activations", "@", "--out", "&/activations"])]
    messages = base / "messages.json"
    messages.write_text(json.dumps([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [{"type": "text", "text": "x"}]}]))
    golden = str(tests / "golden/gpt_oss")
    kinds += 2 * [Kind("messages", messages, None, ["tokenize", "-m", golden, "--messages", "@"])]
    kinds += [Kind("tokens", tokens, None, ["logits", "-m", golden, "--tokens", "@", "--out", "&/out"])]
    return kinds


def limits():
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS * 2, CPU_SECONDS * 2))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def run(larder, command, sample, work, codes):
    """The fault of one run, or `None`; counts its exit code."""
    args = [larder, *(str(a).replace("@", str(sample)).replace("&", str(work)) for a in command)]
    env = {"PATH": os.environ["PATH"], "HOME": str(work), "XDG_CACHE_HOME": str(work / "cache"), "LC_ALL": "C.UTF-8"}
    errors, typed = open(work / "stderr", "w+b"), tempfile.TemporaryFile()
    typed.write(TYPED if command[0] == "chat" else b"")
    typed.seek(0)
    child = subprocess.Popen(args, stdin=typed, stdout=subprocess.DEVNULL, stderr=errors, env=env, preexec_fn=limits)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = 0
    errors.seek(0)
    said = errors.read().decode(errors="backslashreplace")
    seconds, memory, code = usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, os.waitstatus_to_exitcode(status)
    codes[code] += 1
    faults = [line for line in said.split("\n") if line.startswith("error: ")]
    if code not in (0, 1, 2):
        return f"exit code {code}: {said[-300:]}"
    if "panicked" in said:
        return f"panic: {said[-300:]}"
    if code == 1 and len(faults) != 1:
        return f"{len(faults)} errors: {said[:300]!r}"
    if "\x1b" in said or "\0" in said or max(map(len, said.split("\n"))) > 2000:
        return f"control characters or a long line: {said[:300]!r}"
    if seconds > CPU_SECONDS or memory > MEMORY:
        return f"{seconds:.1f} s of processor time, {memory >> 20} MiB"
    return None


def one(kind, larder, rng, work, codes):
    sample = work / kind.sample.name
    if kind.files is None:
        sample.write_bytes(mutate_file(kind.sample, rng))
    else:
        shutil.copytree(kind.sample, sample)
        name = rng.choice(kind.files)
        file = sample / name
        if file.is_dir():
            file = rng.choice(sorted(p for p in file.rglob("*") if p.is_file()))
        file.write_bytes(mutate_file(file, rng))
        if kind.name == "store" and rng.random() < 0.7:
            reseal(sample)
        if kind.name == "files beside a store" and rng.random() < 0.7:
            reseal_sidecar(file)
    for command in kind.commands:
        if fault := run(larder, command, sample, work, codes):
            return f"{kind.name}, {' '.join(map(str, command[:2]))}: {fault}"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--larder", default=str(ROOT / "target/release/larder"))
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind")
    parser.add_argument("--keep", default="mutations", help="folder for the files of findings")
    args = parser.parse_args()
    sys.setrecursionlimit(20_000)  # nested JSON
    counts, codes, findings = collections.Counter(), collections.Counter(), 0
    with tempfile.TemporaryDirectory() as base:
        samples = [k for k in kinds(args.larder, Path(base)) if args.kind in (None, k.name)]
        for number in range(args.count):
            kind, rng = samples[number % len(samples)], random.Random(args.seed * 1_000_000 + number)
            work = Path(base) / "work"
            work.mkdir()
            fault = one(kind, args.larder, rng, work, codes)
            counts[kind.name] += 1
            if fault:
                findings += 1
                kept = Path(args.keep) / f"{args.seed}-{number}"
                shutil.copytree(work, kept, dirs_exist_ok=True)
                print(f"{number}: {fault}\n  kept in {kept}", flush=True)
            shutil.rmtree(work)
    print(", ".join(f"{name} {count}" for name, count in sorted(counts.items())), f"= {args.count} files, {findings} findings")
    print("runs by exit code:", ", ".join(f"{code}: {count}" for code, count in sorted(codes.items())))
    sys.exit(findings > 0)


if __name__ == "__main__":
    main()
