"""Number formats as tables: where a block keeps its scales and quants, and how random ones are drawn."""

import dataclasses

import numpy as np
from gguf import GGMLQuantizationType as Q

# What llama-quantize takes for rows that are not whole blocks of 256 (llama.cpp, src/llama-quant.cpp).
FALLBACK = {Q.Q2_K: Q.Q4_0, Q.Q3_K: Q.Q4_0, Q.IQ4_XS: Q.IQ4_NL, Q.Q4_K: Q.Q5_0, Q.Q5_K: Q.Q5_1, Q.Q6_K: Q.Q8_0}
FALLBACK |= dict.fromkeys([Q.IQ1_S, Q.IQ1_M, Q.IQ2_XXS, Q.IQ2_XS, Q.IQ2_S, Q.IQ3_XXS, Q.IQ3_S], Q.IQ4_NL)
FALLBACK |= dict.fromkeys([Q.TQ1_0, Q.TQ2_0], Q.Q4_0)


@dataclasses.dataclass(frozen=True)
class Mix:
    """The formats of a file: of the experts, of the other matrices, and llama.cpp's number of the file type. `outputs` is
    that of the output matrices of attention, if it is not that of the other matrices."""

    experts: Q
    rest: Q
    file_type: int
    fallback: dict = dataclasses.field(default_factory=lambda: FALLBACK)
    outputs: Q = None

    def fit(self, kind, cols):
        """The format for rows of `cols` values where `kind` is asked for."""
        return self.fallback[kind] if kind in self.fallback and cols % 256 else kind

    def head(self):
        """The format that llama-quantize gives the output head."""
        return Q.Q8_0 if self.rest == Q.Q8_0 else Q.Q6_K


MIXES = {
    "q4_0": Mix(Q.Q4_0, Q.Q4_0, 2),
    "q4_1": Mix(Q.Q4_1, Q.Q4_1, 3),
    "q5_0": Mix(Q.Q5_0, Q.Q5_0, 8),
    "q5_1": Mix(Q.Q5_1, Q.Q5_1, 9),
    "q8_0": Mix(Q.Q8_0, Q.Q8_0, 7),
    "iq4_nl": Mix(Q.IQ4_NL, Q.IQ4_NL, 25),
    "mxfp4": Mix(Q.MXFP4, Q.Q8_0, 38),
    "nvfp4": Mix(Q.NVFP4, Q.Q8_0, 39, outputs=Q.NVFP4),
    "q2_k": Mix(Q.Q2_K, Q.Q2_K, 21),
    "q3_k": Mix(Q.Q3_K, Q.Q3_K, 11),
    "q4_k": Mix(Q.Q4_K, Q.Q4_K, 14),
    "q5_k": Mix(Q.Q5_K, Q.Q5_K, 16),
    "q6_k": Mix(Q.Q6_K, Q.Q6_K, 18),
    "iq4_xs": Mix(Q.IQ4_XS, Q.IQ4_XS, 30),
    "iq3_xxs": Mix(Q.IQ3_XXS, Q.Q4_K, 23),
    "iq3_s": Mix(Q.IQ3_S, Q.Q4_K, 26),
    "iq2_xxs": Mix(Q.IQ2_XXS, Q.Q4_K, 19),
    "iq2_xs": Mix(Q.IQ2_XS, Q.Q4_K, 20),
    "iq2_s": Mix(Q.IQ2_S, Q.Q4_K, 28),
    "tq2_0": Mix(Q.TQ2_0, Q.Q4_K, 37),
    "iq1_s": Mix(Q.IQ1_S, Q.Q4_K, 24),
    "iq1_m": Mix(Q.IQ1_M, Q.Q4_K, 31),
    "tq1_0": Mix(Q.TQ1_0, Q.Q4_K, 36),
}


@dataclasses.dataclass(frozen=True)
class Small:
    """Blocks of 32: an f16 step and perhaps an f16 minimum in front of the quants."""

    rms: float  # of a value as it is drawn, in steps
    largest: int  # value of a quant with all bits set
    minimum: float = 0.0  # in steps; 0 if the format has none
    signed: bool = False  # steps of both signs: the quants have a mean, and theirs cancels it


SMALL = {
    Q.Q4_0: Small(4.18, 7),  # numbers from -7 to 7
    Q.Q8_0: Small(73.4, -1),  # numbers from -127 to 127
    Q.Q4_1: Small(4.61, 15, minimum=-7.5),
    Q.Q5_0: Small(9.247, 15, signed=True),  # numbers from -16 to 15
    Q.Q5_1: Small(9.233, 31, minimum=-15.5),
    Q.IQ4_NL: Small(67.44, 113, signed=True),
}
MXFP4_RMS = 5.852  # of the sixteen numbers, doubled as gguf has them
NVFP4_SCALES = range(0x30, 0x40)  # the bytes of scales that are drawn, floats from 0.5 to 1.875
NVFP4_RMS = MXFP4_RMS * 0.5 * 1.0869  # of a number times its scale, which gguf halves
FILLED = {Q.Q4_0: (0x99, 1), Q.Q8_0: (0x01, 1)}  # quants of 1, where not all bits are set to fill a block


@dataclasses.dataclass(frozen=True)
class Whole:
    """Blocks of which every bit but those of the f16 step may be drawn. Steps of both signs: some quants have a mean."""

    rms: float  # of a value as it is drawn, in steps
    step: list  # fields of the f16 step


def half_at(start):
    return [(start, 0, 8), (start + 1, 0, 8)]


WHOLE = {
    Q.IQ3_XXS: Whole(142.3, half_at(0)),
    Q.IQ3_S: Whole(140.2, half_at(0)),
    Q.IQ2_XXS: Whole(53.4, half_at(0)),
    Q.IQ2_XS: Whole(55.9, half_at(0)),
    Q.IQ2_S: Whole(56.4, half_at(0)),
    Q.TQ2_0: Whole(1.224, half_at(64)),
    Q.IQ1_S: Whole(7.2, half_at(0)),
    Q.IQ1_M: Whole(7.2, [(49, 4, 4), (51, 4, 4), (53, 4, 4), (55, 4, 4)]),
    Q.TQ1_0: Whole(0.817, half_at(52)),
}


@dataclasses.dataclass(frozen=True)
class Large:
    """Blocks of 256 with an f16 step, perhaps one for minima, and a small scale for each group of 16 or 32.

    Bit fields are (byte, shift, bits), lowest bits first.
    """

    rms: float  # of a value as it is drawn, in steps
    step: int  # offset of the f16 step
    largest: int  # value of a quant with all bits set
    group: int  # length of a group
    scales: range  # the bytes of all scales
    scale: callable  # fields of the scale of a group
    drawn: range  # magnitudes of scales as they are drawn
    bias: int  # what is added to a scale before it is stored
    quants: callable  # (bytes, bits in each that belong to it) of the quants of 32 values
    signed: bool = False  # scales of both signs
    minimum: callable = None  # fields of the minimum of a group
    minimum_step: tuple = ()  # offset of the f16 step of the minima, and its size in steps


def six_bits(low):
    """Fields of the eight scales of Q4_K and Q5_K, or with 4 of their minima."""
    return lambda j: [(4 + low + j, 0, 6)] if j < 4 else [(8 + j, low, 4), (low + j, 6, 2)]


def nibbles_of_32(start):
    return lambda g: (range(start + g // 2 * 32, start + g // 2 * 32 + 32), 0x0F << 4 * (g % 2))


def pairs_of_32(start):
    return lambda g: (range(start + g // 4 * 32, start + g // 4 * 32 + 32), 3 << 2 * (g % 4))


def bits_of_32(start):
    return lambda g: (range(start, start + 32), 1 << g)


LARGE = {
    Q.Q2_K: Large(
        1.118 * 11.73, 80, 3, 16, range(16), lambda j: [(j, 0, 4)], range(8, 16), 0, lambda g: [pairs_of_32(16)(g)],
        minimum=lambda j: [(j, 4, 4)], minimum_step=(82, 1.5),
    ),
    Q.Q3_K: Large(
        2.345 * 16.17, 108, 3, 16, range(96, 108), lambda j: [(96 + j % 8, j // 8 * 4, 4), (104 + j % 4, j // 4 * 2, 2)],
        range(8, 24), 32, lambda g: [pairs_of_32(32)(g), bits_of_32(0)(g)], signed=True,
    ),
    Q.Q4_K: Large(
        4.61 * 48.4, 0, 15, 32, range(4, 16), six_bits(0), range(32, 64), 0, lambda g: [nibbles_of_32(16)(g)],
        minimum=six_bits(4), minimum_step=(2, 7.5),
    ),
    Q.Q5_K: Large(
        9.233 * 48.4, 0, 31, 32, range(4, 16), six_bits(0), range(32, 64), 0,
        lambda g: [nibbles_of_32(48)(g), bits_of_32(16)(g)], minimum=six_bits(4), minimum_step=(2, 15.5),
    ),
    Q.Q6_K: Large(
        18.48 * 48.4, 208, 31, 16, range(192, 208), lambda j: [(192 + j, 0, 8)], range(32, 64), 0,
        lambda g: [
            (range(g // 4 * 64 + g % 2 * 32, g // 4 * 64 + g % 2 * 32 + 32), 0x0F << g % 4 // 2 * 4),
            pairs_of_32(128)(g),
        ],
        signed=True,
    ),
    Q.IQ4_XS: Large(
        67.44 * 16.17, 0, 113, 32, range(2, 8), lambda j: [(4 + j // 2, j % 2 * 4, 4), (2 + j // 4, j % 4 * 2, 2)],
        range(8, 24), 32, lambda g: [(range(8 + g * 16, 24 + g * 16), 0xFF)], signed=True,
    ),
}


def put(bytes_, fields, value):
    """Writes a number, or one for each row, into its bit fields. `bytes_` is [..., bytes of a block]."""
    for byte, shift, bits in fields:
        kept = 0xFF & ~(((1 << bits) - 1) << shift)
        part = np.asarray(value & ((1 << bits) - 1), np.uint8) << np.uint8(shift)
        bytes_[..., byte] = bytes_[..., byte] & np.uint8(kept) | part
        value = value >> bits


def scale_table(form, rng, size=4096):
    """[size, bytes]: packed random scales, and minima of the same size, to draw from."""
    groups = 256 // form.group
    scales = rng.integers(form.drawn.start, form.drawn.stop, (size, groups), np.uint8).astype(np.int16)
    if form.signed:
        scales *= rng.integers(0, 2, scales.shape, np.int16) * 2 - 1
    table = np.zeros((size, form.scales.stop), np.uint8)
    for group in range(groups):
        put(table, form.scale(group), scales[:, group] + form.bias & 0xFF)
        if form.minimum:
            put(table, form.minimum(group), scales[:, group])
    return table[:, form.scales.start :]
