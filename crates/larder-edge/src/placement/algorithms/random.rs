//! Random placement.

use larder_core::Rng;

use super::{Placement, fill_in_order};
use crate::placement::Problem;

/// Fills each server with experts in random order.
pub(super) fn place(problem: &Problem, seed: u64) -> Placement {
    let mut rng = Rng::new(seed);
    let mut placement = Placement::empty(problem);
    for server in 0..problem.servers.len() {
        let mut experts: Vec<usize> = (0..problem.library.experts()).collect();
        rng.shuffle(&mut experts);
        fill_in_order(problem, server, experts.into_iter(), &mut placement);
    }
    placement
}
