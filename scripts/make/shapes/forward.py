"""The forward pass of the check in numpy: the parts that all architectures share."""

import dataclasses

import numpy as np

WARM_UP = 16  # first tokens, left out of the statistics


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
    dense: int = 0  # feed_forward_length, if it is not the width of an expert
    tied: bool = False


def norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def silu(x):
    return x / (1 + np.exp(-x))


def rotation(shape):
    """Angle per position of each rotary pair, and the rows of a head that form the pairs."""
    half = shape.head_dim // 2
    theta = shape.theta ** (-np.arange(half) / half)
    if shape.arch == "llama":  # GGUF interleaves the halves of a head in this architecture
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
    """Mean share of a token's experts that the token `lag` positions before uses, too."""
    later, earlier = ids[WARM_UP + lag :], ids[WARM_UP:-lag]
    return float((later[:, :, None] == earlier[:, None, :]).any(-1).mean())
