#!/usr/bin/env python3
"""Measures the tables and figures of the papers on the demo model and writes docs/results.md and docs/results/*.svg.

Needs Python 3.10 and the larder command, built with --release; nothing else.

    python scripts/make/results.py [--larder target/release/larder] [--work target/results] [--only trade-off,speed,...]

Outputs of commands are kept in the work folder, and a measurement with an output there is not repeated: delete the
file, or the folder, to measure again. Everything but speed repeats exactly on every machine. The text of the page is in
results_words.json.
"""

import argparse
import json
import subprocess
from pathlib import Path

from figures import Series, chart

ROOT = Path(__file__).resolve().parent.parent.parent
MODEL, TEXT = ROOT / "models/demo", ROOT / "models/demo/held-out.txt"
REPORTED = 8192  # of the text on which nothing is chosen
TOKENS, CHUNK = 3072, 512  # the model was trained on sequences of 512 tokens
LAMBDAS = "0.02,0.05,0.1,0.15,0.2,0.3,0.5,0.8"
HALF, QUARTER = 16, 8
SIZES = (4, 6, 8, 10, 12, 16, 20, 24, 28, 32)
LOSSES = (0.01, 0.05, 0.10)


class Lab:
    """Runs the command and caches its output."""

    def __init__(self, larder: Path, work: Path):
        self.larder, self.work = larder, work
        work.mkdir(parents=True, exist_ok=True)

    def json(self, name: str, *arguments) -> dict:
        kept = self.work / f"{name}.json"
        if not kept.exists():
            command = [str(self.larder), *map(str, arguments), "--json"]
            print(" ".join(command), flush=True)
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            partial = kept.with_suffix(".part")
            partial.write_text(done.stdout)
            partial.replace(kept)
        return json.loads(kept.read_text())

    def sweep(self, name: str, *flags) -> dict:
        return self.json(name, "eval", "sweep", TEXT, "-m", MODEL, "--tokens", TOKENS, "--chunk", CHUNK, *flags)


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def rows_of(found: dict, slots: int, family: str | None = None) -> list[dict]:
    return [r for r in found["rows"] if r["slots"] == slots and family in (None, r["family"])]


def original(found: dict, slots: int) -> dict:
    return next(r for r in rows_of(found, slots) if r["routing"] == "original")


def optimum(found: dict, slots: int) -> float:
    return dict(map(tuple, found["optimum"]))[slots]


def best(rows: list[dict], loss: float) -> dict | None:
    """The setting with the fewest misses that raises perplexity by no more than `loss`."""
    return min((r for r in rows if r["loss"]["value"] <= loss), key=lambda r: r["miss_rate"], default=None)


def points(rows: list[dict]) -> list[tuple[float, float]]:
    return sorted((100 * r["miss_rate"], 100 * r["loss"]["value"]) for r in rows)


class Page:
    def __init__(self, figures: Path):
        self.figures, self.parts = figures, []
        figures.mkdir(parents=True, exist_ok=True)

    def add(self, *parts: str) -> None:
        self.parts += parts

    def chart(self, name: str, title: str, *arguments, **more) -> None:
        chart(self.figures / f"{name}.svg", title, *arguments, **more)
        self.add(f"![{title}]({self.figures.name}/{name}.svg)")

    def text(self) -> str:
        return "\n\n".join(self.parts) + "\n"


def trade_off(lab: Lab, page: Page) -> None:
    found = lab.sweep("sweep", "--sizes", f"{QUARTER},{HALF}", "--lambda", LAMBDAS, "--budget", "0.003,0.01,0.02,0.03,0.05",
                      "--max-rank", "6,8,12,16", "--cumsum", "0.3,0.5,0.6,0.7,0.8,0.9", "--prune", "3,2,1", "--keep", "1")
    page.add("## Perplexity against misses (paper: figures 4, 8 and 12)")
    for slots, name, title in [(HALF, "half", "Half of the experts in memory"), (QUARTER, "quarter", "A quarter of the experts in memory")]:
        plain, known = original(found, slots), optimum(found, slots)
        families = [f for f in ("prior", "budget", "cumsum", "max-rank", "prune")]
        start = (100 * plain["miss_rate"], 0.0)
        series = [Series(f, [*points(rows_of(found, slots, f)), start]) for f in families]
        series.append(Series("belady", [(100 * known, 0.0)], line=False))
        page.chart(f"trade-off-{name}", title, "misses, % of wanted experts", "perplexity, % more", series, y=(-1, 11),
                   notes=[(*start, "lru, original")])
        rows = []
        for loss in LOSSES:
            cells = [best(rows_of(found, slots, f), loss) for f in families]
            rows.append([percent(loss, 0), *(percent(c["miss_rate"]) if c else "-" for c in cells)])
        page.add(f"{title}: `original` misses {percent(plain['miss_rate'])} with LRU; Belady's policy, which knows the future, "
                 f"would miss {percent(known)}. Misses of the best setting within each limit on the rise of perplexity:",
                 table(["at most", *families], rows))
    page.add(WORDS["trade-off"])


def unseen(lab: Lab, page: Page) -> None:
    """λ chosen on the first half of the book, and what it gives on the second."""
    text = TEXT.read_text()
    middle = text.index("\n\n", len(text) // 2)
    halves = [lab.work / name for name in ("first-half.txt", "second-half.txt")]
    for half, part in zip(halves, (text[:middle], text[middle:])):
        half.write_text(part)
    flags = ["-m", MODEL, "--chunk", CHUNK, "--keep", "1", "-o", "measure-every=1000000"]
    chosen_on = lab.json("choose", "eval", "sweep", halves[0], "--tokens", TOKENS, "--sizes", f"{QUARTER},{HALF}", "--lambda", LAMBDAS, *flags)
    rows = []
    for slots in (HALF, QUARTER):
        choice = best(rows_of(chosen_on, slots, "prior"), 0.01)
        value = float(choice["routing"].split("=")[1].split(",")[0])
        # The next values of λ are as good as this one: what they differ by is what another rounding would change.
        near = ",".join(f"{value * factor:.4g}" for factor in (0.99, 1, 1.01))
        found = lab.json(f"report-{slots}", "eval", "sweep", halves[1], "--tokens", REPORTED, "--sizes", slots, "--lambda", near, *flags)
        plain, mine = original(found, slots), rows_of(found, slots, "prior")
        middle_row = mine[1]
        rises = [row["loss"]["value"] for row in mine]
        mean = sum(rises) / len(rises)
        spread = sum((rise - mean) ** 2 for rise in rises) / (len(rises) - 1)
        error = 1.96 * (middle_row["loss"]["error"] ** 2 + spread) ** 0.5
        fewer = lambda row, own: percent(1 - row["miss_rate"] / own["miss_rate"])
        rows.append([f"{slots} of 32", f"{value:g}", fewer(choice, original(chosen_on, slots)), f"{100 * choice['loss']['value']:+.2f} %",
                     fewer(middle_row, plain), f"{100 * middle_row['loss']['value']:+.2f} ± {100 * error:.2f} %"])
    page.add("## Settings on text that they were not chosen on",
             table(["experts in memory", "λ", "fewer misses, where chosen", "perplexity, more", "fewer misses, elsewhere", "perplexity, more"], rows),
             WORDS["unseen"])


def lifetimes(lab: Lab, page: Page) -> None:
    found = lab.sweep("lifetime", "--sizes", f"{HALF}", "--lambda", "0.1,0.5", "--keep", "1")
    rows = [[f"`{r['routing']}`", f"{r['lifetime']:.0f}", percent(r["miss_rate"]), f"{percent(r['loss']['value'])} ± {percent(r['loss']['error'])}"]
            for r in rows_of(found, HALF)]
    page.add("## Misses and lifetimes (paper: table 2)", table(["16 of 32 experts", "lifetime, tokens", "misses", "perplexity, more"], rows),
             WORDS["lifetimes"])


def sizes(lab: Lab, page: Page) -> None:
    found = lab.sweep("sizes", "--sizes", ",".join(map(str, SIZES)), "--lambda", LAMBDAS, "--keep", "1")
    lines = [("lru, original", [(s, 100 * original(found, s)["miss_rate"]) for s in SIZES]),
             ("belady, original", [(s, 100 * optimum(found, s)) for s in SIZES])]
    header, rows = ["slots per layer", *map(str, SIZES)], []
    for loss in LOSSES:
        chosen = [best([original(found, s), *rows_of(found, s, "prior")], loss) for s in SIZES]
        lines.append((f"prior, ≤ {percent(loss, 0)}", [(s, 100 * r["miss_rate"]) for s, r in zip(SIZES, chosen)]))
    rows = [[name, *(f"{y:.1f}" for _, y in line)] for name, line in lines]
    page.add("## Cache size (paper: figure 9)")
    page.chart("sizes", "Misses against cache size", "slots per layer, of 32", "misses, % of wanted experts",
               [Series(name, line, dashed=name.startswith("belady")) for name, line in lines], y=(0, 100))
    page.add("Misses in %; for `prior` the λ with the fewest misses within the limit on the rise of perplexity.",
             table(header, rows), WORDS["sizes"])


def spreads(lab: Lab, page: Page) -> None:
    found = lab.sweep("delta", "--sizes", HALF, "--lambda", "0.05,0.1,0.2,0.4", "--delta", "running,token,calibrated", "--keep", "1")
    names = {"prior": "running", "prior, token Δ": "token", "prior, calibrated Δ": "calibrated"}
    rows, series = [], []
    for family, name in names.items():
        mine = rows_of(found, HALF, family)
        series.append(Series(name, points(mine)))
        rows.append([name, *(f"{percent(r['miss_rate'])}, {100 * r['loss']['value']:+.1f} %" for r in mine)])
    page.add("## Where Δ comes from (paper: figure 13)")
    page.chart("delta", "prior with three kinds of Δ, half of the experts", "misses, % of wanted experts", "perplexity, % more", series)
    page.add("Misses, and the rise of perplexity:", table(["Δ", "λ = 0.05", "0.1", "0.2", "0.4"], rows), WORDS["delta"])


def kept(lab: Lab, page: Page) -> None:
    rows, series = [], []
    for j in range(4):
        found = lab.sweep(f"keep-{j}", "--sizes", HALF, "--lambda", "0.05,0.1,0.2,0.4", "--max-rank", "8", "--cumsum", "0.7", "--keep", j)
        mine = rows_of(found, HALF, "prior")
        series.append(Series(f"prior, J = {j}", points(mine)))
        others = [rows_of(found, HALF, f)[0] for f in ("max-rank", "cumsum")]
        rows.append([f"J = {j}", *(f"{percent(r['miss_rate'])}, {100 * r['loss']['value']:+.1f} %" for r in [*mine, *others])])
    page.add("## Experts that are always kept (paper: top-J, figure 4)")
    page.chart("top-j", "prior with J experts of the router's own choice kept", "misses, % of wanted experts", "perplexity, % more", series, y=(-1, 11))
    page.add("Misses, and the rise of perplexity, half of the experts in memory:",
             table(["", "prior 0.05", "0.1", "0.2", "0.4", "max-rank 8", "cumsum 0.7"], rows), WORDS["top-j"])


def eviction(lab: Lab, page: Page) -> None:
    trace = lab.work / "held-out.safetensors"
    lab.json("trace", "eval", "ppl", TEXT, "-m", MODEL, "--chunk", CHUNK, "--one-by-one", "--cache", f"{QUARTER}x", "--trace", trace)
    found = lab.json("eviction", "lab", "sweep", trace, "--evictor", MODEL / "evictor.safetensors")
    page.add("## Eviction (papers: layered paging, figures 4 to 6; FlashMoE)")
    for scope, title in [("layer", "a pool for each layer"), ("global", "one pool for all layers")]:
        mine = [r for r in found["rows"] if r["scope"] == scope]
        policies = [p for p in ("lru", "lfu", "lfu:keep", "arc", "lecar", "s3fifo", "llru", "lfru", "learned", "belady") if any(r["policy"] == p for r in mine)]
        line = {p: [(r["slots"], 100 * r["misses"] / r["wanted"]) for r in mine if r["policy"] == p] for p in policies}
        shown = {"lru", "lfru", "s3fifo", "llru", "lfu:keep", "learned", "belady"}
        page.chart(f"eviction-{scope}", f"Misses under original routing, {title}", "slots per layer, of 32", "misses, % of wanted experts",
                   [Series(p, line[p], dashed=p == "belady") for p in policies if p in shown])
        gap = lambda r: f"{100 * r['misses'] / r['wanted']:.1f} ({100 * r['gap_closed']['value']:.0f})" if r.get("gap_closed") and r["policy"] not in ("lru", "belady") else f"{100 * r['misses'] / r['wanted']:.1f}"
        rows = [[p, *(gap(r) for r in mine if r["policy"] == p and r["slots"] <= 24)] for p in policies]
        page.add(f"Misses in %, {title}; in brackets the share of the gap from LRU to Belady that is closed, in %:",
                 table(["slots per layer", *(str(r["slots"]) for r in mine if r["policy"] == "lru" and r["slots"] <= 24)], rows))
    page.add(WORDS["eviction"])


def sensitivity(lab: Lab, page: Page) -> None:
    found = lab.json("sensitivity", "eval", "sensitivity", TEXT, "-m", MODEL, "--tokens", TOKENS, "--chunk", CHUNK)
    cell = lambda r: f"{100 * r['loss']['value']:+.1f} ± {100 * r['loss']['error']:.1f} %" if r else "-"
    rows = [[str(r["rank"]), cell(r["dropped"]), cell(r["replaced"])] for r in found["ranks"]]
    page.add("## Importance of ranks (paper: figure 2)",
             "The rise of perplexity without the experts of a rank and all lower ones, and with a random unchosen expert in place of a rank:",
             table(["rank", "dropped from here", "replaced"], rows), WORDS["sensitivity"])


def second_choice(lab: Lab, page: Page) -> None:
    found = lab.json("optimal", "eval", "optimal", TEXT, "-m", MODEL, "--tokens", TOKENS, "--chunk", CHUNK, "--samples", 48)
    rows = [[str(r["layer"]), percent(r["best"])] for r in found["layers"]]
    page.add("## How often the router's second choice is the best one (paper: figure 10)",
             table(["layer", "share of 48 tokens"], rows), WORDS["optimal"])


def speed(lab: Lab, page: Page) -> None:
    """Tokens per second from the SSD; reads go past the page cache, so experts are cached in the slots only."""
    settings = {"lru": ["--routing", "original"], "prior:lambda=0.1": ["--routing", "prior:lambda=0.1,j=1"],
                "learned": ["-o", "eviction=learned"]}
    found = {}
    for round_ in range(3):  # interleaved, since the SSD's rate drifts
        for size in (4, 8, 16, 24, 32):
            for name, flags in settings.items():
                key = f"speed-{name.split(':')[0]}-{size}-{round_}"
                found[name, size, round_] = lab.json(key, "bench", "-m", MODEL, "-p", 64, "-n", 128, "-r", 1, "--first-token", "off",
                                                    "--cache", f"{size}x", *flags)
    rate = lambda run: run["decode"]["tokens"] / run["decode"]["seconds"]
    pick = lambda name, size: sorted(rate(found[name, size, r]["series"][0]["runs"][0]) for r in range(3))
    lines = {name: [(s, pick(name, s)[1]) for s in (4, 8, 16, 24, 32)] for name in settings}
    page.add("## Tokens per second against cache size (paper: figures 1 and 11)")
    page.chart("speed", "Tokens per second from the SSD", "slots per layer, of 32", "tokens per second",
               [Series(name, line) for name, line in lines.items()])
    rows = [[name, *(f"{pick(name, s)[1]:.0f} ({pick(name, s)[0]:.0f} to {pick(name, s)[2]:.0f})" for s in (4, 8, 16, 24, 32))] for name in settings]
    page.add("Median of three, and the range:", table(["slots per layer", "4", "8", "16", "24", "32"], rows), WORDS["speed"])


SECTIONS = {"trade-off": trade_off, "unseen": unseen, "lifetimes": lifetimes, "sizes": sizes, "delta": spreads, "top-j": kept,
            "eviction": eviction, "sensitivity": sensitivity, "optimal": second_choice, "speed": speed}
WORDS: dict[str, str] = json.loads((ROOT / "scripts/make/results_words.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the papers' tables on the demo model.")
    parser.add_argument("--larder", type=Path, default=ROOT / "target/release/larder")
    parser.add_argument("--work", type=Path, default=ROOT / "target/results")
    parser.add_argument("--only", help="measure only these sections (comma-separated), and print them")
    args = parser.parse_args()
    lab, page = Lab(args.larder, args.work), Page(ROOT / "docs/results")
    page.add("# The papers on the demo model", WORDS["start"])
    for name in args.only.split(",") if args.only else SECTIONS:
        SECTIONS[name](lab, page)
    if args.only:
        print(page.text())
    else:
        (ROOT / "docs/results.md").write_text(page.text())


if __name__ == "__main__":
    main()
