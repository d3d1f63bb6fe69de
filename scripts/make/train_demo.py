#!/usr/bin/env python3
"""Trains the demo model: OLMoE with 8 layers of 32 experts, 20.9 million parameters, on books in the public domain.

    train_demo.py --data BOOKS --out RUN                       (trains until it is stopped; start again to continue)
    train_demo.py --data BOOKS --out RUN --finish 6000000      (decays the learning rate over 6 M tokens and exports)
    train_demo.py --data BOOKS --out RUN --tokens 200000000 --finish 50000000            (both, as on a GPU)
    train_demo.py --data BOOKS --out RUN --eval wiki.test.txt  (bits per byte, load of the experts, a sample)

Requirements: Python 3.10, `pip install torch==2.15.0 transformers==5.23.0 tokenizers numpy`. Uses a GPU if one is
available (bfloat16), else --threads CPU threads.

Writes tokenizer.json, tokens.npy, checkpoint.pt, loss.csv, evaluation.json and, at the end, the checkpoint folder
`model` to RUN. The seed determines initial weights and data order; a resumed run gives the numbers of an uninterrupted
one. The learning rate is constant after a short warmup, so the run can be extended at will; the decay of --finish
completes the model. --tokens and --minutes end the constant phase.
"""

import argparse
import json
from pathlib import Path

import torch

from demo import evaluation, model as demo_model
from demo.books import HELD_OUT, decode, read_books
from demo.tokens import prepare, save_tokenizer
from demo.training import Run

PROMPT = "The old man looked at the door, and"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains the demo model.")
    parser.add_argument("--data", type=Path, required=True, help="folder with the books, one text file each")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokens", type=int, help="the constant phase ends after this many tokens in all")
    parser.add_argument("--minutes", type=float, help="the constant phase ends this long after the start")
    parser.add_argument("--finish", type=int, metavar="TOKENS", help="then decay the learning rate over this many tokens and export")
    parser.add_argument("--checkpoint-minutes", type=float, default=5.0)
    parser.add_argument("--eval", type=Path, metavar="TEXT", help="evaluate the checkpoint instead of training, on the held-out book and this text")
    return parser.parse_args()


def export(run: Run, tokenizer, folder: Path) -> None:
    run.model.save_pretrained(folder)
    save_tokenizer(tokenizer, run.model.config.max_position_embeddings, folder)
    print(f"exported to {folder}")


def evaluate(run: Run, tokenizer, held_out: str, text: Path, seed: int) -> dict:
    held_out_bits, counts = evaluation.measure(run.model, tokenizer, held_out)
    text_bits, _ = evaluation.measure(run.model, tokenizer, decode(text.read_bytes()))
    return {
        "step": run.progress.step,
        "bits_per_byte": {HELD_OUT: round(held_out_bits, 4), text.name: round(text_bits, 4)},
        "load": evaluation.load_report(counts),
        "sample": evaluation.sample(run.model, tokenizer, PROMPT, 200, seed),
    }


def print_report(report: dict) -> None:
    print("\n".join(f"{name}: {bits} bits per byte" for name, bits in report["bits_per_byte"].items()))
    for row in report["load"]:
        print(f"layer {row['layer']}: min {row['least']:.4f}  max {row['most']:.4f}  never chosen {row['dead']}  "
              f"entropy {row['entropy_bits']} bits")
    print(report["sample"])


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    torch.set_num_interop_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    books, held_out = read_books(args.data)
    tokenizer, stream = prepare(books, demo_model.VOCABULARY, args.out)
    run = Run(stream, args.out, args.seed)
    total, active = demo_model.parameters(run.model)
    print(f"{len(books)} books, {len(stream) / 1e6:.2f} M tokens, held out: {HELD_OUT}; "
          f"{total / 1e6:.2f} M parameters, {active / 1e6:.2f} M active; {run.device}", flush=True)
    if args.eval:
        report = evaluate(run, tokenizer, held_out, args.eval, args.seed)
        (args.out / "evaluation.json").write_text(json.dumps(report, indent=1) + "\n")
        print_report(report)
    elif run.train(args.tokens, args.minutes, args.finish, args.checkpoint_minutes):
        export(run, tokenizer, args.out / "model")


if __name__ == "__main__":
    main()
