"""Data frames of the lab, which are the command's numbers."""

import io
import json
import subprocess
import sys

import larder
import larder.lab
import pandas
import pytest


def test_replays(trace_file, command):
    frame = larder.lab.replay(trace_file, ["lru", "belady"], cache="8x", carry=True)
    assert frame["eviction"].tolist() == ["lru", "belady"] and frame["misses"][1] < frame["misses"][0]
    for at, policy in enumerate(["lru", "belady"]):
        flags = ["--eviction", policy, "--cache", "8x", "--carry", "--json"]
        report = json.loads(command("lab", "replay", *trace_file, *flags).stdout)
        for key in ["wanted", "hits", "misses", "evictions", "rereads", "lifetime"]:
            assert frame[key][at] == report[key]
        assert frame.attrs["reports"][at]["layers"] == report["layers"]


def test_a_replay_has_the_counts_of_the_engine(demo):
    with larder.load(demo, cache="8x") as model:
        stream = model.generate("The old man", temperature=0, max_tokens=40, trace=True)
        trace, stats = stream.trace, model.stats()
    replayed = larder.lab.replay(trace, cache="8x")
    assert (replayed["hits"][0], replayed["misses"][0], replayed["evictions"][0]) == (stats.hits, stats.misses, stats.evictions)


def test_sweeps_are_the_commands_csv(trace_file, command, tmp_path):
    flags = dict(eviction=["lru", "lfu", "belady"], cache="4x,8x", scope="both")
    frame = larder.lab.sweep(trace_file, **flags)
    evictions = ["--eviction", "lru", "--eviction", "lfu", "--eviction", "belady"]
    csv = tmp_path / "sweep.csv"
    command("lab", "sweep", *trace_file, *evictions, "--cache", "4x,8x", "--scope", "both", "--csv", csv)
    pandas.testing.assert_frame_equal(frame, pandas.read_csv(csv))
    assert len(frame) == 12
    assert frame.to_csv(index=False).splitlines()[0] == csv.read_text().splitlines()[0]


def test_eval_sweeps_are_the_commands_csv(demo, command, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The old man looked at the door, and then he went out into the rain. " * 8)
    csv = tmp_path / "sweep.csv"
    flags = ["--sizes", "8", "--lambda", "0.1,0.5", "--tokens", 96, "--chunk", 96]
    command("eval", "sweep", text, "-m", demo, *flags, "--csv", csv)
    frame = larder.lab.eval_sweep(demo, text, sizes="8", **{"lambda": "0.1,0.5"}, tokens=96, chunk=96)
    timed = ["tokens_per_second"]
    pandas.testing.assert_frame_equal(frame.drop(columns=timed), pandas.read_csv(csv).drop(columns=timed))
    assert len(frame) >= 3


def test_training(trace_file, command, tmp_path):
    flags = dict(choose=1, judge=1, epochs=2, seed=3)
    frame = larder.lab.train(trace_file, tmp_path / "a.safetensors", **flags)
    printed = command(
        "lab", "train", *trace_file, "--out", tmp_path / "b.safetensors", "--choose", 1, "--judge", 1, "--epochs", 2, "--seed", 3, "--json"
    ).stdout
    report = json.loads(printed)
    pandas.testing.assert_frame_equal(frame, pandas.DataFrame(report["evaluations"]))
    assert frame.attrs["epochs"] == report["epochs"] and len(report["epochs"]) == 2
    weights = [larder.lab.replay(trace_file, "learned", evictor=tmp_path / f"{name}.safetensors", cache="8x") for name in "ab"]
    assert weights[0]["misses"][0] == weights[1]["misses"][0] > 0
    assert {"lru", "learned", "belady", "gap_closed"} <= set(frame.columns)


def test_errors_are_the_commands(tmp_path, trace_file):
    with pytest.raises(larder.Error, match="missing.trace"):
        larder.lab.replay(tmp_path / "missing.trace")
    with pytest.raises(larder.Error, match="--warmth"):
        larder.lab.sweep(trace_file, warmth=3)
    with pytest.raises(larder.Error, match="leave none for training"):
        larder.lab.train(trace_file, tmp_path / "x", choose=2, judge=2)


def test_pandas_is_needed_only_here():
    code = "import sys; sys.modules['pandas'] = None; import larder.lab\ntry: larder.lab.sweep('x')\nexcept larder.Error as e: print(e)"
    said = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert "needs pandas" in said and "larder[lab]" in said


def test_csv_of_a_frame_reads_back(trace_file):
    frame = larder.lab.sweep(trace_file, eviction="lru", cache="4x")
    assert pandas.read_csv(io.StringIO(frame.to_csv(index=False))).equals(frame)
