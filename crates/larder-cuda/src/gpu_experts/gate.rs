//! The numbers by which the kernel that chooses experts applies a gate.

use larder_core::{Gate, GroupRank, Renorm, Score, Weighting};

/// The most experts of a layer, a bit each for a warp.
const MAX_EXPERTS: usize = 1024;

/// A gate in the words of the kernel, in the order of the struct there.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct KernelGate {
    score: u32,
    weighting: u32,
    renorm: u32,
    renorm_by: f32,
    factor: f32,
    groups: u32,
    kept_groups: u32,
    rank: u32,
    masked: f32,
    scales_input: bool,
}

impl KernelGate {
    /// Number of words.
    pub const WORDS: usize = 10;

    /// The gate; `None` if the kernel does not have it.
    pub fn of(gate: &Gate) -> Option<Self> {
        if gate.experts > MAX_EXPERTS {
            return None;
        }
        let score = match gate.score {
            Score::Raw => 0,
            Score::Softmax => 1,
            Score::Sigmoid => 2,
            Score::SqrtSoftplus => 3,
        };
        let (weighting, renorm, factor) = match gate.weighting {
            Weighting::Score { renorm, scale } => (0, renorm, scale),
            Weighting::SoftmaxOfChosen => (1, Renorm::No, 1.0),
            Weighting::SigmoidOfChosen => (2, Renorm::No, 1.0),
            Weighting::SigmoidShareOfChosen => (3, Renorm::No, 1.0),
            Weighting::SparseMixer { .. } => (4, Renorm::No, 1.0),
        };
        let (renorm, renorm_by) = match renorm {
            _ if let Weighting::SparseMixer { eps } = gate.weighting => (0, 2.0 * eps),
            Renorm::No => (0, 0.0),
            Renorm::Sum { plus } => (1, plus),
            Renorm::Floor { min } => (2, min),
        };
        let of_gate = KernelGate {
            score,
            weighting,
            renorm,
            renorm_by,
            factor,
            groups: 0,
            kept_groups: 0,
            rank: 0,
            masked: 0.0,
            scales_input: gate.scales_input,
        };
        Some(match gate.groups {
            None => of_gate,
            Some(groups) => KernelGate {
                groups: groups.count as u32,
                kept_groups: groups.keep as u32,
                rank: match groups.rank {
                    GroupRank::Best => 0,
                    GroupRank::BestTwo => 1,
                },
                masked: groups.masked,
                ..of_gate
            },
        })
    }

    /// The scratch values that a token needs: two scores for each expert, one for none, one for each group, and weights
    /// that scale inputs.
    pub fn scratch(&self, gate: &Gate) -> usize {
        self.weights_at(gate) + if self.scales_input { gate.top_k } else { 0 }
    }

    /// Where the scratch values have the weights that scale inputs.
    pub fn weights_at(&self, gate: &Gate) -> usize {
        2 * gate.experts + 1 + self.groups as usize
    }

    /// The words of the kernel.
    pub fn words(self) -> [u32; KernelGate::WORDS] {
        let KernelGate { score, weighting, renorm, renorm_by, factor, groups, kept_groups, rank, masked, .. } = self;
        let (renorm_by, factor, masked) = (renorm_by.to_bits(), factor.to_bits(), masked.to_bits());
        [score, weighting, renorm, renorm_by, factor, groups, kept_groups, rank, masked, self.scales_input.into()]
    }
}
