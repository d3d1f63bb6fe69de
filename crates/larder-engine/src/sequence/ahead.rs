//! Async steps of a sequence: the one that is begun, how many there were, and how good their draws are.

use larder_model::{BegunStep, BestLogits};

/// A step with another token takes as long as any: async steps go on while at most one in eight is such.
const SELDOM: usize = 8;
/// Wrong draws that are too few to tell.
const FEW: usize = 8;
/// Draws after which those before count half.
const MANY: usize = 64;

/// The device's draws of a text that were compared with the host's.
#[derive(Clone, Copy, Default)]
pub(super) struct ComparedDraws {
    all: usize,
    wrong: usize,
}

impl ComparedDraws {
    pub fn add(&mut self, is_wrong: bool) {
        if self.all >= MANY {
            *self = ComparedDraws { all: self.all / 2, wrong: self.wrong / 2 };
        }
        self.all += 1;
        self.wrong += usize::from(is_wrong);
    }

    /// Whether the device mostly draws what the host draws.
    pub fn are_good(&self) -> bool {
        self.wrong < FEW || SELDOM * self.wrong < self.all
    }
}

/// A step behind all tokens of a sequence. Its rows are in the KV cache behind those that count.
pub(super) struct AheadStep {
    pub step: BegunStep,
    /// The logits that the choice behind the token reads; `None` for all.
    pub best: Option<BestLogits>,
    /// The token, as the device has drawn it.
    pub token: u32,
}

/// How many steps were begun before their token was known, and how many of these were dropped: the text has another
/// token, went back or ended, or the memory of the sequence was given back.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct AheadCounts {
    /// Steps begun.
    pub steps: usize,
    /// Steps dropped.
    pub dropped: usize,
}

larder_core::fieldwise!(AheadCounts { steps, dropped });
