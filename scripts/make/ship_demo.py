#!/usr/bin/env python3
"""Makes models/demo from a finished run of train_demo.py: the store, its weights for eviction, its calibration, held-out
text, figures and README.

Needs what train_demo.py needs, and the larder command, built with --release.

    python scripts/make/ship_demo.py --data BOOKS --run RUN --wikitext wiki.test.txt [--larder target/release/larder]

Steps whose output exists in RUN/ship are skipped; delete an output to make it again.
"""

import argparse
import csv
import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
from demo.books import HELD_OUT, NOT_PROSE, clean, decode, read_books
from demo.manner import ANSWER, FINDINGS, write_settings, write_sidecars
from demo.tokens import save_tokenizer
from figures import Series, chart, heat
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parent.parent.parent
SHIPPED = ROOT / "models/demo"
SEQUENCE = 512  # length of a training sequence in tokens
TRACED = 160  # sequences of the training text whose routing the evictor learns from
HELD_OUT_BYTES = 80_000
TUNE_TEXT = "treasure-island-rest.txt"
TUNE_FLAGS = ["--cache", "8x", "--tokens", 2048]


class Steps:
    """Runs commands and keeps their output."""

    def __init__(self, larder: Path, folder: Path):
        self.larder, self.folder = larder, folder
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, made: str, *arguments) -> Path:
        """Runs larder unless the file or folder exists; `{}` stands for its path."""
        path = self.folder / made
        if not path.exists():
            command = [str(self.larder), *(str(a).format(path) for a in arguments)]
            print(" ".join(command), flush=True)
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            (self.folder / f"{made}.txt").write_text(done.stdout)
        return path

    def printed(self, made: str, *arguments) -> str:
        """The text that larder prints."""
        path = self.folder / f"{made}.txt"
        if not path.exists():
            done = subprocess.run([str(self.larder), *map(str, arguments)], stdout=subprocess.PIPE, text=True, check=True)
            path.write_text(done.stdout)
        return path.read_text()


def tuned(steps: Steps, store: Path, held_out: str) -> Path:
    """The calibration of lossy routing, on the part of the held-out book that does not ship, so that nothing else was chosen on it."""
    text = steps.folder / TUNE_TEXT
    rest = held_out.encode()[HELD_OUT_BYTES:].decode(errors="ignore")
    text.write_text(rest[rest.index("\n\n") + 2 :])
    steps.printed("tune", "tune", text, "-m", store, "--chunk", SEQUENCE, *TUNE_FLAGS, "--force")
    return store / "quality.json"


def traced_text(data: Path, run: Path, folder: Path) -> Path:
    """Token ids of passages spread evenly over the training books."""
    path = folder / "traced.json"
    if not path.exists():
        stream = np.load(run / "tokens.npy")
        starts = np.linspace(0, len(stream) - SEQUENCE, TRACED, dtype=np.int64)
        path.write_text(json.dumps(np.concatenate([stream[s : s + SEQUENCE] for s in starts]).tolist()))
    return path


def loss_figure(run: Path, to: Path) -> list[dict]:
    with (run / "loss.csv").open() as file:
        log = list(csv.DictReader(file))
    every = max(1, len(log) // 300)
    mean = lambda at: sum(float(r["loss"]) for r in log[max(0, at - every + 1) : at + 1]) / min(every, at + 1)
    points = [(int(log[at]["tokens"]) / 1e6, mean(at)) for at in range(every - 1, len(log), every)]
    chart(to, "Training loss", "million tokens", "cross entropy, nats per token", [Series("training", points)])
    return log


def readme(run: Path, log: list[dict], evaluation: dict, store_bits: dict, judged: str, books: list[str], sample: str) -> str:
    load = evaluation["load"]
    rows = "\n".join(f"| {r['layer']} | {100 * r['least']:.2f} % | {100 * r['most']:.2f} % | {r['dead']} | {r['entropy_bits']:.2f} |" for r in load)
    bits = "\n".join(
        f"| {name} | {evaluation['bits_per_byte'][name]:.3f} | {store_bits[name]:.3f} |" for name in evaluation["bits_per_byte"]
    )
    decay = sum(float(r["learning_rate"]) < max(float(x["learning_rate"]) for x in log) for r in log[100:])
    return f"""# The demo model

A larder store, ready to run: OLMoE with 8 layers of 32 experts, 4 for each token, hidden size 192, 20.9 million
parameters of which 4.4 million are active for a token, weights in q8_0, a byte-level BPE tokenizer of 4,096 tokens. It was
trained for larder from scratch on old novels, so that everything can be tried and measured without a download. It writes
English sentences in their style, and has no knowledge of facts.

    cargo run --release -- run -p "The old man looked at the door, and"

> {sample}

## How it writes

Without flags, `run`, `chat`, `serve` and the page use the sampling of `generation_config.json`: temperature 0.7, min-p 0.1, repetition
penalty 1.2. Greedily it repeats itself after a sentence. The settings are among those that repeat pairs of words as seldom as the held-out
book does, and of these among the ones whose text the model itself finds most likely, which reads best; at temperature 0.6 longer texts
begin to repeat themselves. Six prompts with three seeds each, 200 tokens, made by `scripts/make/demo_sampling.py` on 2026-11-26 (the texts do not depend on the
machine; the passages of the book have 800 characters):

{FINDINGS}
`larder.toml` holds the other defaults: slots for a quarter of the experts, and for `chat` and `serve` the context of the training and
answers of {ANSWER} tokens, so that earlier ones stay in the context. `chat_template.jinja` puts messages and answers one behind the other as paragraphs of
one text, since that is all that the model knows. `welcome.json` holds first messages that suit it.

## How it was made

    python scripts/make/train_demo.py --data BOOKS --out RUN
    python scripts/make/train_demo.py --data BOOKS --out RUN --finish 4000000
    python scripts/make/train_demo.py --data BOOKS --out RUN --eval wiki.test.txt
    python scripts/make/ship_demo.py --data BOOKS --run RUN --wikitext wiki.test.txt

{len(log):,} steps of 12,288 tokens, {int(log[-1]['tokens']) / 1e6:.1f} million tokens in all, in sequences of {SEQUENCE}; Muon for the
matrices and AdamW for the rest, warmup of 100 steps, a constant rate, and a linear decay over the last {decay} steps; the
load of the experts is balanced layer by layer. Seed 1, one CPU thread. It was not trained on longer contexts than {SEQUENCE} tokens.

![Training loss](loss.svg)

| bits per byte | float32, transformers | this store, larder |
|---|---:|---:|
{bits}

{HELD_OUT} is the only book of its author in the collection and was held out of training; `held-out.txt` contains its
first {HELD_OUT_BYTES // 1000} kB, one paragraph per line, with plain quotes. WikiText-2 is a different kind of text.
The left column is measured on overlapping windows of 512 tokens, the right one on chunks of 512 tokens without earlier context.

## Its experts

Each expert's share of the choices over the held-out book; an even load is 3.12 % per expert and an entropy of 5 bits.

![Load of the experts](load.svg)

| layer | min | max | never chosen | entropy, bits |
|---|---:|---:|---:|---:|
{rows}

## Its weights for eviction

`evictor.safetensors` was trained by `larder lab train` on the routing of {TRACED} passages of {SEQUENCE} tokens, spread evenly over
the training text. On held-out passages:

```
{judged.strip()}
```

## Its calibration

`quality.json` holds what [budgets of loss](../../docs/lossy-routing.md#a-budget-of-loss---quality) need and the [cost of λ](../../docs/evaluation.md#the-cost-of-λ), measured on the first 2,048 tokens
of {HELD_OUT} behind the part in `held-out.txt`: a text that the model was not trained on, and that no setting was chosen on.

    larder tune {TUNE_TEXT} -m models/demo --chunk {SEQUENCE} {" ".join(map(str, TUNE_FLAGS))}

## Data and licence

Texts of Project Gutenberg in the public domain, without its header: {', '.join(books)}. The lines of a paragraph are
joined, quotes and dashes replaced by plain ones (the tokenizer does the same with its input). The weights, the tokenizer and the figures are
published under the licence of this project; the text of `held-out.txt` is in the public domain.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes models/demo from a finished run of train_demo.py.")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--wikitext", type=Path, required=True)
    parser.add_argument("--larder", type=Path, default=ROOT / "target/release/larder")
    args = parser.parse_args()
    steps = Steps(args.larder, args.run / "ship")
    save_tokenizer(Tokenizer.from_file(str(args.run / "tokenizer.json")), SEQUENCE, args.run / "model")
    write_sidecars(args.run / "model")
    store = steps.run("store", "convert", args.run / "model", "{}", "--experts", "q8_0", "--resident", "q8_0")

    ids = traced_text(args.data, args.run, steps.folder)
    trace = steps.run("trace.safetensors", "eval", "ppl", ids, "-m", store, "--chunk", SEQUENCE, "--one-by-one", "--trace", "{}")
    evictor = steps.run("evictor.safetensors", "lab", "train", trace, "--choose", 0, "--judge", TRACED // 4, "--out", "{}")
    judged = steps.printed("judged", "lab", "judge", trace, "--evictor", evictor, "--unseen")

    books, held_out = read_books(args.data)
    calibration = tuned(steps, store, held_out)
    texts = {HELD_OUT: held_out, args.wikitext.name: decode(args.wikitext.read_bytes())}
    bits = {}
    for name, text in texts.items():
        file = steps.folder / f"{name}.full.txt"
        file.write_text(text)
        found = json.loads(steps.printed(f"bits-{name}", "eval", "ppl", file, "-m", store, "--chunk", SEQUENCE, "--json"))
        bits[name] = found["bits_per_byte"]
    sample = steps.printed("sample", "run", "-m", store, "-p", "The old man looked at the door, and", "-n", 90).strip().replace("\n", " ")

    shutil.rmtree(SHIPPED, ignore_errors=True)
    shutil.copytree(store, SHIPPED)
    shutil.copy(evictor, SHIPPED)
    shutil.copy(calibration, SHIPPED)
    subprocess.run([str(args.larder), "store", "seal", str(SHIPPED)], check=True)
    write_settings(SHIPPED, SEQUENCE)
    cut = held_out.encode()[:HELD_OUT_BYTES].decode(errors="ignore")
    (SHIPPED / "held-out.txt").write_text(cut[: cut.rfind("\n\n")] + "\n")
    evaluation = json.loads((args.run / "evaluation.json").read_text())
    log = loss_figure(args.run, SHIPPED / "loss.svg")
    heat(SHIPPED / "load.svg", "Load of the experts", "expert", "layer", [r["shares"] for r in evaluation["load"]], 1 / 32)
    names = sorted(p.stem for p in args.data.glob("*.txt") if p.stem not in NOT_PROSE and p.stem != HELD_OUT)
    (SHIPPED / "README.md").write_text(readme(args.run, log, evaluation, bits, judged, names, sample))


if __name__ == "__main__":
    main()
