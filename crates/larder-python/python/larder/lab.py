"""Replays, sweeps and training of the lab as pandas data frames.

Each function runs a command of the package in a process of its own and reads what that writes, so its numbers are the command's. Further
keyword arguments are the flags of the command with underscores: ``scratch=2`` is ``--scratch 2``, ``carry=True`` is ``--carry``, and a list
repeats a flag.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Any, Iterator, List, Sequence, Union

from ._larder import Error
from ._trace import Trace

if TYPE_CHECKING:
    import pandas

    TraceInput = Union[str, os.PathLike[str], Trace]
    Traces = Union[TraceInput, Sequence[TraceInput]]

__all__ = ["command", "eval_sweep", "flags_of", "replay", "sweep", "train"]


def replay(traces: "Traces", eviction: "Union[str, Sequence[str]]" = "lru", **flags: Any) -> "pandas.DataFrame":
    """Replays traces with eviction policies: a row for each, with the fields of ``larder lab replay --json`` that are single values.

    ``attrs["reports"]`` has all fields of each, such as the counts of each layer.
    """
    tables = _pandas()
    policies = [eviction] if isinstance(eviction, str) else list(eviction)
    with _files(traces) as files:
        reports = [_report(["lab", "replay", *files, "--json", *flags_of(flags, eviction=policy)]) for policy in policies]
    frame: "pandas.DataFrame" = tables.DataFrame([_single_values(report) for report in reports])
    frame.attrs["reports"] = reports
    return frame


def sweep(traces: "Traces", **flags: Any) -> "pandas.DataFrame":
    """Compares eviction policies over cache sizes: the CSV of ``larder lab sweep``, a row for each policy, scope and size."""
    with _files(traces) as files:
        return _frame_of_csv(["lab", "sweep", *files, *flags_of(flags)])


def train(traces: "Traces", out: "Union[str, os.PathLike[str]]", **flags: Any) -> "pandas.DataFrame":
    """Trains weights for the eviction policy ``learned`` and writes them to ``out``: a row for each cache that measured them.

    ``attrs["epochs"]`` has the losses of each epoch. Without test sequences (``judge=0``) the frame is empty.
    """
    tables = _pandas()
    with _files(traces) as files:
        report = _report(["lab", "train", *files, "--json", *flags_of(flags, out=out)])
    frame: "pandas.DataFrame" = tables.DataFrame(report["evaluations"] or [])
    frame.attrs["epochs"] = report["epochs"]
    return frame


def eval_sweep(model: "Union[str, os.PathLike[str]]", text: "Union[str, os.PathLike[str]]", **flags: Any) -> "pandas.DataFrame":
    """Measures perplexity, output KL and misses of routing strategies on a text: the CSV of ``larder eval sweep``."""
    return _frame_of_csv(["eval", "sweep", os.fspath(text), "--model", os.fspath(model), *flags_of(flags)])


def command(arguments: "Sequence[str]") -> str:
    """Runs ``larder`` with arguments, and returns what it prints; raises :class:`larder.Error` with its error."""
    line = [sys.executable, "-m", "larder", *arguments]
    process = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate()
    except BaseException:
        process.kill()
        process.wait()
        raise
    if process.returncode != 0:
        raise Error(_sentence(err) or f"the command ended with {process.returncode}")
    return out


def flags_of(flags: "dict[str, Any]", **further: Any) -> List[str]:
    """Keyword arguments as flags of the command."""
    line: List[str] = []
    for name, value in {**flags, **further}.items():
        flag = "--" + name.replace("_", "-")
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if one is True:
                line.append(flag)
            elif one is not None and one is not False:
                line.append(f"{flag}={one}")
    return line


def _sentence(err: str) -> str:
    """The error of a command's standard error, without what was told before and the usage behind."""
    at = err.rfind("error: ")
    return err[at + len("error: ") :].split("\n\n")[0].strip() if at >= 0 else err.strip()


def _report(arguments: "Sequence[str]") -> Any:
    return json.loads(command(arguments))


def _single_values(report: "dict[str, Any]") -> "dict[str, Any]":
    return {name: value for name, value in report.items() if not isinstance(value, (dict, list))}


def _frame_of_csv(arguments: "Sequence[str]") -> "pandas.DataFrame":
    tables = _pandas()
    with tempfile.TemporaryDirectory(prefix="larder-") as folder:
        path = os.path.join(folder, "sweep.csv")
        command([*arguments, "--csv", path])
        frame: "pandas.DataFrame" = tables.read_csv(path)
    return frame


@contextlib.contextmanager
def _files(traces: "Traces") -> Iterator[List[str]]:
    """The files of traces; those in memory are written to a folder that is removed again."""
    listed: Sequence[Any] = traces if isinstance(traces, (list, tuple)) else [traces]
    with tempfile.TemporaryDirectory(prefix="larder-") as folder:
        yield [_file(trace, os.path.join(folder, f"{at}.trace")) for at, trace in enumerate(listed)]


def _file(trace: Any, path: str) -> str:
    if isinstance(trace, Trace):
        trace.write(path)
        return path
    return str(os.fspath(trace))


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as missing:
        raise Error("larder.lab needs pandas; install it with `pip install 'larder[lab]'`") from missing
    return pandas
