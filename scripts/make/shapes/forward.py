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
    window: int = 0  # positions that every second layer sees, from the first layer on; 0 if all layers see all
    yarn: int = 0  # factor by which YaRN has stretched the context, or 0
    early: bool = False  # the router reads what the layer gets, before attention and not normalised; SmallThinker's ReLU
    latent: "Latent | None" = None  # DeepSeek's attention and gate, with a shared expert and dense layers first


@dataclasses.dataclass(frozen=True)
class Latent:
    """Widths of DeepSeek's latent attention, and what its gate needs."""

    query_rank: int
    rank: int
    rotated: int  # of the `head_dim` values of a query
    value: int  # values per head
    dense_layers: int
    scale: float  # factor on the expert weights


def norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def silu(x):
    return x / (1 + np.exp(-x))


def clamped_swiglu(gate, up):
    """The activation of gpt-oss."""
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)


def stretched(theta, shape):
    """Angles with YaRN: slow pairs turn slower by its factor, fast ones as before, with a ramp between them."""
    turns = lambda n: shape.head_dim * np.log(shape.context / shape.yarn / (2 * np.pi * n)) / (2 * np.log(shape.theta))
    low, high = max(turns(32), 0), min(turns(1), shape.head_dim - 1)
    ramp = np.clip((np.arange(len(theta)) - low) / max(high - low, 0.001), 0, 1)
    return theta * (1 - ramp) + theta / shape.yarn * ramp


def amplitude(shape):
    """The factor on cosines and sines."""
    return 1 + 0.1 * np.log(shape.yarn) if shape.yarn else 1.0


def rotation(shape):
    """Angle per position of each rotary pair, and the rows of a head that form the pairs."""
    half = shape.head_dim // 2
    theta = shape.theta ** (-np.arange(half) / half)
    if shape.yarn:
        theta = stretched(theta, shape)
    if shape.arch == "llama":  # GGUF interleaves the halves of a head in this architecture
        return theta, np.arange(0, 2 * half, 2), np.arange(1, 2 * half, 2)
    return theta, np.arange(half), np.arange(half) + half


def rotate(x, shape):
    """x: [tokens, heads, head_dim]"""
    theta, first, second = rotation(shape)
    angle = np.arange(len(x))[:, None] * theta
    cos, sin = np.cos(angle)[:, None] * amplitude(shape), np.sin(angle)[:, None] * amplitude(shape)
    out = np.empty_like(x)
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., first] * sin + x[..., second] * cos
    return out


def attention_scores(q, k, shape, window):
    """[heads, tokens, tokens]; `window` is the number of positions that a token sees, 0 for all."""
    q = rotate(q.reshape(len(q), -1, shape.head_dim), shape)
    k = rotate(k.reshape(len(k), -1, shape.head_dim), shape)
    k = np.repeat(k, shape.heads // shape.kv_heads, 1)
    scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(shape.head_dim)
    scores += np.triu(np.full(scores.shape[1:], -np.inf), 1)
    if window:
        scores += np.tril(np.full(scores.shape[1:], -np.inf), -window)
    return scores


def attend(scores, v, shape, sinks=None):
    """Values weighted by softmax; `sinks` [heads] are scores of a position that has no value."""
    v = np.repeat(v.reshape(len(v), -1, shape.head_dim), shape.heads // shape.kv_heads, 1)
    if sinks is not None:
        column = np.broadcast_to(sinks.astype(np.float64)[:, None, None], (*scores.shape[:2], 1))
        weights = softmax(np.concatenate([scores, column], -1))[..., :-1]
    else:
        weights = softmax(scores)
    return np.einsum("hts,shd->thd", weights, v).reshape(len(v), -1)


def latent_scores(q, k, rotated_k, shape):
    """[heads, tokens, tokens]; `rotated_k` [tokens, rotated] is the part of the keys that all heads share."""
    width = shape.latent.rotated
    plain = q.shape[-1] - width
    angle = np.arange(len(q))[:, None] * shape.theta ** (-np.arange(0, width, 2) / width)
    turn = np.exp(1j * angle)[:, None]
    rotated = lambda x: (x[..., 0::2] + 1j * x[..., 1::2]) * turn
    scores = np.einsum("thd,shd->hts", q[..., :plain], k)
    scores += np.einsum("thd,sd->hts", rotated(q[..., plain:]), rotated(rotated_k[:, None]).conj()[:, 0]).real
    return scores / np.sqrt(shape.head_dim) + np.triu(np.full((len(q), len(q)), -np.inf), 1)


def top(logits, k):
    return np.argsort(-logits, -1, kind="stable")[:, :k]


def shared_with(ids, lag):
    """Mean share of a token's experts that the token `lag` positions before uses, too."""
    later, earlier = ids[WARM_UP + lag :], ids[WARM_UP:-lag]
    return float((later[:, :, None] == earlier[:, None, :]).any(-1).mean())
