#!/usr/bin/env python3
"""Compares settings of sampling on the demo model: how often its texts repeat themselves, and how likely it finds them.

    larder serve -m models/demo
    python scripts/make/demo_sampling.py --url http://127.0.0.1:8080

Prints a row for the held-out book, one for greedy decoding and one for each combination of the settings: the mean over prompts
and seeds of the share of pairs of words that occurred before, of distinct words, and of the loss in nats per token.
"""

import argparse
import itertools
import json
import re
import urllib.request
from pathlib import Path
from statistics import mean

HELD_OUT = Path(__file__).resolve().parent.parent.parent / "models/demo/held-out.txt"
TOKENS, SEEDS = 200, (1, 2, 3)
LEAD = 8  # first tokens of a text whose loss is not counted
PASSAGE, BETWEEN, PASSAGES = 800, 2400, 20  # characters of the passages of the book, and their distance
PROMPTS = [
    "The old man looked at the door, and",
    "It was a cold evening in November when the stranger came to the inn.",
    '"I have something to tell you," said the captain,',
    "Alice opened the letter with trembling hands. It said",
    "The children ran down to the river,",
    "On the morning of her wedding, Emma",
]


class Server:
    """Completions of a running `larder serve`."""

    def __init__(self, url: str):
        self.url = f"{url}/v1/completions"

    def choice(self, **body) -> dict:
        request = urllib.request.Request(self.url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as response:
            return json.load(response)["choices"][0]

    def text(self, prompt: str, seed: int, sampling: dict) -> str:
        return self.choice(prompt=prompt, max_tokens=TOKENS, seed=seed, **sampling)["text"]

    def loss(self, text: str) -> float:
        found = self.choice(prompt=text, max_tokens=0, echo=True, logprobs=0, temperature=0)
        return -mean(found["logprobs"]["token_logprobs"][1 + LEAD :])


def words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def repeated_pairs(text: str) -> float:
    pairs = list(itertools.pairwise(words(text)))
    return 1 - len(set(pairs)) / max(1, len(pairs))


def distinct(text: str) -> float:
    return len(set(words(text))) / max(1, len(words(text)))


def row(name: str, texts: list[str], losses: list[float]) -> None:
    pairs, share = mean(map(repeated_pairs, texts)), mean(map(distinct, texts))
    print(f"| {name} | {100 * pairs:.1f} % | {100 * share:.0f} % | {mean(losses):.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.6, 0.7, 0.8, 0.9])
    parser.add_argument("--top-p", type=float, nargs="*", default=[0.9])
    parser.add_argument("--min-p", type=float, nargs="*", default=[0.05, 0.1, 0.15])
    parser.add_argument("--repetition-penalty", type=float, nargs="+", default=[1.0, 1.1, 1.15, 1.2])
    args = parser.parse_args()
    server = Server(args.url)
    print("| sampling | repeated pairs | distinct words | nats per token |\n|---|---:|---:|---:|")
    book = HELD_OUT.read_text()
    passages = [book[at : at + PASSAGE] for at in range(0, PASSAGES * BETWEEN, BETWEEN)]
    row("the held-out book", passages, [server.loss(passage) for passage in passages])
    cuts = [("top_p", p) for p in args.top_p] + [("min_p", p) for p in args.min_p]
    off = {"top_p": 1, "min_p": 0}
    grid = [{"temperature": t, "repetition_penalty": r, **off, cut: p}
            for t, r, (cut, p) in itertools.product(args.temperature, args.repetition_penalty, cuts)]
    for sampling in [{"temperature": 0, "repetition_penalty": 1, **off}, *grid]:
        made = [(prompt, server.text(prompt, seed, sampling)) for prompt in PROMPTS for seed in SEEDS]
        name = ", ".join(f"{key.replace('_', '-')} {value:g}" for key, value in sampling.items() if off.get(key) != value)
        row(name, [text for _, text in made], [server.loss(prompt + text) for prompt, text in made])


if __name__ == "__main__":
    main()
