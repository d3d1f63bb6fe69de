"""A dense Llama in float32 with numpy, from a GGUF file: the reference of the models that are made from it."""

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize


class Dense:
    """Weights and the forward pass. Matrices are [rows, columns], as products need them: x @ w.T."""

    def __init__(self, path):
        self.reader = GGUFReader(path)
        self.layers, self.width = self.field("llama.block_count"), self.field("llama.embedding_length")
        self.heads, self.kv_heads = self.field("llama.attention.head_count"), self.field("llama.attention.head_count_kv")
        self.head, self.base = self.width // self.heads, self.field("llama.rope.freq_base")
        self.epsilon = self.field("llama.attention.layer_norm_rms_epsilon")
        tensors = self.reader.tensors
        self.weights = {t.name: dequantize(t.data, t.tensor_type).astype(np.float32) for t in tensors}

    def field(self, name):
        return self.reader.fields[name].contents()

    def norm(self, x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.epsilon) * weight

    def rotated(self, x):  # [tokens, heads, head]
        """Rotary embeddings; GGUF has the two halves of each head interleaved."""
        angles = np.arange(len(x))[:, None] * self.base ** (-np.arange(0, self.head, 2) / self.head)
        cos, sin = (f(angles)[:, None].astype(np.float32) for f in (np.cos, np.sin))
        even, odd = x[..., 0::2], x[..., 1::2]
        return np.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)

    def attention(self, x, layer):
        q, k, v = (x @ self.weights[f"blk.{layer}.attn_{name}.weight"].T for name in "qkv")
        q, k, v = (rows.reshape(len(x), -1, self.head) for rows in (q, k, v))
        q, k = self.rotated(q), self.rotated(k)
        mask = np.triu(np.full((len(x), len(x)), -np.inf, np.float32), 1)
        out = np.empty_like(q)
        for head in range(self.heads):
            group = head * self.kv_heads // self.heads
            scores = q[:, head] @ k[:, group].T / np.float32(np.sqrt(self.head)) + mask
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = scores / scores.sum(-1, keepdims=True) @ v[:, group]
        return out.reshape(len(x), -1) @ self.weights[f"blk.{layer}.attn_output.weight"].T

    def mlp(self, x, layer):
        gate, up, down = (self.weights[f"blk.{layer}.ffn_{name}.weight"] for name in ("gate", "up", "down"))
        gated = x @ gate.T
        return gated / (1 + np.exp(-gated)) * (x @ up.T) @ down.T

    def hidden(self, ids, see=lambda layer, x: None):
        """The normed hidden states of a chunk of tokens. `see` is given the input of each layer's MLP."""
        x = self.weights["token_embd.weight"][ids]
        for layer in range(self.layers):
            x = x + self.attention(self.norm(x, self.weights[f"blk.{layer}.attn_norm.weight"]), layer)
            inputs = self.norm(x, self.weights[f"blk.{layer}.ffn_norm.weight"])
            see(layer, inputs)
            x = x + self.mlp(inputs, layer)
        return self.norm(x, self.weights["output_norm.weight"])

    def perplexity(self, chunks):
        """Over all tokens but the first of each chunk. The output head is the embedding."""
        losses = []
        for ids in chunks:
            logits = self.hidden(ids)[:-1] @ self.weights["token_embd.weight"].T
            top = logits.max(-1)
            losses.append(top + np.log(np.exp(logits - top[:, None]).sum(-1)) - logits[np.arange(len(ids) - 1), ids[1:]])
        return float(np.exp(np.concatenate(losses).astype(np.float64).mean()))
