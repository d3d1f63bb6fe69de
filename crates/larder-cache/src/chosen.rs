//! The experts that a layer has chosen, as eviction policies see them.

use larder_core::WantedExpert;
use larder_policy::eviction::LayerChoice;

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
    pub fn choice<'a>(&'a self, row: usize, logits: &'a [f32]) -> LayerChoice<'a> {
        LayerChoice { row, wanted: &self.wanted, tokens: &self.tokens, logits }
    }
}
