//! From one token's router logits to experts and their weights, as each model family defines it.
//!
//! A gate works in two steps, so that a routing strategy can act between them: [`Gate::selection_scores`] gives the
//! scores that the model's own top-k sorts, and [`Gate::weights`] gives the weights of the experts that were finally
//! chosen, always from the unmodified logits.

use std::ops::Range;

use crate::{ExpertId, exp, softplus};

/// Largest number of groups that a gate may have.
const GROUPS_MAX: usize = 1024;

/// The rule by which one model turns router logits into experts and weights.
#[derive(Clone, PartialEq, Debug, serde::Serialize, serde::Deserialize)]
pub struct Gate {
    /// Experts to choose from.
    pub experts: usize,
    /// Experts to choose.
    pub top_k: usize,
    /// How logits become scores.
    pub score: Score,
    /// Correction bias, added to the scores for the choice only, never to the weights.
    pub bias: Option<Vec<f32>>,
    /// Group-limited routing: only the best groups of experts take part in the choice.
    pub groups: Option<ExpertGroups>,
    /// How the chosen experts are weighted.
    #[serde(rename = "weigh")]
    pub weighting: Weighting,
    /// Whether the weight scales the expert's input instead of its output.
    pub scales_input: bool,
    /// A factor on the weight of each expert, applied last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expert_scales: Option<Vec<f32>>,
}

/// How logits become the scores that are sorted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub enum Score {
    /// The logits themselves.
    Raw,
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid of each logit.
    Sigmoid,
    /// Root of the softplus of each logit.
    SqrtSoftplus,
}

/// Limits the choice to `keep` of `count` equal groups of adjacent experts.
#[derive(Clone, Copy, PartialEq, Debug, serde::Serialize, serde::Deserialize)]
pub struct ExpertGroups {
    /// Number of groups.
    pub count: usize,
    /// Number of groups that take part in the choice.
    pub keep: usize,
    /// How groups are ranked.
    pub rank: GroupRank,
    /// The score that experts of the other groups get.
    #[serde(with = "bits")]
    pub masked: f32,
}

/// Serializes an f32 by its bits, because JSON has no infinities.
mod bits {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub fn serialize<S: Serializer>(value: &f32, to: S) -> Result<S::Ok, S::Error> {
        value.to_bits().serialize(to)
    }

    pub fn deserialize<'d, D: Deserializer<'d>>(from: D) -> Result<f32, D::Error> {
        u32::deserialize(from).map(f32::from_bits)
    }
}

/// How a group of experts is ranked.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub enum GroupRank {
    /// By the score of its best expert.
    Best,
    /// By the sum of the scores of its two best experts.
    BestTwo,
}

/// How the weights of the chosen experts are computed.
#[derive(Clone, Copy, PartialEq, Debug, serde::Serialize, serde::Deserialize)]
pub enum Weighting {
    /// Their scores (without the bias), normalised and scaled.
    Score {
        /// The normalisation.
        renorm: Renorm,
        /// Factor that is applied last.
        scale: f32,
    },
    /// Softmax over the chosen logits only.
    SoftmaxOfChosen,
    /// The sigmoid of each chosen logit.
    SigmoidOfChosen,
    /// The sigmoid of each chosen logit, divided by the sum of these.
    SigmoidShareOfChosen,
    /// Sparsemixer of Phi: each of two experts is weighted by a softmax over the experts within `2 * eps` of it.
    SparseMixer {
        /// The config's `router_jitter_noise`.
        eps: f32,
    },
}

/// The divisor of the chosen experts' scores.
#[derive(Clone, Copy, PartialEq, Debug, serde::Serialize, serde::Deserialize)]
pub enum Renorm {
    /// No division.
    No,
    /// Their sum, plus a constant.
    Sum {
        /// Added to the sum.
        plus: f32,
    },
    /// Their sum, but at least `min`.
    Floor {
        /// The smallest divisor.
        min: f32,
    },
}

/// Why a gate is invalid.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum GateError {
    /// No experts per token, or more than there are.
    #[error("the config asks for {top_k} experts per token, which must be 1 to {experts}")]
    TopK {
        /// Experts per token.
        top_k: usize,
        /// Experts per layer.
        experts: usize,
    },
    /// Groups that do not divide the experts evenly, or leave too few of them.
    #[error("the config's {keep} of {count} groups do not allow {top_k} experts per token of {experts}")]
    Groups {
        /// Groups that take part in the choice.
        keep: usize,
        /// Number of groups.
        count: usize,
        /// Experts per token.
        top_k: usize,
        /// Experts per layer.
        experts: usize,
    },
    /// Factors of experts of the wrong number.
    #[error("the router's factors of experts have {got} values for {experts} experts")]
    ExpertScales {
        /// Number of factors.
        got: usize,
        /// Experts per layer.
        experts: usize,
    },
    /// A correction bias of the wrong length.
    #[error("the router's correction bias has {got} values for {experts} experts")]
    Bias {
        /// Length of the bias.
        got: usize,
        /// Experts per layer.
        experts: usize,
    },
    /// Sparsemixer is defined for exactly two experts.
    #[error("the sparsemixer gate is defined for 2 experts per token, the config asks for {top_k}")]
    SparseMixer {
        /// Experts per token.
        top_k: usize,
    },
}

impl Gate {
    /// A softmax gate, the most common kind.
    pub fn softmax(experts: usize, top_k: usize, renorm: bool) -> Self {
        let renorm = if renorm { Renorm::Sum { plus: 0.0 } } else { Renorm::No };
        Gate {
            experts,
            top_k,
            score: Score::Softmax,
            bias: None,
            groups: None,
            weighting: Weighting::Score { renorm, scale: 1.0 },
            scales_input: false,
            expert_scales: None,
        }
    }

    /// Returns the gate, or an error if it is invalid. All methods below rely on a checked gate.
    pub fn checked(self) -> Result<Self, GateError> {
        let (top_k, experts) = (self.top_k, self.experts);
        if top_k == 0 || top_k > experts {
            return Err(GateError::TopK { top_k, experts });
        }
        if let Some(g) = self.groups {
            let per = if g.count > 0 && experts.is_multiple_of(g.count) { experts / g.count } else { 0 };
            let two = g.rank == GroupRank::BestTwo && per < 2;
            if per == 0 || g.count > GROUPS_MAX || two || g.keep == 0 || g.keep > g.count || g.keep * per < top_k {
                return Err(GateError::Groups { keep: g.keep, count: g.count, top_k, experts });
            }
        }
        if let Some(got) = self.bias.as_ref().map(Vec::len).filter(|n| *n != experts) {
            return Err(GateError::Bias { got, experts });
        }
        if let Some(got) = self.expert_scales.as_ref().map(Vec::len).filter(|n| *n != experts) {
            return Err(GateError::ExpertScales { got, experts });
        }
        if matches!(self.weighting, Weighting::SparseMixer { .. }) && top_k != 2 {
            return Err(GateError::SparseMixer { top_k });
        }
        Ok(self)
    }

    /// The scores that the model's own top-k sorts: scores plus bias, with the losing groups masked.
    ///
    /// The caller guarantees one logit per expert.
    pub fn selection_scores(&self, logits: &[f32], out: &mut Vec<f32>) {
        self.unmasked(logits, out);
        if let Some(groups) = self.groups {
            groups.mask(out, |_| {});
        }
    }

    /// [`selection_scores`](Self::selection_scores), and for each expert whether its group takes part in the choice.
    pub fn selection_scores_and_mask(&self, logits: &[f32], out: &mut Vec<f32>, running: &mut Vec<bool>) {
        self.unmasked(logits, out);
        running.clear();
        running.resize(out.len(), true);
        if let Some(groups) = self.groups {
            groups.mask(out, |lost| running[lost].fill(false));
        }
    }

    /// The router's probability of each expert: the softmax of the logits or, if each logit has a score of its own,
    /// that score's share of their sum.
    ///
    /// The caller guarantees one logit per expert.
    pub fn probabilities(&self, logits: &[f32], out: &mut Vec<f32>) {
        self.scores(logits, out);
        match self.score {
            Score::Raw => softmax(out),
            Score::Softmax => {}
            Score::Sigmoid | Score::SqrtSoftplus => {
                let sum: f32 = out.iter().sum();
                out.iter_mut().for_each(|v| *v /= sum.max(f32::MIN_POSITIVE));
            }
        }
    }

    /// The experts of the `top_k` largest values, in descending order; the lower index wins a tie, NaN comes last.
    pub fn choose(&self, values: &[f32], out: &mut Vec<ExpertId>) {
        let key = |e: &ExpertId| if values[e.index()].is_nan() { f32::NEG_INFINITY } else { values[e.index()] };
        let descending = |a: &ExpertId, b: &ExpertId| key(b).total_cmp(&key(a)).then(a.cmp(b));
        out.clear();
        out.extend((0..values.len()).map(|i| ExpertId(i as u16)));
        if self.top_k < out.len() {
            out.select_nth_unstable_by(self.top_k, descending);
            out.truncate(self.top_k);
        }
        out.sort_unstable_by(descending);
    }

    /// The weights of `chosen`, in the same order, from the unmodified logits.
    pub fn weights(&self, logits: &[f32], chosen: &[ExpertId], out: &mut Vec<f32>) {
        let logit = |e: &ExpertId| logits[e.index()];
        match self.weighting {
            Weighting::Score { renorm, scale } => {
                self.scores(logits, out);
                chosen.iter().for_each(|e| out.push(out[e.index()]));
                out.drain(..logits.len());
                let sum: f32 = out.iter().sum();
                let divisor = match renorm {
                    Renorm::No => 1.0,
                    Renorm::Sum { plus } => sum + plus,
                    Renorm::Floor { min } => sum.max(min),
                };
                // All scores of a forced choice may round to 0; weights of 0 are not divided by their sum of 0.
                out.iter_mut().filter(|w| **w != 0.0).for_each(|w| *w = *w / divisor * scale);
            }
            Weighting::SoftmaxOfChosen => {
                out.clear();
                out.extend(chosen.iter().map(logit));
                softmax(out);
            }
            Weighting::SigmoidOfChosen => {
                out.clear();
                out.extend(chosen.iter().map(|e| sigmoid(logit(e))));
            }
            Weighting::SigmoidShareOfChosen => {
                out.clear();
                out.extend(chosen.iter().map(|e| sigmoid(logit(e))));
                let sum: f32 = out.iter().sum();
                out.iter_mut().filter(|w| **w != 0.0).for_each(|w| *w /= sum);
            }
            Weighting::SparseMixer { eps } => {
                out.clear();
                for (rank, e) in chosen.iter().enumerate() {
                    out.push(sparse_mixer(logits, e.index(), &chosen[..rank], eps));
                }
            }
        }
        if let Some(scales) = &self.expert_scales {
            out.iter_mut().zip(chosen).for_each(|(w, e)| *w *= scales[e.index()]);
        }
    }

    fn unmasked(&self, logits: &[f32], out: &mut Vec<f32>) {
        self.scores(logits, out);
        if let Some(bias) = &self.bias {
            out.iter_mut().zip(bias).for_each(|(v, b)| *v += b);
        }
    }

    fn scores(&self, logits: &[f32], out: &mut Vec<f32>) {
        out.clear();
        out.extend_from_slice(logits);
        match self.score {
            Score::Raw => {}
            Score::Softmax => softmax(out),
            Score::Sigmoid => out.iter_mut().for_each(|v| *v = sigmoid(*v)),
            Score::SqrtSoftplus => out.iter_mut().for_each(|v| *v = softplus(*v).sqrt()),
        }
    }
}

impl ExpertGroups {
    /// Masks the losing groups and reports the range of experts of each to `lost`.
    fn mask(&self, values: &mut [f32], mut lost: impl FnMut(Range<usize>)) {
        let per = values.len() / self.count;
        // Groups are ranked before any is masked. A gate has few groups, so comparing all pairs is cheap.
        let mut kept = [0u64; GROUPS_MAX / 64];
        for g in 0..self.count {
            let score = self.group_score(&values[g * per..][..per]);
            let better = values.chunks(per).enumerate().filter(|(other, group)| {
                let other_score = self.group_score(group);
                other_score.total_cmp(&score).then(g.cmp(other)).is_gt()
            });
            kept[g / 64] |= u64::from(better.count() < self.keep) << (g % 64);
        }
        for (g, group) in values.chunks_mut(per).enumerate() {
            if kept[g / 64] >> (g % 64) & 1 == 0 {
                group.fill(self.masked);
                lost(g * per..(g + 1) * per);
            }
        }
    }

    /// The score by which a group is ranked; a group with only NaN, or with a sum that is NaN, comes last.
    fn group_score(&self, group: &[f32]) -> f32 {
        let (mut best, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
        for v in group {
            if *v > best {
                (best, second) = (*v, best);
            } else if *v > second {
                second = *v;
            }
        }
        match self.rank {
            GroupRank::Best => best,
            GroupRank::BestTwo => Some(best + second).filter(|sum| !sum.is_nan()).unwrap_or(f32::NEG_INFINITY),
        }
    }
}

/// Softmax of `logits` at `at` over the experts whose logit is close enough to it, without those in `taken`.
fn sparse_mixer(logits: &[f32], at: usize, taken: &[ExpertId], eps: f32) -> f32 {
    let top = logits[at];
    let near = |j: usize| {
        let l = logits[j];
        let far = (top - l) / l.abs().max(top) > 2.0 * eps;
        !far && !taken.iter().any(|t| t.index() == j)
    };
    let sum: f32 = (0..logits.len()).filter(|j| near(*j)).map(|j| exp(logits[j] - top)).sum();
    1.0 / sum
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

fn softmax(values: &mut [f32]) {
    let top = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for v in values.iter_mut() {
        *v = exp(*v - top);
        sum += *v;
    }
    values.iter_mut().for_each(|v| *v /= sum);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(gate: &Gate, logits: &[f32]) -> (Vec<u16>, Vec<f32>) {
        let (mut values, mut ids, mut weights) = (vec![], vec![], vec![]);
        gate.selection_scores(logits, &mut values);
        gate.choose(&values, &mut ids);
        gate.weights(logits, &ids, &mut weights);
        (ids.into_iter().map(|e| e.0).collect(), weights)
    }

    #[test]
    fn softmax_gate_ranks_and_normalises() {
        let (ids, weights) = run(&Gate::softmax(4, 2, true), &[0.0, 2.0, 1.0, -1.0]);
        assert_eq!(ids, [1, 2]);
        assert!((weights.iter().sum::<f32>() - 1.0).abs() < 1e-6);
        assert!((weights[0] / weights[1] - 1f32.exp()).abs() < 1e-5);
    }

    #[test]
    fn the_bias_affects_the_choice_but_not_the_weight() {
        let gate = Gate {
            score: Score::Sigmoid,
            bias: Some(vec![0.0, 0.0, 5.0, 0.0]),
            weighting: Weighting::Score { renorm: Renorm::No, scale: 2.0 },
            ..Gate::softmax(4, 1, false)
        };
        let (ids, weights) = run(&gate, &[3.0, 1.0, 0.0, -1.0]);
        assert_eq!((ids, weights), (vec![2], vec![1.0]));
    }

    #[test]
    fn factors_of_experts_come_after_the_normalisation() {
        let gate = Gate { expert_scales: Some(vec![1.0, 2.0, 0.5, 1.0]), ..Gate::softmax(4, 2, true) };
        let (ids, weights) = run(&gate, &[-9.0, 1.0, 1.0, -9.0]);
        assert_eq!((ids, weights), (vec![1, 2], vec![1.0, 0.25]));
        let short = Gate { expert_scales: Some(vec![1.0]), ..gate.clone() };
        assert_eq!(short.checked(), Err(GateError::ExpertScales { got: 1, experts: 4 }));
        let json = serde_json::to_string(&gate).unwrap();
        assert_eq!(serde_json::from_str::<Gate>(&json).unwrap(), gate);
    }

    #[test]
    fn groups_are_ranked_by_the_sum_of_their_two_best() {
        let groups = ExpertGroups { count: 2, keep: 1, rank: GroupRank::BestTwo, masked: f32::NEG_INFINITY };
        let gate = Gate { score: Score::Raw, groups: Some(groups), ..Gate::softmax(6, 2, false) };
        // The best single expert is in the losing group.
        let logits = [9.0, 0.0, 0.0, 5.0, 5.0, 5.0];
        assert_eq!(run(&gate, &logits).0, [3, 4]);
        let (mut values, mut running) = (vec![], vec![]);
        gate.selection_scores_and_mask(&logits, &mut values, &mut running);
        assert_eq!(running, [false, false, false, true, true, true]);
        assert_eq!(values[..3], [f32::NEG_INFINITY; 3]);
    }

    #[test]
    fn sparse_mixer_weights_each_of_two_among_close_logits() {
        let gate =
            Gate { score: Score::Raw, weighting: Weighting::SparseMixer { eps: 0.01 }, ..Gate::softmax(4, 2, false) };
        let (ids, weights) = run(&gate, &[1.0, 1.01, 0.5, -3.0]);
        assert_eq!(ids, [1, 0]);
        // 1.0 is within 2 % of 1.01; nothing else is within 2 % of 1.0 once 1.01 is taken.
        assert!((weights[0] - 1.0 / (1.0 + (-0.01f32).exp())).abs() < 1e-6);
        assert_eq!(weights[1], 1.0);
    }

    #[test]
    fn the_first_of_equal_groups_win() {
        let groups = ExpertGroups { count: 3, keep: 2, rank: GroupRank::Best, masked: -1.0 };
        let gate = Gate { score: Score::Raw, groups: Some(groups), ..Gate::softmax(6, 2, false) };
        let mut values = vec![];
        gate.selection_scores(&[1.0, 0.0, f32::NAN, 1.0, 0.0, 1.0], &mut values);
        assert_eq!((values[0], values[3], values[4], values[5]), (1.0, 1.0, -1.0, -1.0));
    }

    #[test]
    fn probabilities_sum_to_one() {
        let logits = [0.5, -1.0, 2.0, 0.0];
        for score in [Score::Raw, Score::Softmax, Score::Sigmoid, Score::SqrtSoftplus] {
            let (gate, mut shares) = (Gate { score, ..Gate::softmax(4, 1, false) }, vec![]);
            gate.probabilities(&logits, &mut shares);
            assert!((shares.iter().sum::<f32>() - 1.0).abs() < 1e-6, "{score:?}");
            assert!(shares[2] > shares[0] && shares[0] > shares[3] && shares[3] > shares[1], "{score:?}");
        }
    }

    #[test]
    fn ties_go_to_the_lower_index_and_nan_comes_last() {
        let mut chosen = Vec::new();
        Gate::softmax(4, 4, false).choose(&[1.0, 2.0, 2.0, f32::NAN], &mut chosen);
        assert_eq!(chosen, [1, 2, 0, 3].map(ExpertId));
    }

    #[test]
    fn invalid_gates_are_refused() {
        assert!(Gate::softmax(4, 5, false).checked().is_err());
        assert!(Gate::softmax(4, 0, false).checked().is_err());
        let groups = |count, keep| {
            let groups = Some(ExpertGroups { count, keep, rank: GroupRank::Best, masked: 0.0 });
            Gate { groups, ..Gate::softmax(8, 3, false) }.checked()
        };
        assert!(groups(4, 2).is_ok());
        assert!([(4, 1), (3, 2), (0, 0)].into_iter().all(|(count, keep)| groups(count, keep).is_err()));
    }
}
