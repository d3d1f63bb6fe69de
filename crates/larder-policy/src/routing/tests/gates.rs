//! One gate of every form.

use super::*;
use larder_core::{ExpertGroups, GroupRank, Renorm, Score, Weighting};

pub const EXPERTS: usize = 12;
pub const TOP_K: usize = 4;

pub fn gates() -> Vec<(&'static str, Gate)> {
    let softmax = Gate::softmax(EXPERTS, TOP_K, true);
    let bias = Some((0..EXPERTS).map(|i| (i % 5) as f32 * 0.1 - 0.2).collect::<Vec<_>>());
    let groups = |rank, masked| Some(ExpertGroups { count: 4, keep: 2, rank, masked });
    let chosen = Weighting::SoftmaxOfChosen;
    let score = Weighting::Score { renorm: Renorm::No, scale: 1.0 };
    let raw = Gate { score: Score::Raw, weighting: chosen, ..softmax.clone() };
    let sigmoid = Gate { score: Score::Sigmoid, bias: bias.clone(), weighting: score, ..softmax.clone() };
    let lowest = f32::NEG_INFINITY;
    [
        ("softmax", softmax.clone()),
        ("softmax in groups", Gate { groups: groups(GroupRank::Best, 0.0), ..softmax.clone() }),
        ("softmax and bias", Gate { bias, ..softmax.clone() }),
        ("raw", raw.clone()),
        (
            "raw, one, sigmoid",
            Gate { top_k: 1, weighting: Weighting::SigmoidOfChosen, scales_input: true, ..raw.clone() },
        ),
        ("sigmoid and bias", sigmoid.clone()),
        ("sigmoid and bias in groups", Gate { groups: groups(GroupRank::BestTwo, lowest), ..sigmoid.clone() }),
        ("sparsemixer", Gate { top_k: 2, weighting: Weighting::SparseMixer { eps: 0.01 }, ..raw }),
    ]
    .map(|(name, gate)| (name, gate.checked().unwrap()))
    .into()
}

/// The index of a gate.
pub fn gate() -> impl Values<Value = usize> {
    0..gates().len()
}

/// Logits with ties, logits so far apart that probabilities round to 0, and NaN.
pub fn logits() -> impl Values<Value = Vec<f32>> {
    let one = prop_oneof![
        6 => (-8i8..8).prop_map(|i| f32::from(i) / 4.0),
        6 => -6f32..6.0,
        1 => -300f32..300.0,
        1 => Just(-0.0f32),
    ];
    prop_oneof![
        20 => prop::collection::vec(one.clone(), EXPERTS),
        1 => prop::collection::vec(prop_oneof![8 => one, 1 => Just(f32::NAN)], EXPERTS),
    ]
}
