use super::{Placement, fill_in_order};
use crate::Problem;

/// Each server for itself: what the users ask for most often whose requests enter there.
pub(super) fn place(problem: &Problem) -> Placement {
    let mut placement = Placement::empty(problem);
    for server in 0..problem.servers.len() {
        let asked = frequencies(problem, server);
        let mut experts: Vec<usize> = (0..asked.len()).filter(|expert| asked[*expert] > 0.0).collect();
        experts.sort_by(|a, b| asked[*b].total_cmp(&asked[*a]).then(a.cmp(b)));
        fill_in_order(problem, server, experts.into_iter(), &mut placement);
    }
    placement
}

/// How often each expert is asked for; by all users, if none is associated with this server.
fn frequencies(problem: &Problem, server: usize) -> Vec<f64> {
    let count = |own: bool| {
        let mut asked = vec![0.0; problem.library.experts()];
        for request in problem.requests.all() {
            if !own || problem.sites[request.site as usize].associated == Some(server) {
                problem.requests.experts(request).iter().for_each(|expert| asked[*expert as usize] += request.weight);
            }
        }
        asked
    };
    let own = count(true);
    match own.iter().any(|asked| *asked > 0.0) {
        true => own,
        false => count(false),
    }
}
