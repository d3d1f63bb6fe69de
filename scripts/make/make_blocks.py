#!/usr/bin/env python3
"""Writes blocks of each block format with the values that the Python package gguf gives them, for the tests of
larder-kernels.

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
}
# As f16: zero, minus zero, subnormal, largest, infinite, NaN.
ODD_HALVES = [0x0000, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0xFC00, 0x7E00]
# As exponents of MXFP4: the subnormal ones, the first normal one, the middle, and the largest two.
ODD_EXPONENTS = [0, 1, 2, 127, 128, 254, 255]


def blocks_of(kind, rng):
    """Bytes of blocks, [BLOCKS, bytes]."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = np.array([[rng.randrange(256) for _ in range(size)] for _ in range(BLOCKS)], np.uint8)
    for i, block in enumerate(blocks):
        for at in KINDS[kind]:
            half = np.float16(rng.uniform(-0.1, 0.1)).view(np.uint16)
            if i < len(ODD_HALVES):
                half = ODD_HALVES[(i + at) % len(ODD_HALVES)]
            block[at : at + 2] = half & 255, half >> 8
        if kind == Q.MXFP4:
            block[0] = ODD_EXPONENTS[i] if i < len(ODD_EXPONENTS) else rng.randrange(100, 140)
    return blocks


def main():
    root = Path(__file__).parent.parent.parent
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else root / "crates" / "larder-kernels" / "tests" / "blocks"
    rng = random.Random(20261122)
    for kind in KINDS:
        blocks = blocks_of(kind, rng)
        with np.errstate(all="ignore"):
            values = gguf.quants.dequantize(blocks, kind)
        data = blocks.tobytes() + values.astype("<f4").tobytes()
        (out / f"{kind.name.lower()}.bin").write_bytes(data)
        print(f"{kind.name}: {BLOCKS} blocks, {values.size} values, {len(data)} bytes")


if __name__ == "__main__":
    main()
