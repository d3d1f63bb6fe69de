#!/usr/bin/env python3
"""Writes layers for multi-token prediction (MTP) of some golden models, with random weights, and what they compute.

    python scripts/make/make_mtp.py

Needs numpy. Run by hand; the tests only read its output, tests/mtp/NAME: `layer.safetensors`, the tensors of the layer behind the
last one of tests/golden/NAME, and `reference.safetensors`, computed in float64 from the tensors as stored:

- `logits` and `hidden`, for each token of the golden reference but the last: what the layer makes of the model's hidden state
  there (behind the final norm, as the reference has it) and of the next token;
- `chain_ids` and `chain_logits`: the likeliest token behind those, and so on: the layer reads its own hidden states.

The layer, by the implementations of vLLM and SGLang: `projection([norm(embedding), norm(hidden)])`, a decoder layer with experts
at the position of the hidden state, a norm, and the output head of the model. Seeds are tried until every choice of experts and
of a token has a margin larger than rounding errors.
"""

import json
import struct
from pathlib import Path

import numpy as np

TESTS = Path(__file__).resolve().parents[2] / "tests"
MODELS = ("bailing_moe_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "hy_v3")
# Where a family has other names than DeepSeek-V3.
NAMES = {
    "bailing_moe_v2": {
        "model.embed_tokens": "model.word_embeddings",
        "self_attn.o_proj": "attention.dense",
        "self_attn.q_norm": "attention.query_layernorm",
        "self_attn.k_norm": "attention.key_layernorm",
        "mlp.gate.e_score_correction_bias": "mlp.gate.expert_bias",
        "shared_head.norm": "final_layernorm",
    },
    "hy_v3": {
        "mlp.gate": "mlp.router.gate",
        "mlp.gate.e_score_correction_bias": "mlp.expert_bias",
        "mlp.shared_experts": "mlp.shared_mlp",
        "shared_head.norm": "final_layernorm",
    },
}
SELECTION_MARGIN = 4e-4
TOKEN_MARGIN = 1e-2
CHAIN = 3
DTYPES = {"F32": np.float32, "I32": np.int32, "I64": np.int64}


class TooClose(Exception):
    """A choice that rounding could flip; the next seed is tried."""


def read(path):
    """The tensors of a safetensors file, floats as float64."""
    data = path.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    found = {}
    for name, entry in json.loads(data[8:start]).items():
        if name == "__metadata__":
            continue
        begin, end = (start + at for at in entry["data_offsets"])
        if entry["dtype"] == "BF16":
            values = (np.frombuffer(data[begin:end], np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(data[begin:end], DTYPES[entry["dtype"]])
        values = values.astype(np.float64) if values.dtype.kind == "f" else values
        found[name] = values.reshape(entry["shape"])
    return found


def write(path, tensors, as_bf16=()):
    """Writes tensors as f32 or i32, and those of names in `as_bf16`, whose values fit, as bf16."""
    header, data = {}, b""
    for name in sorted(tensors):
        values = tensors[name]
        if name in as_bf16:
            dtype, stored = "BF16", (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
        elif values.dtype.kind == "i":
            dtype, stored = "I32", values.astype(np.int32).tobytes()
        else:
            dtype, stored = "F32", values.astype(np.float32).tobytes()
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [len(data), len(data) + len(stored)]}
        data += stored
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def named(config, name):
    """The family's name for a tensor or a part of its name."""
    names = NAMES.get(config["model_type"], {})
    part = max((part for part in names if name.startswith(part)), key=len, default="")
    return names.get(part, "") + name.removeprefix(part)


def draw(model, config, seed):
    """The tensors of the layer, in shapes of the model's own layers. Products are values of bf16."""
    random, layers, hidden = np.random.RandomState(seed), config["num_hidden_layers"], config["hidden_size"]
    is_sparse = lambda layer: f"model.layers.{layer}.{named(config, 'mlp.gate')}.weight" in model
    like = f"model.layers.{next(filter(is_sparse, range(layers)))}."
    shapes = {name.removeprefix(like): values.shape for name, values in model.items() if name.startswith(like)}
    for name in ("enorm", "hnorm", "shared_head.norm"):
        shapes[named(config, f"{name}.weight")] = (hidden,)
    shapes["eh_proj.weight"] = (hidden, 2 * hidden)
    tensors = {}
    for name in sorted(shapes):
        noise = random.standard_normal(shapes[name])
        if "norm" in name:
            values = 1.0 + 0.2 * noise
        elif name == named(config, "mlp.gate.e_score_correction_bias"):
            values = 0.15 * noise
        elif name.endswith("bias"):
            values = 0.2 * noise
        else:
            gain = 2.0 if name == named(config, "mlp.gate.weight") else 1.0
            values = gain * noise / shapes[name][-1] ** 0.5
        bits = values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
        tensors[f"model.layers.{layers}.{name}"] = bits.view(np.float32).astype(np.float64)
    return tensors


def rms(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def silu(x):
    return x / (1.0 + np.exp(-x))


def softmax(x):
    shifted = np.exp(x - x.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def rotate(x, theta, factor, interleaved):
    """Rotates `x [tokens, heads, width]` by the positions 0, 1, …"""
    width = x.shape[-1]
    angles = np.arange(len(x))[:, None] / factor * theta ** (-np.arange(0, width, 2) / width)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else np.split(x, 2, -1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def attend(q, k, v, scale):
    """Causal attention over `[tokens, heads, width]`."""
    scores = np.einsum("qhd,khd->hqk", q, k) * scale
    scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
    out = np.einsum("hqk,khd->qhd", softmax(scores), v)
    return out.reshape(len(q), -1)


class Layer:
    """The layer with its tensors."""

    def __init__(self, config, model, tensors):
        self.config, self.model, self.eps = config, model, config["rms_norm_eps"]
        prefix = f"model.layers.{config['num_hidden_layers']}."
        self.own = {name.removeprefix(prefix): values for name, values in tensors.items()}
        self.embedding = model[named(config, "model.embed_tokens.weight")]
        self.head = self.embedding if config["tie_word_embeddings"] else model["lm_head.weight"]
        rope = config.get("rope_parameters") or config
        self.theta = rope["rope_theta"]

    def norm(self, x, name):
        return rms(x, self.own[named(self.config, f"{name}.weight")], self.eps)

    def linear(self, x, name):
        name = named(self.config, name)
        return x @ self.own[f"{name}.weight"].T + self.own.get(f"{name}.bias", 0.0)

    def forward(self, ids, hidden):
        """Logits and hidden states `[tokens, ..]` of tokens behind positions with these hidden states."""
        parts = [self.norm(self.embedding[ids], "enorm"), self.norm(hidden, "hnorm")]
        x = self.linear(np.concatenate(parts, -1), "eh_proj")
        attention = self.latent if "kv_lora_rank" in self.config else self.grouped
        x = x + self.linear(attention(self.norm(x, "input_layernorm")), "self_attn.o_proj")
        x = x + self.experts(self.norm(x, "post_attention_layernorm"))
        x = self.norm(x, "shared_head.norm")
        return x @ self.head.T, x

    def latent(self, x):
        """Latent attention with whole keys and values."""
        c, tokens = self.config, len(x)
        heads, rank, nope, turned = c["num_attention_heads"], c["kv_lora_rank"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        q = self.linear(x, "self_attn.q_proj").reshape(tokens, heads, nope + turned)
        latent = self.linear(x, "self_attn.kv_a_proj_with_mqa")
        kv = self.linear(self.norm(latent[:, :rank], "self_attn.kv_a_layernorm"), "self_attn.kv_b_proj")
        kv = kv.reshape(tokens, heads, nope + c["v_head_dim"])
        rotated = lambda part: rotate(part, self.theta, 1.0, True)
        shared = np.repeat(rotated(latent[:, None, rank:]), heads, 1)
        q = np.concatenate([q[..., :nope], rotated(q[..., nope:])], -1)
        k = np.concatenate([kv[..., :nope], shared], -1)
        return attend(q, k, kv[..., nope:], (nope + turned) ** -0.5)

    def grouped(self, x):
        """Attention with grouped queries, of which a part of each head is rotated."""
        c, tokens = self.config, len(x)
        heads, kv_heads, width = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        turned, factor = int(width * c.get("partial_rotary_factor", 1.0)), (c.get("rope_scaling") or {}).get("factor", 1.0)
        if "attention.query_key_value.weight" in self.own:
            all = self.linear(x, "attention.query_key_value")
        else:
            all = np.concatenate([self.linear(x, f"self_attn.{part}_proj") for part in "qkv"], -1)
        q, k, v = np.split(all.reshape(tokens, -1, width), [heads, heads + kv_heads], 1)

        def turn(all, norm):
            if named(c, f"self_attn.{norm}.weight") in self.own:
                all = self.norm(all, f"self_attn.{norm}")
            return np.concatenate([rotate(all[..., :turned], self.theta, factor, False), all[..., turned:]], -1)

        q, k = turn(q, "q_norm"), turn(k, "k_norm")
        k, v = (np.repeat(values, heads // kv_heads, 1) for values in (k, v))
        return attend(q, k, v, width**-0.5)

    def experts(self, x):
        """Shared experts and those that the gate of DeepSeek-V3 chooses."""
        c = self.config
        scores = 1.0 / (1.0 + np.exp(-self.linear(x, "mlp.gate")))
        out = self.mlp(x, "mlp.shared_experts")
        for token, own in enumerate(scores):
            chosen = self.choose(own + self.own[named(c, "mlp.gate.e_score_correction_bias")])
            scale = c.get("routed_scaling_factor") or c["router_scaling_factor"]
            weights = own[chosen] / (own[chosen].sum() if c.get("norm_topk_prob", True) else 1.0) * scale
            for expert, weight in zip(chosen, weights):
                out[token] += weight * self.mlp(x[token], f"mlp.experts.{expert}")
        return out

    def choose(self, values):
        groups = values.reshape(self.config.get("n_group", 1), -1)
        ranks = np.sort(groups, -1)[:, -2:].sum(-1)
        kept = best(ranks, self.config.get("topk_group", 1))
        values = np.where(np.isin(np.arange(len(groups)), kept)[:, None], groups, -np.inf).reshape(-1)
        return best(values, self.config["num_experts_per_tok"])

    def mlp(self, x, name):
        gated = silu(self.linear(x, f"{name}.gate_proj")) * self.linear(x, f"{name}.up_proj")
        return self.linear(gated, f"{name}.down_proj")


def best(values, count, margin=SELECTION_MARGIN):
    order = np.argsort(-values, kind="stable")
    if count < len(values) and values[order[count - 1]] - values[order[count]] < margin:
        raise TooClose
    return order[:count]


def compute(layer, ids, hidden):
    """The tensors of the reference."""
    logits, own = layer.forward(ids[1:], hidden[:-1])
    behind, states, chain, rows = list(ids[1:]), list(hidden[:-1]), [], []
    last, state = logits[-1], own[-1]
    for _ in range(CHAIN):
        chain.append(int(best(last, 1, TOKEN_MARGIN)[0]))
        behind, states = [*behind, chain[-1]], [*states, state]
        all_logits, all_own = layer.forward(np.array(behind), np.array(states))
        last, state = all_logits[-1], all_own[-1]
        rows.append(last)
    return {"logits": logits, "hidden": own, "chain_ids": np.array(chain), "chain_logits": np.array(rows)}


def main():
    for name in MODELS:
        golden, target = TESTS / "golden" / name, TESTS / "mtp" / name
        config = json.loads((golden / "config.json").read_text())
        model, reference = read(golden / "model.safetensors"), read(golden / "reference.safetensors")
        hidden = reference[f"hidden.{config['num_hidden_layers']}"]
        for seed in range(100):
            tensors = draw(model, config, seed)
            try:
                computed = compute(Layer(config, model, tensors), reference["full_ids"], hidden)
            except TooClose:
                continue
            break
        else:
            raise SystemExit(f"{name}: no seed keeps its margins")
        target.mkdir(parents=True, exist_ok=True)
        write(target / "layer.safetensors", tensors, [n for n in tensors if not n.endswith(("correction_bias", "expert_bias"))])
        write(target / "reference.safetensors", computed)
        print(f"{name}: seed {seed}, chain {computed['chain_ids'].tolist()}")


if __name__ == "__main__":
    main()
