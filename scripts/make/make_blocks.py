#!/usr/bin/env python3
"""Writes blocks of each block format with the values that the Python package gguf gives them, for the tests of
larder-kernels. gguf cannot dequantise q2_0 and q1_0: their values are computed here.

Needs Python 3.10 or newer, gguf 0.19 and numpy. Run by hand:

    python scripts/make/make_blocks.py [OUT]

Each file has the bytes of some blocks and, behind them, all their values as f32. Blocks are random bits; some have
scales that are zero, subnormal, infinite or NaN. It gives the same bytes every time.
"""

import random
import sys
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q

BLOCKS = 16
# Each kind with the offsets of its f16 scales.
KINDS = {
    Q.Q8_0: [0],
    Q.Q4_0: [0],
    Q.Q4_1: [0, 2],
    Q.Q5_0: [0],
    Q.Q5_1: [0, 2],
    Q.IQ4_NL: [0],
    Q.MXFP4: [],
    Q.Q2_K: [80, 82],
    Q.Q3_K: [108],
    Q.Q4_K: [0, 2],
    Q.Q5_K: [0, 2],
    Q.Q6_K: [208],
    Q.IQ4_XS: [0],
    Q.IQ3_XXS: [0],
    Q.IQ3_S: [0],
    Q.IQ2_XXS: [0],
    Q.IQ2_XS: [0],
    Q.IQ2_S: [0],
    "Q2_0": [0],
    Q.TQ2_0: [64],
    "Q1_0": [0],
    Q.IQ1_S: [0],
    Q.IQ1_M: [],
    Q.TQ1_0: [52],
    Q.NVFP4: [],
}
# Kinds that gguf cannot dequantise: bytes of a block, and bits of a value.
OTHERS = {"Q2_0": (18, 2), "Q1_0": (18, 1)}
# As f16: zero, minus zero, subnormal, largest, infinite, NaN.
ODD_HALVES = [0x0000, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0xFC00, 0x7E00]
# As exponents of MXFP4: the subnormal ones, the first normal one, the middle, and the largest two.
ODD_EXPONENTS = [0, 1, 2, 127, 128, 254, 255]

# As scales of NVFP4: zero, the smallest and the largest subnormal one, the first normal one, the largest, NaN, and those with a sign.
ODD_FLOATS = [0x00, 0x01, 0x07, 0x08, 0x7E, 0x7F, 0x80, 0x81, 0xFE, 0xFF]


def values_of(kind, blocks):
    """The values of blocks, by gguf where it can, else by the layout: behind an f16 scale, values from the lowest bits
    of a byte on. Two bits are 1 more than their integer; one bit is 1 or, if it is 0, -1."""
    if kind not in OTHERS:
        return gguf.quants.dequantize(blocks, kind)
    bits = OTHERS[kind][1]
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    numbers = (blocks[:, 2:, None] >> shifts & (1 << bits) - 1).reshape(len(blocks), -1).astype(np.float32)
    return scale * (numbers - 1 if bits == 2 else 2 * numbers - 1)


def spread_scale(block, half):
    """Writes the f16 scale of a block of IQ1_M: four bits at the top of each of its last four pairs of bytes."""
    for i in range(4):
        at = 49 + 2 * i
        block[at] = block[at] & 15 | (half >> 4 * i & 15) << 4


def half_of(i, at, rng):
    """The f16 scale of block `i` at offset `at`, as bits."""
    half = int(np.float16(rng.uniform(-0.1, 0.1)).view(np.uint16))
    return ODD_HALVES[(i + at) % len(ODD_HALVES)] if i < len(ODD_HALVES) else half


def blocks_of(kind, rng):
    """Bytes of blocks, [BLOCKS, bytes]."""
    size = OTHERS[kind][0] if kind in OTHERS else gguf.GGML_QUANT_SIZES[kind][1]
    blocks = np.array([[rng.randrange(256) for _ in range(size)] for _ in range(BLOCKS)], np.uint8)
    for i, block in enumerate(blocks):
        for at in KINDS[kind]:
            half = half_of(i, at, rng)
            block[at : at + 2] = half & 255, half >> 8
        if kind == Q.IQ1_M:
            spread_scale(block, half_of(i, 0, rng))
        if kind == Q.MXFP4:
            block[0] = ODD_EXPONENTS[i] if i < len(ODD_EXPONENTS) else rng.randrange(100, 140)
        if kind == Q.NVFP4 and 4 * i < len(ODD_FLOATS):
            odd = ODD_FLOATS[4 * i : 4 * i + 4]
            block[: len(odd)] = odd
    return blocks


def main():
    root = Path(__file__).parent.parent.parent
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else root / "crates" / "larder-kernels" / "tests" / "blocks"
    rng = random.Random(20261122)
    for kind in KINDS:
        blocks = blocks_of(kind, rng)
        with np.errstate(all="ignore"):
            values = values_of(kind, blocks)
        data = blocks.tobytes() + values.astype("<f4").tobytes()
        name = kind if kind in OTHERS else kind.name
        (out / f"{name.lower()}.bin").write_bytes(data)
        print(f"{name}: {BLOCKS} blocks, {values.size} values, {len(data)} bytes")


if __name__ == "__main__":
    main()
