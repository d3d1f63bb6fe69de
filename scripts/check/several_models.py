"""Has clients ask a server of two models in turns, within a memory limit, while an upstream server goes away and comes back.

    larder convert A.gguf A.larder && larder convert B.gguf B.larder
    python scripts/check/several_models.py --larder target/release/larder -m A.larder -m B.larder --limit 2GiB --seconds 600

Starts `larder serve` with both models, and an upstream server of the demo model that is killed and started again every 20 s. The server runs in a
control group with --limit if one can be made (needs root); --models-mem is --limit less 64 MiB. Each client asks for one model after the other, greedily, and every
fifth time for the upstream server's, half of the answers streamed. Fails if a request is not answered, an answer differs from the first of its
model, or the process exceeds the limit. Prints counts, loads, times and the peak. Needs Python alone.
"""

import argparse
import collections
import json
import os
import pathlib
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request

DEMO = pathlib.Path(__file__).parent.parent.parent / "models" / "demo"
AWAY_SECONDS = 20
GROUPS = pathlib.Path("/sys/fs/cgroup")
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def size(text):
    number, unit = re.fullmatch(r"([\d.]+)(KiB|MiB|GiB)", text).groups()
    return int(float(number) * UNITS[unit])


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Group:
    """A control group with a memory limit; `made` is false where none can be made."""

    def __init__(self, limit):
        self.made = False
        for parent, name in ((GROUPS, "memory.max"), (GROUPS / "memory", "memory.limit_in_bytes")):
            folder = parent / f"larder-check-{os.getpid()}"
            try:
                folder.mkdir()
                (folder / name).write_text(str(limit))
                self.folder, self.made = folder, True
                return
            except OSError:
                if folder.is_dir():
                    folder.rmdir()

    def enter(self):
        if self.made:
            (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def killed(self):
        """How often the kernel has killed a process for memory."""
        for name in ("memory.events", "memory.oom_control"):
            if self.made and (self.folder / name).exists():
                found = re.search(r"oom_kill (\d+)", (self.folder / name).read_text())
                return int(found[1]) if found else 0
        return 0


def start(larder, arguments, port, group=None):
    enter = group.enter if group else None
    process = subprocess.Popen([larder, "serve", "--port", str(port), *arguments], stderr=subprocess.PIPE, text=True, preexec_fn=enter)
    for line in process.stderr:
        print(line, end="")
        if " on http://" in line:
            break
    threading.Thread(target=lambda: [print(line, end="") for line in process.stderr], daemon=True).start()
    return process


def get(port, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as response:
        return response.read().decode()


def ask(port, model, stream):
    body = {"model": model, "prompt": "Once upon a time there was", "max_tokens": 16, "temperature": 0, "ignore_eos": True, "stream": stream}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=600) as response:
        text, fallback = response.read().decode(), response.headers.get("x-larder-fallback")
    if not stream:
        return json.loads(text)["choices"][0]["text"], fallback
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert not any("error" in chunk for chunk in chunks), text
    assert text.rstrip().endswith("data: [DONE]"), text
    return "".join(chunk["choices"][0]["text"] for chunk in chunks), fallback


class Run:
    def __init__(self, port, models, seconds):
        self.port, self.models, self.end = port, models, time.monotonic() + seconds
        self.texts, self.lock = {}, threading.Lock()
        self.counts, self.times, self.faults = collections.Counter(), collections.defaultdict(list), []

    def client(self, number):
        turn = number
        while time.monotonic() < self.end:
            model = "upstream-demo" if turn % 5 == 4 else self.models[turn % 2]
            stream, since = turn % 4 < 2, time.monotonic()
            turn += 1
            try:
                text, fallback = ask(self.port, model, stream)
            except Exception as error:  # any is a request without an answer
                broke_off = model == "upstream-demo" and "upstream_failed" in str(error)
                with self.lock:
                    self.counts["streams of the upstream server that broke off with an error"] += broke_off
                    if not broke_off:
                        self.faults.append(f"{model}: {error!r}")
                continue
            key = fallback or model
            with self.lock:
                self.counts[f"{model}{' by fallback' if fallback else ''}"] += 1
                self.times[model].append(time.monotonic() - since)
                if self.texts.setdefault(key, text) != text:
                    self.faults.append(f"{key}: another answer: {text!r}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--larder", default="target/release/larder")
    parser.add_argument("-m", "--model", action="append", required=True)
    parser.add_argument("--limit", type=size, required=True)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=600)
    args = parser.parse_args()
    port, upstream_port, group = free_port(), free_port(), Group(args.limit)
    upstream = ["-m", str(DEMO), "--alias", "upstream-demo"]
    other = start(args.larder, upstream, upstream_port)
    models = [part for model in args.model for part in ("-m", model)]
    flags = ["--context", "512", "--models-mem", str(args.limit - (64 << 20)), "--upstream", f"http://127.0.0.1:{upstream_port}"]
    server = start(args.larder, [*models, *flags, "--log-level", "error"], port, group)
    names = [model["id"] for model in json.loads(get(port, "/v1/models"))["data"] if model["id"] != "upstream-demo"]
    run = Run(port, names, args.seconds)
    clients = [threading.Thread(target=run.client, args=(number,)) for number in range(args.clients)]
    [client.start() for client in clients]
    peak, loads, before, changed, is_there = 0, collections.Counter(), set(), time.monotonic(), True
    while any(client.is_alive() for client in clients):
        time.sleep(0.1)
        peak = max(peak, float(re.search(r"process_memory_bytes (\d+)", get(port, "/metrics"))[1]))
        status = {m["id"] for m in json.loads(get(port, "/v1/models"))["data"] if m.get("status", {}).get("value") == "loaded"}
        loads.update(status - before)
        before = status
        if time.monotonic() - changed > AWAY_SECONDS:
            changed, is_there = time.monotonic(), not is_there
            if is_there:
                other = start(args.larder, upstream, upstream_port)
            else:
                other.send_signal(signal.SIGKILL)
                other.wait()
    other.kill()
    server.send_signal(signal.SIGTERM)
    code = server.wait()
    where = "a control group with this limit" if group.made else "no control group could be made"
    print(f"limit {args.limit / 2**20:.0f} MiB ({where}, {group.killed()} processes killed), peak {peak / 2**20:.0f} MiB")
    for name, count in sorted(run.counts.items()):
        if count:
            print(f"{name}: {count} answers")
    for name, times in sorted(run.times.items()):
        print(f"{name}: median {statistics.median(times):.2f} s, longest {max(times):.2f} s")
    print("loads that were seen:", dict(loads))
    time.sleep(0.5)  # the kernel takes the ended process out of the group
    if group.made and not (group.folder / "cgroup.procs").read_text():
        group.folder.rmdir()
    faults = run.faults + ([f"the server ended with {code}"] if code else [])
    faults += [f"{peak:.0f} bytes exceed the limit"] if peak > args.limit else []
    faults += ["the kernel killed a process"] if group.killed() else []
    print("\n".join(faults[:20]) or "ok")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
