#!/usr/bin/env python3
"""Prints the errors that ggml's quantiser makes on Gaussian noise, which the test of larder's own quantiser compares with.

For each format: the root mean square of the errors without an importance matrix, and that of the errors weighed by the
importances with one.

Needs Python 3.10 or newer, gguf 0.19, numpy, and a build of ggml as a shared library (libggml-base.so, as llama.cpp
builds it):

    python scripts/check/quantise_errors.py LIBRARY

The noise is that of `crates/larder-store/src/quantize/tests.rs`: 16384 values, each the sum of twelve numbers of a
linear congruential generator, so that both have the same bits. The importances are those of a row of 512 columns.
"""

import ctypes
import sys

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q

VALUES = 16384
COLUMNS = 512
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
    Q.IQ3_XXS: "iq3_xxs",
    Q.IQ3_S: "iq3_s",
    Q.IQ2_XXS: "iq2_xxs",
    Q.IQ2_XS: "iq2_xs",
    Q.IQ2_S: "iq2_s",
}


def noise(state, count):
    """Values of mean 0 and standard deviation 1."""
    values = []
    for _ in range(count):
        total = 0
        for _ in range(12):
            state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
            total += state >> 48
        values.append((total - 12 * 32768) / 65536)
    return np.array(values, np.float32)


def importance():
    """What each column matters: from a sixteenth to about ten."""
    values = noise(2, COLUMNS)
    return values * values + np.float32(0.0625)


def error(quantize, kind, values, weights):
    """The root mean square of errors, with what columns matter or without."""
    length, size = gguf.GGML_QUANT_SIZES[kind]
    out = np.zeros(VALUES // length * size, np.uint8)
    pointer = None if weights is None else weights.ctypes.data
    quantize(values.ctypes.data, out.ctypes.data, VALUES // COLUMNS, COLUMNS, pointer)
    squares = (gguf.quants.dequantize(out, kind).astype(np.float64) - values).reshape(-1, COLUMNS) ** 2
    return np.sqrt(np.mean(np.average(squares, axis=1, weights=weights)))


def main():
    library = ctypes.CDLL(sys.argv[1])
    values, weights = noise(1, VALUES), importance()
    for kind, name in KINDS.items():
        library.ggml_quantize_init(int(kind))
        quantize = getattr(library, f"quantize_{name}")
        quantize.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
        # Two formats cannot be written without importances.
        equal = np.ones(COLUMNS, np.float32) if kind in (Q.IQ2_XXS, Q.IQ2_XS) else None
        plain, weighed = (error(quantize, kind, values, of) for of in (equal, weights))
        print(f"{kind.name}: {plain:.6f} {weighed:.6f}")


if __name__ == "__main__":
    main()
