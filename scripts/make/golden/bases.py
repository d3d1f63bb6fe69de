"""One plain config per architecture, in the keys of checkpoints on the hub."""

DROP = object()  # as a value: the key is left out

COMMON = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "tie_word_embeddings": False,
    "output_router_logits": False,
}

MLA = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "attention_bias": False, "rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "rope_theta": 10000,
    "rope_scaling": None, "first_k_dense_replace": 1, "moe_layer_freq": 1,
}

BASES = {
    "mixtral": ("MixtralForCausalLM", {
        "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
        "sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02,
    }),
    "phimoe": ("PhimoeForCausalLM", {
        "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 131072, "num_local_experts": 16,
        "num_experts_per_tok": 2, "router_jitter_noise": 0.01, "input_jitter_noise": 0.01, "attention_bias": True,
        "lm_head_bias": True, "router_aux_loss_coef": 0.0, "hidden_dropout": 0.0,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.02, 1.05, 1.1, 1.2, 1.4, 1.8, 2.5],
            "long_factor": [1.0, 1.3, 2.0, 3.5, 6.0, 11.0, 19.0, 32.0],
            "short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122,
            "original_max_position_embeddings": 4096,
        },
    }),
    "deepseek_v2": ("DeepseekV2ForCausalLM", {
        "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 3, **MLA,
        "n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 2, "norm_topk_prob": False,
        "routed_scaling_factor": 1.0, "topk_method": "greedy", "n_group": 1, "topk_group": 1,
        "scoring_func": "softmax", "seq_aux": True, "aux_loss_alpha": 0.001, "ep_size": 1, "pretraining_tp": 1,
    }),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {
        "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 4, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 21, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": False, "qkv_bias": True,
        "router_aux_loss_coef": 0.001,
    }),
    "olmoe": ("OlmoeForCausalLM", {
        "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 4, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "rope_scaling": None, "attention_bias": False, "clip_qkv": None, "num_experts": 16,
        "num_experts_per_tok": 4, "norm_topk_prob": False, "router_aux_loss_coef": 0.01,
    }),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {
        "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_scaling": None, "attention_bias": False,
        "use_sliding_window": False, "sliding_window": None, "max_window_layers": 48, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True,
        "router_aux_loss_coef": 0.001,
    }),
    "gpt_oss": ("GptOssForCausalLM", {
        "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 131072, "initial_context_length": 4096,
        "rms_norm_eps": 1e-5, "rope_theta": 150000, "sliding_window": 12, "attention_bias": True,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "num_local_experts": 8, "num_experts_per_tok": 4, "experts_per_token": 4, "swiglu_limit": 7.0,
        "router_aux_loss_coef": 0.9,
    }),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {
        "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 3, **MLA,
        "n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
        "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
    }),
    "glm4_moe": ("Glm4MoeForCausalLM", {
        "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "rope_theta": 1000000, "rope_scaling": None, "partial_rotary_factor": 0.5,
        "attention_bias": True, "n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 4,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 1.8, "use_qk_norm": True, "num_nextn_predict_layers": 0,
    }),
    "granitemoe": ("GraniteMoeForCausalLM", {
        "hidden_size": 64, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 10000,
        "rope_scaling": None, "attention_bias": False, "attention_multiplier": 0.0625, "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22, "logits_scaling": 6.0, "num_local_experts": 16, "num_experts_per_tok": 4,
        "router_aux_loss_coef": 0.0,
    }),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", {
        "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "use_bias": False, "moe_k": 4, "moe_num_experts": 16, "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1, "moe_layer_end_index": 2, "moe_layer_interval": 1, "moe_norm_min": 1e-12,
        "tie_word_embeddings": True, "attention_dropout": DROP,
    }),
    "lfm2_moe": ("Lfm2MoeForCausalLM", {
        "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2,
        "layer_types": ["conv", "conv", "full_attention", "conv"], "conv_L_cache": 3, "conv_bias": False,
        "norm_eps": 1e-5, "rope_theta": 1000000.0, "max_position_embeddings": 128000, "num_dense_layers": 1,
        "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True, "use_expert_bias": True,
        "routed_scaling_factor": 1.0, "tie_word_embeddings": True, "hidden_act": DROP, "attention_dropout": DROP,
        "output_router_logits": DROP,
    }),
    "qwen3_next": ("Qwen3NextForCausalLM", {
        "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
        "rope_theta": 10000000, "partial_rotary_factor": 0.25, "rope_scaling": None, "attention_bias": False,
        "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 16,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "num_experts": 16, "num_experts_per_tok": 4,
        "norm_topk_prob": True, "router_aux_loss_coef": 0.001,
    }),
    "llama4_text": ("Llama4ForCausalLM", {
        "hidden_size": 64, "intermediate_size": 48, "intermediate_size_mlp": 96, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "rope_scaling": None, "num_local_experts": 8,
        "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "use_qk_norm": True, "attention_chunk_size": 16,
        "attn_temperature_tuning": True, "floor_scale": 16, "attn_scale": 0.1, "no_rope_layers": [1, 1, 1, 0],
        "attention_bias": False, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0,
    }),
}

def hub_config(model_type, vocab, ids, overrides, dtype):
    """The contents of config.json. `ids` are bos, eos and pad of the tokenizer."""
    architecture, base = BASES[model_type]
    config = {"architectures": [architecture], "model_type": model_type, "vocab_size": vocab, **COMMON, **base}
    config |= {k: v for k, v in ids.items() if v is not None}
    config |= {"torch_dtype": dtype, "transformers_version": "4.45.0", **overrides}
    return {k: v for k, v in config.items() if v is not DROP}
