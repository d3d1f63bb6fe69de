//! One server after the other, each as a knapsack whose items have independent values: problems P2 and P3 of the paper.

use super::Placement;
use crate::placement::Problem;
use crate::placement::gains::GainEvaluator;

/// An expert that could be placed.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Item {
    pub bytes: u64,
    /// Seconds per token that it saves; above 0.
    pub value: f64,
}

/// Chooses the items that fit into a number of bytes and have the greatest total value; returns their indices,
/// ascending.
pub(super) type KnapsackSolver = dyn Fn(&[Item], u64) -> Vec<usize>;

/// Fills the servers in their order, each given the experts of those before it.
pub(super) fn place(problem: &Problem, solve: &KnapsackSolver) -> Placement {
    let gains = GainEvaluator::new(problem);
    let mut placement = Placement::empty(problem);
    for (server, about) in problem.servers.iter().enumerate() {
        let (experts, items): (Vec<usize>, Vec<Item>) = items(problem, &gains, server, &placement).unzip();
        for chosen in solve(&items, about.storage) {
            placement.put(server, experts[chosen]);
        }
    }
    placement
}

/// The experts that save time on a server that is still empty, with the value of each alone.
pub(super) fn items<'a>(
    problem: &'a Problem,
    gains: &'a GainEvaluator,
    server: usize,
    placement: &'a Placement,
) -> impl Iterator<Item = (usize, Item)> + 'a {
    let item = move |expert| {
        let value = gains.gain(server, expert, placement);
        (expert, Item { bytes: problem.library.bytes(expert), value })
    };
    (0..problem.library.experts()).map(item).filter(|(_, item)| item.value > 0.0)
}
