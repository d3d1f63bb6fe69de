//! The strategy `original`: the model's own choice.

use super::{Ranking, RouterInput, Selector, Strategy};

pub(super) const STRATEGY: Strategy =
    Strategy { name: "original", about: "the model's own choice", knobs: &[], make: |_, _| Ok(Box::new(Original)) };

struct Original;

impl Selector for Original {
    fn select(&mut self, input: &RouterInput, ranking: &mut Ranking, _: &dyn Fn(usize) -> bool) {
        ranking.mark_first(input.gate.top_k);
    }
}
