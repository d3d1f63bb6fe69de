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

MISTRAL4_ROPE = {
    "type": "yarn", "rope_type": "yarn", "rope_theta": 10000.0, "factor": 128.0,
    "original_max_position_embeddings": 8, "max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
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
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "moe_intermediate_size": 24, "shared_expert_intermediate_size": 32, "num_experts": 16,
        "num_experts_per_tok": 4, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "attention_bias": False,
        "attn_output_gate": True, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_value_head_dim": 16, "mamba_ssm_dtype": "float32", "mlp_only_layers": [], "mtp_num_hidden_layers": 0,
        "router_aux_loss_coef": 0.001,
        "rope_parameters": {"mrope_interleaved": True, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25,
                            "rope_theta": 10000000, "rope_type": "default"},
    }),
    "minimax_m2": ("MiniMaxM2ForCausalLM", {
        "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 16, "rotary_dim": 8, "max_position_embeddings": 196608,
        "rms_norm_eps": 1e-6, "rope_theta": 5000000, "num_local_experts": 16, "num_experts_per_tok": 4,
        "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer",
        "attn_type_list": [1, 1, 1], "mlp_intermediate_size": 96, "num_mtp_modules": 0, "mtp_transformer_layers": 1,
        "shared_intermediate_size": 0, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0,
        "sliding_window": None,
    }),
    "hy_v3": ("HYV3ForCausalLM", {
        "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "attention_bias": False, "mlp_bias": False, "num_experts": 16,
        "num_experts_per_tok": 4, "num_shared_experts": 1, "router_scaling_factor": 2.826,
        "enable_moe_fp32_combine": False, "first_k_dense_replace": 1, "qk_norm": True, "route_norm": True,
        "moe_router_use_sigmoid": True, "moe_router_enable_expert_bias": True,
        "rope_parameters": {"rope_theta": 11158840.0, "rope_type": "default"},
    }),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", {
        "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 3, **MLA,
        "moe_layer_freq": DROP, "rms_norm_eps": 1e-5, "rope_theta": 1000000, "partial_rotary_factor": 1.0,
        "n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 1.8,
        "num_nextn_predict_layers": 0,
    }),
    "gemma4_text": ("Gemma4ForCausalLM", {
        "hidden_size": 64, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32,
        "num_global_key_value_heads": 1, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6, "attention_bias": False, "sliding_window": 12, "final_logit_softcapping": 30.0,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "attention_k_eq_v": True, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2,
        "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_double_wide_mlp": False,
        "use_bidirectional_attention": None, "vocab_size_per_layer_input": 512,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        },
        "tie_word_embeddings": True, "hidden_act": DROP, "output_router_logits": DROP,
    }),
    "mistral4": ("Mistral4ForCausalLM", {
        "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 3, **MLA,
        "moe_layer_freq": DROP, "rope_theta": DROP, "rope_scaling": DROP, "qk_nope_head_dim": 8,
        "first_k_dense_replace": 0, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 1,
        "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "norm_topk_prob": True,
        "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 0, "rope_interleave": True,
        "rope_parameters": MISTRAL4_ROPE,
    }),
    "dots1": ("Dots1ForCausalLM", {
        "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 24, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "attention_bias": False, "n_routed_experts": 16, "n_shared_experts": 2,
        "num_experts_per_tok": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "scoring_func": "noaux_tc", "topk_method": "noaux_tc", "moe_layer_freq": 1,
        "rope_theta": 10000000, "rope_scaling": None, "sliding_window": None, "max_window_layers": 62,
    }),
    "exaone_moe": ("ExaoneMoeForCausalLM", {
        "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "num_experts": 16, "num_shared_experts": 1, "num_experts_per_tok": 4,
        "first_k_dense_replace": 1, "first_last_k_dense_replace": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "sliding_window": 12, "sliding_window_pattern": "LLLG",
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    }),
    "solar_open": ("SolarOpenForCausalLM", {
        "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "attention_bias": False, "n_routed_experts": 16, "n_shared_experts": 1,
        "num_experts_per_tok": 4, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 1.0, "use_qk_norm": False, "rope_theta": 1000000, "partial_rotary_factor": 1.0,
        "rope_scaling": {"type": "yarn", "rope_type": "yarn", "factor": 2.0,
                         "original_max_position_embeddings": 65536},
    }),
    "granitemoeshared": ("GraniteMoeSharedForCausalLM", {
        "hidden_size": 64, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 10000,
        "rope_scaling": None, "attention_bias": False, "attention_multiplier": 0.0625, "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22, "logits_scaling": 6.0, "num_local_experts": 16, "num_experts_per_tok": 4,
        "shared_intermediate_size": 48, "router_aux_loss_coef": 0.0,
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

# Multimodal models, whose text part alone is run: (architecture, keys beside the text config, keys of the text config). Their other parts are as small as transformers allows. make_multimodal.py writes variants; they have no golden model.
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64}
VL_TEXT = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6, "num_experts": 8, "num_experts_per_tok": 3, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 4, 4], "mrope_interleaved": True},
}
MULTIMODAL = {
    "qwen3_vl_moe": (
        "Qwen3VLMoeForConditionalGeneration",
        {"vision_config": {**VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}},
        VL_TEXT,
    ),
    "glm4v_moe": (
        "Glm4vMoeForConditionalGeneration",
        {"vision_config": {**VISION, "image_size": 16}},
        {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 24,
         "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 65536,
         "n_routed_experts": 8, "num_experts_per_tok": 3, "first_k_dense_replace": 1,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1],
                             "partial_rotary_factor": 0.5}},
    ),
    "kimi_k25": (
        "Kimi_K25ForConditionalGeneration",
        {"vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1,
                           "pos_emb_height": 4, "pos_emb_width": 4},
         "tie_word_embeddings": False, "projection_hidden_size": 32},
        {"model_type": "deepseek_v3", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96,
         "moe_intermediate_size": 32, "num_hidden_layers": 3, **MLA, "n_routed_experts": 16, "num_experts_per_tok": 4,
         "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    ),
    "qwen3_omni_moe": (
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        {"vision_config": {**VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
         "audio_config": {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32,
                          "output_dim": 64, "downsample_hidden_size": 16, "num_mel_bins": 16}},
        {**VL_TEXT, "norm_topk_prob": False},
    ),
}


def hub_config(model_type, vocab, ids, overrides, dtype):
    """The contents of config.json. `ids` are bos, eos and pad of the tokenizer."""
    architecture, base = BASES[model_type]
    config = {"architectures": [architecture], "model_type": model_type, "vocab_size": vocab, **COMMON, **base}
    config |= {k: v for k, v in ids.items() if v is not None}
    config |= {"torch_dtype": dtype, "transformers_version": "4.45.0", **overrides}
    return {k: v for k, v in config.items() if v is not DROP}
