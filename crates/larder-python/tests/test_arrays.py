"""Logits, embeddings and traces as numpy arrays."""

import gc
import json
import re
import signal
import struct
import subprocess
import sys
import urllib.request

import larder
import numpy
import pytest
from conftest import PROMPT, command_of_package


def tensors(path):
    """The float tensors of a safetensors file."""
    with open(path, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        data = file.read()
    header.pop("__metadata__", None)
    floats = {name: entry for name, entry in header.items() if entry["dtype"] == "F32"}
    part = lambda entry: numpy.frombuffer(data[slice(*entry["data_offsets"])], "<f4").reshape(entry["shape"])
    return {name: part(entry) for name, entry in floats.items()}


def test_logits_are_the_commands(model, command, demo, tmp_path):
    tokens = model.tokenize(PROMPT)
    (tmp_path / "tokens.json").write_text(json.dumps(tokens))
    command("logits", "-m", demo, "--tokens", tmp_path / "tokens.json", "--out", tmp_path / "out", "--cache", "8x")
    logits = model.logits(tokens)
    assert logits.dtype == numpy.float32 and logits.shape == (len(tokens), model.info()["vocab"])
    assert numpy.array_equal(logits, tensors(tmp_path / "out")["full_logits"])
    assert numpy.array_equal(logits, model.logits(numpy.array(tokens)))
    next_token = model.generate(tokens, temperature=0, repetition_penalty=1, max_tokens=1).answer().tokens
    assert [int(logits[-1].argmax())] == next_token


def test_embeddings_are_directions(model):
    texts = ["The king sat on his throne.", "The queen sat on her throne.", "Two pounds of flour and an egg."]
    embeddings = model.embed(texts)
    assert embeddings.shape == (3, model.info()["hidden"])
    assert numpy.allclose(numpy.linalg.norm(embeddings, axis=1), 1, atol=1e-5)
    assert numpy.array_equal(embeddings[1], model.embed(texts[1]))
    assert embeddings[0] @ embeddings[1] > embeddings[0] @ embeddings[2]
    with pytest.raises(larder.Error, match="longer|tokens"):
        model.embed("word " * 100_000)


def test_embeddings_are_the_servers(model, demo):
    texts = ["The king sat on his throne.", "Two pounds of flour"]
    server = subprocess.Popen(
        [command_of_package(), "serve", "-m", demo, "--port", "0", "--context", "512"], stderr=subprocess.PIPE, text=True
    )
    try:
        url = next(found[1] for line in server.stderr if (found := re.match(r"serving .* on (http\S+)$", line)))
        request = urllib.request.Request(url.rstrip("/").removesuffix("/v1") + "/v1/embeddings", json.dumps({"model": "demo", "input": texts}).encode())
        request.add_header("Content-Type", "application/json")
        data = json.load(urllib.request.urlopen(request, timeout=60))["data"]
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(20)
    served = numpy.array([entry["embedding"] for entry in data], dtype=numpy.float32)
    assert numpy.allclose(served, model.embed(texts), atol=1e-6)


def test_a_trace_of_a_generation(model, command, demo, tmp_path):
    stream = model.generate(PROMPT, temperature=0, max_tokens=16, trace_logits=True)
    trace, prompt = stream.trace, stream.answer().prompt_tokens
    info = model.info()
    # The last token is not computed.
    assert trace.ids.shape == (prompt + 15, len(info["moe_layers"]), info["top_k"]) == (len(trace), trace.layers, trace.top_k)
    assert trace.logits.shape == (len(trace), trace.layers, trace.experts)
    assert (trace.ids < trace.experts).all() and trace.ids.dtype == numpy.uint16
    assert trace.decoded.tolist() == [False] * prompt + [True] * 15 and trace.passes.tolist() == [prompt] + [1] * 15
    # Weights are those of the router's best experts.
    best = numpy.argsort(-trace.logits, axis=-1, kind="stable")[..., : trace.top_k]
    assert (best == trace.ids).mean() > 0.99 and trace.weights.dtype == numpy.float16
    file = tmp_path / "command.trace"
    flags = ["--temperature", 0, "--max-tokens", 16, "--cache", "8x", "--trace", file, "--trace-logits"]
    command("run", "-m", demo, "-p", PROMPT, *flags)
    read = larder.read_trace(file)
    for name in ["ids", "weights", "logits", "passes", "sequences", "decoded"]:
        assert numpy.array_equal(getattr(read, name), getattr(trace, name)), name
    trace.write(tmp_path / "again.trace")
    assert numpy.array_equal(larder.read_trace(tmp_path / "again.trace").ids, read.ids)
    assert read.meta["routing"] == "original"


def test_arrays_share_the_memory_of_their_trace(model):
    stream = model.generate(PROMPT, temperature=0, max_tokens=8, trace=True)
    trace = stream.trace
    first, second = trace.ids, trace.ids
    assert numpy.shares_memory(first, second) and not first.flags.writeable and not first.flags.owndata
    assert trace.logits is None
    kept = first.copy()
    del trace, stream, second
    gc.collect()
    model.generate(PROMPT, temperature=0, max_tokens=30, trace=True).answer()
    assert numpy.array_equal(first, kept)


def test_chats_are_traced_whole(model):
    messages = [{"role": "user", "content": "Once upon a time there was a king"}]
    model.chat(messages, temperature=0, max_tokens=4).answer()
    stream = model.chat(messages, temperature=0, max_tokens=4, trace=True)
    assert len(stream.trace) == stream.answer().prompt_tokens + 3


def test_files_that_are_no_traces(tmp_path):
    (tmp_path / "x.trace").write_bytes(b"nothing of the kind")
    for path in [tmp_path / "x.trace", tmp_path / "missing.trace", tmp_path]:
        with pytest.raises(larder.Error, match="trace|missing|No such|folder|directory"):
            larder.read_trace(path)


def test_numpy_is_imported_when_it_is_needed():
    code = "import sys, larder; print(sorted({'numpy', 'pandas', 'asyncio', 'ray'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
