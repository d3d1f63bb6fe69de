//! Tensor names of each architecture, in GGUF and on the Hugging Face hub.

use super::bailing_moe::{LING_JOINED, LING_OUTPUT, LING_ROUTER_BIAS, LING_SPLIT};
use super::deepseek4::{DEEPSEEK4_ATTENTION, DEEPSEEK4_OUTER, DEEPSEEK4_PARTS, HYPER_CONNECTIONS};
use super::granite::{GRANITE_MAMBA, GRANITE_PARTS};
use super::kimi_delta::{GLM5_NEXT, KIMI_DECAYS, KIMI_DELTA, KIMI_EXPERTS, LING_HYBRID};
use super::minimax_m3::MINIMAX_M3;
use super::qwen4_exp::{QWEN4_OUTER, QWEN4_PARTS};
use super::state_space::{JAMBA_OUTER, JAMBA_PARTS, NEMOTRON_LAYER};
use crate::source::gguf::remap::Remap::{
    AsChannels, AsRow, KeyRows, NegatedExp, OnePlus, QueryRows, RopeFactors, Same,
};
use crate::source::gguf::remap::Rename;

/// A supported architecture.
pub(in crate::source::gguf) struct Architecture {
    /// `general.architecture`.
    pub arch: &'static str,
    /// Tensors outside the layers.
    pub outer: &'static [Rename],
    /// Tensors of a layer, without the experts.
    pub layer: &'static [&'static [Rename]],
}

impl Architecture {
    /// The architecture of this name, if it is supported.
    pub fn of(arch: &str) -> Option<&'static Architecture> {
        ARCHITECTURES.iter().find(|f| f.arch == arch)
    }

    /// The names of all supported architectures, for messages.
    pub fn supported() -> String {
        ARCHITECTURES.iter().map(|f| f.arch).collect::<Vec<_>>().join(", ")
    }
}

pub(in crate::source::gguf) const ARCHITECTURES: &[Architecture] = &[
    Architecture { arch: "llama", outer: OUTER, layer: &[NORMS, ROTATED, OUTPUT, MIXTRAL_ROUTER] },
    Architecture {
        arch: "qwen2moe",
        outer: OUTER,
        layer: &[NORMS, ATTENTION, OUTPUT, ATTENTION_BIAS, ROUTER, SHARED_EXPERT],
    },
    Architecture { arch: "qwen3moe", outer: OUTER, layer: &[NORMS, ATTENTION, OUTPUT, HEAD_NORMS, ROUTER] },
    Architecture { arch: "qwen3vlmoe", outer: OUTER, layer: &[NORMS, ATTENTION, OUTPUT, HEAD_NORMS, ROUTER] },
    Architecture { arch: "olmoe", outer: OUTER, layer: &[NORMS, ATTENTION, OUTPUT, HEAD_NORMS, ROUTER] },
    Architecture {
        arch: "gpt-oss",
        outer: OUTER,
        layer: &[POST_NORMS, ATTENTION, OUTPUT, ATTENTION_BIAS, OUTPUT_BIAS, GPT_OSS_PARTS],
    },
    Architecture {
        arch: "gemma4",
        outer: ROTATED_OUTER,
        layer: &[GEMMA4_NORMS, ATTENTION, OUTPUT, HEAD_NORMS, GEMMA4_PARTS, DENSE],
    },
    Architecture {
        arch: "glm4moe",
        outer: OUTER,
        layer: &[POST_NORMS, ATTENTION, OUTPUT, ATTENTION_BIAS, HEAD_NORMS, ROUTER, ROUTER_BIAS, SHARED_EXPERTS, DENSE],
    },
    Architecture { arch: "granitemoe", outer: OUTER, layer: &[NORMS, ROTATED, OUTPUT, GRANITE_PARTS] },
    Architecture {
        arch: "granitehybrid",
        outer: OUTER,
        layer: &[NORMS, ROTATED, OUTPUT, GRANITE_MAMBA, GRANITE_PARTS],
    },
    Architecture { arch: "jamba", outer: JAMBA_OUTER, layer: &[ATTENTION, OUTPUT, JAMBA_PARTS] },
    Architecture { arch: "nemotron_h_moe", outer: OUTER, layer: &[NEMOTRON_LAYER] },
    Architecture {
        arch: "deepseek2",
        outer: OUTER,
        layer: &[NORMS, LATENT, OUTPUT, ROUTER, ROUTER_BIAS, SHARED_EXPERTS, DENSE],
    },
    Architecture {
        arch: "deepseek4",
        outer: DEEPSEEK4_OUTER,
        layer: &[DEEPSEEK4_ATTENTION, DEEPSEEK4_PARTS, HYPER_CONNECTIONS],
    },
    Architecture {
        arch: "deepseek32",
        outer: OUTER,
        layer: &[NORMS, LATENT, INDEXER, OUTPUT, ROUTER, ROUTER_BIAS, SHARED_EXPERTS, DENSE],
    },
    Architecture {
        arch: "glm-dsa",
        outer: OUTER,
        layer: &[NORMS, LATENT, INDEXER, OUTPUT, ROUTER, ROUTER_BIAS, SHARED_EXPERTS, DENSE],
    },
    Architecture { arch: "mistral4", outer: OUTER, layer: &[NORMS, LATENT, OUTPUT, ROUTER, SHARED_EXPERTS, DENSE] },
    Architecture {
        arch: "dots1",
        outer: OUTER,
        layer: &[NORMS, ATTENTION, OUTPUT, HEAD_NORMS, ROUTER, ROUTER_BIAS, SHARED_EXPERTS, DENSE],
    },
    Architecture {
        arch: "exaone-moe",
        outer: ROTATED_OUTER,
        layer: &[NORMS, ATTENTION, OUTPUT, HEAD_NORMS, ROUTER, EXAONE_ROUTER_BIAS, SHARED_EXPERTS, DENSE],
    },
    Architecture {
        arch: "ernie4_5-moe",
        outer: OUTER,
        layer: &[NORMS, ATTENTION, OUTPUT, ROUTER, ERNIE_ROUTER_BIAS, SHARED_EXPERTS, DENSE],
    },
    Architecture { arch: "lfm2moe", outer: LFM_OUTER, layer: &[LFM_LAYER] },
    Architecture {
        arch: "phimoe",
        outer: PHI_OUTER,
        layer: &[NORMS, NORM_BIAS, ATTENTION, OUTPUT, ATTENTION_BIAS, OUTPUT_BIAS, MIXTRAL_ROUTER],
    },
    Architecture {
        arch: "qwen3next",
        outer: QWEN3_NEXT_OUTER,
        layer: &[QWEN3_NEXT_NORMS, ATTENTION, OUTPUT, DELTA_RULE, ROUTER, SHARED_EXPERT],
    },
    Architecture {
        arch: "qwen35moe",
        outer: QWEN3_NEXT_OUTER,
        layer: &[QWEN3_NEXT_NORMS, ATTENTION, OUTPUT, DELTA_RULE, DELTA_RATES, ROUTER, SHARED_EXPERT],
    },
    Architecture {
        arch: "qwen4exp",
        outer: QWEN4_OUTER,
        layer: &[QWEN3_NEXT_NORMS, ATTENTION, OUTPUT, DELTA_RULE, DELTA_RATES, QWEN4_PARTS, ROUTER, SHARED_EXPERT],
    },
    Architecture {
        arch: "minimax-m2",
        outer: OUTER,
        layer: &[NORMS, ATTENTION, OUTPUT, HEAD_NORMS, MIXTRAL_ROUTER, MINIMAX_ROUTER_BIAS],
    },
    Architecture {
        arch: "minimax-m3",
        outer: QWEN3_NEXT_OUTER,
        layer: &[STEP_NORMS, ATTENTION, OUTPUT, MIXTRAL_ROUTER, MINIMAX_ROUTER_BIAS, MINIMAX_M3, DENSE],
    },
    Architecture { arch: "hunyuan-moe", outer: OUTER, layer: &[NORMS, ATTENTION, OUTPUT, HUNYUAN_PARTS] },
    Architecture { arch: "hy_v3", outer: OUTER, layer: &[NORMS, ATTENTION, OUTPUT, HEAD_NORMS, HY_V3_PARTS, DENSE] },
    Architecture { arch: "smallthinker", outer: OUTER, layer: &[NORMS, ATTENTION, OUTPUT, PRIMARY_ROUTER] },
    Architecture { arch: "llama4", outer: ROTATED_OUTER, layer: &[NORMS, ATTENTION, OUTPUT, LLAMA4_FFN] },
    Architecture { arch: "mellum", outer: OUTER, layer: &[NORMS, ATTENTION, OUTPUT, HEAD_NORMS, ROUTER] },
    Architecture {
        arch: "afmoe",
        outer: OUTER,
        layer: &[AFMOE_PARTS, ATTENTION, OUTPUT, HEAD_NORMS, SHARED_EXPERTS, DENSE],
    },
    Architecture {
        arch: "laguna",
        outer: OUTER,
        layer: &[NORMS, ATTENTION, OUTPUT, HEAD_NORMS, HEAD_GATE, ROUTER, LAGUNA_ROUTER_BIAS, SHARED_EXPERT, DENSE],
    },
    Architecture {
        arch: "mimo2",
        outer: OUTER,
        layer: &[NORMS, ATTENTION, OUTPUT, ATTENTION_BIAS, SINKS, ROUTER, ROUTER_BIAS, DENSE],
    },
    Architecture {
        arch: "step35",
        outer: STEP_OUTER,
        layer: &[STEP_NORMS, ATTENTION, OUTPUT, HEAD_GATE, STEP_PARTS, DENSE],
    },
    Architecture {
        arch: "bailingmoe",
        outer: OUTER,
        layer: &[NORMS, LING_SPLIT, LING_OUTPUT, ROUTER, SHARED_EXPERTS, DENSE],
    },
    Architecture {
        arch: "bailingmoe2",
        outer: OUTER,
        layer: &[NORMS, LING_JOINED, LING_OUTPUT, ROUTER, LING_ROUTER_BIAS, SHARED_EXPERTS, DENSE],
    },
    Architecture {
        arch: "bailingmoe3",
        outer: OUTER,
        layer: &[NORMS, LING_HYBRID, LING_OUTPUT, ROUTER, LING_ROUTER_BIAS, SHARED_EXPERTS, DENSE],
    },
    Architecture {
        arch: "kimi-linear",
        outer: OUTER,
        layer: &[NORMS, LATENT, KIMI_DELTA, KIMI_DECAYS, OUTPUT, KIMI_EXPERTS, DENSE],
    },
    Architecture {
        arch: "glm5-next",
        outer: OUTER,
        layer: &[
            NORMS,
            HYPER_CONNECTIONS,
            LATENT,
            INDEXER,
            KIMI_DELTA,
            GLM5_NEXT,
            OUTPUT,
            ROUTER,
            ROUTER_BIAS,
            SHARED_EXPERTS,
            DENSE,
        ],
    },
];

/// Tensors that only a block for multi-token prediction has.
pub(in crate::source::gguf) const MTP: &[Rename] = &[
    ("nextn.eh_proj.weight", "eh_proj.weight", Same),
    ("nextn.enorm.weight", "enorm.weight", Same),
    ("nextn.hnorm.weight", "hnorm.weight", Same),
    ("nextn.shared_head_norm.weight", "shared_head.norm.weight", Same),
    ("layer_output_norm.weight", "shared_head.norm.weight", Same),
];

const OUTER: &[Rename] = &[
    ("token_embd.weight", "model.embed_tokens.weight", Same),
    ("output_norm.weight", "model.norm.weight", Same),
    ("output.weight", "lm_head.weight", Same),
];

const PHI_OUTER: &[Rename] = &[
    ("token_embd.weight", "model.embed_tokens.weight", Same),
    ("output_norm.weight", "model.norm.weight", Same),
    ("output_norm.bias", "model.norm.bias", Same),
    ("output.weight", "lm_head.weight", Same),
    ("output.bias", "lm_head.bias", Same),
    ("rope_factors_long.weight", "rope_scaling.long_factor", RopeFactors),
    ("rope_factors_short.weight", "rope_scaling.short_factor", RopeFactors),
];

const ROTATED_OUTER: &[Rename] = &[
    ("token_embd.weight", "model.embed_tokens.weight", Same),
    ("output_norm.weight", "model.norm.weight", Same),
    ("output.weight", "lm_head.weight", Same),
    ("rope_freqs.weight", "rope_scaling", RopeFactors),
];

const QWEN3_NEXT_OUTER: &[Rename] = &[
    ("token_embd.weight", "model.embed_tokens.weight", Same),
    ("output_norm.weight", "model.norm.weight", OnePlus),
    ("output.weight", "lm_head.weight", Same),
];

const STEP_OUTER: &[Rename] = &[
    ("token_embd.weight", "model.embed_tokens.weight", Same),
    ("output_norm.weight", "model.norm.weight", OnePlus),
    ("output.weight", "lm_head.weight", Same),
    ("rope_freqs.weight", "rope_scaling", RopeFactors),
];

const NORMS: &[Rename] = &[
    ("attn_norm.weight", "input_layernorm.weight", Same),
    ("ffn_norm.weight", "post_attention_layernorm.weight", Same),
];

const NORM_BIAS: &[Rename] =
    &[("attn_norm.bias", "input_layernorm.bias", Same), ("ffn_norm.bias", "post_attention_layernorm.bias", Same)];

const POST_NORMS: &[Rename] = &[
    ("attn_norm.weight", "input_layernorm.weight", Same),
    ("post_attention_norm.weight", "post_attention_layernorm.weight", Same),
];

const GEMMA4_NORMS: &[Rename] = &[
    ("attn_norm.weight", "input_layernorm.weight", Same),
    ("post_attention_norm.weight", "post_attention_layernorm.weight", Same),
    ("ffn_norm.weight", "pre_feedforward_layernorm.weight", Same),
    ("pre_ffw_norm_2.weight", "pre_feedforward_layernorm_2.weight", Same),
    ("post_ffw_norm.weight", "post_feedforward_layernorm.weight", Same),
    ("post_ffw_norm_1.weight", "post_feedforward_layernorm_1.weight", Same),
    ("post_ffw_norm_2.weight", "post_feedforward_layernorm_2.weight", Same),
];

const STEP_NORMS: &[Rename] = &[
    ("attn_norm.weight", "input_layernorm.weight", OnePlus),
    ("ffn_norm.weight", "post_attention_layernorm.weight", OnePlus),
    ("attn_q_norm.weight", "self_attn.q_norm.weight", OnePlus),
    ("attn_k_norm.weight", "self_attn.k_norm.weight", OnePlus),
];

const QWEN3_NEXT_NORMS: &[Rename] = &[
    ("attn_norm.weight", "input_layernorm.weight", OnePlus),
    ("post_attention_norm.weight", "post_attention_layernorm.weight", OnePlus),
    ("attn_q_norm.weight", "self_attn.q_norm.weight", OnePlus),
    ("attn_k_norm.weight", "self_attn.k_norm.weight", OnePlus),
];

const ATTENTION: &[Rename] = &[
    ("attn_q.weight", "self_attn.q_proj.weight", Same),
    ("attn_k.weight", "self_attn.k_proj.weight", Same),
    ("attn_v.weight", "self_attn.v_proj.weight", Same),
];

/// Attention for which GGUF applies RoPE to adjacent pairs, and the hub to the two halves of a head.
const ROTATED: &[Rename] = &[
    ("attn_q.weight", "self_attn.q_proj.weight", QueryRows),
    ("attn_k.weight", "self_attn.k_proj.weight", KeyRows),
    ("attn_v.weight", "self_attn.v_proj.weight", Same),
];

const OUTPUT: &[Rename] = &[("attn_output.weight", "self_attn.o_proj.weight", Same)];

const OUTPUT_BIAS: &[Rename] = &[("attn_output.bias", "self_attn.o_proj.bias", Same)];

const ATTENTION_BIAS: &[Rename] = &[
    ("attn_q.bias", "self_attn.q_proj.bias", Same),
    ("attn_k.bias", "self_attn.k_proj.bias", Same),
    ("attn_v.bias", "self_attn.v_proj.bias", Same),
];

const HEAD_NORMS: &[Rename] =
    &[("attn_q_norm.weight", "self_attn.q_norm.weight", Same), ("attn_k_norm.weight", "self_attn.k_norm.weight", Same)];

const LATENT: &[Rename] = &[
    ("attn_q.weight", "self_attn.q_proj.weight", Same),
    ("attn_q_a.weight", "self_attn.q_a_proj.weight", Same),
    ("attn_q_a_norm.weight", "self_attn.q_a_layernorm.weight", Same),
    ("attn_q_b.weight", "self_attn.q_b_proj.weight", Same),
    ("attn_kv_a_mqa.weight", "self_attn.kv_a_proj_with_mqa.weight", Same),
    ("attn_kv_a_norm.weight", "self_attn.kv_a_layernorm.weight", Same),
    ("attn_kv_b.weight", "self_attn.kv_b_proj.weight", Same),
    // The two halves of kv_b_proj by head, [heads, rank, key] and [heads, value, rank]; the hub has no names for them.
    ("attn_k_b.weight", "self_attn.k_b_proj.weight", Same),
    ("attn_v_b.weight", "self_attn.v_b_proj.weight", Same),
];

const INDEXER: &[Rename] = &[
    ("indexer.attn_q_b.weight", "self_attn.indexer.wq_b.weight", Same),
    ("indexer.attn_k.weight", "self_attn.indexer.wk.weight", Same),
    ("indexer.k_norm.weight", "self_attn.indexer.k_norm.weight", Same),
    ("indexer.k_norm.bias", "self_attn.indexer.k_norm.bias", Same),
    ("indexer.proj.weight", "self_attn.indexer.weights_proj.weight", Same),
];

const DELTA_RULE: &[Rename] = &[
    // Queries, keys and values of all heads, and apart from them the output gates; the hub has no names for these.
    ("attn_qkv.weight", "linear_attn.in_proj_qkv.weight", Same),
    ("attn_gate.weight", "linear_attn.in_proj_z.weight", Same),
    // Older files hold both as the hub does, grouped by key head.
    ("ssm_in.weight", "linear_attn.in_proj_qkvz.weight", Same),
    ("ssm_ba.weight", "linear_attn.in_proj_ba.weight", Same),
    ("ssm_conv1d.weight", "linear_attn.conv1d.weight", AsChannels),
    ("ssm_dt.bias", "linear_attn.dt_bias", Same),
    ("ssm_a", "linear_attn.A_log", NegatedExp),
    ("ssm_norm.weight", "linear_attn.norm.weight", Same),
    ("ssm_out.weight", "linear_attn.out_proj.weight", Same),
];

/// The strengths and decays of the delta rule, where they are apart.
const DELTA_RATES: &[Rename] = &[
    ("ssm_beta.weight", "linear_attn.in_proj_b.weight", Same),
    ("ssm_alpha.weight", "linear_attn.in_proj_a.weight", Same),
];

const ROUTER: &[Rename] = &[("ffn_gate_inp.weight", "mlp.gate.weight", Same)];

const MIXTRAL_ROUTER: &[Rename] = &[("ffn_gate_inp.weight", "block_sparse_moe.gate.weight", Same)];

const PRIMARY_ROUTER: &[Rename] = &[("ffn_gate_inp.weight", "block_sparse_moe.primary_router.weight", Same)];

const GPT_OSS_PARTS: &[Rename] = &[
    ("ffn_gate_inp.weight", "mlp.router.weight", Same),
    ("ffn_gate_inp.bias", "mlp.router.bias", Same),
    ("attn_sinks.weight", "self_attn.sinks", Same),
];

const GEMMA4_PARTS: &[Rename] = &[
    ("ffn_gate_inp.weight", "router.proj.weight", Same),
    ("ffn_gate_inp.scale", "router.scale", Same),
    ("ffn_down_exps.scale", "router.per_expert_scale", Same),
    ("layer_output_scale.weight", "layer_scalar", Same),
];

const ROUTER_BIAS: &[Rename] = &[("exp_probs_b.bias", "mlp.gate.e_score_correction_bias", Same)];

const EXAONE_ROUTER_BIAS: &[Rename] = &[("exp_probs_b.bias", "mlp.e_score_correction_bias", Same)];

const MINIMAX_ROUTER_BIAS: &[Rename] = &[("exp_probs_b.bias", "block_sparse_moe.e_score_correction_bias", Same)];

const HUNYUAN_PARTS: &[Rename] = &[
    ("attn_q_norm.weight", "self_attn.query_layernorm.weight", Same),
    ("attn_k_norm.weight", "self_attn.key_layernorm.weight", Same),
    ("ffn_gate_inp.weight", "mlp.gate.wg.weight", Same),
    ("ffn_gate_shexp.weight", "mlp.shared_mlp.gate_proj.weight", Same),
    ("ffn_up_shexp.weight", "mlp.shared_mlp.up_proj.weight", Same),
    ("ffn_down_shexp.weight", "mlp.shared_mlp.down_proj.weight", Same),
];

const HY_V3_PARTS: &[Rename] = &[
    ("ffn_gate_inp.weight", "mlp.router.gate.weight", Same),
    ("exp_probs_b", "mlp.expert_bias", Same),
    ("exp_probs_b.bias", "mlp.expert_bias", Same),
    ("ffn_gate_shexp.weight", "mlp.shared_mlp.gate_proj.weight", Same),
    ("ffn_up_shexp.weight", "mlp.shared_mlp.up_proj.weight", Same),
    ("ffn_down_shexp.weight", "mlp.shared_mlp.down_proj.weight", Same),
];

const HEAD_GATE: &[Rename] = &[("attn_gate.weight", "self_attn.g_proj.weight", Same)];

const SINKS: &[Rename] = &[("attn_sinks.weight", "self_attn.attention_sink_bias", Same)];

const AFMOE_PARTS: &[Rename] = &[
    ("attn_norm.weight", "input_layernorm.weight", Same),
    ("post_attention_norm.weight", "post_attention_layernorm.weight", Same),
    ("attn_gate.weight", "self_attn.gate_proj.weight", Same),
    ("ffn_norm.weight", "pre_mlp_layernorm.weight", Same),
    ("post_ffw_norm.weight", "post_mlp_layernorm.weight", Same),
    ("ffn_gate_inp.weight", "mlp.router.gate.weight", Same),
    ("exp_probs_b.bias", "mlp.expert_bias", Same),
];

const LAGUNA_ROUTER_BIAS: &[Rename] = &[("exp_probs_b.bias", "mlp.experts.e_score_correction_bias", Same)];

const STEP_PARTS: &[Rename] = &[
    ("ffn_gate_inp.weight", "moe.gate.weight", Same),
    ("exp_probs_b.bias", "moe.router_bias", Same),
    ("ffn_gate_shexp.weight", "share_expert.gate_proj.weight", Same),
    ("ffn_up_shexp.weight", "share_expert.up_proj.weight", Same),
    ("ffn_down_shexp.weight", "share_expert.down_proj.weight", Same),
];

const ERNIE_ROUTER_BIAS: &[Rename] = &[("exp_probs_b.bias", "mlp.moe_statics.e_score_correction_bias", AsRow)];

const SHARED_EXPERT: &[Rename] = &[
    ("ffn_gate_shexp.weight", "mlp.shared_expert.gate_proj.weight", Same),
    ("ffn_up_shexp.weight", "mlp.shared_expert.up_proj.weight", Same),
    ("ffn_down_shexp.weight", "mlp.shared_expert.down_proj.weight", Same),
    ("ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight", AsRow),
];

const SHARED_EXPERTS: &[Rename] = &[
    ("ffn_gate_shexp.weight", "mlp.shared_experts.gate_proj.weight", Same),
    ("ffn_up_shexp.weight", "mlp.shared_experts.up_proj.weight", Same),
    ("ffn_down_shexp.weight", "mlp.shared_experts.down_proj.weight", Same),
];

const DENSE: &[Rename] = &[
    ("ffn_gate.weight", "mlp.gate_proj.weight", Same),
    ("ffn_up.weight", "mlp.up_proj.weight", Same),
    ("ffn_down.weight", "mlp.down_proj.weight", Same),
];

const LLAMA4_FFN: &[Rename] = &[
    ("ffn_gate_inp.weight", "feed_forward.router.weight", Same),
    ("ffn_gate_shexp.weight", "feed_forward.shared_expert.gate_proj.weight", Same),
    ("ffn_up_shexp.weight", "feed_forward.shared_expert.up_proj.weight", Same),
    ("ffn_down_shexp.weight", "feed_forward.shared_expert.down_proj.weight", Same),
    ("ffn_gate.weight", "feed_forward.gate_proj.weight", Same),
    ("ffn_up.weight", "feed_forward.up_proj.weight", Same),
    ("ffn_down.weight", "feed_forward.down_proj.weight", Same),
];

const LFM_OUTER: &[Rename] = &[
    ("token_embd.weight", "model.embed_tokens.weight", Same),
    ("output_norm.weight", "model.embedding_norm.weight", Same),
    // Older files name the last norm after its name on the hub.
    ("token_embd_norm.weight", "model.embedding_norm.weight", Same),
    ("output.weight", "lm_head.weight", Same),
];

const LFM_LAYER: &[Rename] = &[
    ("attn_norm.weight", "operator_norm.weight", Same),
    ("ffn_norm.weight", "ffn_norm.weight", Same),
    ("attn_q.weight", "self_attn.q_proj.weight", Same),
    ("attn_k.weight", "self_attn.k_proj.weight", Same),
    ("attn_v.weight", "self_attn.v_proj.weight", Same),
    ("attn_output.weight", "self_attn.out_proj.weight", Same),
    ("attn_q_norm.weight", "self_attn.q_layernorm.weight", Same),
    ("attn_k_norm.weight", "self_attn.k_layernorm.weight", Same),
    ("shortconv.conv.weight", "conv.conv.weight", AsChannels),
    ("shortconv.in_proj.weight", "conv.in_proj.weight", Same),
    ("shortconv.out_proj.weight", "conv.out_proj.weight", Same),
    ("ffn_gate_inp.weight", "feed_forward.gate.weight", Same),
    ("exp_probs_b.bias", "feed_forward.expert_bias", Same),
    ("ffn_gate.weight", "feed_forward.w1.weight", Same),
    ("ffn_up.weight", "feed_forward.w3.weight", Same),
    ("ffn_down.weight", "feed_forward.w2.weight", Same),
];
