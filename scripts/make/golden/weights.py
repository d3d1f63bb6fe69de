"""Random weights that give every part of a model an effect: no norm is one, no bias is zero, router margins are large."""

import torch

HASHES = ("layer_multipliers", "ngram_heads_offsets", "ngram_heads_vocab_sizes")  # follow from the config
TRANSPOSED_EXPERTS = ("gpt_oss", "llama4_text")  # experts stored as [in, out]


def fill(model, seed):
    """Draws every parameter and persistent buffer. The result depends only on the seed and the names."""
    generator = torch.Generator().manual_seed(seed)
    state = model.state_dict()
    # Some models have no tied weights, whatever their config says.
    tied = "lm_head.weight" in state and model.config.tie_word_embeddings and model._tied_weights_keys
    with torch.no_grad():
        for name in sorted(state):
            if not (tied and name == "lm_head.weight") and not name.endswith(HASHES):
                state[name].copy_(draw(model.config, name, state[name].shape, generator))


def draw(config, name, shape, generator):
    if name.endswith("tid2eid"):  # distinct experts for each token
        experts = torch.rand((shape[0], config.n_routed_experts), generator=generator)
        return experts.argsort(dim=-1)[:, : shape[1]]
    noise = torch.randn(shape, generator=generator)
    if name.endswith("balancing_biases"):  # zaya: transformers sets that of no expert to -1 when it loads a model
        return torch.cat((noise[:-1] * 0.07 - 0.75, torch.full((1,), -1.0)))
    kind = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if name.endswith(("embed_tokens.weight", "embeddings.weight")):
        return noise * embedding_std(config)
    if kind == "ngram_embedding":
        return noise
    if name == "lm_head.weight":
        return noise * 1.7 * getattr(config, "logits_scaling", 1.0) / shape[-1] ** 0.5
    if kind == "A_log":
        return noise * 0.5
    if kind in ("layer_scalar", "scale", "per_expert_scale", "temp") or kind.endswith(("_states_scale", "residual_scale")):
        return noise * 0.2 + 1.0
    if kind in ("dt_bias", "sinks"):
        return noise * 0.7
    if "correction_bias" in kind or kind == "expert_bias":
        return noise * 0.15
    if len(shape) == 1 and "norm" in name and name.endswith(".weight"):
        return noise * 0.2 + (0.0 if zero_centred(config, name) else 1.0)
    if kind.endswith("bias"):
        return noise * 0.2
    return noise * gain(name, kind) / fan_in(config, name, shape) ** 0.5


def embedding_std(config):
    if config.tie_word_embeddings:
        return 0.25 * getattr(config, "logits_scaling", 1.0)
    return 1.0 / getattr(config, "embedding_multiplier", 1.0)


def zero_centred(config, name):
    kinds = ("qwen3_next", "qwen3_5_moe_text", "qwen4_exp_text", "minimax_m3_vl_text", "step3p5")
    return config.model_type in kinds and not name.endswith("linear_attn.norm.weight")


def fan_in(config, name, shape):
    if "experts." in name and config.model_type in TRANSPOSED_EXPERTS and "shared" not in name:
        return shape[-2]
    if name.endswith("conv_qk_grouped.weight"):
        return shape[-2] * shape[-1]
    return shape[-1]


def gain(name, kind):
    if name.endswith("router_mlp.out_proj.weight"):
        return 6.0
    if kind in ("gate", "router", "primary_router", "wg"):
        return 2.0
    if kind == "proj":  # gemma's router divides its input by the root of the hidden size
        return 16.0
    return 1.5 if kind in ("q_proj", "k_proj", "q_b_proj") else 1.0
