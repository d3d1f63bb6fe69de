"""A model of random weights, generated tensor by tensor during a forward pass."""

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q

from shapes.blocks import Matrix
from shapes.forward import (
    amplitude, attend, attention_scores, clamped_swiglu, latent_scores, norm, rotation, shared_with, silu, softmax, top,
)

CONSTANT = 32  # values at the start of the residual stream that are equal for all tokens
EMBEDDING_STD = 1.0
SHARPNESS = 2.0  # attention falls off with this power of the distance
KNEE, FAR = 3.0, 3000.0  # the range of distances where it does
NOISE = 0.3  # standard deviation of the token-dependent part of queries and keys
ROUTER_STD = 1.5  # standard deviation of router logits
TOKENS = 128  # length of the checked text
GPT_OSS_GAIN = 2.5  # of gate and up, so that some values reach the limit of the activation


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
        output = lambda cols: self.mix.fit(self.mix.outputs or self.mix.rest, cols)
        experts = lambda cols: self.mix.fit(self.mix.experts, cols)
        width, kv_width = s.heads * s.head_dim, s.kv_heads * s.head_dim
        yield "token_embd.weight", (s.vocab, s.hidden), kind(s.hidden)
        for layer in range(s.layers):
            b = f"blk.{layer}."
            yield b + "attn_norm.weight", (s.hidden,), f32
            if s.latent:
                yield from self.latent_tensors(b, layer, kind, experts)
                continue
            for part, rows in (("q", width), ("k", kv_width), ("v", kv_width)):
                yield f"{b}attn_{part}.weight", (rows, s.hidden), kind(s.hidden)
            if s.arch in ("qwen2moe", "gpt-oss"):
                for part, rows in (("q", width), ("k", kv_width), ("v", kv_width)):
                    yield f"{b}attn_{part}.bias", (rows,), f32
            if s.arch in ("olmoe", "qwen3moe"):
                per_head = s.arch == "qwen3moe"
                yield b + "attn_q_norm.weight", (s.head_dim if per_head else width,), f32
                yield b + "attn_k_norm.weight", (s.head_dim if per_head else kv_width,), f32
            if s.arch == "gpt-oss":
                yield b + "attn_sinks.weight", (s.heads,), f32
            yield from self.scaled(b + "attn_output", (s.hidden, width), output(width), 1)
            if s.arch == "gpt-oss":
                yield b + "attn_output.bias", (s.hidden,), f32
            yield b + ("post_attention_norm" if s.arch == "gpt-oss" else "ffn_norm") + ".weight", (s.hidden,), f32
            yield b + "ffn_gate_inp.weight", (s.experts, s.hidden), f32
            if s.arch == "gpt-oss":
                yield b + "ffn_gate_inp.bias", (s.experts,), f32
            yield from self.expert_tensors(b, experts)
            if s.arch == "gpt-oss":
                for part, rows in (("gate", s.inter), ("up", s.inter), ("down", s.hidden)):
                    yield f"{b}ffn_{part}_exps.bias", (s.experts, rows), f32
            if s.shared:
                yield b + "ffn_gate_inp_shexp.weight", (s.hidden,), f32
                yield from self.mlp_tensors(b, "_shexp", s.shared, kind)
        yield "output_norm.weight", (s.hidden,), f32
        if not s.tied:
            yield "output.weight", (s.vocab, s.hidden), self.output_kind()

    def latent_tensors(self, b, layer, kind, experts):
        s, a, f32 = self.shape, self.shape.latent, Q.F32
        plain = s.head_dim - a.rotated
        yield b + "attn_q_a.weight", (a.query_rank, s.hidden), kind(s.hidden)
        yield b + "attn_q_a_norm.weight", (a.query_rank,), f32
        yield b + "attn_q_b.weight", (s.heads * s.head_dim, a.query_rank), kind(a.query_rank)
        yield b + "attn_kv_a_mqa.weight", (a.rank + a.rotated, s.hidden), kind(s.hidden)
        yield b + "attn_kv_a_norm.weight", (a.rank,), f32
        yield b + "attn_k_b.weight", (s.heads, a.rank, plain), kind(plain)
        yield b + "attn_v_b.weight", (s.heads, a.value, a.rank), kind(a.rank)
        yield b + "attn_output.weight", (s.hidden, s.heads * a.value), kind(s.heads * a.value)
        yield b + "ffn_norm.weight", (s.hidden,), f32
        if layer < a.dense_layers:
            yield from self.mlp_tensors(b, "", s.dense, kind)
            return
        yield b + "ffn_gate_inp.weight", (s.experts, s.hidden), f32
        yield b + "exp_probs_b.bias", (s.experts,), f32
        yield from self.expert_tensors(b, experts)
        yield from self.mlp_tensors(b, "_shexp", s.shared, kind)

    def expert_tensors(self, b, kind):
        s = self.shape
        for part, rows, cols in (("gate", s.inter, s.hidden), ("up", s.inter, s.hidden), ("down", s.hidden, s.inter)):
            yield from self.scaled(f"{b}ffn_{part}_exps", (s.experts, rows, cols), kind(cols), s.experts)

    def mlp_tensors(self, b, name, width, kind):
        hidden = self.shape.hidden
        for part, rows, cols in (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)):
            yield f"{b}ffn_{part}{name}.weight", (rows, cols), kind(cols)

    def scaled(self, name, dims, kind, parts):
        """A matrix and, in NVFP4, the scales of its parts and those of their inputs, which no weight depends on."""
        yield f"{name}.weight", dims, kind
        if kind == Q.NVFP4:
            yield f"{name}.scale", (parts,), Q.F32
            yield f"{name}.input_scale", (parts,), Q.F32

    def written(self, matrix):
        """The data of a matrix and of its scales."""
        yield matrix.bytes()
        if matrix.scales is not None:
            yield matrix.scales
            yield np.full(len(matrix.scales), 0.01, np.float32)

    def output_kind(self):
        return self.mix.fit(self.mix.rest if self.tiny else self.mix.head(), self.shape.hidden)

    def matrix(self, rows, cols, gain=1.0, kind=None, parts=1):
        return self.draw(rows, cols, gain / np.sqrt(cols), kind, parts)

    def draw(self, rows, cols, std, kind=None, parts=1):
        return Matrix(self.rng, rows, cols, self.mix.fit(kind or self.mix.rest, cols), std, parts)

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
            before = x
            x = yield from (self.latent_attention(x) if s.latent else self.attention(x, layer))
            dense = s.latent and layer < s.latent.dense_layers
            x = yield from (self.dense(x) if dense else self.mixture(x, layer, before if s.early else None))
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

    def attention(self, x, layer):
        s = self.shape
        half = s.head_dim // 2
        theta, first, second = rotation(s)
        averaging = (theta >= 1 / FAR) & (theta <= 1 / KNEE)
        per_fold = half / np.log(s.theta)  # rotary pairs per factor of e in distance
        constant = np.sqrt(SHARPNESS / per_fold * np.sqrt(s.head_dim) / 2) / amplitude(s)
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
        if s.arch in ("qwen2moe", "gpt-oss"):
            for part in "qkv":
                bias = self.bias(0.02, parts[part].shape[1])
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
        scores = attention_scores(parts["q"], parts["k"], s, 0 if layer % 2 else s.window)
        sinks = None
        if s.arch == "gpt-oss":
            # About a quarter of a head's attention: its sum is e times a sink on average.
            sums = np.log(np.exp(scores - scores.max()).sum(-1)).mean(-1) + scores.max()
            sinks = (sums - 1 + self.bias(0.5, s.heads)).astype(np.float32)
            yield sinks
        out = self.matrix(s.hidden, s.heads * s.head_dim, kind=self.mix.outputs)
        if out.scales is None:
            fast = self.draw(self.slow.start, s.heads * s.head_dim, 0.25 * out.std)
            out.blocks[: self.slow.start] = fast.blocks
        else:
            out.quarter_rows(slice(0, self.slow.start))
        out.clear_rows(slice(0, CONSTANT))
        yield from self.written(out)
        x = x + attend(scores, parts["v"], s, sinks) @ out.floats().T
        if s.arch == "gpt-oss":
            bias = self.bias(0.02, s.hidden)
            bias[:CONSTANT] = 0
            yield bias
            x = x + bias
        return x

    def latent_attention(self, x):
        """Without a constant part: attention is spread over all positions, so the slow quarter averages a text from its start."""
        s, a, tokens = self.shape, self.shape.latent, len(x)
        plain = s.head_dim - a.rotated
        weight = self.hiding_constant()
        yield weight
        n = norm(x, weight, s.eps)
        down = self.matrix(a.query_rank, s.hidden)
        yield down.bytes()
        ones = np.ones(a.query_rank, np.float32)
        yield ones
        up = self.matrix(s.heads * s.head_dim, a.query_rank)
        yield up.bytes()
        q = (norm(n @ down.floats().T, ones, s.eps) @ up.floats().T).reshape(tokens, s.heads, s.head_dim)
        down = self.matrix(a.rank + a.rotated, s.hidden)
        yield down.bytes()
        latent, rotated = np.split(n @ down.floats().T, [a.rank], 1)
        ones = np.ones(a.rank, np.float32)
        yield ones
        latent = norm(latent, ones, s.eps)
        keys = self.draw(s.heads * a.rank, plain, 1 / np.sqrt(a.rank))
        yield keys.bytes()
        values = self.matrix(s.heads * a.value, a.rank)
        yield values.bytes()
        k = np.einsum("tr,hrd->thd", latent, keys.floats().reshape(s.heads, a.rank, plain))
        v = np.einsum("tr,hvr->thv", latent, values.floats().reshape(s.heads, a.value, a.rank))
        attended = np.einsum("hts,shv->thv", softmax(latent_scores(q, k, rotated, s)), v).reshape(tokens, -1)
        out = self.matrix(s.hidden, s.heads * a.value).clear_rows(slice(0, CONSTANT))
        yield out.bytes()
        return x + attended @ out.floats().T

    def dense(self, x):
        weight = self.hiding_constant()
        yield weight
        unwritten = np.r_[0:CONSTANT, self.slow.start : self.shape.hidden]
        return x + (yield from self.mlp(norm(x, weight, self.shape.eps), self.shape.dense, unwritten))

    def bias(self, std, *shape):
        return (self.rng.standard_normal(shape) * std).astype(np.float32)

    def router(self, n, bias):
        """A router that, with its bias, gives the requested reuse of experts between adjacent tokens on these hidden states."""
        s = self.shape
        rows = self.rng.standard_normal((s.experts, s.hidden))
        rows[:, :CONSTANT] = 0

        def weighed(slow):
            w = rows.copy()
            w[:, self.slow] *= slow
            return (w * (ROUTER_STD / (n @ w.T).std())).astype(np.float32)

        share = lambda slow: shared_with(top(n @ weighed(slow).T + bias, s.top_k), 1)
        low, high = 0.0, 1.0
        while share(high) < self.reuse and high < 256:
            high *= 2
        for _ in range(12):
            middle = (low + high) / 2
            low, high = (middle, high) if share(middle) < self.reuse else (low, middle)
        return weighed(0.0 if share(0.0) >= self.reuse else high)

    def mixture(self, x, layer, before):
        """`before` is what the router reads, if that is not the normalised `x`."""
        s = self.shape
        weight = self.hiding_constant()
        yield weight
        n = norm(x, weight, s.eps)
        bias = self.bias(0.2, s.experts) if s.arch == "gpt-oss" else 0
        seen = n if before is None else before
        router = self.router(seen, bias)
        yield router
        if s.arch == "gpt-oss":
            yield bias
        logits = seen @ router.T + bias
        if s.latent:
            yield np.zeros(s.experts, np.float32)
        ids = top(logits, s.top_k)
        self.measured.append([shared_with(ids, lag) for lag in (1, 4, 16)])
        self.used.append(ids)
        chosen = np.take_along_axis(1 / (1 + np.exp(-logits)) if s.latent else softmax(logits), ids, -1)
        if s.arch in ("llama", "qwen3moe", "gpt-oss", "deepseek2", "smallthinker"):
            chosen /= chosen.sum(-1, keepdims=True)
        if s.latent:
            chosen *= s.latent.scale
        exact = self.tiny or self.expert_std is None  # in the first layer with experts
        wide, narrow = (GPT_OSS_GAIN, 0.15) if s.arch == "gpt-oss" else (1.0, 1.5)
        gate = self.matrix(s.experts * s.inter, s.hidden, wide, self.mix.experts, s.experts)
        yield from self.written(gate)
        up = self.matrix(s.experts * s.inter, s.hidden, wide, self.mix.experts, s.experts)
        yield from self.written(up)
        # Weights that are not normalised sum to well below 1; 1.5 keeps both kinds of model in one range.
        down = self.matrix(s.experts * s.hidden, s.inter, narrow, self.mix.experts, s.experts)
        rows = np.arange(s.experts)[:, None] * s.hidden
        unwritten = np.r_[0:CONSTANT, self.slow.start : s.hidden]
        down.clear_rows((rows + unwritten).ravel())
        yield from self.written(down)
        biases = None
        if s.arch == "gpt-oss":
            biases = [self.bias(std, s.experts, m.shape[0] // s.experts) for std, m in ((1, gate), (1, up), (0.1, down))]
            biases[2][:, unwritten] = 0
            yield from biases
        if exact:
            out = self.experts(n, ids, chosen, (gate, up, down), biases)
            self.expert_std = out[:, CONSTANT : self.slow.start].std()
        else:
            out = self.rng.standard_normal(x.shape) * self.expert_std
            out[:, unwritten] = 0
        del gate, up, down
        if s.latent:
            out = out + (yield from self.mlp(n, s.shared, unwritten))
        elif s.shared:
            out = out + (yield from self.shared_expert(n, unwritten))
        return x + out

    def experts(self, n, ids, weights, matrices, biases):
        out = np.zeros_like(n)
        for expert in np.unique(ids):
            tokens, rank = np.nonzero(ids == expert)
            floats = [self.part(m, expert) for m in matrices]
            if biases:
                g, u = (n[tokens] @ w.T + b[expert] for w, b in zip(floats[:2], biases))
                y = clamped_swiglu(g, u) @ floats[2].T + biases[2][expert]
            else:
                g, u = (n[tokens] @ w.T for w in floats[:2])
                y = (np.maximum(g, 0) if self.shape.early else silu(g)) * u @ floats[2].T
            out[tokens] += weights[tokens, rank][:, None] * y
        return out

    def part(self, matrix, expert):
        return matrix.floats(expert, self.shape.experts)

    def shared_expert(self, n, unwritten):
        s = self.shape
        how_much = (self.rng.standard_normal(s.hidden) / np.sqrt(s.hidden)).astype(np.float32)
        yield how_much
        return (yield from self.mlp(n, s.shared, unwritten)) / (1 + np.exp(-(n @ how_much)))[:, None]

    def mlp(self, n, width, unwritten):
        hidden = self.shape.hidden
        gate = self.matrix(width, hidden)
        yield gate.bytes()
        up = self.matrix(width, hidden)
        yield up.bytes()
        down = self.matrix(hidden, width, 0.5).clear_rows(unwritten)
        yield down.bytes()
        return (silu(n @ gate.floats().T) * (n @ up.floats().T)) @ down.floats().T
