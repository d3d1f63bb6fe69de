#!/usr/bin/env python3
"""Measures what each lossy routing lever saves and costs, alone and together, on the demo model, and prints Markdown tables.

Needs Python 3.10 or newer, numpy, safetensors, and larder (default: target/release/larder).

    python scripts/bench/lossy_frontier.py --choose FILE [--text FILE] [--larder LARDER] [--work FOLDER]

The demo model with sizes filled up to 256 (as format_quality.py makes it) becomes a store with experts in q4_0 and smaller copies in
q2_k, both with an importance matrix of the text of --choose. Every setting of a family is measured on that text, one token at a time,
with half and with a quarter of the experts in memory. Of each family, the setting with the fewest bytes whose perplexity rises by no
more than 1 % is then measured on --text (default: the held-out book), on which nothing is chosen. The last two columns divide the bytes
that `prior` with LRU reads there at the same perplexity, and at the same output KL, on the line between its measured settings, by the
family's.

The rivals are the whole model in smaller number formats, with as many slots as the same memory holds. Outputs are kept in the work
folder, and a measurement that is there is not repeated. No figure depends on the speed of the machine.
"""

import argparse
import json
import shutil
import subprocess
from pathlib import Path

import format_quality

LIMIT = 0.01
SIZES = (16, 8)
CHUNK = 512
PRIORS = (0.05, 0.1, 0.15, 0.2, 0.3)
THRESHOLDS = ((0.05, 0.1), (0.06, 0.12), (0.08, 0.12))
FAMILIES = {
    "prior": [f"prior:lambda={bonus}" for bonus in PRIORS],
    "light": [f"light:tau={tau}" for tau in (0.03, 0.05, 0.06, 0.08, 0.1)],
    "light, filled": [f"light:tau={tau},fill=resident" for tau in (0.03, 0.05, 0.06, 0.08, 0.1)],
    "shelf": [f"shelf:tau={tau}" for tau in (0.05, 0.1, 0.15, 0.2)],
    "light + shelf": [f"light:tau={low}+shelf:tau={high}" for low, high in (*THRESHOLDS, (0.06, 0.15), (0.08, 0.2))],
    "prior + shelf": [f"prior:lambda={bonus}+shelf:tau=0.12" for bonus in (0.05, 0.1, 0.15, 0.2)],
    "prior + light + shelf": [
        f"prior:lambda={bonus}+light:tau={low}+shelf:tau={high}" for bonus in (0.1, 0.15, 0.2) for low, high in THRESHOLDS
    ],
}
EVICTIONS = {"lru": ["-o", "eviction=lru"]}
LEARNED = ("prior", "prior + light + shelf")
RIVALS = ("q3_k", "iq3_xxs", "q2_k")
Q4_0_BITS = 4.5


class Bench:
    def __init__(self, larder: Path, work: Path, choose: Path):
        self.larder, self.work, self.choose = larder, work, choose
        work.mkdir(parents=True, exist_ok=True)
        EVICTIONS["learned"] = ["-o", "eviction=learned", "-o", f"evictor={format_quality.DEMO / 'evictor.safetensors'}"]

    def run(self, *arguments) -> str:
        done = subprocess.run([str(self.larder), *map(str, arguments)], stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout

    def store(self, experts: str, *more) -> Path:
        store = self.work / experts
        if not (store / "larder.json").exists():
            checkpoint, imatrix = self.work / "checkpoint", self.work / "imatrix.gguf"
            if not checkpoint.exists():
                shutil.rmtree(self.work / "store", ignore_errors=True)
                format_quality.make_checkpoint(self.larder, self.work)
            if not imatrix.exists():
                self.run("imatrix", self.choose, "-m", checkpoint, "--chunk", CHUNK, "-o", imatrix)
            self.run("convert", checkpoint, store, "--experts", experts, "--imatrix", imatrix, *more)
        return store

    def sweep(self, name: str, store: Path, text: Path, tokens: int, size: int, eviction: str, specs) -> list[dict]:
        """A row for the model's own routing and for each strategy."""
        kept = self.work / f"{name}-{size}-{eviction}.json"
        if not kept.exists():
            strategies = [flag for spec in specs for flag in ("--strategy", spec)] or ["--lambda", "0"]
            flags = ["--tokens", tokens, "--chunk", CHUNK, "--sizes", size, "-o", "measure-every=1", *EVICTIONS[eviction]]
            kept.write_text(self.run("eval", "sweep", text, "-m", store, *flags, *strategies, "--json"))
        return json.loads(kept.read_text())["rows"]


def chosen(rows: list[dict]) -> dict | None:
    fits = [row for row in rows if row["loss"]["value"] <= LIMIT]
    return min(fits, key=lambda row: row["bytes_per_token"], default=None)


def perplexity_of(row: dict) -> float:
    return row["perplexity"]["value"]


def kl_of(row: dict) -> float:
    return row["output_kl"] or 0.0


def bytes_at(curve: list[dict], loss_of, loss: float) -> float | None:
    """Bytes per token of a curve at this loss, between two measured settings; None beyond them."""
    points = sorted((loss_of(row), row["bytes_per_token"]) for row in curve)
    for (low, high_bytes), (high, low_bytes) in zip(points, points[1:]):
        if low <= loss <= high:
            return high_bytes + (low_bytes - high_bytes) * (loss - low) / (high - low)
    return None


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---", "---", *["---:"] * (len(header) - 2)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def change(loss: dict) -> str:
    return f"{100 * loss['value']:+.2f} ± {196 * (loss['error'] or 0):.2f} %"


def frontier(bench: Bench, store: Path, text: Path, tokens: tuple[int, int], size: int) -> str:
    settings = [spec for specs in FAMILIES.values() for spec in specs]
    found = {"lru": bench.sweep("choose", store, bench.choose, tokens[0], size, "lru", settings)}
    learned = [spec for family in LEARNED for spec in FAMILIES[family]]
    found["learned"] = bench.sweep("choose", store, bench.choose, tokens[0], size, "learned", learned)
    picked = []
    for family, specs in FAMILIES.items():
        for eviction in ("lru", "learned")[: 2 if family in LEARNED else 1]:
            row = chosen([row for row in found[eviction] if row["routing"] in specs])
            if row:
                picked.append((family, eviction, row["routing"]))
    reported = {}
    for eviction in EVICTIONS:
        specs = dict.fromkeys(spec for _, how, spec in picked if how == eviction)
        specs |= dict.fromkeys(FAMILIES["prior"] if eviction == "lru" else [])
        reported[eviction] = bench.sweep("report", store, text, tokens[1], size, eviction, list(specs))
    own = next(row for row in reported["lru"] if row["routing"] == "original")
    curve = [own, *(row for row in reported["lru"] if row["routing"] in FAMILIES["prior"])]
    rows = [["original", "lru", "", f"{own['perplexity']['value']:.2f}", "", "", f"{own['bytes_per_token'] / 1e3:.0f} kB", "", ""]]
    for family, eviction, spec in picked:
        row = next(row for row in reported[eviction] if row["routing"] == spec)
        same = [bytes_at(curve, loss_of, loss_of(row)) for loss_of in (perplexity_of, kl_of)]
        rows.append([
            f"{family}: `{spec}`",
            eviction,
            change(row["loss"]),
            f"{row['perplexity']['value']:.2f}",
            f"{row['output_kl']:.4f} ± {row['output_kl_half_interval']:.4f}",
            f"{100 * row['output_agreement']:.1f} %",
            f"{row['bytes_per_token'] / 1e3:.0f} kB",
            *(f"{other / row['bytes_per_token']:.2f}" if other else "–" for other in same),
        ])
    header = ["routing", "eviction", "perplexity, more", "perplexity", "output KL", "same token", "read per token"]
    header += ["÷ at its perplexity", "÷ at its KL"]
    return f"{size} of 32 experts in memory:\n\n{table(header, rows)}"


def rivals(bench: Bench, text: Path, tokens: int, size: int, base: float) -> str:
    rows = []
    for kind in RIVALS:
        values, block = format_quality.read_store.BLOCKS[kind]
        slots = min(32, int(size * Q4_0_BITS / (8 * block / values)))
        found = bench.sweep(f"rival-{kind}", bench.store(kind), text, tokens, slots, "lru", ["prior:lambda=0.1"])
        for row in found:
            loss = row["perplexity"]["value"] / base - 1
            cells = [kind, f"`{row['routing']}`", str(slots), f"{row['perplexity']['value']:.2f}", f"{100 * loss:+.2f} %"]
            rows.append([*cells, f"{row['bytes_per_token'] / 1e3:.0f} kB"])
    header = ["experts in", "routing", "slots", "perplexity", "over q4_0", "read per token"]
    return f"The whole model smaller, in the memory of {size} experts in q4_0:\n\n{table(header, rows)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--choose", type=Path, required=True, help="text on which settings are chosen")
    parser.add_argument("--text", type=Path, default=format_quality.DEMO / "held-out.txt", help="text of the reported figures")
    parser.add_argument("--larder", type=Path, default=format_quality.ROOT / "target" / "release" / "larder")
    parser.add_argument("--work", type=Path, default=format_quality.ROOT / "target" / "frontier")
    parser.add_argument("--tokens", type=int, nargs=2, default=(2048, 8192), help="tokens of either text")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="experts per layer in memory, of 32")
    args = parser.parse_args()
    bench = Bench(args.larder, args.work, args.choose)
    store = bench.store("q4_0", "--shelf", "q2_k")
    for size in args.sizes:
        print(frontier(bench, store, args.text, args.tokens, size), flush=True)
        own = bench.sweep("report", store, args.text, args.tokens[1], size, "lru", [])[0]
        print("\n" + rivals(bench, args.text, args.tokens[1], size, own["perplexity"]["value"]) + "\n", flush=True)


if __name__ == "__main__":
    main()
