#!/usr/bin/env python3
"""Compares larder with transformers on the demo model, through the SSD and with a small cache.

Needs Python 3.10 and, from PyPI: torch transformers>=5 safetensors numpy; and the larder command, built with --release.

    python scripts/check/check_demo.py [--larder target/release/larder]

The shipped store holds weights in q8_0. This script dequantises them to float32, writes them as a checkpoint in the
hub's format, converts that to a store in float32, and compares both programs: the logits of a passage, and greedy text
that continues its first half. Exits with 1 if any logit differs by more than 1e-3, or if the texts differ.
"""

import argparse
import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent.parent
MODEL = ROOT / "models/demo"
BLOCK, ROWS = 32, 8
PASSAGE, WRITTEN, SLOTS = 256, 64, 6


def numbers(raw: np.ndarray, description: str) -> np.ndarray:
    """The float32 values of a tensor with a description from the metadata, such as 'q8_0 128x192 rows8 …'."""
    kind, shape, *more = description.split(" ")
    rows, columns = (int(n) for n in shape.split("x")) if "x" in shape else (1, int(shape))
    if kind == "f32":
        return raw
    assert kind == "q8_0" and rows % ROWS == 0 and columns % BLOCK == 0, description
    blocks = columns // BLOCK
    if "rows8" not in more:
        cells = raw.reshape(rows, blocks, 2 + BLOCK)
        scales, quants = cells[..., :2].copy().view(np.float16), cells[..., 2:].view(np.int8)
        return (scales.astype(np.float32) * quants).reshape(rows, columns)
    cells = raw.reshape(rows // ROWS, blocks, ROWS * (2 + BLOCK))
    scales = cells[..., : 2 * ROWS].copy().view(np.float16).astype(np.float32)  # [groups, blocks, 8]
    quants = cells[..., 2 * ROWS :].view(np.int8).reshape(rows // ROWS, blocks, BLOCK // 4, ROWS, 4)
    values = scales[:, :, None, :, None] * quants  # [groups, blocks, runs, 8, 4]
    return values.transpose(0, 3, 1, 2, 4).reshape(rows, columns).astype(np.float32)


def metadata_of(path: Path) -> dict[str, str]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(length))["__metadata__"]


def unpack(to: Path) -> None:
    """Writes the store as a checkpoint in float32."""
    resident = MODEL / "resident.safetensors"
    metadata = metadata_of(resident)
    tensors = {name: numbers(raw, metadata[name]) for name, raw in load_file(resident).items() if name in metadata}
    for shard in sorted(MODEL.glob("experts/*/*.safetensors")):
        metadata, parts = metadata_of(shard), load_file(shard)
        prefix = f"model.layers.{metadata['layer']}.mlp.experts.{metadata['expert']}"
        for part in ("gate", "up", "down"):
            tensors[f"{prefix}.{part}_proj.weight"] = numbers(parts[part], f"{metadata[part]} {metadata['layout']}")
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, to / "model.safetensors", {"format": "pt"})
    (to / "config.json").write_text(json.dumps(json.loads((MODEL / "larder.json").read_text())["config"]))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (to / name).write_bytes((MODEL / name).read_bytes())


def main() -> int:
    parser = argparse.ArgumentParser(description="Compares larder with transformers on the demo model.")
    parser.add_argument("--larder", type=Path, default=ROOT / "target/release/larder")
    args = parser.parse_args()
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, store = Path(folder) / "checkpoint", Path(folder) / "store"
        checkpoint.mkdir()
        unpack(checkpoint)
        larder = lambda *words: subprocess.run([str(args.larder), *map(str, words)], check=True, stdout=subprocess.DEVNULL)
        larder("convert", checkpoint, store, "--experts", "f32")
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        ids = tokenizer((MODEL / "held-out.txt").read_text()[:4000])["input_ids"][:PASSAGE]

        passage, out = Path(folder) / "ids.json", Path(folder) / "out.safetensors"
        passage.write_text(json.dumps(ids))
        larder("logits", "-m", store, "--tokens", passage, "--out", out, "--cache", f"{SLOTS}x")
        with torch.no_grad():
            theirs = model(torch.tensor([ids])).logits[0].numpy()
        worst = float(np.abs(load_file(out)["full_logits"].reshape(theirs.shape) - theirs).max())

        half = ids[: PASSAGE // 2]
        with torch.no_grad():
            written = model.generate(torch.tensor([half]), max_new_tokens=WRITTEN, do_sample=False)[0].tolist()[len(half) :]
        output = subprocess.run(
            [str(args.larder), "run", "-m", str(store), "-p", tokenizer.decode(half), "-n", str(WRITTEN), "--json", "--cache", f"{SLOTS}x",
             "--temperature", "0"],
            check=True, stdout=subprocess.PIPE, text=True,
        )
        ours = json.loads(output.stdout)
        same = ours["prompt_tokens"] == len(half) and ours["ids"] == written
    print(f"{PASSAGE} tokens with {SLOTS} of 32 experts per layer in slots: logits differ by at most {worst:.1e}")
    print(f"{WRITTEN} greedy tokens: {'equal' if same else 'DIFFERENT'}")
    return 0 if worst < 1e-3 and same else 1


if __name__ == "__main__":
    sys.exit(main())
