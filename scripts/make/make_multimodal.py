#!/usr/bin/env python3
"""Writes tiny multimodal checkpoints with the results of transformers on the text part, three variants per architecture.

Needs what make_golden.py needs.

    python scripts/make/make_multimodal.py DIR [PREFIX]      only names with this prefix

`LARDER_REFERENCE=DIR cargo test --release -p larder-tests --test it references` compares larder with them. They have no tokenizer.
"""

import argparse
import copy
import json
import shutil
from pathlib import Path

import make_golden  # noqa: F401  sets the environment of transformers
import safetensors.torch as st
import torch
import transformers

from golden import bases, weights

GENERATED, PROMPT = 12, 20
OTHER_PARTS = ("visual", "vision", "audio", "projector")
GLM_ROPE = {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [4, 2, 2], "partial_rotary_factor": 0.5}

VARIANTS = {
    "qwen3_vl_moe": [
        {},
        {"tie_word_embeddings": True, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 12,
         "attention_bias": True, "norm_topk_prob": False},
        {"mlp_only_layers": [1], "num_experts": 7, "num_experts_per_tok": 7, "hidden_act": "gelu"},
    ],
    "glm4v_moe": [
        {},
        {"tie_word_embeddings": True, "attention_bias": False, "num_attention_heads": 2, "n_shared_experts": 2,
         "rope_parameters": GLM_ROPE},
        {"n_group": 4, "topk_group": 2, "norm_topk_prob": False, "routed_scaling_factor": 1.7,
         "first_k_dense_replace": 0},
    ],
    "kimi_k25": [
        {},
        {"tie_word_embeddings": True, "attention_bias": True, "qk_nope_head_dim": 12, "v_head_dim": 20},
        {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 0},
    ],
    "minimax_m3_vl": [
        {},
        {"tie_word_embeddings": True, "num_key_value_heads": 4, "swiglu_limit": 0.7},
        {"moe_layer_freq": [1, 0, 1, 1], "num_local_experts": 7, "num_experts_per_tok": 7, "head_dim": 32},
    ],
    "qwen3_omni_moe": [
        {},
        {"tie_word_embeddings": True, "norm_topk_prob": True, "num_attention_heads": 6},
        {"decoder_sparse_step": 2, "attention_bias": True},
    ],
}


def new_model(name, overrides):
    architecture, outer, text = bases.MULTIMODAL[name]
    kind = getattr(transformers, architecture)
    text = {"tie_word_embeddings": False, **copy.deepcopy(text), **overrides}
    config = kind.config_class(
        **{**copy.deepcopy(outer), "text_config": text, "tie_word_embeddings": text["tie_word_embeddings"]}
    )
    return kind._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def fill(model, seed):
    generator = torch.Generator().manual_seed(seed)
    config, state = model.config.get_text_config(), model.state_dict()
    for name in sorted(state):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if any(part in name for part in OTHER_PARTS):
            if state[name].is_floating_point():
                state[name].normal_(generator=generator)
            continue
        state[name].copy_(weights.draw(config, name, state[name].shape, generator))


class Probe:
    """The last hidden states and router results of the text decoder."""

    def __init__(self, model):
        self.found = {}
        decoder = model.get_decoder()
        layers = decoder.layers
        layers[0].register_forward_pre_hook(
            lambda _, args, kwargs: self.hidden(0, args or kwargs["hidden_states"]), with_kwargs=True
        )
        for i, layer in enumerate(layers[:-1]):
            layer.register_forward_hook(lambda _, args, out, i=i: self.hidden(i + 1, out))
        decoder.norm.register_forward_hook(lambda _, args, out: self.hidden(len(layers), out))
        for name, module in decoder.named_modules():
            if type(module).__name__.lower().endswith("router"):
                layer = int(name.split("layers.")[1].split(".")[0])
                module.register_forward_hook(lambda _, args, out, layer=layer: self.router(layer, *out))

    def hidden(self, i, out):
        out = out[0] if isinstance(out, tuple) else out
        self.found[f"hidden.{i}"] = out.detach().reshape(-1, out.shape[-1]).clone()

    def router(self, layer, logits, chosen_weights, ids):
        self.found[f"router_logits.{layer}"] = logits.detach().reshape(ids.shape[0], -1).float()
        self.found[f"topk_weights.{layer}"] = chosen_weights.detach().float()
        self.found[f"topk_ids.{layer}"] = ids.to(torch.int32)


@torch.no_grad()
def capture(model):
    probe = Probe(model)
    prompt = torch.randint(3, 300, (1, PROMPT), generator=torch.Generator().manual_seed(5))
    ids, rows = prompt, []
    for _ in range(GENERATED):
        rows.append(model(input_ids=ids, use_cache=False).logits[0, -1])
        ids = torch.cat([ids, rows[-1].argmax().view(1, 1)], 1)
    named = {"input_ids": prompt[0], "generated_ids": ids[0, PROMPT:], "full_ids": ids[0]}
    named = {name: values.to(torch.int32) for name, values in named.items()}
    named |= {"prompt_logits": model(input_ids=prompt, use_cache=False).logits[0], "decode_logits": torch.stack(rows)}
    named["full_logits"] = model(input_ids=ids, use_cache=False).logits[0]
    return {name: values.contiguous().clone() for name, values in (named | probe.found).items()}


def save(model, name, folder):
    """Writes the checkpoint with the names of the hub, where those that transformers writes differ."""
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    file, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    stored = st.load_file(file)
    if name == "kimi_k25":
        stored = {key.replace("language_model.model.blocks.", "language_model.model.layers."): w for key, w in stored.items()}
    if name == "qwen3_omni_moe":
        stored = {f"thinker.{key}": w for key, w in stored.items()}
        config = {"model_type": name, "thinker_config": config, "enable_audio_output": False}
    st.save_file(stored, file, metadata={"format": "pt"})
    for file in ("config.json", "config.transformers5.json"):
        make_golden.write_json(folder / file, config)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("prefix", nargs="?", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name, variants in VARIANTS.items():
        for i, overrides in enumerate(variants if name.startswith(args.prefix) else []):
            model = new_model(name, overrides)
            fill(model, 7 + i)
            tensors = capture(model)
            folder = args.out / f"{name}-v{i}"
            save(model, name, folder)
            st.save_file(tensors, folder / "reference.safetensors")
            top = tensors["decode_logits"].topk(2, dim=-1).values
            print(f"{folder.name}: greedy_top1_top2_min={(top[:, 0] - top[:, 1]).min():.1e}", flush=True)


if __name__ == "__main__":
    main()
