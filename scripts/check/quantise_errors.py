#!/usr/bin/env python3
"""Prints the error that ggml's quantiser makes on Gaussian noise, which the test of larder's own quantiser compares with.

Needs Python 3.10 or newer, gguf 0.19, numpy, and a build of ggml as a shared library (libggml-base.so, as llama.cpp
builds it):

    python scripts/check/quantise_errors.py LIBRARY

The noise is that of `crates/larder-store/src/quantize/tests.rs`: 16384 values, each the sum of twelve numbers of a
linear congruential generator, so that both have the same bits.
"""

import ctypes
import sys

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q

VALUES = 16384
KINDS = {
    Q.Q8_0: "q8_0",
    Q.Q4_0: "q4_0",
    Q.Q4_1: "q4_1",
    Q.Q5_0: "q5_0",
    Q.Q5_1: "q5_1",
    Q.IQ4_NL: "iq4_nl",
    Q.MXFP4: "mxfp4",
    Q.Q2_K: "q2_K",
    Q.Q3_K: "q3_K",
    Q.Q4_K: "q4_K",
    Q.Q5_K: "q5_K",
    Q.Q6_K: "q6_K",
    Q.IQ4_XS: "iq4_xs",
}


def noise():
    """Values of mean 0 and standard deviation 1."""
    state, values = 1, []
    for _ in range(VALUES):
        total = 0
        for _ in range(12):
            state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
            total += state >> 48
        values.append((total - 12 * 32768) / 65536)
    return np.array(values, np.float32)


def main():
    library = ctypes.CDLL(sys.argv[1])
    values = noise()
    for kind, name in KINDS.items():
        length, size = gguf.GGML_QUANT_SIZES[kind]
        out = np.zeros(VALUES // length * size, np.uint8)
        quantize = getattr(library, f"quantize_{name}")
        quantize.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
        quantize(values.ctypes.data, out.ctypes.data, 1, VALUES, None)
        errors = gguf.quants.dequantize(out, kind).astype(np.float64) - values
        print(f"{kind.name}: {np.sqrt(np.mean(errors**2)):.6f}")


if __name__ == "__main__":
    main()
