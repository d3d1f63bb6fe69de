#!/usr/bin/env python3
"""Throughput and waits of a server with several clients at once: larder's, or llama.cpp's on the same file.

    clients.py --url http://127.0.0.1:8080 --clients 1,2,4,8,16

Each client streams completions of its own random prompt, one after the other. Counted are tokens that arrive while all clients
have theirs under way: from the last first token to the first last one. Standard library only.
"""

import argparse
import http.client
import json
import random
import statistics
import threading
import time
from urllib.parse import urlsplit

WORDS = "sea ship light old house wind letter garden river stone voice morning road winter window table star field".split()


def prompt(rng, words):
    return " ".join(rng.choice(WORDS) for _ in range(words))


def answer(url, text, tokens, timeout):
    """The times at which the pieces of an answer arrive, after the request."""
    target = urlsplit(url)
    connection = http.client.HTTPConnection(target.hostname, target.port, timeout=timeout)
    body = {"prompt": text, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True, "cache_prompt": False}
    began, times = time.monotonic(), []
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"{url}: {response.status} {response.read(500)}")
    for line in response:
        if line.startswith(b"data: {"):
            choices = json.loads(line[6:])["choices"]
            if choices and choices[0].get("text"):
                times.append(time.monotonic())
    connection.close()
    return began, times


def measure(url, clients, tokens, words, timeout, seed):
    rng = random.Random(seed)
    prompts = [prompt(rng, words) for _ in range(clients)]
    results, gate = [None] * clients, threading.Barrier(clients)

    def client(i):
        gate.wait()
        results[i] = answer(url, prompts[i], tokens, timeout)

    threads = [threading.Thread(target=client, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = max(times[0] for _, times in results)
    last = min(times[-1] for _, times in results)
    within = sum(1 for _, times in results for t in times if first < t <= last)
    waits = [b - a for _, times in results for a, b in zip(times, times[1:]) if a >= first]
    starts = [times[0] - began for began, times in results]
    # Short answers may end before the last prompt is computed.
    return within / (last - first) if last > first else float("nan"), waits, starts


def at(values, share):
    values = sorted(values)
    return values[round((len(values) - 1) * share)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--clients", default="1,2,4,8,16")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--words", type=int, default=32, help="words of a prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=600)
    args = parser.parse_args()
    print(f"{'clients':>7} {'tokens/s':>9} {'of one':>7} {'between p50':>12} {'p99':>8} {'first p50':>10} {'p99':>8}")
    one = None
    for clients in map(int, args.clients.split(",")):
        runs = [measure(args.url, clients, args.tokens, args.words, args.timeout, seed) for seed in range(args.repeats)]
        rate = statistics.median(run[0] for run in runs)
        waits = [wait for run in runs for wait in run[1]]
        starts = [start for run in runs for start in run[2]]
        one = one or rate
        times = " ".join(f"{1e3 * at(values, share):>{width}.0f} ms" for values, share, width in (
            (waits, 0.5, 9), (waits, 0.99, 5), (starts, 0.5, 7), (starts, 0.99, 5)))
        print(f"{clients:>7} {rate:>9.1f} {rate / one:>7.2f} {times}", flush=True)


if __name__ == "__main__":
    main()
