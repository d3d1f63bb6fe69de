//! A layer's visit to the cache: what it wants, and what it finds.

use larder_core::{ExpertKey, MoeRow, WantedExpert};
use larder_policy::eviction::LayerChoice;

use crate::one_tier::Wave;

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
    pub(crate) fn clear(&mut self) {
        self.hits.clear();
        self.in_flight.clear();
        self.misses.clear();
        self.evicted.clear();
    }

    pub(crate) fn add(&mut self, wave: &Wave) {
        let kinds =
            [(&mut self.hits, &wave.hits), (&mut self.in_flight, &wave.in_flight), (&mut self.misses, &wave.misses)];
        for (all, new) in kinds {
            all.extend(new.iter().map(|(expert, _)| expert));
        }
        self.evicted.extend_from_slice(&wave.evicted);
    }
}

/// The wanted experts of the current visit; its buffers are kept from visit to visit.
#[derive(Default)]
pub struct ChosenExperts {
    wanted: Vec<usize>,
    tokens: Vec<usize>,
}

impl ChosenExperts {
    /// Replaces the experts.
    pub fn set(&mut self, wanted: &[WantedExpert]) {
        self.wanted.clear();
        self.wanted.extend(wanted.iter().map(|w| w.expert.index()));
        self.tokens.clear();
        self.tokens.extend(wanted.iter().map(|w| w.tokens));
    }

    /// The choice of a layer; `logits` are those of its one token or empty.
    pub fn choice<'a>(&'a self, row: MoeRow, logits: &'a [f32]) -> LayerChoice<'a> {
        LayerChoice { row, wanted: &self.wanted, tokens: &self.tokens, logits }
    }
}
