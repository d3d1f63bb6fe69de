//! A router whose choice is overridden from outside, to try single experts.

use std::sync::Arc;

use larder_core::{ExpertKey, Gate, Residency};
use larder_policy::routing::{ExpertChoice, Ranking, Router, RouterInput, RouterReport};
use larder_policy::spec::PolicyError;
use parking_lot::Mutex;

/// The replacement of the expert at one rank of one layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExpertSwap {
    /// The rank to replace, 1 being the best.
    pub rank: usize,
    /// The expert of that layer to choose instead, which must not be chosen at another rank.
    pub expert: ExpertKey,
}

/// A shared handle that controls a [`ForcedRouter`].
#[derive(Clone, Default)]
pub struct SwapHandle(Arc<Mutex<Option<ExpertSwap>>>);

impl SwapHandle {
    /// Sets the swap for the next choices; `None` restores the model's own.
    pub fn set(&self, swap: Option<ExpertSwap>) {
        *self.0.lock() = swap;
    }

    fn get(&self) -> Option<ExpertSwap> {
        *self.0.lock()
    }
}

/// A router that makes the model's own choice but for the swap that its handle sets.
pub struct ForcedRouter {
    swaps: SwapHandle,
    ranking: Ranking,
}

impl ForcedRouter {
    /// A router that is controlled by the given handle.
    pub fn new(swaps: &SwapHandle) -> Self {
        ForcedRouter { swaps: swaps.clone(), ranking: Ranking::default() }
    }
}

impl Router for ForcedRouter {
    fn supports(&self, _: &Gate) -> Result<(), PolicyError> {
        Ok(())
    }

    fn choose(&mut self, ask: &RouterInput, _: &dyn Residency, out: &mut ExpertChoice) {
        let ranking = &mut self.ranking;
        ranking.rank(ask.gate, ask.logits);
        let swap = self.swaps.get().filter(|swap| swap.expert.row == ask.row);
        for rank in 0..ask.gate.top_k {
            match swap {
                Some(swap) if swap.rank == rank + 1 => ranking.mark(swap.expert.expert.index()),
                _ => ranking.mark(ranking.at(rank)),
            }
        }
        ranking.marked(&mut out.experts);
        out.weigh(ask.gate, ask.logits);
    }

    fn report(&self) -> RouterReport {
        RouterReport::default()
    }
}
