"""Sweeps over the nodes of a cluster.

``larder eval sweep`` and ``larder lab sweep`` measure a part of their strategies and sizes with ``--part I/N``. A Ray task computes each part,
and the parts are put together in the order of a sweep on one machine. So the tables are equal but for the measured tokens per second.
"""

from __future__ import annotations

import csv
import io
import json
import os
import tempfile
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Optional, Sequence, Tuple, Union

import ray

from .._larder import Error
from ..lab import command, flags_of

if TYPE_CHECKING:
    import pandas

Row = List[str]
_OPTIMUM = "original, evicted by belady"


def sweep(
    kind: str,
    inputs: "Union[str, os.PathLike[str], Sequence[Union[str, os.PathLike[str]]]]",
    *,
    model: "Union[str, os.PathLike[str], None]" = None,
    parts: Optional[int] = None,
    num_cpus: float = 1,
    csv_file: "Union[str, os.PathLike[str], None]" = None,
    **flags: Any,
) -> "pandas.DataFrame":
    """Runs a sweep in parts on the nodes of the cluster, and returns the table that it has on one machine.

    ``kind`` is ``"eval"`` with a text as ``inputs`` and a ``model``, or ``"lab"`` with traces; they are read on the nodes. ``parts`` is 4 for each
    node by default, ``flags`` are those of the command, and ``csv_file`` gets the table as the command writes it. A part whose node is lost is
    measured again by another.
    """
    if kind not in ("eval", "lab"):
        raise Error(f"a sweep is of kind eval or lab, not {kind!r}")
    files = [os.fspath(file) for file in (inputs if isinstance(inputs, (list, tuple)) else [inputs])]
    of_model = [] if model is None else ["--model", os.fspath(model)]
    line = [kind, "sweep", *files, *of_model, *flags_of(flags)]
    count = parts or 4 * max(1, len([node for node in ray.nodes() if node["Alive"]]))
    task = ray.remote(num_cpus=num_cpus, max_retries=-1)(_part)
    done = ray.get([task.remote(line, part, count) for part in range(count)])
    tables = [table for table in done if table is not None]
    if not tables:
        raise Error("the sweep has nothing to measure")
    head, rows = _eval_rows(tables, count) if kind == "eval" else _lab_rows(tables, count)
    text = "\n".join([head, *rows]) + "\n"
    if csv_file is not None:
        with open(csv_file, "w", encoding="utf-8") as file:
            file.write(text)
    import pandas

    return pandas.read_csv(io.StringIO(text))


def _part(line: Sequence[str], part: int, count: int) -> Optional[Tuple[int, str, Any]]:
    """Measures a part: its number, its CSV and its JSON. Nothing if there are fewer pieces than parts."""
    with tempfile.TemporaryDirectory(prefix="larder-") as folder:
        path = os.path.join(folder, "part.csv")
        report = json.loads(command([*line, "--part", f"{part}/{count}", "--csv", path, "--json"]))
        if not report["rows"]:
            return None
        with open(path, encoding="utf-8") as file:
            return part, file.read(), report


def _lines(text: str) -> Tuple[str, List[str]]:
    head, *lines = text.splitlines()
    return head, lines


def _cells(line: str) -> Row:
    return next(csv.reader([line]))


def _lab_rows(tables: Sequence[Tuple[int, str, Any]], count: int) -> Tuple[str, List[str]]:
    """Rows by scope and size, of which part I of N has each N-th, from the I-th on."""
    groups: List[Tuple[int, List[str]]] = []
    head = ""
    for part, text, _ in tables:
        head, lines = _lines(text)
        of_part = list(_groups(lines))
        groups += [(part + at * count, group) for at, group in enumerate(of_part)]
    return head, [line for _, group in sorted(groups) for line in group]


def _groups(lines: Sequence[str]) -> Iterator[List[str]]:
    """Consecutive rows of one scope and size."""
    group: List[str] = []
    last = None
    for line in lines:
        key = _cells(line)[1:3]
        if group and key != last:
            yield group
            group = []
        group.append(line)
        last = key
    if group:
        yield group


def _eval_rows(tables: Sequence[Tuple[int, str, Any]], count: int) -> Tuple[str, List[str]]:
    """For each size the model's own routing, which every part has measured too, and the strategies by their numbers."""
    head = ""
    own: Dict[int, Tuple[str, Any]] = {}
    best: Dict[int, str] = {}
    strategies: Dict[int, Dict[int, Tuple[str, Any]]] = {}
    for part, text, report in tables:
        head, lines = _lines(text)
        units = 0
        for line, row in zip(lines, report["rows"]):
            if row["routing"] == "original":
                own.setdefault(row["slots"], (line, row))
            else:
                strategies.setdefault(row["slots"], {})[part + units * count] = (line, row)
                units += 1
        for line in lines[len(report["rows"]) :]:
            best.setdefault(int(_cells(line)[1]), line)
    rows: List[str] = []
    column = _cells(head).index("pareto")
    for slots in sorted(own):
        of_size = [own[slots], *(strategies.get(slots, {})[at] for at in sorted(strategies.get(slots, {})))]
        front = _front([(row["miss_rate"], row["perplexity"]["value"]) for _, row in of_size])
        rows += [_with_cell(line, column, is_on) for (line, _), is_on in zip(of_size, front)]
    return head, rows + [best[slots] for slots in sorted(best)]


def _front(points: Sequence[Tuple[float, float]]) -> List[bool]:
    """Whether each point is on the Pareto front, smaller being better; of equal points only the first."""

    def dominated(at: int) -> bool:
        x, y = points[at]
        return any(
            a <= x and b <= y and (a < x or b < y or other < at) for other, (a, b) in enumerate(points) if other != at
        )

    return [x == x and y == y and not dominated(at) for at, (x, y) in enumerate(points)]


def _with_cell(line: str, column: int, value: bool) -> str:
    """A CSV line, of which only the first cell is quoted, with another value in a column."""
    quoted, rest = line[: line.index('"', 1) + 1], line[line.index('"', 1) + 2 :]
    cells = rest.split(",")
    cells[column - 1] = "true" if value else "false"
    return ",".join([quoted, *cells])
