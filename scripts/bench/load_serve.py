"""Load test of a running `larder serve` with many concurrent clients: no stream may be lost or mixed up.

Needs Python 3.9 or newer and nothing else.

    larder serve -m STORE --parallel 8 --queue 64 --context 512
    python scripts/bench/load_serve.py --url http://127.0.0.1:8080 --clients 64 --seconds 120 --pid PID

Each client has its own prompts, a short one and with --long also one of that many words, and its own seed. It sends each once
while it is alone, and then, concurrently with all others, repeats them until the time is over; each answer must equal the one
that it got alone. With --hang-up and --slow that share of the requests is abandoned after some pieces, or read slowly. Prints
the number of answers, the times to the first token and between pieces (p50 and p99), and, with --pid, the server's memory:
the peak, and how it grew in the second half. Exits with 1 if an answer was lost or mixed up.
"""

import argparse
import http.client
import json
import random
import sys
import threading
import time
import urllib.parse

WORDS = "house river garden letter winter doctor window horse castle island captain merchant shadow forest".split()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--long", type=int, default=0, metavar="WORDS", help="every fourth request has a prompt of so many words")
    parser.add_argument("--hang-up", type=float, default=0, metavar="SHARE", help="share of requests that are abandoned")
    parser.add_argument("--slow", type=float, default=0, metavar="SHARE", help="share of answers that are read slowly")
    parser.add_argument("--pid", type=int, help="the server's process id, to report its peak memory")
    args = parser.parse_args()
    clients = [Client(args, i) for i in range(args.clients)]
    for client in clients:
        for request in client.requests:
            request.expected = client.ask(request, sys.maxsize)
    print(f"{len(clients)} clients have sent their requests alone", flush=True)
    end = time.monotonic() + args.seconds
    threads = [threading.Thread(target=client.run, args=(end,)) for client in clients]
    memory = Memory(args.pid, args.seconds)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.exit(report(clients, memory))


class Memory:
    """The resident memory of a process, halfway and at the end."""

    def __init__(self, pid, seconds):
        self.pid, self.halfway = pid, None
        if pid:
            threading.Timer(seconds / 2, self.note).start()

    def note(self):
        self.halfway = self.read("VmRSS:")

    def read(self, name):
        with open(f"/proc/{self.pid}/status") as status:
            return int(next(line for line in status if line.startswith(name)).split()[1]) * 1024


class Request:
    def __init__(self, prompt, seed, tokens):
        self.body = json.dumps({
            "prompt": prompt, "max_tokens": tokens, "temperature": 0.9, "seed": seed, "stream": True, "ignore_eos": True,
        })
        self.expected = None


class Client:
    def __init__(self, args, number):
        self.host, self.args, self.random = urllib.parse.urlsplit(args.url).netloc, args, random.Random(number)
        words = [WORDS[(number * k + k) % len(WORDS)] for k in (1, 3, 5)]
        prompt = f"Of the {words[0]} and the {words[1]}, number {number}, and of a {words[2]} that"
        self.requests = [Request(prompt, number, args.tokens)]
        if args.long:
            before = " ".join(self.random.choice(WORDS) for _ in range(args.long))
            self.requests.append(Request(f"{before}. {prompt}", number, args.tokens))
        self.firsts, self.waits, self.answers, self.refused, self.abandoned = [], [], 0, 0, 0
        self.wrong = []

    def run(self, end):
        while time.monotonic() < end:
            request = self.requests[-1] if self.random.random() < 0.25 else self.requests[0]
            hangs_up = self.random.random() < self.args.hang_up
            pause = 0.2 if self.random.random() < self.args.slow else 0
            most = self.random.randrange(self.args.tokens) if hangs_up else sys.maxsize
            try:
                text = self.ask(request, most, pause, measured=not pause)
            except Busy as busy:
                self.refused += 1
                time.sleep(min(busy.seconds, max(0.0, end - time.monotonic())))
                continue
            except Exception as error:
                self.wrong.append(f"lost: {error!r}")
                continue
            if text is None:
                self.abandoned += 1
                continue
            self.answers += 1
            if text != request.expected:
                self.wrong.append(f"{text!r} instead of {request.expected!r}")

    def ask(self, request, most, pause=0, measured=False):
        """Sends the request; returns the text, or None if it was abandoned after `most` pieces."""
        connection = http.client.HTTPConnection(self.host, timeout=600)
        try:
            start, last, text, ended, pieces = time.monotonic(), None, "", False, 0
            connection.request("POST", "/v1/completions", request.body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status == 429:
                raise Busy(float(response.headers["Retry-After"]))
            if response.status != 200:
                raise RuntimeError(f"status {response.status}: {response.read()!r}")
            for line in response:
                if not line.startswith(b"data: "):
                    continue
                data = line[len(b"data: "):].strip()
                if data == b"[DONE]":
                    ended = True
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    raise RuntimeError(chunk["error"]["message"])
                text += chunk["choices"][0]["text"]
                now, pieces = time.monotonic(), pieces + 1
                if measured:
                    self.firsts.append(now - start) if last is None else self.waits.append(now - last)
                last = now
                if pieces > most:
                    return None
                time.sleep(pause)
            if not ended:
                raise RuntimeError("the stream ended without [DONE]")
            return text
        finally:
            connection.close()


class Busy(Exception):
    def __init__(self, seconds):
        super().__init__(f"busy for {seconds} s")
        self.seconds = seconds


def report(clients, memory):
    wrong = [what for client in clients for what in client.wrong]
    total = lambda name: sum(getattr(client, name) for client in clients)
    print(f"{total('answers')} answers, {total('abandoned')} abandoned, {total('refused')} refusals (429), {len(wrong)} lost or mixed up")
    for name, what in ("firsts", "time to first token"), ("waits", "between pieces"):
        times = sorted(time for client in clients for time in getattr(client, name))
        at = lambda share: times[min(len(times) - 1, int(share * len(times)))] if times else float("nan")
        print(f"{what}: p50 {at(0.5):.3f} s, p99 {at(0.99):.3f} s, longest {at(1):.3f} s")
    if memory.pid:
        grown = (memory.read("VmRSS:") - memory.halfway) / 1e6 if memory.halfway else float("nan")
        print(f"peak memory: {memory.read('VmHWM:') / 1e6:.1f} MB; grown by {grown:+.1f} MB in the second half")
    for what in wrong[:10]:
        print(f"wrong: {what}")
    silent = sum(not client.answers for client in clients)
    if silent:
        print(f"{silent} clients got no answer")
    return 1 if wrong or silent else 0


if __name__ == "__main__":
    main()
