"""Random matrices, drawn in their quantised form."""

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q

def kind_for(kind, cols):
    """The format for rows of `cols`: Q4_K and Q6_K need multiples of 256; like llama.cpp, others fall back to a larger one."""
    return Q.Q8_0 if kind in (Q.Q4_K, Q.Q6_K) and cols % 256 else kind


def pack_scales(low, high, mins_low, mins_high):
    """Packs eight 6-bit scales and eight 6-bit minima into the twelve bytes of Q4_K. Arguments are [n, 4]."""
    out = np.empty((len(low), 12), np.uint8)
    out[:, 0:4] = low | (high >> 4) << 6
    out[:, 4:8] = mins_low | (mins_high >> 4) << 6
    out[:, 8:12] = high & 15 | (mins_high & 15) << 4
    return out


def without_minus_eight(words):
    """Replaces nibbles of 0, which mean -8 in Q4_0 and have no positive counterpart, by 8, which means 0."""
    for start in range(0, len(words), 1 << 15):
        part = words[start : start + (1 << 15)]
        some = part | part >> np.uint64(1)
        some |= some >> np.uint64(2)
        part |= (~some & np.uint64(0x1111111111111111)) << np.uint64(3)


class Matrix:
    """[rows, cols] of random numbers with standard deviation `std`, as blocks of bytes [rows, blocks, bytes]."""

    def __init__(self, rng, rows, cols, kind, std):
        self.kind, self.std, self.shape = kind_for(kind, cols), std, (rows, cols)
        length, size = gguf.GGML_QUANT_SIZES[self.kind]
        total = rows * cols // length * size
        words = rng.bit_generator.random_raw(total // 8 + 1)
        self.blocks = blocks = words.view(np.uint8)[:total].reshape(rows, cols // length, size)
        spread = rng.random(blocks.shape[:2], np.float32) * 0.5 + 0.75
        if self.kind == Q.Q4_0:
            without_minus_eight(words)
            self._half(0, spread * (std / 4.18))  # 4.18: standard deviation of -7..7, drawn as above
        elif self.kind == Q.Q8_0:
            np.putmask(blocks, blocks == 0x80, 0)
            self._half(0, spread * (std / 73.4))
        elif self.kind == Q.Q4_K:
            scales = rng.integers(32, 64, (4096, 8), np.uint8)
            packed = pack_scales(scales[:, :4], scales[:, 4:], scales[:, :4], scales[:, 4:])
            blocks[:, :, 4:16] = packed[rng.integers(0, 4096, blocks.shape[:2])]
            step = np.full_like(spread, std / (4.61 * 48.4))
            self._half(0, step)
            self._half(2, step * 7.5)
        else:  # Q6_K: scales of both signs cancel the offset of half a step
            sign = rng.integers(0, 2, (*blocks.shape[:2], 16), np.int8) * 2 - 1
            blocks[:, :, 192:208] = (rng.integers(32, 64, sign.shape, np.int8) * sign).view(np.uint8)
            self._half(208, spread * (std / (18.5 * 48.4)))

    def _half(self, at, values):
        self.blocks[:, :, at : at + 2] = np.ascontiguousarray(values, np.float16)[..., None].view(np.uint8)

    def clear_rows(self, rows):
        """Sets these rows to zero."""
        at = {Q.Q6_K: [208, 209], Q.Q4_K: [0, 1, 2, 3]}.get(self.kind, [0, 1])
        for byte in at:
            self.blocks[rows, :, byte] = 0
        return self

    def fill_columns(self, rows, columns, value):
        """Sets whole runs of 32 columns to `value`, which may be 0, in these rows."""
        for start in range(columns.start, columns.stop, 32):
            if self.kind == Q.Q4_K:
                self._fill_group(rows, start, value)
                continue
            block, ones = start // 32, {Q.Q4_0: 0x99, Q.Q8_0: 1}[self.kind]
            self.blocks[rows, block, 0:2] = np.array([value], np.float16).view(np.uint8)
            self.blocks[rows, block, 2:] = ones
        return self

    def _fill_group(self, rows, start, value):
        """Fills one of the eight groups of a Q4_K block: scale as needed, no minimum, all numbers 15."""
        block, group = start // 256, start % 256 // 32
        step = float(self.blocks[0, block, 0:2].copy().view(np.float16)[0])
        scale = round(value / (15 * step)) if value else 0
        assert 0 <= scale < 64, f"{value} is too large for a matrix with standard deviation {self.std}"
        part = self.blocks[rows, block]
        if group < 4:
            part[:, 4 + group] = part[:, 4 + group] & 0xC0 | scale
            part[:, 8 + group] &= 0xC0
        else:
            j = group - 4
            part[:, 4 + j] = part[:, 4 + j] & 0x3F | scale >> 4 << 6
            part[:, 8 + j] &= 0x3F
            part[:, 12 + j] = scale & 15
        half = 16 + group // 2 * 32
        low, high = (0x0F, 0xF0) if group % 2 == 0 else (0xF0, 0x0F)
        part[:, half : half + 32] = part[:, half : half + 32] & high | low
        self.blocks[rows, block] = part

    def floats(self):
        return gguf.quants.dequantize(self.blocks.reshape(self.shape[0], -1), self.kind)

    def bytes(self):
        return self.blocks.reshape(self.shape[0], -1)
