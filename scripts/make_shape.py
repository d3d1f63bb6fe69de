#!/usr/bin/env python3
"""Writes GGUF files with random weights in the shapes of real Mixture-of-Experts models, for measurements.

    make_shape.py olmoe-1b-7b --kind q4_0 --reuse 0.43 --out olmoe.gguf
    make_shape.py --tiny tests/fixtures/gguf          (the fixtures of the tests, the same bytes every time)

Requirements: Python 3.10, `pip install gguf==0.19.0 numpy==2.4.6`. llama.cpp and larder can both run the files.

How each property comes about:

* Weights. Blocks are drawn in their quantised form, so nothing is ever quantised: a random scale, and numbers that are
  symmetric about zero (Q4_0 never draws -8, Q8_0 never -128, Q4_K has a minimum that is half of its range). Uniform
  Q4_0 nibbles would have a mean of half a step, and that alone pulls all tokens into one direction. Spreads follow the
  width of the input, so that a hidden state keeps its size through all layers and logits stay near 1 to 2.
* Reuse: the share of a token's experts, per layer, that the token before has used too. It comes from the text before a
  token, not from its id, so it holds for any text, random ids included, and neighbours share more than distant tokens:
    - 32 values of the residual stream (`CONSTANT`) are the same for every token and are never written by a layer. The
      query and key matrices read them, so that every query and every key has a constant part, alike in all rotary pairs
      that turn between 1/3 and 1/3000 per position. What remains of the product after the rotation depends on the
      distance alone and falls off like a power of it: each head averages the last few values.
    - A quarter of the residual stream (`slow`) is written by attention only. It therefore changes slowly from one token
      to the next, while the rest, embeddings and outputs of experts, is new with every token.
    - The router (F32) weighs the slow quarter against the rest. That weight is found per layer by bisection on a forward
      pass of random ids. Without it, sharing is what chance gives: top-k over experts.
  Norm weights hide the constant from the router, the experts and the output head.
* Check. While the layers are written, 128 random ids pass through them in numpy, at full width, with the very weights
  that are written: embeddings, attention, routers, norms, shared experts and the output head in every layer, experts in
  the first layer (in all layers of tiny shapes). In later layers the output of the experts is replaced by random values
  of the size that the first layer gave, as expanding every expert would take longer than writing the file. The script
  prints the reuse it measured, fails if a logit is not finite or if tokens do not differ in their experts, and only then
  gives the file its name. A text that repeats tokens shares more.
* Vocabulary. Byte-level BPE of the real size: 256 bytes, pairs of letters, pairs with a space before them, words of two
  pairs, each with its merge; then the tokens of a chat. Any text can be encoded, and comes back unchanged.
"""

import argparse
import dataclasses
import os
import sys
import time
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q

CONSTANT = 32  # values that are the same for every token, at the start of the residual stream
EMBEDDING_STD = 1.0
SHARPNESS = 2.0  # the power by which attention falls off with distance
KNEE, FAR = 3.0, 3000.0  # it does so between these distances
NOISE = 0.3  # spread of what depends on the token, in queries and keys
ROUTER_STD = 1.5  # spread of router logits
TOKENS, WARM_UP = 128, 16  # length of the checked text, and how much of it is left out of the statistics


@dataclasses.dataclass(frozen=True)
class Shape:
    arch: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inter: int
    experts: int
    top_k: int
    vocab: int
    context: int
    theta: float
    eps: float
    pre: str
    shared: int = 0
    dense: int = 0  # feed_forward_length, where it is not the width of an expert
    tied: bool = False


SHAPES = {
    "olmoe-1b-7b": Shape("olmoe", 16, 2048, 16, 16, 128, 1024, 64, 8, 50304, 4096, 1e4, 1e-5, "olmo"),
    "qwen1.5-moe-a2.7b": Shape(
        "qwen2moe", 24, 2048, 16, 16, 128, 1408, 60, 4, 151936, 8192, 1e6, 1e-6, "qwen2", shared=5632, dense=5632
    ),
    "qwen3-30b-a3b": Shape("qwen3moe", 48, 2048, 32, 4, 128, 768, 128, 8, 151936, 40960, 1e6, 1e-6, "qwen2", dense=6144),
    "mixtral-8x7b": Shape("llama", 32, 4096, 32, 8, 128, 14336, 8, 2, 32000, 32768, 1e6, 1e-5, "gpt-2"),
    "tiny-olmoe": Shape("olmoe", 2, 96, 6, 6, 16, 32, 4, 2, 272, 256, 1e4, 1e-5, "olmo"),
    "tiny-qwen2moe": Shape("qwen2moe", 1, 96, 2, 2, 48, 32, 3, 2, 272, 256, 1e4, 1e-6, "qwen2", shared=32, dense=64),
    "tiny-qwen3moe": Shape("qwen3moe", 1, 256, 2, 1, 16, 32, 2, 1, 264, 256, 1e4, 1e-6, "qwen2", dense=64, tied=True),
    "tiny-mixtral": Shape("llama", 2, 96, 4, 2, 24, 32, 3, 2, 272, 256, 1e4, 1e-5, "gpt-2"),
}
FIXTURES = {"tiny-olmoe": "q4_0", "tiny-qwen2moe": "q8_0", "tiny-qwen3moe": "q4_k", "tiny-mixtral": "q4_0"}
KINDS = {"q4_0": (Q.Q4_0, 2), "q8_0": (Q.Q8_0, 7), "q4_k": (Q.Q4_K, 14)}  # with llama.cpp's number of the file type

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


# ---- random matrices in quantised form -------------------------------------------------------------------------------


def kind_for(kind, cols):
    """Q4_K needs rows of whole 256s; llama.cpp too falls back to something larger where they are not."""
    return Q.Q8_0 if kind in (Q.Q4_K, Q.Q6_K) and cols % 256 else kind


def pack_scales(low, high, mins_low, mins_high):
    """Eight 6-bit scales and eight 6-bit minima in twelve bytes, as Q4_K has them. All are [n, 4]."""
    out = np.empty((len(low), 12), np.uint8)
    out[:, 0:4] = low | (high >> 4) << 6
    out[:, 4:8] = mins_low | (mins_high >> 4) << 6
    out[:, 8:12] = high & 15 | (mins_high & 15) << 4
    return out


def without_minus_eight(words):
    """A nibble of 0 stands for -8 in Q4_0, which has no counterpart; it becomes 8, which stands for 0."""
    for start in range(0, len(words), 1 << 15):
        part = words[start : start + (1 << 15)]
        some = part | part >> np.uint64(1)
        some |= some >> np.uint64(2)
        part |= (~some & np.uint64(0x1111111111111111)) << np.uint64(3)


class Matrix:
    """[rows, cols] of random numbers with the given spread, as blocks of bytes [rows, blocks, bytes]."""

    def __init__(self, rng, rows, cols, kind, std):
        self.kind, self.std, self.shape = kind_for(kind, cols), std, (rows, cols)
        length, size = gguf.GGML_QUANT_SIZES[self.kind]
        total = rows * cols // length * size
        words = rng.bit_generator.random_raw(total // 8 + 1)
        self.blocks = blocks = words.view(np.uint8)[:total].reshape(rows, cols // length, size)
        spread = rng.random(blocks.shape[:2], np.float32) * 0.5 + 0.75
        if self.kind == Q.Q4_0:
            without_minus_eight(words)
            self._half(0, spread * (std / 4.18))  # the spread of -7..7, drawn as above
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
        else:  # Q6_K: scales of both signs make the half step vanish
            sign = rng.integers(0, 2, (*blocks.shape[:2], 16), np.int8) * 2 - 1
            blocks[:, :, 192:208] = (rng.integers(32, 64, sign.shape, np.int8) * sign).view(np.uint8)
            self._half(208, spread * (std / (18.5 * 48.4)))

    def _half(self, at, values):
        self.blocks[:, :, at : at + 2] = np.ascontiguousarray(values, np.float16)[..., None].view(np.uint8)

    def clear_rows(self, rows):
        """Makes these rows zero."""
        at = {Q.Q6_K: [208, 209], Q.Q4_K: [0, 1, 2, 3]}.get(self.kind, [0, 1])
        for byte in at:
            self.blocks[rows, :, byte] = 0
        return self

    def fill_columns(self, rows, columns, value):
        """Makes whole runs of 32 columns `value`, which may be 0, in these rows."""
        for start in range(columns.start, columns.stop, 32):
            if self.kind == Q.Q4_K:
                self._fill_group(rows, start, value)
                continue
            block, ones = start // 32, {Q.Q4_0: 0x99, Q.Q8_0: 1}[self.kind]
            self.blocks[rows, block, 0:2] = np.array([value], np.float16).view(np.uint8)
            self.blocks[rows, block, 2:] = ones
        return self

    def _fill_group(self, rows, start, value):
        """One of the eight groups of a Q4_K block: scale as needed, no minimum, all numbers 15."""
        block, group = start // 256, start % 256 // 32
        step = float(self.blocks[0, block, 0:2].copy().view(np.float16)[0])
        scale = round(value / (15 * step)) if value else 0
        assert 0 <= scale < 64, f"{value} is too large for a matrix of spread {self.std}"
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


# ---- vocabulary ------------------------------------------------------------------------------------------------------


def byte_letters():
    """The printable letter that byte-level BPE uses for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(others)) for b in range(256)]


def vocabulary(size, rng):
    """Tokens and merges; every merge makes one token."""
    tokens, merges, space = byte_letters(), [], byte_letters()[32]
    letters = "etaoinshrdlcumwfgypbvkjxqz"
    pairs = [a + b for a in letters for b in letters]

    def merge(left, right):
        if len(tokens) < size - len(SPECIAL):
            tokens.append(left + right)
            merges.append(f"{left} {right}")

    for pair in pairs:
        merge(pair[0], pair[1])
    for pair in pairs:
        merge(space, pair)
    for word in rng.permutation(len(pairs) ** 2)[: max(0, size - len(tokens))]:
        merge(pairs[word // len(pairs)], pairs[word % len(pairs)])
    return tokens + SPECIAL, merges


# ---- the forward pass of the check -----------------------------------------------------------------------------------


def norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def silu(x):
    return x / (1 + np.exp(-x))


def rotation(shape):
    """Angle per position of each pair, and the rows of a head that make up the pairs."""
    half = shape.head_dim // 2
    theta = shape.theta ** (-np.arange(half) / half)
    if shape.arch == "llama":  # GGUF keeps the halves of a head interleaved in this architecture
        return theta, np.arange(0, 2 * half, 2), np.arange(1, 2 * half, 2)
    return theta, np.arange(half), np.arange(half) + half


def rotate(x, shape):
    """x: [tokens, heads, head_dim]"""
    theta, first, second = rotation(shape)
    angle = np.arange(len(x))[:, None] * theta
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    out = np.empty_like(x)
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., first] * sin + x[..., second] * cos
    return out


def attend(q, k, v, shape):
    q = rotate(q.reshape(len(q), -1, shape.head_dim), shape)
    k = rotate(k.reshape(len(k), -1, shape.head_dim), shape)
    group = shape.heads // shape.kv_heads
    k, v = (np.repeat(t.reshape(len(t), -1, shape.head_dim), group, 1) for t in (k, v))
    scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(shape.head_dim)
    scores += np.triu(np.full(scores.shape[1:], -np.inf), 1)
    return np.einsum("hts,shd->thd", softmax(scores), v).reshape(len(q), -1)


def top(logits, k):
    return np.argsort(-logits, -1, kind="stable")[:, :k]


def shared_with(ids, lag):
    """Mean share of a token's experts that the token `lag` before has too."""
    later, earlier = ids[WARM_UP + lag :], ids[WARM_UP:-lag]
    return float((later[:, :, None] == earlier[:, None, :]).any(-1).mean())


# ---- the model -------------------------------------------------------------------------------------------------------


class Maker:
    def __init__(self, shape, kind, seed, reuse):
        self.shape, self.kind, self.reuse = shape, kind, reuse
        self.rng = np.random.Generator(np.random.SFC64(seed))
        self.tiny = shape.hidden < 512
        slow = max(32, shape.hidden // 4)
        self.slow = slice(shape.hidden - slow, shape.hidden)
        self.measured, self.used, self.logits = [], [], None
        self.expert_std = None

    # Each tensor is declared and made in the same order; `tensors` is walked twice.

    def tensors(self):
        """(name, shape, kind) of everything, in the order in which `make` gives it."""
        s, f32 = self.shape, Q.F32
        kind = lambda cols: kind_for(self.kind, cols)
        width, kv_width = s.heads * s.head_dim, s.kv_heads * s.head_dim
        yield "token_embd.weight", (s.vocab, s.hidden), kind(s.hidden)
        for layer in range(s.layers):
            b = f"blk.{layer}."
            yield b + "attn_norm.weight", (s.hidden,), f32
            for part, rows in (("q", width), ("k", kv_width), ("v", kv_width)):
                yield f"{b}attn_{part}.weight", (rows, s.hidden), kind(s.hidden)
            if s.arch == "qwen2moe":
                for part, rows in (("q", width), ("k", kv_width), ("v", kv_width)):
                    yield f"{b}attn_{part}.bias", (rows,), f32
            if s.arch in ("olmoe", "qwen3moe"):
                per_head = s.arch == "qwen3moe"
                yield b + "attn_q_norm.weight", (s.head_dim if per_head else width,), f32
                yield b + "attn_k_norm.weight", (s.head_dim if per_head else kv_width,), f32
            yield b + "attn_output.weight", (s.hidden, width), kind(width)
            yield b + "ffn_norm.weight", (s.hidden,), f32
            yield b + "ffn_gate_inp.weight", (s.experts, s.hidden), f32
            yield b + "ffn_gate_exps.weight", (s.experts, s.inter, s.hidden), kind(s.hidden)
            yield b + "ffn_up_exps.weight", (s.experts, s.inter, s.hidden), kind(s.hidden)
            yield b + "ffn_down_exps.weight", (s.experts, s.hidden, s.inter), kind(s.inter)
            if s.shared:
                yield b + "ffn_gate_inp_shexp.weight", (s.hidden,), f32
                yield b + "ffn_gate_shexp.weight", (s.shared, s.hidden), kind(s.hidden)
                yield b + "ffn_up_shexp.weight", (s.shared, s.hidden), kind(s.hidden)
                yield b + "ffn_down_shexp.weight", (s.hidden, s.shared), kind(s.shared)
        yield "output_norm.weight", (s.hidden,), f32
        if not s.tied:
            yield "output.weight", (s.vocab, s.hidden), self.output_kind()

    def output_kind(self):
        return kind_for(Q.Q6_K, self.shape.hidden) if not self.tiny else kind_for(self.kind, self.shape.hidden)

    def matrix(self, rows, cols, gain=1.0, kind=None):
        return Matrix(self.rng, rows, cols, kind or self.kind, gain / np.sqrt(cols))

    def make(self):
        """The bytes of everything, while the ids of the check pass through it."""
        s = self.shape
        std = 1.5 / np.sqrt(s.hidden) if s.tied else EMBEDDING_STD
        embedding = Matrix(self.rng, s.vocab, s.hidden, self.kind, std)
        embedding.fill_columns(slice(None), range(CONSTANT), std)
        embedding.fill_columns(slice(None), range(self.slow.start, self.slow.stop), 0)
        yield embedding.bytes()
        ids = self.rng.permutation(s.vocab)[: min(TOKENS, s.vocab)]
        picked = embedding.blocks[ids].reshape(len(ids), -1)
        x = gguf.quants.dequantize(picked, embedding.kind).astype(np.float64)
        for layer in range(s.layers):
            x = yield from self.attention(x)
            x = yield from self.mixture(x, layer)
        weight = self.hiding_constant()
        yield weight
        head = embedding if s.tied else self.matrix(s.vocab, s.hidden, 1.5, self.output_kind())
        if not s.tied:
            yield head.bytes()
        self.logits = norm(x, weight, s.eps).astype(np.float32) @ head.floats().T

    def hiding_constant(self):
        weight = np.ones(self.shape.hidden, np.float32)
        weight[:CONSTANT] = 0
        return weight

    def attention(self, x):
        s = self.shape
        half = s.head_dim // 2
        theta, first, second = rotation(s)
        averaging = (theta >= 1 / FAR) & (theta <= 1 / KNEE)
        per_fold = half / np.log(s.theta)  # pairs while the distance grows by a factor of e
        constant = np.sqrt(SHARPNESS / per_fold * np.sqrt(s.head_dim) / 2)
        std = NOISE / np.sqrt(s.hidden)
        weight = np.ones(s.hidden, np.float32)
        size = np.sqrt((x * x).mean(-1) + s.eps).mean()
        weight[:CONSTANT] = constant / (CONSTANT * 2 * std) * size / x[0, 0]
        yield weight
        n = norm(x, weight, s.eps)
        still = np.concatenate([first[~averaging], second[~averaging]])
        moving = np.concatenate([first[averaging], second[averaging]])
        parts = {}
        for part, heads in (("q", s.heads), ("k", s.kv_heads)):
            m = Matrix(self.rng, heads * s.head_dim, s.hidden, self.kind, std)
            rows = lambda within: (np.arange(heads)[:, None] * s.head_dim + within).ravel()
            m.fill_columns(rows(moving), range(CONSTANT), 2 * std).fill_columns(rows(still), range(CONSTANT), 0)
            yield m.bytes()
            parts[part] = n @ m.floats().T
        values = self.matrix(s.kv_heads * s.head_dim, s.hidden).fill_columns(slice(None), range(CONSTANT), 0)
        yield values.bytes()
        parts["v"] = n @ values.floats().T
        if s.arch == "qwen2moe":
            for part in "qkv":
                bias = (self.rng.standard_normal(parts[part].shape[1]) * 0.02).astype(np.float32)
                yield bias
                parts[part] = parts[part] + bias
        if s.arch in ("olmoe", "qwen3moe"):
            gain = np.sqrt(averaging.mean() * constant**2 + NOISE**2)
            for part in "qk":
                split = (-1, s.head_dim) if s.arch == "qwen3moe" else (1, -1)
                heads = parts[part].reshape(len(x), *split)
                scale = np.full(heads.shape[-1], gain, np.float32)
                yield scale
                parts[part] = norm(heads, scale, s.eps).reshape(len(x), -1)
        out = self.matrix(s.hidden, s.heads * s.head_dim)
        fast = Matrix(self.rng, self.slow.start, s.heads * s.head_dim, self.kind, 0.25 * out.std)
        out.blocks[: self.slow.start] = fast.blocks
        out.clear_rows(slice(0, CONSTANT))
        yield out.bytes()
        return x + attend(parts["q"], parts["k"], parts["v"], s) @ out.floats().T

    def router(self, n):
        """A router for these hidden states that shares as many experts between neighbours as is asked for."""
        s = self.shape
        rows = self.rng.standard_normal((s.experts, s.hidden))
        rows[:, :CONSTANT] = 0

        def weighed(slow):
            w = rows.copy()
            w[:, self.slow] *= slow
            return (w * (ROUTER_STD / (n @ w.T).std())).astype(np.float32)

        share = lambda slow: shared_with(top(n @ weighed(slow).T, s.top_k), 1)
        low, high = 0.0, 1.0
        while share(high) < self.reuse and high < 256:
            high *= 2
        for _ in range(12):
            middle = (low + high) / 2
            low, high = (middle, high) if share(middle) < self.reuse else (low, middle)
        return weighed(0.0 if share(0.0) >= self.reuse else high)

    def mixture(self, x, layer):
        s = self.shape
        weight = self.hiding_constant()
        yield weight
        n = norm(x, weight, s.eps)
        router = self.router(n)
        yield router
        logits = n @ router.T
        ids = top(logits, s.top_k)
        self.measured.append([shared_with(ids, lag) for lag in (1, 4, 16)])
        self.used.append(ids)
        chosen = np.take_along_axis(softmax(logits), ids, -1)
        if s.arch in ("llama", "qwen3moe"):
            chosen /= chosen.sum(-1, keepdims=True)
        exact = self.tiny or layer == 0
        gate = self.matrix(s.experts * s.inter, s.hidden)
        yield gate.bytes()
        up = self.matrix(s.experts * s.inter, s.hidden)
        yield up.bytes()
        # Without normalised weights their sum is well below 1; 1.5 keeps both kinds of model in the same range.
        down = self.matrix(s.experts * s.hidden, s.inter, 1.5)
        rows = np.arange(s.experts)[:, None] * s.hidden
        unwritten = np.r_[0:CONSTANT, self.slow.start : s.hidden]
        down.clear_rows((rows + unwritten).ravel())
        yield down.bytes()
        if exact:
            out = self.experts(n, ids, chosen, gate, up, down)
            self.expert_std = out[:, CONSTANT : self.slow.start].std()
        else:
            out = self.rng.standard_normal(x.shape) * self.expert_std
            out[:, unwritten] = 0
        del gate, up, down
        if s.shared:
            out = out + (yield from self.shared_expert(n, unwritten))
        return x + out

    def experts(self, n, ids, weights, gate, up, down):
        out = np.zeros_like(n)
        for expert in np.unique(ids):
            tokens, rank = np.nonzero(ids == expert)
            part = lambda m, rows: gguf.quants.dequantize(m.bytes()[expert * rows : (expert + 1) * rows], m.kind)
            g, u = (n[tokens] @ part(m, self.shape.inter).T for m in (gate, up))
            out[tokens] += weights[tokens, rank][:, None] * (silu(g) * u @ part(down, self.shape.hidden).T)
        return out

    def shared_expert(self, n, unwritten):
        s = self.shape
        how_much = (self.rng.standard_normal(s.hidden) / np.sqrt(s.hidden)).astype(np.float32)
        yield how_much
        gate = self.matrix(s.shared, s.hidden)
        yield gate.bytes()
        up = self.matrix(s.shared, s.hidden)
        yield up.bytes()
        down = self.matrix(s.hidden, s.shared, 0.5).clear_rows(unwritten)
        yield down.bytes()
        hidden = silu(n @ gate.floats().T) * (n @ up.floats().T)
        return hidden @ down.floats().T / (1 + np.exp(-(n @ how_much)))[:, None]


# ---- the file --------------------------------------------------------------------------------------------------------


def metadata(writer, name, shape, file_type, rng):
    s = shape
    writer.add_name(f"{name} (random weights)")
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(s.vocab)
    writer.add_context_length(s.context)
    writer.add_embedding_length(s.hidden)
    writer.add_block_count(s.layers)
    writer.add_feed_forward_length(s.dense or s.inter)
    writer.add_head_count(s.heads)
    writer.add_head_count_kv(s.kv_heads)
    writer.add_key_length(s.head_dim)
    writer.add_value_length(s.head_dim)
    writer.add_rope_dimension_count(s.head_dim)
    writer.add_rope_freq_base(s.theta)
    writer.add_layer_norm_rms_eps(s.eps)
    writer.add_expert_count(s.experts)
    writer.add_expert_used_count(s.top_k)
    writer.add_expert_feed_forward_length(s.inter)
    if s.shared:
        writer.add_expert_shared_feed_forward_length(s.shared)
    tokens, merges = vocabulary(s.vocab, rng)
    normal = len(tokens) - len(SPECIAL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(s.pre)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * normal + [gguf.TokenType.CONTROL] * len(SPECIAL))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(normal)
    writer.add_eos_token_id(normal + 2)
    writer.add_pad_token_id(normal)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def write(name, kind_name, seed, reuse, out):
    started = time.monotonic()
    shape, (kind, file_type) = SHAPES[name], KINDS[kind_name]
    maker = Maker(shape, kind, seed, reuse)
    part = out.with_name(out.name + ".part")
    writer = gguf.GGUFWriter(part, shape.arch)
    metadata(writer, name, shape, file_type, np.random.Generator(np.random.SFC64(seed + 1)))
    tensors = list(maker.tensors())
    for tensor, dims, tensor_kind in tensors:
        length, size = gguf.GGML_QUANT_SIZES[tensor_kind]
        total = int(np.prod(dims)) // length * size
        writer.add_tensor_info(tensor, dims, np.dtype(np.float32), total, raw_dtype=tensor_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    written = 0
    for (tensor, dims, tensor_kind), data in zip(tensors, maker.make(), strict=True):
        length, size = gguf.GGML_QUANT_SIZES[tensor_kind]
        assert data.nbytes == int(np.prod(dims)) // length * size, f"{tensor}: {data.nbytes} bytes for {dims}"
        writer.write_tensor_data(data)
        written += data.nbytes
        if sys.stderr.isatty():
            print(f"\r{tensor:40} {written / 1e9:6.2f} GB", end="", file=sys.stderr)
    writer.close()
    report(maker)
    os.replace(part, out)
    seconds = time.monotonic() - started
    print(f"{out}: {out.stat().st_size / 1e9:.3f} GB in {seconds:.0f} s, {written / 1e6 / seconds:.0f} MB/s")


def report(maker):
    """Prints what was measured, and fails if the model would be of no use."""
    s = maker.shape
    lags = np.array(maker.measured)
    chance = s.top_k / s.experts
    distinct = np.mean([len({tuple(sorted(row)) for row in ids}) / len(ids) for ids in maker.used])
    touched = np.mean([len(np.unique(ids)) / s.experts for ids in maker.used])
    exact = "all layers" if maker.tiny else "layer 0"
    print(f"experts shared with the token 1, 4, 16 before: {' '.join(f'{v:.3f}' for v in lags.mean(0))}")
    print(f"  asked for {maker.reuse:.3f}, chance is {chance:.3f}; by layer {lags[:, 0].min():.3f} to {lags[:, 0].max():.3f}")
    print(f"  over {len(maker.used[0])} random ids in numpy, all layers, experts computed in {exact}")
    print(f"choices of experts that differ: {distinct:.3f} of tokens; experts used at all: {touched:.3f}")
    logits = maker.logits
    print(f"logits: spread {logits.std():.2f}, largest {np.abs(logits).max():.2f}")
    if not np.isfinite(logits).all():
        sys.exit("some logits are not finite; the file is of no use")
    if len(np.unique(logits.argmax(-1))) < len(logits) // 4:
        sys.exit("tokens hardly differ in their logits; the file is of no use")
    if s.experts > 4 and (distinct < 0.2 or touched < 0.5):
        sys.exit("tokens hardly differ in their experts; the file is of no use")


def main():
    parser = argparse.ArgumentParser(description="GGUF files with random weights in the shapes of real models")
    parser.add_argument("shape", nargs="?", choices=sorted(SHAPES))
    parser.add_argument("--kind", choices=sorted(KINDS), default="q4_0")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reuse", type=float, default=0.43, help="share of experts in common with the token before")
    parser.add_argument("--out", type=Path, help="the file; SHAPE-KIND.gguf unless given")
    parser.add_argument("--tiny", type=Path, metavar="FOLDER", help="write the fixtures of the tests instead")
    args = parser.parse_args()
    if args.tiny:
        args.tiny.mkdir(parents=True, exist_ok=True)
        for name, kind in FIXTURES.items():
            write(name, kind, 0, 0.43, args.tiny / f"{name}-{kind}.gguf")
        return
    if not args.shape:
        parser.error("name a shape, or --tiny FOLDER")
    write(args.shape, args.kind, args.seed, args.reuse, args.out or Path(f"{args.shape}-{args.kind}.gguf"))


if __name__ == "__main__":
    main()
