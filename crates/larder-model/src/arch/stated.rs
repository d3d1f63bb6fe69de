//! Keys that only state what a model does anyway, with what it does. Which architecture has them in its config is a
//! matter of where a model was made: another value than that of the model that was built would change the result, and
//! is refused.

use larder_core::{Gate, Renorm, Score, TensorSpec, Weighting};
use serde_json::Value;

use crate::nn::Moe;
use crate::stack::{Ffn, Stack};

/// Whether the weights of a token's experts are divided by their sum.
const NORMALISES: &[&str] = &["norm_topk_prob", "moe_renormalize", "route_norm"];
/// The scores of experts.
const SCORE: &[&str] = &["scoring_func", "score_func", "score_function", "moe_router_activation_func"];
/// How experts are chosen by their scores.
const METHOD: &[&str] = &["topk_method"];
/// Groups of experts, and groups from which they are chosen.
const GROUPS: &[&str] = &["n_group", "topk_group", "num_expert_group", "num_expert_groups", "num_limited_groups"];
/// The factor on the weights of experts.
const FACTOR: &[&str] = &["routed_scaling_factor"];
/// Whether there are shared experts.
const HAS_SHARED: &[&str] = &["moe_router_enable_shared_expert"];
/// Whether the choice of experts has a bias.
const CHOICE_BIAS: &[&str] = &["use_routing_bias", "moe_router_enable_expert_bias", "use_expert_bias"];
/// The number format in which the router is computed.
const ROUTER_FORMAT: &[&str] = &["moe_router_dtype", "router_dtype"];
/// Number or width of shared experts.
const SHARED: &[&str] = &[
    "n_shared_experts",
    "num_shared_experts",
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "shared_intermediate_size",
];
/// The types of layers.
const LAYER_TYPES: &[&str] = &["layer_types"];
/// Whether queries and keys are normalised.
const QK_NORM: &[&str] = &["use_qk_norm", "qk_norm", "use_qk_layernorm", "qk_layernorm"];

/// Factors, shares and steps that are 1 in a model that does not read them.
const ONE: &[&str] = &[
    "decoder_sparse_step",
    "embedding_multiplier",
    "logit_scale",
    "logits_scaling",
    "moe_layer_freq",
    "partial_rotary_factor",
    "residual_multiplier",
];

/// What the names of weights of such norms have in them.
const QK_NORM_WEIGHTS: [&str; 2] = [".q_norm.", ".query_layernorm."];

/// The keys, with the values that the model in `stack` may have for each; `requested` are the tensors that it consists
/// of.
pub fn stated(stack: &Stack, requested: &[TensorSpec]) -> Vec<(&'static str, Vec<Value>)> {
    let normed = requested.iter().any(|spec| QK_NORM_WEIGHTS.iter().any(|part| spec.name.contains(part)));
    let full = vec![vec!["full_attention"; stack.layer_count()].into()]; // of a model with one type of layers
    let mut all = vec![
        (QK_NORM, vec![normed.into()]),
        (ROUTER_FORMAT, vec!["float32".into(), "fp32".into()]),
        (ONE, vec![1.into()]),
        (LAYER_TYPES, full),
    ];
    let moes = stack.ffns().filter_map(|ffn| match ffn {
        Ffn::Moe(moe) => Some(moe),
        Ffn::Dense(_) => None,
    });
    all.extend(moes.last().map(|moe| of_experts(moe)).into_iter().flatten());
    all.into_iter().flat_map(|(keys, values)| keys.iter().map(move |key| (*key, values.clone()))).collect()
}

/// What the experts of a layer state.
fn of_experts(moe: &Moe) -> Vec<(&'static [&'static str], Vec<Value>)> {
    let Gate { score, bias, groups, weighting, .. } = &moe.gate;
    let method = match (bias, groups) {
        (Some(_), _) => "noaux_tc",
        (None, Some(_)) => "group_limited_greedy",
        (None, None) => "greedy",
    };
    let mut all = vec![
        (METHOD, vec![method.into()]),
        (CHOICE_BIAS, vec![bias.is_some().into()]),
        (HAS_SHARED, vec![moe.shared.is_some().into()]),
        (SHARED, if moe.shared.is_some() { vec![] } else { vec![0.into()] }),
        (SCORE, vec![score_name(*score, weighting).into()]),
        (NORMALISES, vec![normalises(weighting).into()]),
    ];
    if groups.is_none() {
        all.push((GROUPS, vec![1.into(), 0.into()]));
    }
    if let Weighting::Score { scale, .. } = weighting {
        all.push((FACTOR, vec![(*scale).into()]));
    }
    all
}

fn score_name(score: Score, weighting: &Weighting) -> &'static str {
    match (score, weighting) {
        (Score::Sigmoid, _) | (Score::Raw, Weighting::SigmoidOfChosen | Weighting::SigmoidShareOfChosen) => "sigmoid",
        (Score::SqrtSoftplus, _) => "sqrtsoftplus",
        (Score::Softmax | Score::Raw, _) => "softmax",
    }
}

fn normalises(weighting: &Weighting) -> bool {
    match weighting {
        Weighting::Score { renorm: Renorm::No, .. } | Weighting::SigmoidOfChosen => false,
        Weighting::Score { .. } | Weighting::SoftmaxOfChosen => true,
        Weighting::SigmoidShareOfChosen | Weighting::SparseMixer { .. } => true,
    }
}
