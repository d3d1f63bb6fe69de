//! A layer's visit to the cache: what it wants, and what it finds.

use larder_core::{ExpertKey, MoeRow, WantedExpert};
use larder_policy::eviction::LayerChoice;

use crate::one_tier::SlotAssignment;

/// The result of a visit; experts are in the order wanted.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Visit {
    /// Experts that were resident.
    pub hits: Vec<usize>,
    /// Experts that were in flight: prefetched and still being read, or being copied.
    pub in_flight: Vec<usize>,
    /// Experts that had to be read.
    pub misses: Vec<usize>,
    /// Experts of any layer that were evicted.
    pub evicted: Vec<ExpertKey>,
}

impl Visit {
    /// Sets it to what an assignment says, and keeps its allocations.
    pub(crate) fn set(&mut self, assignment: &SlotAssignment) {
        self.clear();
        self.hits.extend(assignment.hits.iter().map(|(expert, _)| expert));
        self.in_flight.extend(assignment.in_flight.iter().map(|(expert, _)| expert));
        self.misses.extend(assignment.misses.iter().map(|(expert, _)| expert));
        self.evicted.extend_from_slice(&assignment.evicted);
    }

    pub(crate) fn clear(&mut self) {
        self.hits.clear();
        self.in_flight.clear();
        self.misses.clear();
        self.evicted.clear();
    }
}

/// The wanted experts of the current visit; its buffers are kept from visit to visit.
#[derive(Default)]
pub struct ChosenExperts {
    wanted: Vec<usize>,
    tokens: Vec<usize>,
    /// For each expert of the layer, its entry in `tokens`; of use for the wanted ones only.
    tokens_by_expert: Vec<usize>,
}

impl ChosenExperts {
    /// Replaces the experts.
    pub fn set(&mut self, wanted: &[WantedExpert]) {
        self.wanted.clear();
        self.wanted.extend(wanted.iter().map(|w| w.expert.index()));
        self.tokens.clear();
        self.tokens.extend(wanted.iter().map(|w| w.tokens));
        let experts = self.wanted.iter().max().map_or(0, |last| last + 1);
        self.tokens_by_expert.resize(self.tokens_by_expert.len().max(experts), 0);
        wanted.iter().for_each(|w| self.tokens_by_expert[w.expert.index()] = w.tokens);
    }

    /// The number of tokens that chose a wanted expert.
    pub fn tokens_of(&self, expert: usize) -> usize {
        self.tokens_by_expert[expert]
    }

    /// Rows of inputs of all wanted experts together.
    pub fn rows(&self) -> usize {
        self.tokens.iter().sum()
    }

    /// The choice of a layer; `logits` are those of its one token or empty.
    pub fn choice<'a>(&'a self, row: MoeRow, logits: &'a [f32]) -> LayerChoice<'a> {
        LayerChoice { row, wanted: &self.wanted, tokens: &self.tokens, logits }
    }
}
