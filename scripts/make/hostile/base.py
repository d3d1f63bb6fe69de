"""The tiny valid model from which every hostile file is derived."""

import json
import random
import struct

HIDDEN, INTER, EXPERTS, TOP_K, VOCAB, HEADS = 4, 2, 2, 1, 8, 2

CONFIG = {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INTER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "clip_qkv": None,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "norm_topk_prob": False,
    "tie_word_embeddings": False,
    "eos_token_id": VOCAB - 1,
    "torch_dtype": "bfloat16",
}


class Case:
    """A file or folder that must be refused: kind of fault, reason and content."""

    def __init__(self, kind, reason, content):
        self.kind, self.reason, self.content = kind, reason, content


def numbers(seed, count):
    rng = random.Random(seed)
    return [rng.uniform(-0.5, 0.5) for _ in range(count)]


def bf16(values):
    """Values as bfloat16 by truncation of float32, which is precise enough here."""
    return b"".join(struct.pack("<f", v)[2:] for v in values)


def shapes():
    attention = "model.layers.0.self_attn"
    named = {
        "lm_head.weight": [VOCAB, HIDDEN],
        "model.embed_tokens.weight": [VOCAB, HIDDEN],
        "model.layers.0.input_layernorm.weight": [HIDDEN],
        "model.layers.0.mlp.gate.weight": [EXPERTS, HIDDEN],
        "model.layers.0.post_attention_layernorm.weight": [HIDDEN],
        "model.norm.weight": [HIDDEN],
        **{f"{attention}.{p}_proj.weight": [HIDDEN, HIDDEN] for p in "qkvo"},
        **{f"{attention}.{p}_norm.weight": [HIDDEN] for p in "qk"},
    }
    for e in range(EXPERTS):
        prefix = f"model.layers.0.mlp.experts.{e}"
        named[f"{prefix}.gate_proj.weight"] = [INTER, HIDDEN]
        named[f"{prefix}.up_proj.weight"] = [INTER, HIDDEN]
        named[f"{prefix}.down_proj.weight"] = [HIDDEN, INTER]
    return dict(sorted(named.items()))


def tensors():
    """All tensors of the model: name to (dtype, shape, bytes)."""
    made = {}
    for i, (name, shape) in enumerate(shapes().items()):
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        values = numbers(i, count)
        made[name] = ("BF16", shape, bf16([v + 1.0 for v in values] if len(shape) == 1 else values))
    return made


def safetensors(entries):
    """A well-formed safetensors file of the given (dtype, shape, bytes)."""
    header, data = {}, b""
    for name, (dtype, shape, blob) in entries.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(blob)]}
        data += blob
    return framed(json.dumps(header, separators=(",", ":")).encode(), data)


def framed(header, data, length=None):
    """Header length, header, data; `length` replaces the true header length."""
    return struct.pack("<Q", len(header) if length is None else length) + header + data
