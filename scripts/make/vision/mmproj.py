"""Writes a tower of Qwen3-VL's kind as llama.cpp's converter names it."""

import gguf
import numpy as np

BLOCK = {
    "attn.qkv": "attn_qkv", "attn.proj": "attn_out", "mlp.linear_fc1": "ffn_up", "mlp.linear_fc2": "ffn_down",
    "norm1": "ln1", "norm2": "ln2",
}
MERGER = {
    "norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2", "ln_q": "v.post_ln", "mlp.0": "mm.0", "mlp.2": "mm.2",
}
DEEPSTACK = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2", "ln_q": "norm", "mlp.0": "fc1", "mlp.2": "fc2"}


def write(path, tensors, config, limits):
    out = gguf.GGUFWriter(str(path), "clip")
    layers = list(getattr(config, "deepstack_visual_indexes", None) or [])
    out.add_string("general.type", "mmproj")
    out.add_bool("clip.has_vision_encoder", True)
    out.add_string("clip.projector_type", "qwen3vl_merger")
    out.add_bool("clip.use_gelu", True)
    side = int(config.num_position_embeddings**0.5)
    numbers = {
        "image_size": side * config.patch_size, "patch_size": config.patch_size, "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size, "block_count": config.depth, "projection_dim": config.out_hidden_size,
        "attention.head_count": config.num_heads, "spatial_merge_size": config.spatial_merge_size,
        "image_min_pixels": limits["shortest_edge"], "image_max_pixels": limits["longest_edge"],
    }
    for key, value in numbers.items():
        out.add_uint32(f"clip.vision.{key}", value)
    out.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    out.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    out.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
    out.add_array("clip.vision.is_deepstack_layers", [layer in layers for layer in range(config.depth)])
    for name, value in tensors.items():
        if "visual." in name:
            add(out, name.split("visual.")[1], value.float().numpy(), layers)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def add(out, name, value, layers):
    stem, kind = name.rsplit(".", 1)
    if name == "patch_embed.proj.weight":
        # One matrix per time slice.
        out.add_tensor("v.patch_embd.weight", np.ascontiguousarray(value[:, :, 0]))
        out.add_tensor("v.patch_embd.weight.1", np.ascontiguousarray(value[:, :, 1]))
    elif stem == "patch_embed.proj":
        out.add_tensor(f"v.patch_embd.{kind}", value)
    elif stem == "pos_embed":
        out.add_tensor("v.position_embd.weight", value)
    elif stem.startswith("blocks."):
        _, layer, part = stem.split(".", 2)
        out.add_tensor(f"v.blk.{layer}.{BLOCK[part]}.{kind}", value)
    elif stem.startswith("merger."):
        out.add_tensor(f"{MERGER[stem.removeprefix('merger.')]}.{kind}", value)
    else:
        _, number, part = stem.split(".", 2)
        out.add_tensor(f"v.deepstack.{layers[int(number)]}.{DEEPSTACK[part]}.{kind}", value)
