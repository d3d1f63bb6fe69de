//! One server after the other, each as if its experts did not help each other: problems P2 and P3 of the paper.

use super::Placement;
use crate::Problem;
use crate::remote_requests::GainEvaluator;

/// An expert that could be placed.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Item {
    pub bytes: u64,
    /// What it saves; above 0.
    pub value: f64,
}

/// Chooses items that fit into so many bytes and together have the greatest value, ascending.
pub(super) type KnapsackSolver = dyn Fn(&[Item], u64) -> Vec<usize>;

/// Fills the servers in their order, each beside what the ones before it hold.
pub(super) fn place(problem: &Problem, solve: &KnapsackSolver) -> Placement {
    let worth = GainEvaluator::new(problem);
    let mut placement = Placement::empty(problem);
    for (server, about) in problem.servers.iter().enumerate() {
        let (experts, items): (Vec<usize>, Vec<Item>) = items(problem, &worth, server, &placement).unzip();
        for chosen in solve(&items, about.storage) {
            placement.put(server, experts[chosen]);
        }
    }
    placement
}

/// What each expert alone would be worth at a server that is still empty.
pub(super) fn items<'a>(
    problem: &'a Problem,
    worth: &'a GainEvaluator,
    server: usize,
    placement: &'a Placement,
) -> impl Iterator<Item = (usize, Item)> + 'a {
    let item = move |expert| {
        let value = worth.gain(server, expert, placement);
        (expert, Item { bytes: problem.library.bytes(expert), value })
    };
    (0..problem.library.experts()).map(item).filter(|(_, item)| item.value > 0.0)
}
