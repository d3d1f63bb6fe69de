"""Checkpoint folders with an invalid config, index or tensor."""

import json
import struct

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


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
MXFP4 = {"quant_method": "mxfp4"}


def packed(form, **weights):
    """The config of compressed-tensors for weights stored as `form`."""
    spec = {"num_bits": 4, "type": "int", "symmetric": True} | weights
    groups = {"group_0": {"targets": ["Linear"], "weights": spec}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


def quantised(config, changes):
    """The folder with this quantization_config and these tensors; a tensor that is None is left out."""
    changed = tensors() | changes
    kept = {k: v for k, v in changed.items() if v is not None}
    return folder(config=text(CONFIG | {"quantization_config": config}), weights=safetensors(kept))


def fp8(scale=("F32", [1, 1], struct.pack("<f", 0.01)), weights=bytes(range(0x30, 0x38)), config=FP8, suffix="_scale_inv"):
    return quantised(config, {UP: ("F8_E4M3", [2, 4], weights), UP + suffix: scale})


def int4(codes, scales, config=packed("pack-quantized"), more=None):
    return quantised(config, {UP: None, UP + "_packed": codes, UP + "_scale": scales} | (more or {}))


def nvfp4(scales=("F8_E4M3", [2, 4], bytes(8)), more=None):
    config = packed("nvfp4-pack-quantized", type="float")
    return int4(("U8", [2, 32], bytes(64)), scales, config, more)


def quantised_cases():
    codes, scales = ("I32", [2, 4], bytes(32)), ("BF16", [2, 1], bytes(4))
    blocks = "model.layers.0.mlp.experts.gate_up_proj_blocks"
    infinite = struct.pack("<f", float("inf"))
    return {
        "quantised-fp8": ("valid", "nothing is wrong with it", fp8()),
        "quantised-fp8-no-scale": ("missing", "no scale for the weights in FP8", fp8(scale=None)),
        "quantised-fp8-scale-shape": (
            "mismatch", "six scales for one block", fp8(scale=("F32", [2, 3], bytes(24))),
        ),
        "quantised-fp8-scale-infinite": ("malformed", "the scale is infinite", fp8(scale=("F32", [1, 1], infinite))),
        "quantised-fp8-scale-integer": ("unsupported", "the scale is I64", fp8(scale=("I64", [1, 1], bytes(8)))),
        "quantised-fp8-nan": ("malformed", "a weight is NaN", fp8(weights=b"\x7f" * 8)),
        "quantised-fp8-block-zero": ("malformed", "blocks of no rows", fp8(config=FP8 | {"weight_block_size": [0, 128]})),
        "quantised-fp8-e5m2": ("unsupported", "another format of eight bits", fp8(config=FP8 | {"fmt": "e5m2"})),
        "quantised-mxfp4-nothing": ("missing", "no tensor is in MXFP4", quantised(MXFP4, {})),
        "quantised-mxfp4-flat": ("mismatch", "blocks of one dimension", quantised(MXFP4, {blocks: ("U8", [32], bytes(32))})),
        "quantised-mxfp4-no-scales": (
            "missing", "blocks without scales", quantised(MXFP4, {blocks: ("U8", [1, 1, 2, 16], bytes(32))}),
        ),
        "quantised-int4-wrong-shape": ("mismatch", "the config says 4 columns, 32 are packed", int4(codes, scales)),
        "quantised-int4-no-groups": ("mismatch", "rows without scales", int4(codes, ("BF16", [2, 0], b""))),
        "quantised-int4-zero-points": (
            "unsupported", "zero points", int4(codes, scales, more={UP + "_zero_point": ("I32", [1], bytes(4))}),
        ),
        "quantised-int4-asymmetric": (
            "unsupported", "zero points in the config", int4(codes, scales, packed("pack-quantized", symmetric=False)),
        ),
        "quantised-int8": ("unsupported", "integers of eight bits", int4(codes, scales, packed("int-quantized"))),
        "quantised-nvfp4-no-global-scale": ("missing", "no scale of the matrix", nvfp4()),
        "quantised-nvfp4-scale-shape": ("mismatch", "three scales for 64 columns", nvfp4(("F8_E4M3", [2, 3], bytes(6)))),
        "quantised-nvfp4-scales-of-all": (
            "mismatch", "two scales of the matrix", nvfp4(more={UP + "_global_scale": ("F32", [2], bytes(8))}),
        ),
        "quantised-modelopt-awq": (
            "unsupported", "another algorithm", quantised({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, {}),
        ),
        "quantised-by-nothing": ("unsupported", "no method is named", quantised({"bits": 4}, {})),
        "quantised-by-a-list": ("unsupported", "the config of the quantisation is a list", quantised([1], {})),
    }


def cases():
    made = {"valid": ("valid", "nothing is wrong with it", folder())}
    made |= config_cases() | tensor_cases() | index_cases() | quantised_cases()
    return {f"checkpoint/{name}": Case(*case) for name, case in made.items()}
