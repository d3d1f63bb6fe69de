"""Checkpoint folders with an invalid config, index or tensor."""

import json

from hostile.base import CONFIG, Case, bf16, numbers, safetensors, tensors

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00001.safetensors"


def text(value):
    return json.dumps(value, separators=(",", ":")).encode()


def folder(config=None, weights=None):
    return {
        "config.json": text(CONFIG) if config is None else config,
        WEIGHTS: safetensors(tensors()) if weights is None else weights,
    }


def with_config(**changes):
    return folder(config=text(CONFIG | changes))


def with_tensor(name, value):
    """The folder with one tensor replaced, or removed if `value` is None."""
    changed = tensors() | {name: value}
    return folder(weights=safetensors({k: v for k, v in changed.items() if v is not None}))


def indexed(shard_of, shards):
    """A sharded folder whose index maps every tensor to `shard_of(name)`."""
    index = {"metadata": {"total_size": 0}, "weight_map": {name: shard_of(name) for name in tensors()}}
    return {"config.json": text(CONFIG), INDEX: text(index), **shards}


def whole_shard():
    return {SHARD: safetensors(tensors())}


def raw_index(value):
    return {"config.json": text(CONFIG), INDEX: value, **whole_shard()}


UP = "model.layers.0.mlp.experts.1.up_proj.weight"
HALF_EXPERT = ("BF16", [1, 4], bf16(numbers(1, 4)))


def config_cases():
    deep = b'{"model_type":"olmoe","rope_scaling":' + b"[" * 2000
    return {
        "config-missing": ("missing", "there is no config.json", {WEIGHTS: safetensors(tensors())}),
        "config-not-json": ("malformed", "config.json is not JSON", folder(config=b"{ model_type: olmoe")),
        "config-an-array": ("malformed", "config.json is an array", folder(config=b"[]")),
        "config-deeply-nested": ("malformed", "config.json is nested 2000 deep", folder(config=deep)),
        "config-no-model-type": ("unsupported", "config.json names no model_type", with_config(model_type=None)),
        "config-unknown-model-type": ("unsupported", "the model_type is not known", with_config(model_type="dodo")),
        "config-unknown-key": (
            "unsupported", "attention_flavour could change the result", with_config(attention_flavour="x"),
        ),
        "config-unknown-rope": (
            "unsupported", "the rope type spiral is not known",
            with_config(rope_scaling={"type": "spiral", "factor": 2.0}),
        ),
        "config-unknown-activation": (
            "unsupported", "the activation snake is not known", with_config(hidden_act="snake"),
        ),
        "config-quantized": (
            "unsupported", "the weights would have to be dequantised first",
            with_config(quantization_config={"quant_method": "gptq", "bits": 4}),
        ),
        "config-hidden-zero": ("malformed", "hidden_size is 0", with_config(hidden_size=0)),
        "config-hidden-negative": ("malformed", "hidden_size is -4", with_config(hidden_size=-4)),
        "config-hidden-huge": ("mismatch", "hidden_size is 10^18", with_config(hidden_size=10**18)),
        "config-hidden-string": ("malformed", "hidden_size is a string", with_config(hidden_size="4")),
        "config-hidden-fraction": ("malformed", "hidden_size is 4.5", with_config(hidden_size=4.5)),
        "config-hidden-wrong": ("mismatch", "hidden_size is 8, the tensors say 4", with_config(hidden_size=8)),
        "config-heads-zero": ("malformed", "num_attention_heads is 0", with_config(num_attention_heads=0)),
        "config-heads-uneven": (
            "malformed", "2 heads cannot share 3 key heads",
            with_config(num_attention_heads=2, num_key_value_heads=3),
        ),
        "config-layers-huge": ("mismatch", "10^12 layers, one is stored", with_config(num_hidden_layers=10**12)),
        "config-layers-too-many": ("missing", "2 layers, one is stored", with_config(num_hidden_layers=2)),
        "config-experts-too-many": ("missing", "4 experts, 2 are stored", with_config(num_experts=4)),
        "config-experts-huge": ("mismatch", "10^12 experts, 2 are stored", with_config(num_experts=10**12)),
        "config-experts-zero": ("malformed", "no experts to choose from", with_config(num_experts=0)),
        "config-top-k-too-large": ("malformed", "5 experts per token of 2", with_config(num_experts_per_tok=5)),
        "config-top-k-zero": ("malformed", "no expert per token", with_config(num_experts_per_tok=0)),
        "config-vocab-wrong": ("mismatch", "vocab_size is 9, the tensors say 8", with_config(vocab_size=9)),
    }


def tensor_cases():
    up = tensors()[UP]
    return {
        "tensor-missing": ("missing", f"{UP} is not stored", with_tensor(UP, None)),
        "tensor-missing-head": ("missing", "lm_head is not stored and not tied", with_tensor("lm_head.weight", None)),
        "tensor-wrong-shape": ("mismatch", f"{UP} is [1, 4] instead of [2, 4]", with_tensor(UP, HALF_EXPERT)),
        "tensor-transposed": (
            "mismatch", f"{UP} is [4, 2] instead of [2, 4]", with_tensor(UP, ("BF16", [4, 2], up[2])),
        ),
        "tensor-wrong-dtype": ("unsupported", f"{UP} is I64", with_tensor(UP, ("I64", [2, 4], bytes(64)))),
        "weights-missing": ("missing", "there are no weights", {"config.json": text(CONFIG)}),
        "weights-truncated": ("malformed", "the weights lack 100 bytes", folder(weights=safetensors(tensors())[:-100])),
    }


def index_cases():
    lacking = safetensors({k: v for k, v in tensors().items() if k != UP})
    outside = {
        "index-parent": ("../../evil.safetensors", "a shard outside the folder"),
        "index-parent-that-exists": ("../valid/model.safetensors", "a shard outside the folder, which exists"),
        "index-absolute": ("/evil.safetensors", "a shard by absolute path"),
        "index-empty-name": ("", "a shard without a name"),
        "index-dot": (".", "the folder itself as a shard"),
    }
    made = {
        name: ("malformed", f"the index names {why}", indexed(lambda n, to=to: to if n == UP else SHARD, whole_shard()))
        for name, (to, why) in outside.items()
    }
    absent = lambda n: "model-00002-of-00002.safetensors" if n == UP else SHARD
    return made | {
        "index-absent-shard": ("missing", "the index names a shard that is not there", indexed(absent, whole_shard())),
        "index-shard-lacks-tensor": (
            "missing", f"the index claims that the shard holds {UP}", indexed(lambda n: SHARD, {SHARD: lacking}),
        ),
        "index-not-json": ("malformed", "the index is not JSON", raw_index(b"{")),
        "index-no-map": ("malformed", "the index has no weight_map", raw_index(text({"metadata": {}}))),
        "index-map-an-array": ("malformed", "weight_map is an array", raw_index(text({"weight_map": ["a", "b"]}))),
        "index-map-of-numbers": ("malformed", "weight_map leads to a number", raw_index(text({"weight_map": {UP: 7}}))),
    }


def cases():
    made = {"valid": ("valid", "nothing is wrong with it", folder())}
    made |= config_cases() | tensor_cases() | index_cases()
    return {f"checkpoint/{name}": Case(*case) for name, case in made.items()}
