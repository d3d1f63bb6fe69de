"""Configs of tiny models with a tower, and their random weights."""

import copy

import torch
import transformers

from golden import bases, tokens, weights

# The placeholders come after the special tokens of a chat.
SPECIALS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>", "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>",
]
TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content is string -%}{{ message.content }}"
    "{%- else -%}{%- for part in message.content -%}"
    "{%- if part.type == 'image' or 'image_url' in part -%}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif 'text' in part -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{{ '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
FAMILY = tokens.Family(SPECIALS, None, "<|im_end|>", "<|endoftext|>", TEMPLATE, adds_bos=False, one_digit=True)
VOCAB = 330

TOWER = {
    "hidden_act": "gelu_pytorch_tanh", "in_channels": 3, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
}
LARGER = {**TOWER, "depth": 4, "hidden_size": 64, "intermediate_size": 112, "num_heads": 4, "num_position_embeddings": 2304}
SMALLER = {**TOWER, "depth": 3, "hidden_size": 24, "intermediate_size": 40, "num_heads": 2, "num_position_embeddings": 49}
ROPE = {"rope_type": "default", "mrope_interleaved": True}
VL_TEXT = {
    **bases.VL_TEXT, "vocab_size": VOCAB, "tie_word_embeddings": False,
    "rope_parameters": {**ROPE, "rope_theta": 5e6, "mrope_section": [6, 3, 3]},
}
PART_ROPE = {**ROPE, "rope_theta": 1e7, "mrope_section": [3, 3, 2], "partial_rotary_factor": 0.5}
AUDIO = {
    "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "output_dim": 64,
    "downsample_hidden_size": 16, "num_mel_bins": 16,
}


def text_of(model_type):
    return {**bases.BASES[model_type][1], "vocab_size": VOCAB, "rope_parameters": PART_ROPE, "tie_word_embeddings": False}


# By model_type: the class, the keys of the text config, and whether its tower has a deepstack.
KINDS = {
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", VL_TEXT, True),
    "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration", text_of("qwen3_5_moe"), False),
    "qwen4_exp": ("Qwen4ExpForConditionalGeneration", text_of("qwen4_exp"), False),
    "qwen3_omni_moe": ("Qwen3OmniMoeThinkerForConditionalGeneration", {**VL_TEXT, "norm_topk_prob": False}, True),
}


def smaller_text(text):
    """A text model of half the width, for the repository."""
    text = {**text, "hidden_size": 32, "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 3}
    if "hc_lowrank" in text:
        # The n-gram tables are most of the bytes of such a model.
        text |= {"ple_embed_dim": 16, "ngram_vocab_size_base": 60, "hc_lowrank": 12}
    if "intermediate_size" in text:
        text |= {"intermediate_size": 48, "num_hidden_layers": 2}
    if "shared_expert_intermediate_size" in text:
        text |= {"shared_expert_intermediate_size": 16}
    return text


def new_model(model_type, small):
    """The model, and the ids of its special tokens."""
    architecture, text, has_deepstack = KINDS[model_type]
    ids = {name: VOCAB - len(SPECIALS) + i for i, name in enumerate(SPECIALS)}
    text = smaller_text(text) if small else dict(text)
    text |= {"eos_token_id": ids["<|im_end|>"], "bos_token_id": ids["<|endoftext|>"], "pad_token_id": None}
    tower = {**(SMALLER if small else LARGER), "out_hidden_size": text["hidden_size"]}
    if has_deepstack:
        tower["deepstack_visual_indexes"] = [0, 1] if small else [0, 2]
    outer = {
        "image_token_id": ids["<|image_pad|>"], "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"], "vision_end_token_id": ids["<|vision_end|>"],
    }
    if model_type == "qwen3_omni_moe":
        outer |= {
            "audio_token_id": ids["<|audio_pad|>"], "audio_start_token_id": ids["<|audio_start|>"],
            "audio_config": {**AUDIO, "output_dim": text["hidden_size"]},
        }
    kind = getattr(transformers, architecture)
    config = kind.config_class(
        **outer, vision_config=tower, text_config=copy.deepcopy(text), tie_word_embeddings=False,
    )
    model = kind._from_config(config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager")
    return model.eval(), ids


@torch.no_grad()
def fill(model, seed, stored):
    """Draws all weights, rounded to the type in which they are stored. Those of a tower are as large as it takes for a picture
    to change every logit visibly."""
    generator = torch.Generator().manual_seed(seed)
    config, state = model.config.get_text_config(), model.state_dict()
    for name in sorted(state):
        value = state[name]
        if not value.is_floating_point() or name.endswith(weights.HASHES):
            continue
        drawn = tower_weight(name, value.shape, generator) if "visual." in name else None
        if drawn is None:
            drawn = weights.draw(config, name, value.shape, generator)
        value.copy_(drawn if name.endswith("A_log") else drawn.to(stored).to(torch.float32))


def tower_weight(name, shape, generator):
    noise = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        is_norm = name.endswith(".weight")
        return noise * 0.2 + (1.0 if is_norm else 0.0)
    if name.endswith("pos_embed.weight"):
        return noise * 0.5
    fan_in = 1
    for size in shape[1:]:
        fan_in *= size
    last = "merger" in name and (name.endswith("linear_fc2.weight") or name.endswith("mlp.2.weight"))
    return noise * (2.5 if last else 1.4) / fan_in**0.5
