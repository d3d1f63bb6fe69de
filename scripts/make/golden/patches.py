"""Corrections where transformers 5.23.0 deviates from the definition of a model."""

import importlib
import types

import torch


LIMITED = {
    "nemotron_h": lambda config: (config.time_step_min, float("inf")),
    "granitemoehybrid": lambda config: config.time_step_limit,
}


def apply(model):
    """Makes phimoe's longrope switch to the long factors, limits the time step of Mamba 2 in cached steps too, and makes lfm2's
    expert bias visible to its router."""
    if model.config.model_type == "phimoe" and model.config.rope_parameters["rope_type"] == "longrope":
        rotary = model.model.rotary_emb
        rotary.forward = types.MethodType(phimoe_rotary, rotary)
    if model.config.model_type == "lfm2_moe" and model.config.use_expert_bias:
        for layer in model.model.layers:
            block = layer.feed_forward
            if hasattr(block, "gate"):
                # A view, so that it follows the weights; only the margins use it.
                object.__setattr__(block.gate, "expert_bias_for_margin", block.expert_bias)
    if model.config.model_type in LIMITED:
        limit_steps(model.config)


def limit_steps(config):
    """5.23.0 limits the time step in a pass over many tokens, but not in a cached step of one."""
    kind = config.model_type
    modeling = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    least, most = LIMITED[kind](config)
    update = getattr(modeling.mamba2_selective_state_update, "unlimited", modeling.mamba2_selective_state_update)

    def limited(state, x, dt, *rest, dt_bias, dt_softplus, **more):
        dt = torch.nn.functional.softplus(dt + dt_bias).clamp(least, most)
        return update(state, x, dt, *rest, **more)

    limited.unlimited = update
    modeling.mamba2_selective_state_update = limited


def cache_is_exact(config):
    """Whether decoding with a KV cache computes what a whole pass does. deepseek_v4 of 5.23.0 attends to all compressed entries
    while it decodes, also to those that its indexer does not choose."""
    return config.model_type != "deepseek_v4"


@torch.no_grad()
def phimoe_rotary(self, x, position_ids=None):
    """Factors and mscale both depend on the length; 5.23.0 itself keeps the short factors at every length."""
    rope = self.config.rope_parameters
    long = int(position_ids.max()) + 1 > rope["original_max_position_embeddings"]
    factors = torch.tensor(rope["long_factor" if long else "short_factor"], dtype=torch.float32)
    mscale = rope["long_mscale" if long else "short_mscale"]
    dim = 2 * len(factors)
    inv_freq = 1.0 / (factors * rope["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim))
    angles = position_ids[..., None].float() * inv_freq
    angles = torch.cat((angles, angles), dim=-1)
    return (angles.cos() * mscale).to(x.dtype), (angles.sin() * mscale).to(x.dtype)


def hub_name(model_type, name):
    """The name on the hub of a tensor that transformers saves: kimi_linear's dense layers get that of its experts."""
    dense = model_type == "kimi_linear" and name.count(".") == 5
    return name.replace(".block_sparse_moe.", ".mlp.") if dense and name.endswith("_proj.weight") else name


def fresh_rope(model):
    """Resets the length that dynamic rope has grown to, so that a result does not depend on earlier calls."""
    rotary = getattr(model.model, "rotary_emb", None) or getattr(model.model, "pos_emb", None)
    if getattr(rotary, "rope_type", None) == "dynamic":
        rotary.register_buffer("inv_freq", rotary.original_inv_freq.clone(), persistent=False)
        rotary.max_seq_len_cached = rotary.original_max_seq_len
