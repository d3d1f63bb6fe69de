"""A model of random weights, generated tensor by tensor during a forward pass."""

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q

from shapes.blocks import Matrix
from shapes.forward import attend, norm, rotation, shared_with, silu, softmax, top

CONSTANT = 32  # values at the start of the residual stream that are equal for all tokens
EMBEDDING_STD = 1.0
SHARPNESS = 2.0  # attention falls off with this power of the distance
KNEE, FAR = 3.0, 3000.0  # the range of distances where it does
NOISE = 0.3  # standard deviation of the token-dependent part of queries and keys
ROUTER_STD = 1.5  # standard deviation of router logits
TOKENS = 128  # length of the checked text


class Maker:
    def __init__(self, shape, mix, seed, reuse):
        self.shape, self.mix, self.reuse = shape, mix, reuse
        self.rng = np.random.Generator(np.random.SFC64(seed))
        self.tiny = shape.hidden < 512
        slow = max(32, shape.hidden // 4 // 32 * 32)
        self.slow = slice(shape.hidden - slow, shape.hidden)
        self.measured, self.used, self.logits = [], [], None
        self.expert_std = None

    # Tensors are declared and generated in the same order; `tensors` is iterated twice.

    def tensors(self):
        """(name, shape, kind) of all tensors, in the order of `make`."""
        s, f32 = self.shape, Q.F32
        kind = lambda cols: self.mix.fit(self.mix.rest, cols)
        experts = lambda cols: self.mix.fit(self.mix.experts, cols)
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
            yield b + "ffn_gate_exps.weight", (s.experts, s.inter, s.hidden), experts(s.hidden)
            yield b + "ffn_up_exps.weight", (s.experts, s.inter, s.hidden), experts(s.hidden)
            yield b + "ffn_down_exps.weight", (s.experts, s.hidden, s.inter), experts(s.inter)
            if s.shared:
                yield b + "ffn_gate_inp_shexp.weight", (s.hidden,), f32
                yield b + "ffn_gate_shexp.weight", (s.shared, s.hidden), kind(s.hidden)
                yield b + "ffn_up_shexp.weight", (s.shared, s.hidden), kind(s.hidden)
                yield b + "ffn_down_shexp.weight", (s.hidden, s.shared), kind(s.shared)
        yield "output_norm.weight", (s.hidden,), f32
        if not s.tied:
            yield "output.weight", (s.vocab, s.hidden), self.output_kind()

    def output_kind(self):
        return self.mix.fit(self.mix.rest if self.tiny else self.mix.head(), self.shape.hidden)

    def matrix(self, rows, cols, gain=1.0, kind=None):
        return self.draw(rows, cols, gain / np.sqrt(cols), kind)

    def draw(self, rows, cols, std, kind=None):
        return Matrix(self.rng, rows, cols, self.mix.fit(kind or self.mix.rest, cols), std)

    def make(self):
        """The bytes of all tensors; runs the forward pass of the check along the way."""
        s = self.shape
        std = 1.5 / np.sqrt(s.hidden) if s.tied else EMBEDDING_STD
        embedding = self.draw(s.vocab, s.hidden, std)
        embedding.fill_columns(slice(None), range(CONSTANT), std)
        embedding.fill_columns(slice(None), range(self.slow.start, self.slow.stop), 0)
        yield embedding.bytes()
        ids = self.ids = self.rng.permutation(s.vocab)[: min(TOKENS, s.vocab)]
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
        per_fold = half / np.log(s.theta)  # rotary pairs per factor of e in distance
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
            m = self.draw(heads * s.head_dim, s.hidden, std)
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
        fast = self.draw(self.slow.start, s.heads * s.head_dim, 0.25 * out.std)
        out.blocks[: self.slow.start] = fast.blocks
        out.clear_rows(slice(0, CONSTANT))
        yield out.bytes()
        return x + attend(parts["q"], parts["k"], parts["v"], s) @ out.floats().T

    def router(self, n):
        """A router that gives the requested reuse of experts between adjacent tokens on these hidden states."""
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
        gate = self.matrix(s.experts * s.inter, s.hidden, kind=self.mix.experts)
        yield gate.bytes()
        up = self.matrix(s.experts * s.inter, s.hidden, kind=self.mix.experts)
        yield up.bytes()
        # Weights that are not normalised sum to well below 1; 1.5 keeps both kinds of model in one range.
        down = self.matrix(s.experts * s.hidden, s.inter, 1.5, self.mix.experts)
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
