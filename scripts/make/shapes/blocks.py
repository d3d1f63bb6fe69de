"""Random matrices, drawn in their quantised form."""

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q

from shapes.formats import FILLED, LARGE, MXFP4_RMS, NVFP4_RMS, NVFP4_SCALES, SMALL, WHOLE, put, scale_table


def without_minus_eight(words):
    """Replaces nibbles of 0, which mean -8 in Q4_0 and have no positive counterpart, by 8, which means 0."""
    for start in range(0, len(words), 1 << 15):
        part = words[start : start + (1 << 15)]
        some = part | part >> np.uint64(1)
        some |= some >> np.uint64(2)
        part |= (~some & np.uint64(0x1111111111111111)) << np.uint64(3)


class Matrix:
    """[rows, cols] of random numbers with standard deviation `std`, as blocks of bytes [rows, blocks, bytes]. In NVFP4, each of
    the `parts` that follow one another has an f32 in `scales` by which its values are multiplied."""

    def __init__(self, rng, rows, cols, kind, std, parts=1):
        self.kind, self.std, self.shape, self.scales = kind, std, (rows, cols), None
        length, size = gguf.GGML_QUANT_SIZES[kind]
        total = rows * cols // length * size
        words = rng.bit_generator.random_raw(total // 8 + 1)
        self.blocks = words.view(np.uint8)[:total].reshape(rows, cols // length, size)
        spread = rng.random(self.blocks.shape[:2], np.float32) * 0.5 + 0.75
        if kind == Q.Q4_0:
            without_minus_eight(words)
        elif kind == Q.Q8_0:
            np.putmask(self.blocks, self.blocks == 0x80, 0)
        if kind == Q.MXFP4:
            self._draw_exponents(spread)
        elif kind == Q.NVFP4:
            self._draw_floats(rng, parts)
        elif kind in SMALL:
            self._draw_small(SMALL[kind], spread, rng)
        elif kind in WHOLE:
            self._draw_whole(WHOLE[kind], spread, rng)
        else:
            self._draw_large(LARGE[kind], rng)

    def _draw_exponents(self, uniform):
        """Two neighbouring powers of two, as often as the standard deviation needs. `uniform` is from 0.75 to 1.25."""
        step = self.std / MXFP4_RMS
        low = int(np.floor(np.log2(step)))
        larger = ((step / 2.0**low) ** 2 - 1) / 3
        self.blocks[:, :, 0] = 128 + low + (uniform < 0.75 + 0.5 * larger)

    def _draw_floats(self, rng, parts):
        low, high = NVFP4_SCALES.start, NVFP4_SCALES.stop
        self.blocks[:, :, :4] = rng.integers(low, high, (*self.blocks.shape[:2], 4), np.uint8)
        self.scales = ((rng.random(parts, np.float32) * 0.5 + 0.75) * (self.std / NVFP4_RMS)).astype(np.float32)

    def _draw_small(self, form, spread, rng):
        step = spread * (self.std / form.rms)
        if form.signed:
            np.negative(step, out=step, where=rng.integers(0, 2, step.shape, bool))
        self._half(0, step)
        if form.minimum:
            self._half(2, step * form.minimum)

    def _draw_whole(self, form, spread, rng):
        step = spread * (self.std / form.rms)
        np.negative(step, out=step, where=rng.integers(0, 2, step.shape, bool))
        put(self.blocks, form.step, np.asarray(step, np.float16).view(np.uint16))

    def _draw_large(self, form, rng):
        table = scale_table(form, rng)
        self.blocks[:, :, form.scales.start : form.scales.stop] = table[rng.integers(0, len(table), self.blocks.shape[:2])]
        step = np.full(self.blocks.shape[:2], self.std / form.rms, np.float32)
        self._half(form.step, step)
        if form.minimum:
            at, size = form.minimum_step
            self._half(at, step * size)

    def _half(self, at, values):
        self.blocks[:, :, at : at + 2] = np.ascontiguousarray(values, np.float16)[..., None].view(np.uint8)

    def quarter_rows(self, rows):
        """Makes these rows, in NVFP4, smaller by two powers of two."""
        self.blocks[rows, :, :4] -= 0x10

    def clear_rows(self, rows):
        """Sets these rows to zero."""
        if self.kind in WHOLE:
            part = self.blocks[rows]
            put(part, WHOLE[self.kind].step, 0)
            self.blocks[rows] = part
            return self
        if self.kind == Q.MXFP4:  # no scale means zero, but all quants may
            zeros = range(1, 17)
        elif self.kind == Q.NVFP4:
            zeros = range(4)
        elif self.kind in SMALL:
            zeros = range(4 if SMALL[self.kind].minimum else 2)
        else:
            form = LARGE[self.kind]
            starts = [form.step, *form.minimum_step[:1]]
            zeros = [byte for start in starts for byte in (start, start + 1)]
        for byte in zeros:
            self.blocks[rows, :, byte] = 0
        return self

    def fill_columns(self, rows, columns, value):
        """Sets whole runs of 32 columns to `value`, or close to it in blocks of 256, in these rows."""
        for start in range(columns.start, columns.stop, 32):
            if self.kind in LARGE:
                self._fill_group(LARGE[self.kind], rows, start, value)
            else:
                self._fill_block(SMALL[self.kind], rows, start // 32, value)
        return self

    def _fill_block(self, form, rows, block, value):
        """Fills a block of 32 with equal quants. A minimum alone is the value."""
        byte, number = FILLED.get(self.kind, (0xFF, form.largest))
        halves = [0, value] if form.minimum else [value / number]
        self.blocks[rows, block, 0 : 2 * len(halves)] = np.array(halves, np.float16).view(np.uint8)
        self.blocks[rows, block, 2 * len(halves) :] = byte

    def _fill_group(self, form, rows, start, value):
        """Fills 32 values of a block of 256: scale as needed, no minimum, all quants with all bits set."""
        block, run = start // 256, start % 256 // 32
        part = self.blocks[rows, block]
        step = float(self.blocks[0, block, form.step : form.step + 2].copy().view(np.float16)[0])
        scale = round(value / (form.largest * step)) if value else 0
        bits = sum(bits for _, _, bits in form.scale(0)) - form.signed
        assert 0 <= scale < 1 << bits, f"{value} is too large for a matrix with standard deviation {self.std}"
        each = 32 // form.group
        for group in range(run * each, run * each + each):
            put(part, form.scale(group), scale + form.bias)
            if form.minimum:
                put(part, form.minimum(group), 0)
        for where, bits in form.quants(run):
            part[:, where.start : where.stop] |= np.uint8(bits)
        self.blocks[rows, block] = part

    def floats(self, part=0, parts=1):
        """The values of a part of the rows."""
        rows = self.shape[0] // parts
        values = gguf.quants.dequantize(self.bytes()[part * rows : (part + 1) * rows], self.kind)
        return values if self.scales is None else values.astype(np.float64) * self.scales[part]

    def bytes(self):
        return self.blocks.reshape(self.shape[0], -1)
