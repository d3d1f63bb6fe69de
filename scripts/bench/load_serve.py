"""Load test of a running `larder serve` with many concurrent clients: no stream may be lost or mixed up.

Needs Python 3.9 or newer and nothing else.

    larder serve -m STORE --parallel 8 --queue 64 --context 512
    python scripts/bench/load_serve.py --url http://127.0.0.1:8080 --clients 64 --seconds 120 --pid PID

Each client has its own prompt and seed. It sends one request while it is alone, and then, concurrently with all others,
repeats it until the time is over; each answer must equal the one that it got alone. Prints the number of answers, the
time to first token (p50 and p99), and, with --pid, the server's peak memory. Exits with 1 if an answer was lost or
mixed up.
"""

import argparse
import http.client
import json
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
    parser.add_argument("--pid", type=int, help="the server's process id, to report its peak memory")
    args = parser.parse_args()
    clients = [Client(args, i) for i in range(args.clients)]
    for client in clients:
        client.expected, _ = client.ask()
    print(f"{len(clients)} clients have sent their first request alone", flush=True)
    end = time.monotonic() + args.seconds
    threads = [threading.Thread(target=client.run, args=(end,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.exit(report(clients, args.pid))


class Client:
    def __init__(self, args, number):
        self.host = urllib.parse.urlsplit(args.url).netloc
        words = [WORDS[(number * k + k) % len(WORDS)] for k in (1, 3, 5)]
        self.body = json.dumps({
            "prompt": f"Of the {words[0]} and the {words[1]}, number {number}, and of a {words[2]} that",
            "max_tokens": args.tokens, "temperature": 0.9, "seed": number, "stream": True, "ignore_eos": True,
        })
        self.expected, self.firsts, self.answers, self.refused = None, [], 0, 0
        self.wrong = []

    def run(self, end):
        while time.monotonic() < end:
            try:
                text, first = self.ask()
            except Busy as busy:
                self.refused += 1
                time.sleep(min(busy.seconds, max(0.0, end - time.monotonic())))
                continue
            except Exception as error:
                self.wrong.append(f"lost: {error!r}")
                continue
            self.answers += 1
            self.firsts.append(first)
            if text != self.expected:
                self.wrong.append(f"{text!r} instead of {self.expected!r}")

    def ask(self):
        """Sends the request; returns the text and the time to its first piece."""
        connection = http.client.HTTPConnection(self.host, timeout=300)
        try:
            start, first, text, ended = time.monotonic(), None, "", False
            connection.request("POST", "/v1/completions", self.body, {"Content-Type": "application/json"})
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
                piece = chunk["choices"][0]["text"]
                if piece and first is None:
                    first = time.monotonic() - start
                text += piece
            if not ended:
                raise RuntimeError("the stream ended without [DONE]")
            return text, first if first is not None else time.monotonic() - start
        finally:
            connection.close()


class Busy(Exception):
    def __init__(self, seconds):
        super().__init__(f"busy for {seconds} s")
        self.seconds = seconds


def report(clients, pid):
    firsts = sorted(first for client in clients for first in client.firsts)
    wrong = [what for client in clients for what in client.wrong]
    at = lambda share: firsts[min(len(firsts) - 1, int(share * len(firsts)))] if firsts else float("nan")
    answers, refused = (sum(getattr(client, name) for client in clients) for name in ("answers", "refused"))
    print(f"{answers} answers, {refused} refusals (429), {len(wrong)} lost or mixed up")
    print(f"time to first token: p50 {at(0.5):.2f} s, p99 {at(0.99):.2f} s")
    if pid:
        with open(f"/proc/{pid}/status") as status:
            peak = next(line for line in status if line.startswith("VmHWM:"))
        print(f"peak memory: {int(peak.split()[1]) * 1024 / 1e6:.1f} MB")
    for what in wrong[:10]:
        print(f"wrong: {what}")
    silent = sum(not client.answers for client in clients)
    if silent:
        print(f"{silent} clients got no answer")
    return 1 if wrong or silent else 0


if __name__ == "__main__":
    main()
