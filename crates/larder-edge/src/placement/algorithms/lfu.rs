//! Placement by frequency: the experts that a server's users need most often.

use super::{Placement, fill_in_order};
use crate::placement::Problem;

/// Fills each server on its own with the experts that are needed most often by the users whose requests enter there.
pub(super) fn place(problem: &Problem) -> Placement {
    let mut placement = Placement::empty(problem);
    for server in 0..problem.servers.len() {
        let counts = frequencies(problem, server);
        let mut experts: Vec<usize> = (0..counts.len()).filter(|expert| counts[*expert] > 0.0).collect();
        experts.sort_by(|a, b| counts[*b].total_cmp(&counts[*a]).then(a.cmp(b)));
        fill_in_order(problem, server, experts.into_iter(), &mut placement);
    }
    placement
}

/// How often each expert is requested by the users of this server, or by all users if the server has none.
fn frequencies(problem: &Problem, server: usize) -> Vec<f64> {
    let count = |own: bool| {
        let mut counts = vec![0.0; problem.library.experts()];
        for request in problem.requests.all() {
            if !own || problem.sites[request.site as usize].associated == Some(server) {
                problem.requests.experts(request).iter().for_each(|expert| counts[*expert as usize] += request.weight);
            }
        }
        counts
    };
    let own = count(true);
    if own.iter().any(|counts| *counts > 0.0) { own } else { count(false) }
}
