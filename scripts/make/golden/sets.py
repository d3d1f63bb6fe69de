"""The golden models of the repository."""

from collections.abc import Callable
from dataclasses import dataclass, field

from golden.bases import BASES, DROP, MISTRAL4_ROPE
from golden.variants import VARIANTS_OF


@dataclass
class Spec:
    """One model folder to write."""

    name: str
    model_type: str
    notes: str
    config: dict
    dtype: str = "float32"
    vocab: int = 288
    vocab_padding: int = 0  # rows of the vocabulary that the tokenizer never produces
    prompt: int = 12
    generated: int = 12
    seed: int = 0
    shard_size: str = "1GB"
    generation: dict = field(default_factory=dict)
    rounded: Callable | None = None  # makes the weights of a model numbers of the format in which they are published


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL_MLA = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12, "intermediate_size": 40,
}

GOLDEN_CONFIGS = {
    "mixtral": (
        "multi-query, head_dim 12 instead of 8, sliding window 5, tied, 6 experts, f16; expert sizes fit q8_0 and q4_0",
        {**SMALL, "num_key_value_heads": 1, "head_dim": 12, "intermediate_size": 32, "num_local_experts": 6,
         "sliding_window": 5, "tie_word_embeddings": True},
        {"dtype": "float16"},
    ),
    "phimoe": (
        "longrope beyond the original length (long factors, other mscale), window 7, no biases, wide sparsemixer cut",
        {**SMALL, "intermediate_size": 24, "num_local_experts": 6, "router_jitter_noise": 0.1, "sliding_window": 7,
         "attention_bias": False, "lm_head_bias": False, "original_max_position_embeddings": 8,
         "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.1, 1.4, 2.0], "long_factor": [1.0, 2.0, 4.0, 9.0],
                          "short_mscale": 1.1, "long_mscale": 1.3, "original_max_position_embeddings": 8}},
        {},
    ),
    "deepseek_v2": (
        "q-LoRA, group-limited choice 2 of 4 groups, scale 2.5, attention biases, all layers sparse, two mscales",
        {**SMALL_MLA, "moe_intermediate_size": 16, "q_lora_rank": 10, "n_routed_experts": 8, "num_experts_per_tok": 3,
         "n_shared_experts": 1, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
         "routed_scaling_factor": 2.5, "attention_bias": True, "first_k_dense_replace": 0,
         "rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
                          "mscale_all_dim": 0.5, "original_max_position_embeddings": 16}},
        {},
    ),
    "qwen2_moe": (
        "grouped queries, renormalised, layer 1 dense, window 4 in layer 0 only, three bf16 shards, padded vocabulary",
        {**SMALL, "num_hidden_layers": 3, "intermediate_size": 40, "moe_intermediate_size": 16,
         "shared_expert_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True,
         "mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        {"dtype": "bfloat16", "shard_size": "90KB", "vocab_padding": 5},
    ),
    "olmoe": (
        "clip_qkv 0.8, grouped queries, biases, tied, renormalised, linear rope, bf16; sizes fit q8_0 and q4_0",
        {**SMALL, "intermediate_size": 32, "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True,
         "clip_qkv": 0.8, "attention_bias": True, "tie_word_embeddings": True,
         "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"dtype": "bfloat16"},
    ),
    "qwen3_moe": (
        "attention biases, head_dim 10, sparse step 2, window 6 everywhere, not renormalised, yarn attention_factor",
        {**SMALL, "num_hidden_layers": 3, "head_dim": 10, "intermediate_size": 40, "moe_intermediate_size": 20,
         "num_experts": 7, "num_experts_per_tok": 3, "norm_topk_prob": False, "attention_bias": True,
         "decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2,
         "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.2,
                          "original_max_position_embeddings": 64}},
        {},
    ),
    "gpt_oss": (
        "multi-query, 5 experts of odd width, top-2, window 4, clamp at 1.5 so that it acts, yarn truncated",
        {**SMALL, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 20, "num_local_experts": 5,
         "num_experts_per_tok": 2, "experts_per_token": 2, "sliding_window": 4, "swiglu_limit": 1.5,
         "layer_types": ["full_attention", "sliding_attention"],
         "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": True,
                          "original_max_position_embeddings": 32}},
        {},
    ),
    "deepseek_v3": (
        "no q-LoRA, 1 of 2 groups, not renormalised, scale 1.7, all layers sparse, plain rope, bf16 with f32 biases",
        {**SMALL_MLA, "moe_intermediate_size": 16, "q_lora_rank": None, "n_routed_experts": 8,
         "num_experts_per_tok": 3, "n_group": 2, "topk_group": 1, "norm_topk_prob": False,
         "routed_scaling_factor": 1.7, "first_k_dense_replace": 0},
        {"dtype": "bfloat16"},
    ),
    "glm4_moe": (
        "no q/k norm, no biases, tied, 1 of 2 groups, two shared experts, linear rope on a quarter of the head",
        {**SMALL, "head_dim": 16, "intermediate_size": 40, "moe_intermediate_size": 16, "n_routed_experts": 6,
         "num_experts_per_tok": 2, "n_shared_experts": 2, "n_group": 2, "topk_group": 1, "norm_topk_prob": False,
         "use_qk_norm": False, "attention_bias": False, "tie_word_embeddings": True, "partial_rotary_factor": 0.25,
         "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {},
    ),
    "granitemoe": (
        "multi-head, attention biases, tied, gelu, other multipliers, 6 experts top-3",
        {**SMALL, "num_key_value_heads": 4, "intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 3,
         "attention_bias": True, "tie_word_embeddings": True, "hidden_act": "gelu", "attention_multiplier": 0.25,
         "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
        {},
    ),
    "ernie4_5_moe": (
        "untied, biases, no shared experts, every second layer sparse, last layer given as -1, norm_min that acts",
        {**SMALL, "num_hidden_layers": 3, "intermediate_size": 40, "moe_intermediate_size": 16, "moe_num_experts": 6,
         "moe_k": 2, "moe_num_shared_experts": 0, "moe_layer_start_index": 0, "moe_layer_end_index": -1,
         "moe_layer_interval": 2, "moe_norm_min": 0.7, "use_bias": True, "tie_word_embeddings": False},
        {},
    ),
    "lfm2_moe": (
        "attention first, convolution with bias and 4 taps, no expert bias, not renormalised, scale 1.5",
        {**SMALL, "num_hidden_layers": 3, "intermediate_size": 40, "moe_intermediate_size": 16, "num_experts": 6,
         "num_experts_per_tok": 2, "layer_types": ["full_attention", "conv", "conv"], "conv_L_cache": 4,
         "conv_bias": True, "use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 1.5},
        {},
    ),
    "qwen3_next": (
        "every second layer full attention with biases, one key head for two value heads, 3 taps, not renormalised",
        {**SMALL, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 40, "moe_intermediate_size": 16,
         "shared_expert_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": False,
         "full_attention_interval": 2, "linear_conv_kernel_dim": 3, "linear_key_head_dim": 8,
         "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_value_head_dim": 12,
         "partial_rotary_factor": 0.5, "attention_bias": True},
        {},
    ),
    "glm4_moe_lite": (
        "no q-LoRA, attention biases, tied, layer 0 sparse, two shared experts, 1 of 2 groups, value heads of 12, bf16",
        {**SMALL_MLA, "moe_intermediate_size": 16, "q_lora_rank": None, "n_routed_experts": 6,
         "num_experts_per_tok": 2, "n_shared_experts": 2, "n_group": 2, "topk_group": 1, "attention_bias": True,
         "tie_word_embeddings": True, "mlp_layer_types": ["sparse", "dense"]},
        {"dtype": "bfloat16"},
    ),
    "gemma4_text": (
        "untied, attention biases, 5 experts top-2, other head widths and counts per type, cap 4 so that it acts, bf16",
        {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8,
         "global_head_dim": 12, "num_global_key_value_heads": 2, "intermediate_size": 24, "moe_intermediate_size": 12,
         "num_experts": 5, "sliding_window": 4, "attention_bias": True, "final_logit_softcapping": 4.0,
         "layer_types": ["sliding_attention", "full_attention", "full_attention"], "tie_word_embeddings": False,
         "rope_parameters": {
             "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
             "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 10000.0}}},
        {"dtype": "bfloat16"},
    ),
    "mistral4": (
        "no q-LoRA, attention biases, layer 0 dense, 1 of 2 groups, not renormalised, scale 1.7, positions in halves",
        {**SMALL_MLA, "moe_intermediate_size": 16, "q_lora_rank": None, "n_routed_experts": 6,
         "num_experts_per_tok": 2, "n_shared_experts": 2, "n_group": 2, "topk_group": 1, "attention_bias": True,
         "norm_topk_prob": False, "routed_scaling_factor": 1.7, "first_k_dense_replace": 1, "rope_interleave": False,
         "rope_parameters": {**MISTRAL4_ROPE, "original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.4,
                             "mscale": 0.7}},
        {"dtype": "bfloat16"},
    ),
    "dots1": (
        "grouped queries, attention biases, tied, window 4 from layer 1 on, 1 of 2 groups, not renormalised",
        {**SMALL, "head_dim": 10, "intermediate_size": 40, "moe_intermediate_size": 16, "n_routed_experts": 6,
         "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "norm_topk_prob": False,
         "attention_bias": True, "tie_word_embeddings": True, "sliding_window": 4, "max_window_layers": 1},
        {"dtype": "bfloat16"},
    ),
    "exaone_moe": (
        "a pattern in place of types, window 4, first layer dense by number, two shared experts, tied, 6 experts top-2",
        {**SMALL, "num_hidden_layers": 3, "head_dim": 10, "intermediate_size": 40, "moe_intermediate_size": 16,
         "num_experts": 6, "num_experts_per_tok": 2, "num_shared_experts": 2, "sliding_window": 4,
         "sliding_window_pattern": 2, "layer_types": DROP, "mlp_layer_types": DROP, "tie_word_embeddings": True},
        {"dtype": "bfloat16"},
    ),
    "solar_open": (
        "attention biases, tied, linear rope, 1 of 2 groups, two shared experts, scale 1.5",
        {**SMALL, "head_dim": 12, "moe_intermediate_size": 16, "n_routed_experts": 6, "num_experts_per_tok": 2,
         "n_shared_experts": 2, "n_group": 2, "topk_group": 1, "attention_bias": True, "tie_word_embeddings": True,
         "routed_scaling_factor": 1.5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "intermediate_size": 40},
        {"dtype": "bfloat16"},
    ),
    "smallthinker": (
        "softmax gate, multi-query, window 4 and rope in different layers, untied, 6 experts top-2, bf16",
        {**SMALL, "num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 12, "moe_ffn_hidden_size": 16,
         "moe_num_primary_experts": 6, "moe_num_active_primary_experts": 2, "moe_primary_router_apply_softmax": True,
         "rope_layout": [1, 0, 1], "sliding_window_layout": [1, 1, 0], "sliding_window_size": 4},
        {"dtype": "bfloat16"},
    ),
    "llama_moe": (
        "a factor per layer, widths of all experts given, grouped queries, 6 experts top-3, tied, bf16",
        {**SMALL, "intermediate_size": 96, "num_experts": 6, "num_selects": 3, "size_experts": [[16] * 6] * 2,
         "score_scale_factor": [2.0, 3.5], "tie_word_embeddings": True},
        {"dtype": "bfloat16"},
    ),
    "granitemoeshared": (
        "multi-query, attention biases, tied, gelu, other multipliers, 6 experts top-3, shared width 20",
        {**SMALL, "num_key_value_heads": 1, "intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 3,
         "attention_bias": True, "tie_word_embeddings": True, "hidden_act": "gelu", "attention_multiplier": 0.25,
         "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0,
         "shared_intermediate_size": 20},
        {},
    ),
    "granitemoehybrid": (
        "positions, limits of the time step that act, biases but of the convolution, 2 groups, 3 taps, gelu, tied, bf16",
        {**SMALL, "num_hidden_layers": 3, "num_key_value_heads": 1, "intermediate_size": 24, "num_local_experts": 6,
         "attention_bias": True, "tie_word_embeddings": True, "hidden_act": "gelu", "attention_multiplier": 0.25,
         "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0,
         "shared_intermediate_size": 20, "layer_types": ["mamba", "attention", "mamba"],
         "position_embedding_type": "rope", "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 12,
         "mamba_d_head": "auto", "mamba_d_conv": 3, "mamba_conv_bias": False, "mamba_proj_bias": True,
         "time_step_limit": [0.4, 1.2]},
        {"dtype": "bfloat16"},
    ),
    "jamba": (
        "tied, attention in layer 1 of 3, experts first, rank auto, three times as wide, 5 experts, biases, 3 taps, bf16",
        {**SMALL, "num_hidden_layers": 4, "num_key_value_heads": 1, "intermediate_size": 24, "num_experts": 5,
         "expert_layer_offset": 0, "attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 5,
         "mamba_d_conv": 3, "mamba_expand": 3, "mamba_dt_rank": "auto", "mamba_conv_bias": False,
         "mamba_proj_bias": True, "tie_word_embeddings": True, "use_mamba_kernels": True},
        {"dtype": "bfloat16"},
    ),
    "nemotron_h": (
        "latent experts, biases but of the convolution, 1 of 2 groups of experts, 3 groups of 2 heads, 3 taps, bf16",
        {**SMALL, "hybrid_override_pattern": "ME*M-E", "num_hidden_layers": 6, "num_key_value_heads": 1,
         "head_dim": 12, "intermediate_size": 40, "ssm_state_size": 12, "mamba_num_heads": 6, "mamba_head_dim": 10,
         "n_groups": 3, "conv_kernel": 3, "use_conv_bias": False, "use_bias": True, "mlp_bias": True,
         "n_routed_experts": 6, "moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": 24,
         "moe_latent_size": 32, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "norm_topk_prob": False,
         "routed_scaling_factor": 1.5, "time_step_min": 0.4},
        {"dtype": "bfloat16"},
    ),
    "flex_olmo": (
        "multi-query, attention biases, tied, renormalised, linear rope, 6 experts top-2",
        {**SMALL, "num_key_value_heads": 1, "intermediate_size": 20, "num_experts": 6, "num_experts_per_tok": 2,
         "norm_topk_prob": True, "attention_bias": True, "tie_word_embeddings": True,
         "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"dtype": "bfloat16"},
    ),
    "hunyuan_v1_moe": (
        "grouped queries, attention biases, tied, head_dim 10, alpha 50, 6 experts top-2, lists of two",
        {**SMALL, "head_dim": 10, "intermediate_size": 20, "moe_intermediate_size": [20, 20], "num_experts": 6,
         "moe_topk": [2, 2], "num_shared_expert": [1, 1], "attention_bias": True, "tie_word_embeddings": True,
         "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0}},
        {"dtype": "bfloat16"},
    ),
    "llama4_text": (
        "sparse every second layer, no q/k norm, top-2, chunks of 6, layer 0 without rope, temperature, llama3, bf16",
        {**SMALL, "num_hidden_layers": 3, "head_dim": 12, "intermediate_size": 24, "intermediate_size_mlp": 40,
         "num_local_experts": 5, "num_experts_per_tok": 2, "interleave_moe_layer_step": 2, "use_qk_norm": False,
         "attention_chunk_size": 6, "no_rope_layers": [0, 1, 1], "floor_scale": 4, "attn_scale": 0.3,
         "attention_bias": True,
         "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 32}},
        {"dtype": "bfloat16"},
    ),
    "qwen3_5_moe": (
        "linear attention first and last, one key head for two value heads, 3 taps, attention biases, half rotary, bf16",
        {**SMALL, "num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 8, "moe_intermediate_size": 16,
         "shared_expert_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2,
         "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_conv_kernel_dim": 3,
         "linear_key_head_dim": 8, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
         "linear_value_head_dim": 12, "attention_bias": True,
         "rope_parameters": {"mrope_interleaved": True, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5,
                             "rope_theta": 10000, "rope_type": "default"}},
        {"dtype": "bfloat16"},
    ),
    "qwen4_exp": (
        "two n-gram tables in three parts, two streams, 4 of 18 blocks of 3 tokens chosen, sigmoid gate, attention biases, not "
        "renormalised, one key head for two value heads, 3 taps, half rotary, bf16",
        {**SMALL, "num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 8, "moe_intermediate_size": 16,
         "shared_expert_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": False,
         "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_conv_kernel_dim": 3,
         "linear_key_head_dim": 8, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
         "linear_value_head_dim": 12, "attention_bias": True, "output_gate_type": "sigmoid",
         "rope_parameters": {"mrope_interleaved": True, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5,
                             "rope_theta": 10000, "rope_type": "default"},
         "hc_count": 2, "hc_lowrank": 10, "ple_layer_ids": [3, 1], "ple_embed_dim": 24, "ple_conv_kernel_size": 3,
         "ngram_size": 4, "heads_per_ngram": 1, "ngram_vocab_size_base": 60, "make_ngram_vocab_size_divisible_by": 10,
         "seed": 7, "split_ngram_parts": 3, "indexer_n_heads": 3, "indexer_head_dim": 12, "indexer_budget": 12,
         "indexer_compress_ratio": 3},
        {"dtype": "bfloat16"},
    ),
    "minimax_m2": (
        "multi-query, tied, 7 experts top-3, 6 of 12 values of a head rotated, bf16 with f32 biases",
        {**SMALL, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 12, "rotary_dim": 6,
         "intermediate_size": 20, "num_local_experts": 7, "num_experts_per_tok": 3, "attn_type_list": [1, 1],
         "tie_word_embeddings": True},
        {"dtype": "bfloat16"},
    ),
    "hy_v3": (
        "two shared experts, attention biases, tied, the middle layer dense, 6 experts top-2, scale 1.5",
        {**SMALL, "num_hidden_layers": 3, "head_dim": 10, "intermediate_size": 40, "moe_intermediate_size": 16,
         "num_experts": 6, "num_experts_per_tok": 2, "num_shared_experts": 2, "attention_bias": True,
         "tie_word_embeddings": True, "router_scaling_factor": 1.5, "mlp_layer_types": ["sparse", "dense", "sparse"]},
        {},
    ),
    "mellum": (
        "attention biases, tied, the middle layer dense, window 4, not renormalised, linear and yarn ropes, bf16",
        {**SMALL, "num_hidden_layers": 3, "head_dim": 10, "intermediate_size": 40, "moe_intermediate_size": 16,
         "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": False, "attention_bias": True,
         "tie_word_embeddings": True, "sliding_window": 4, "mlp_layer_types": ["sparse", "dense", "sparse"],
         "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
         "rope_parameters": {
             "full_attention": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                                "original_max_position_embeddings": 32},
             "sliding_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}}},
        {"dtype": "bfloat16"},
    ),
    "afmoe": (
        "attention biases, tied, no scaled embedding, window 4 by an interval, two shared experts, scale 1.5, bf16",
        {**SMALL, "num_hidden_layers": 3, "head_dim": 10, "intermediate_size": 40, "moe_intermediate_size": 16,
         "num_experts": 6, "num_experts_per_tok": 2, "num_shared_experts": 2, "attention_bias": True,
         "tie_word_embeddings": True, "mup_enabled": False, "route_scale": 1.5, "global_attn_every_n_layers": 2,
         "layer_types": DROP, "sliding_window": 4},
        {"dtype": "bfloat16"},
    ),
    "bailing_moe": (
        "one key head, biases, columns of the head normalised, 6 experts, not renormalised, layer 0 dense, bf16",
        {**SMALL, "num_key_value_heads": 1, "head_dim": 12, "use_bias": True, "use_qkv_bias": True, "norm_head": True,
         "intermediate_size": 40, "moe_intermediate_size": 16, "num_experts": 6, "num_experts_per_tok": 2,
         "norm_topk_prob": False, "first_k_dense_replace": 1, "rope_theta": 5000.0},
        {"dtype": "bfloat16"},
    ),
    "bailing_moe_v2": (
        "heads of 12 of which 6 values rotate, biases, tied, 8 experts in 4 groups, two shared, bf16",
        {**SMALL, "head_dim": 12, "use_bias": True, "use_qkv_bias": True, "tie_word_embeddings": True,
         "intermediate_size": 40, "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2,
         "num_shared_experts": 2, "routed_scaling_factor": 1.5, "rope_theta": 5000.0},
        {"dtype": "bfloat16"},
    ),
    "mimo_v2_flash": (
        "values wider than keys, biases, tied, groups, 2 of 4 sliding layers, 2 dense layers, window 4, not renormalised, bf16",
        {**SMALL, "num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 12, "v_head_dim": 20,
         "swa_num_key_value_heads": 2, "swa_head_dim": 12, "swa_v_head_dim": 20, "attention_bias": True,
         "tie_word_embeddings": True, "intermediate_size": 40, "moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2,
         "norm_topk_prob": False, "routed_scaling_factor": 1.5, "attention_value_scale": 0.5,
         "rope_theta": DROP, "swa_rope_theta": DROP, "partial_rotary_factor": DROP,
         "rope_parameters": {
             "full_attention": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
             "sliding_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}},
         "sliding_window_size": 3, "hybrid_layer_pattern": [1, 0, 1, 0], "moe_layer_freq": [1, 0, 1, 0],
         "layer_types": ["sliding_attention", "full_attention"] * 2, "mlp_layer_types": ["sparse", "dense"] * 2},
        {"dtype": "bfloat16"},
    ),
    "step3p5": (
        "attention and MLP biases, tied, 2 and 4 heads, clamps in all layers, a scale of its own, last layer dense, bf16",
        {**SMALL, "num_hidden_layers": 3, "num_attention_heads": 2, "num_attention_groups": 1, "head_dim": 8,
         "num_key_value_heads": DROP, "attention_other_setting": {"num_attention_heads": 4}, "intermediate_size": 40,
         "moe_intermediate_size": 16, "share_expert_dims": 20, "moe_num_experts": 6, "moe_top_k": 2,
         "moe_layers_enum": [0, 1], "moe_router_scaling_factor": 1.5, "attention_bias": True, "mlp_bias": True,
         "tie_word_embeddings": True, "query_pre_attn_scalar": 20, "sliding_window": 4,
         "swiglu_limits": [0.3, None, 0.3], "swiglu_limits_shared": [0.5, 0.3, 0.2],
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
         "rope_theta": [500.0, 10000.0, 500.0], "partial_rotary_factors": [1.0, 0.5, 1.0]},
        {"dtype": "bfloat16"},
    ),
    "laguna": (
        "a gate per value, attention biases, tied, capped router, 2 and 6 heads, the last layer dense, window 4, bf16",
        {**SMALL, "num_hidden_layers": 3, "head_dim": 8, "num_attention_heads_per_layer": [4, 2, 6],
         "intermediate_size": 40, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 20,
         "num_experts": 6, "num_experts_per_tok": 2, "moe_routed_scaling_factor": 1.5, "gating": "per-element",
         "moe_router_logit_softcapping": 1.5, "attention_bias": True, "tie_word_embeddings": True,
         "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
         "mlp_layer_types": ["sparse", "sparse", "dense"],
         "rope_parameters": {
             "full_attention": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                                "original_max_position_embeddings": 32, "partial_rotary_factor": 0.5},
             "sliding_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}}},
        {"dtype": "bfloat16"},
    ),
    "deepseek_v32": (
        "6 positions of 5 index heads, attention biases, tied, 1 of 2 groups, not renormalised, yarn, layer 1 dense, bf16",
        {**SMALL_MLA, "num_hidden_layers": 3, "moe_intermediate_size": 16, "q_lora_rank": 10, "n_routed_experts": 8,
         "num_experts_per_tok": 3, "n_group": 2, "topk_group": 1, "norm_topk_prob": False, "attention_bias": True,
         "tie_word_embeddings": True, "index_n_heads": 5, "index_head_dim": 12, "index_topk": 6,
         "mlp_layer_types": ["sparse", "dense", "sparse"],
         "rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
                          "mscale_all_dim": 0.5, "original_max_position_embeddings": 16}},
        {"dtype": "bfloat16"},
    ),
    "glm_moe_dsa": (
        "7 positions of 6 index heads, shared by two layers behind the first, 3 groups, two shared experts, linear rope",
        {**SMALL_MLA, "num_hidden_layers": 3, "moe_intermediate_size": 16, "q_lora_rank": 10, "n_routed_experts": 6,
         "num_experts_per_tok": 2, "n_shared_experts": 2, "n_group": 3, "topk_group": 2, "index_n_heads": 6,
         "index_head_dim": 8, "index_topk": 7, "index_topk_pattern": "FSS",
         "mlp_layer_types": ["sparse", "dense", "sparse"],
         "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
        {"dtype": "float16"},
    ),
    "deepseek_v4": (
        "3 streams, 3 entries of 2 tokens by 3 index heads, entries of 5 tokens, window 4, a layer by token, bound 0.5, bf16",
        {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 12, "q_lora_rank": 10,
         "qk_rope_head_dim": DROP, "partial_rotary_factor": 0.34, "moe_intermediate_size": 16, "n_routed_experts": 6,
         "num_experts_per_tok": 2, "routed_scaling_factor": 2.5, "compress_ratios": DROP, "compress_rate_hca": DROP,
         "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"],
         "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 5}, "hc_mult": 3,
         "hc_sinkhorn_iters": 4, "hc_eps": 1e-3, "num_hash_layers": DROP,
         "mlp_layer_types": ["moe", "hash_moe", "moe"], "swiglu_limit": 0.5, "sliding_window": 4,
         "o_groups": 4, "o_lora_rank": 6, "index_n_heads": 3, "index_head_dim": 8, "index_topk": 3,
         "rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 32, "beta_slow": 1,
                          "original_max_position_embeddings": 16}},
        {"dtype": "bfloat16"},
    ),
    "kimi_linear": (
        "latent attention first, 3 heads beside 2 of linear attention, 3 taps, biases, query latents, 1 of 2 groups, bf16",
        {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 3,
         "kv_lora_rank": 12, "q_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12,
         "intermediate_size": 40, "moe_intermediate_size": 16, "num_experts": 6, "num_experts_per_token": 2,
         "num_shared_experts": 2, "num_expert_group": 2, "topk_group": 1, "moe_renormalize": False,
         "routed_scaling_factor": 1.7, "attention_bias": True,
         "linear_attn_config": {"full_attn_layers": [1], "kda_layers": [2, 3], "head_dim": 12, "num_heads": 2,
                                "short_conv_kernel_size": 3}},
        {"dtype": "bfloat16"},
    ),
    "glm5_next": (
        "3 streams, 3 heads beside 2 of linear attention, 2 blocks of 2, shared with the next layer, clamp 0.5, biases, bf16",
        {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 3,
         "kv_lora_rank": 12, "q_lora_rank": 10, "qk_nope_head_dim": 8, "v_head_dim": 12, "intermediate_size": 40,
         "moe_intermediate_size": 16, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 2,
         "n_group": 2, "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.7, "attention_bias": True,
         "hc_mult": 3, "hc_sinkhorn_iters": 4, "index_kpool": 2, "index_topk": 4, "index_n_heads": 6,
         "index_head_dim": 8, "index_topk_pattern": "FFS", "swiglu_limit": 0.5, "tie_word_embeddings": True,
         "mlp_layer_types": ["sparse", "dense", "sparse"],
         "layer_types": ["linear_attention", "full_attention", "indexed_attention"],
         "linear_attn_config": {"head_dim": 12, "num_heads": 2, "short_conv_kernel_size": 3, "gate_lower_bound": -2.0}},
        {"dtype": "bfloat16"},
    ),
    "bailing_hybrid": (
        "softplus decays, latent attention in every second layer with biases, 3 taps, all experts in one group, yarn",
        {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 3,
         "head_dim": 12, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12,
         "intermediate_size": 40, "moe_intermediate_size": 16, "num_experts": 6, "num_experts_per_token": 2,
         "num_shared_experts": 2, "num_expert_group": 1, "topk_group": 1, "moe_renormalize": False,
         "attention_bias": True, "layer_group_size": 2, "short_conv_kernel_size": 3, "kda_safe_gate": False,
         "rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
                          "mscale_all_dim": 0.5, "original_max_position_embeddings": 16}},
        {"dtype": "bfloat16"},
    ),
    "minimax_m3_vl": (
        "2 blocks of 3 positions for each of two index heads, tied, clamp that acts, last layer dense and without them, bf16",
        {**SMALL, "num_hidden_layers": 3, "head_dim": 12, "rotary_dim": 6, "intermediate_size": 16,
         "dense_intermediate_size": 40, "shared_intermediate_size": 24, "num_local_experts": 6,
         "num_experts_per_tok": 2, "routed_scaling_factor": 1.5, "tie_word_embeddings": True, "swiglu_limit": 0.8,
         "moe_layer_freq": [1, 1, 0],
         "sparse_attention_config": {
             "use_sparse_attention": True, "sparse_index_dim": 8, "sparse_num_index_heads": 2, "sparse_topk_blocks": 2,
             "sparse_block_size": 3, "sparse_score_type": "max", "sparse_init_block": 0, "sparse_local_block": 1,
             "sparse_attention_freq": [1, 1, 0]}},
        {"dtype": "bfloat16"},
    ),
    "zaya": (
        "windows in one of 3 layers, one head of keys, 3 and 4 taps, biases everywhere, own ropes, gelu, 5 experts, bf16",
        {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 12,
         "moe_intermediate_size": 16, "num_experts": 5, "router_hidden_size": 12, "cca_time0": 3, "cca_time1": 4,
         "attention_bias": True, "lm_head_bias": True, "hidden_act": "gelu", "sliding_window": 6,
         "layer_types": ["hybrid", "hybrid_sliding", "hybrid"],
         "rope_parameters": {"hybrid": {"rope_type": "default", "rope_theta": 100000.0},
                             "hybrid_sliding": {"rope_type": "default", "rope_theta": 1000.0,
                                                "partial_rotary_factor": 0.34}}},
        {"dtype": "bfloat16"},
    ),
}


# The first seed that is tried for each.
SEEDS = {
    "mixtral": 1_000, "phimoe": 2_000, "deepseek_v2": 3_000, "qwen2_moe": 4_000, "olmoe": 5_000, "qwen3_moe": 6_000,
    "gpt_oss": 7_000, "deepseek_v3": 8_000, "glm4_moe": 9_000, "granitemoe": 10_000, "ernie4_5_moe": 11_000,
    "lfm2_moe": 12_000, "qwen3_next": 13_000, "glm4_moe_lite": 14_000, "gemma4_text": 15_000, "mistral4": 16_000,
    "dots1": 17_000, "exaone_moe": 18_000, "solar_open": 19_000, "smallthinker": 20_000, "llama_moe": 21_000,
    "granitemoeshared": 20_000, "granitemoehybrid": 23_000, "jamba": 24_000, "nemotron_h": 25_000, "flex_olmo": 21_000,
    "hunyuan_v1_moe": 22_000, "llama4_text": 14_000, "qwen3_5_moe": 15_000, "qwen4_exp": 30_000, "minimax_m2": 16_000,
    "hy_v3": 17_000, "mellum": 27_000, "afmoe": 28_000, "bailing_moe": 31_000, "bailing_moe_v2": 32_000,
    "mimo_v2_flash": 31_000, "step3p5": 32_000, "laguna": 29_000, "deepseek_v32": 36_000, "glm_moe_dsa": 37_000,
    "deepseek_v4": 41_000, "kimi_linear": 36_000, "glm5_next": 43_000, "bailing_hybrid": 37_000,
    "minimax_m3_vl": 45_000, "zaya": 47_000,
}


def golden():
    for kind, (notes, config, more) in GOLDEN_CONFIGS.items():
        yield Spec(kind, kind, notes, config, seed=SEEDS[kind], **more)


def variants():
    for i, kind in enumerate(BASES):
        for j, (notes, config, more) in enumerate(VARIANTS_OF[kind], start=1):
            seed = 100_000 + 10_000 * i + 1000 * j
            sizes = {"vocab": 320, "prompt": 24, "generated": 32, "seed": seed}
            yield Spec(f"{kind}-v{j}", kind, notes, config, **(sizes | more))


GOLDEN = list(golden())
VARIANTS = list(variants())
