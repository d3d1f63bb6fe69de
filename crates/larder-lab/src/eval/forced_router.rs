use std::sync::{Arc, Mutex, PoisonError};

use larder_core::{ExpertId, Gate, Residency};
use larder_policy::routing::{Ranking, Router, RouterInput, RouterReport};
use larder_policy::spec::PolicyError;

/// In one layer, one expert instead of the one at a rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExpertSwap {
    /// The layer, among those with experts.
    pub row: usize,
    /// The rank that is replaced, the best being of rank 1.
    pub rank: usize,
    /// Who is chosen instead, not one of the others.
    pub expert: usize,
}

/// Whoever holds it says what a [`ForcedRouter`] router chooses.
#[derive(Clone, Default)]
pub struct SwapHandle(Arc<Mutex<Option<ExpertSwap>>>);

impl SwapHandle {
    /// From now on; `None` leaves every choice to the model.
    pub fn set(&self, swap: Option<ExpertSwap>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = swap;
    }

    fn get(&self) -> Option<ExpertSwap> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A router that chooses as the model does but for one expert, as it is told.
pub struct ForcedRouter {
    order: SwapHandle,
    ranking: Ranking,
}

impl ForcedRouter {
    /// Does what `order` says.
    pub fn new(order: &SwapHandle) -> Self {
        ForcedRouter { order: order.clone(), ranking: Ranking::default() }
    }
}

impl Router for ForcedRouter {
    fn supports(&self, _: &Gate) -> Result<(), PolicyError> {
        Ok(())
    }

    fn choose(&mut self, ask: &RouterInput, _: &dyn Residency, out: &mut Vec<ExpertId>) {
        let ranking = &mut self.ranking;
        ranking.rank(ask.gate, ask.logits);
        let swap = self.order.get().filter(|swap| swap.row == ask.row);
        for rank in 0..ask.gate.top_k {
            match swap {
                Some(swap) if swap.rank == rank + 1 => ranking.mark(swap.expert),
                _ => ranking.mark(ranking.at(rank)),
            }
        }
        ranking.marked(out);
    }

    fn report(&self) -> RouterReport {
        RouterReport::default()
    }
}
