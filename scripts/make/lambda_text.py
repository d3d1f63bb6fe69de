#!/usr/bin/env python3
"""Generates texts of the demo model with several λ, and shows where they break: repeated and distinct words, marks, and their loss.

    larder serve -m models/demo --cache 8x --port 8080
    python scripts/make/lambda_text.py --url http://127.0.0.1:8080

Prints a row for each λ: the mean over prompts and seeds of the share of pairs of words that occurred before, of distinct words, of
punctuation marks for each word, and of the loss in nats per token that the model's own routing gives to the text.
"""

import argparse
import json
import re
import urllib.request
from statistics import mean

from demo_sampling import PROMPTS, SEEDS, Server, distinct, repeated_pairs, words

LAMBDAS = [0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7, 1]


def marks(text: str) -> float:
    return len(re.findall(r"[^\w\s']", text)) / max(1, len(words(text)))


def set_routing(url: str, routing: str) -> None:
    urllib.request.urlopen(urllib.request.Request(f"{url}/engine", json.dumps({"routing": routing}).encode())).close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--lambda", dest="lambdas", type=float, nargs="+", default=LAMBDAS)
    parser.add_argument("--keep", type=int, default=1, help="experts that are always chosen (j)")
    parser.add_argument("--show", action="store_true", help="print the first text of each λ too")
    args = parser.parse_args()
    server = Server(args.url)
    print("| λ | repeated pairs | distinct words | marks per word | nats per token |\n|---|---:|---:|---:|---:|")
    for value in args.lambdas:
        set_routing(args.url, f"prior:lambda={value},j={args.keep}")
        made = [(prompt, server.text(prompt, seed, {})) for prompt in PROMPTS for seed in SEEDS]
        set_routing(args.url, "original")
        loss = mean(server.loss(prompt + text) for prompt, text in made)
        texts = [text for _, text in made]
        pairs, share, dots = (mean(map(measure, texts)) for measure in (repeated_pairs, distinct, marks))
        print(f"| {value:g} | {100 * pairs:.1f} % | {100 * share:.0f} % | {dots:.2f} | {loss:.2f} |", flush=True)
        if args.show:
            print(f"<!-- {texts[0]!r} -->", flush=True)


if __name__ == "__main__":
    main()
