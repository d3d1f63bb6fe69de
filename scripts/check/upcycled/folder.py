"""Writes a mixture as a checkpoint folder in float32, as the Hugging Face hub has them."""

import json

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL = 3
# By the names of GGUF files.
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
EXPERT = {"w1": "gate", "w2": "down", "w3": "up"}


def tokenizer(dense):
    """The tokenizer in the form of the package `tokenizers`. Of SmolLM: digits are single, and texts are split as GPT-2's."""
    field = lambda name: dense.field(f"tokenizer.ggml.{name}")
    assert (field("model"), field("pre")) == ("gpt2", "smollm")
    tokens, merges = field("tokens"), [tuple(merge.split(" ")) for merge in field("merges")]
    made = Tokenizer(models.BPE({token: at for at, token in enumerate(tokens)}, merges))
    digits, bytes_ = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    made.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, field("token_type")) if kind == CONTROL]
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return made


def halves(rows, heads):
    """Rows of queries or keys with the halves of each head one after the other, which GGUF files have interleaved."""
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def tensors(dense, mixture):
    """The tensors of a Mixtral."""
    weights = dense.weights
    yield "model.embed_tokens.weight", weights["token_embd.weight"]
    yield "model.norm.weight", weights["output_norm.weight"]
    for layer, router in enumerate(mixture.routers):
        prefix = f"model.layers.{layer}"
        for part, name in LAYER.items():
            weight = weights[f"blk.{layer}.{part}.weight"]
            heads = {"attn_q": dense.heads, "attn_k": dense.kv_heads}.get(part)
            yield f"{prefix}.{name}.weight", halves(weight, heads) if heads else weight
        yield f"{prefix}.block_sparse_moe.gate.weight", router
        for expert, part in np.ndindex(len(router), len(EXPERT)):
            name, part = list(EXPERT.items())[part]
            weight, neurons = weights[f"blk.{layer}.ffn_{part}.weight"], mixture.neurons(expert)
            weight = weight[:, neurons] * np.float32(mixture.factor) if part == "down" else weight[neurons]
            yield f"{prefix}.block_sparse_moe.experts.{expert}.{name}.weight", weight


def write(dense, mixture, folder):
    folder.mkdir()
    field = lambda name: dense.field(f"tokenizer.ggml.{name}")
    config = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "dtype": "float32",
        "vocab_size": len(field("tokens")),
        "hidden_size": dense.width,
        "intermediate_size": len(mixture.neurons(0)),
        "num_hidden_layers": dense.layers,
        "num_attention_heads": dense.heads,
        "num_key_value_heads": dense.kv_heads,
        "num_local_experts": len(mixture.runs),
        "num_experts_per_tok": mixture.active,
        "max_position_embeddings": dense.field("llama.context_length"),
        "rms_norm_eps": dense.epsilon,
        "rope_theta": dense.base,
        "hidden_act": "silu",
        "sliding_window": None,
        "tie_word_embeddings": True,
        "bos_token_id": field("bos_token_id"),
        "eos_token_id": field("eos_token_id"),
    }
    words = {f"{name}_token": field("tokens")[field(f"{name}_token_id")] for name in ("bos", "eos")}
    words["chat_template"] = dense.field("tokenizer.chat_template")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    tokenizer(dense).save(str(folder / "tokenizer.json"))
    weights = {name: np.ascontiguousarray(tensor) for name, tensor in tensors(dense, mixture)}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
