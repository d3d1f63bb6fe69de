#!/usr/bin/env python3
"""Writes the code books of the number formats iq1_s to iq3_s as a Rust file, from the tables of the Python package gguf.

Needs Python 3.10 or newer, gguf 0.19 and numpy. Run by hand:

    python scripts/make/make_codebooks.py [OUT]

An entry of a code book has four or eight values, each of which is one of a few levels; the file has the numbers of the
levels, three or two bits each, the first value lowest. It gives the same bytes every time.
"""

import sys
from pathlib import Path

import gguf
import numpy as np
from gguf import quants

HEAD = """\
//! The code books of `iq1_s`, `iq1_m`, `iq2_xxs`, `iq2_xs`, `iq2_s`, `iq3_xxs` and `iq3_s`: data, written by
//! `scripts/make/make_codebooks.py` from the tables of the Python package gguf {version} (`gguf/quants.py` of llama.cpp).
//!
//! That package is under the MIT licence, Copyright (c) 2023 Georgi Gerganov: `CODE_BOOKS_LICENSE` beside this file.
"""
# The name in Rust, what the entries are for, and the class in gguf.
BOOKS = [
    ("IQ1", "`iq1_s` and `iq1_m`", quants.IQ1_S),
    ("IQ2_XXS", "`iq2_xxs`", quants.IQ2_XXS),
    ("IQ2_XS", "`iq2_xs`", quants.IQ2_XS),
    ("IQ2_S", "`iq2_s`", quants.IQ2_S),
    ("IQ3_XXS", "`iq3_xxs`", quants.IQ3_XXS),
    ("IQ3_S", "`iq3_s`", quants.IQ3_S),
]
PER_LINE = 14


def numbers_of_levels(form):
    """[entries, values per entry], numbers of levels."""
    form.init_grid()
    values = form.grid.reshape(form.grid_shape)
    numbers = np.searchsorted(form.grid_map, values)
    assert (np.array(form.grid_map)[numbers] == values).all()
    return numbers


def check_signs():
    """The eighth sign of a group follows from the other seven: the number of minus signs is even."""
    signs = [i | i.bit_count() % 2 << 7 for i in range(128)]
    assert bytes(signs) == quants.IQ2_XXS.ksigns


def book(name, what, form):
    numbers = numbers_of_levels(form)
    entries, values = numbers.shape
    bits = {4: 3, 8: 2}[values]
    packed = (numbers << bits * np.arange(values)).sum(axis=1)
    levels = ", ".join(str(level) for level in form.grid_map)
    lines = [
        "",
        f"/// Entries of {what}: {values} values of {bits} bits each, which number the levels {levels}.",
        "#[rustfmt::skip]",
        f"pub const {name}: [u16; {entries}] = [",
    ]
    for start in range(0, entries, PER_LINE):
        lines.append("    " + " ".join(f"0x{entry:04x}," for entry in packed[start : start + PER_LINE]))
    return lines + ["];"]


def main():
    root = Path(__file__).parent.parent.parent
    default = root / "crates" / "larder-core" / "src" / "formats" / "code_books.rs"
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    check_signs()
    version = gguf.__version__ if hasattr(gguf, "__version__") else "0.19"
    lines = HEAD.format(version=version).splitlines()
    for name, what, form in BOOKS:
        lines += book(name, what, form)
    out.write_text("\n".join(lines) + "\n")
    print(f"{out}: {len(lines)} lines")


if __name__ == "__main__":
    main()
