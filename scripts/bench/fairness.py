"""What a long prompt costs the others: two agents and a chat on a running `larder serve`.

Needs Python 3.9 or newer and nothing else.

    larder serve -m STORE --context 32K --parallel 4
    python scripts/bench/fairness.py --url http://127.0.0.1:8080 --step-time 0.5

A chat decodes all the time. Agent B is warm: it has had its answer to a prompt of --warm tokens. Then agent A sends a prompt of
--long tokens that nobody has sent before. While it is computed, B sends its prompt with 30 tokens more, and newcomers send 50
tokens, by turns. Prints the chat's gaps between tokens with and without A's prompt, and for B and the newcomers the time to their
first token, and how many tokens the chat got meanwhile: each step gives it one. Exits with 1 if the chat's 95th percentile
is above two step times, or the median newcomer waits for more than two steps or a warm request for more than three.
"""

import argparse
import http.client
import json
import random
import statistics
import sys
import threading
import time
import urllib.parse


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--long", type=int, default=20000)
    parser.add_argument("--warm", type=int, default=4000)
    parser.add_argument("--vocab", type=int, default=1000, help="tokens are drawn from those below")
    parser.add_argument("--step-time", type=float, default=0.5, help="that of the server")
    args = parser.parse_args()
    host, draw = urllib.parse.urlsplit(args.url).netloc, random.Random(7)
    tokens = lambda count: [draw.randrange(3, args.vocab) for _ in range(count)]
    chat = Stream(host, tokens(20), 100000)
    warm = tokens(args.warm)
    Stream(host, warm, 2).wait()
    began = time.monotonic()
    time.sleep(5)
    agent = Stream(host, tokens(args.long), 2)
    waits = {"newcomer, 50 tokens": [], "warm request": []}
    time.sleep(2 * args.step_time)
    while agent.is_running():
        for name, found in waits.items():
            prompt = tokens(50) if name.startswith("newcomer") else warm + tokens(30)
            before, start = len(chat.times), time.monotonic()
            first = Stream(host, prompt, 1)
            first.wait()
            if agent.is_running():
                found.append((first.times[0] - start, sum(start < at < first.times[0] for at in chat.times[before:])))
        time.sleep(args.step_time)
    ended = agent.times[0]
    chat.stop()
    gaps = [(b, b - a) for a, b in zip(chat.times, chat.times[1:])]
    alone = [gap for at, gap in gaps if began < at < agent.start]
    beside = [gap for at, gap in gaps if agent.start < at < ended]
    print(f"a prompt of {args.long} tokens: {ended - agent.start:.1f} s beside the others")
    print("| | median | 95th percentile | longest | of |\n|---|---|---|---|---|")
    row = lambda name, times: print(f"| {name} | {statistics.median(times):.3f} s | {late(times):.3f} s | {max(times):.3f} s | {len(times)} |")
    row("the chat's gaps before", alone)
    row("the chat's gaps beside the prompt", beside)
    steps = {}
    for name, found in waits.items():
        row(f"first token of a {name}", [seconds for seconds, _ in found])
        steps[name] = statistics.median(steps for _, steps in found)
        print(f"| its steps | {steps[name]:g} | | {max(steps for _, steps in found)} | {len(found)} |")
    holds = late(beside) <= 2 * args.step_time and steps["newcomer, 50 tokens"] <= 2 and steps["warm request"] <= 3
    print("holds" if holds else "DOES NOT HOLD")
    sys.exit(not holds)


def late(times):
    return sorted(times)[int(0.95 * (len(times) - 1))]


class Stream:
    """A completion that is read as it comes; `times` has when each piece came."""

    def __init__(self, host, prompt, answer):
        self.times, self.start, self.stopped = [], time.monotonic(), False
        self.connection = http.client.HTTPConnection(host, timeout=3600)
        body = {"prompt": prompt, "max_tokens": answer, "temperature": 1, "seed": 1, "stream": True, "ignore_eos": True}
        self.thread = threading.Thread(target=self.read, args=(json.dumps(body),), daemon=True)
        self.thread.start()

    def read(self, body):
        self.connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = self.connection.getresponse()
        if response.status != 200:
            sys.exit(f"status {response.status}: {response.read()!r}")
        for line in response:
            if self.stopped:
                return
            if line.startswith(b"data: {"):
                data = json.loads(line[6:])
                if data.get("choices"):
                    self.times.append(time.monotonic())

    def is_running(self):
        return not self.times

    def wait(self):
        self.thread.join()

    def stop(self):
        self.stopped = True


if __name__ == "__main__":
    main()
