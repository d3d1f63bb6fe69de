//! Whole layers instead of experts: the placement of split inference, and its latency per token.

use super::Placement;
use crate::placement::machine_cost::{NetworkLink, ServingMode};
use crate::placement::{Demand, Problem, User};

/// Fills each server on its own with layers of the models that its users run most, from the first layer on, as many
/// whole layers as fit.
pub(super) fn place(problem: &Problem) -> Placement {
    let mut placement = Placement::empty(problem);
    let models = problem.library.models();
    for (server, about) in problem.servers.iter().enumerate() {
        let shares = model_shares(problem, server);
        let mut order: Vec<usize> = (0..models.len()).filter(|m| shares[*m] > 0.0).collect();
        order.sort_by(|a, b| shares[*b].total_cmp(&shares[*a]));
        let mut free_bytes = about.storage;
        for m in order {
            let bytes = models[m].expert_bytes * models[m].experts as u64;
            for row in 0..models[m].rows.min((free_bytes / bytes) as usize) {
                let first = problem.library.first_expert(m, row);
                (first..first + models[m].experts).for_each(|expert| placement.put(server, expert));
                free_bytes -= bytes;
            }
        }
    }
    placement
}

/// The share of tokens that each model has among the users of a server, or among all users if the server has none.
fn model_shares(problem: &Problem, server: usize) -> Vec<f64> {
    let count = |own: bool| {
        let mut shares = vec![0.0; problem.library.models().len()];
        let here = |user: &&User| !own || problem.sites[user.site].associated == Some(server);
        for demand in problem.users.iter().filter(here).flat_map(|user| &user.demands) {
            shares[demand.model] += demand.share;
        }
        shares
    };
    let own = count(true);
    if own.iter().any(|share| *share > 0.0) { own } else { count(false) }
}

/// The part of a placement that is usable if a token goes to the servers for all layers or for none: the models that
/// the servers together hold completely.
pub fn usable(problem: &Problem, placement: &Placement) -> Placement {
    let library = &problem.library;
    let mut usable = Placement::empty(problem);
    for (m, model) in library.models().iter().enumerate() {
        let experts = library.first_expert(m, 0)..library.first_expert(m, model.rows);
        if experts.clone().all(|expert| placement.holders(expert) != 0) {
            experts.for_each(|expert| usable.holders[expert] = placement.holders[expert]);
        }
    }
    usable
}

/// Seconds per token of the average user with split inference, where a hidden state leaves the device once and not for
/// each layer. A device holds as many whole layers as its number of experts makes up. The other layers of a model are
/// computed by the machine that holds all experts if they are not all on servers.
pub fn split_inference_seconds(problem: &Problem, placement: &Placement) -> f64 {
    let of_user = |user: &User| -> f64 {
        let demands = user.demands.iter().zip(layers_held(problem, user));
        demands.map(|(demand, held)| demand.share * of_model(problem, placement, user, demand, held)).sum()
    };
    problem.users.iter().map(of_user).sum::<f64>() / problem.users.len().max(1) as f64
}

/// Number of layers that the device holds for each demand; the models with the largest shares come first.
fn layers_held(problem: &Problem, user: &User) -> Vec<usize> {
    let mut free_bytes = user.local.iter().filter(|held| **held).count();
    let mut order: Vec<usize> = (0..user.demands.len()).collect();
    order.sort_by(|a, b| user.demands[*b].share.total_cmp(&user.demands[*a].share));
    let mut held = vec![0; order.len()];
    for at in order {
        let model = &problem.library.models()[user.demands[at].model];
        held[at] = (free_bytes / model.experts).min(model.rows);
        free_bytes -= held[at] * model.experts;
    }
    held
}

fn of_model(problem: &Problem, placement: &Placement, user: &User, demand: &Demand, held: usize) -> f64 {
    let model = &problem.library.models()[demand.model];
    let (site, away) = (&problem.sites[user.site], model.rows - held);
    // In direct mode a layer's experts are computed one after the other.
    let sequential = match problem.serving {
        ServingMode::Relayed => 1.0,
        ServingMode::Direct | ServingMode::DirectSeparate => model.top_k as f64,
    };
    let compute = |flops| sequential * problem.serving.compute(model, flops);
    let own = held as f64 * compute(user.compute);
    if away == 0 {
        return own;
    }
    let round_trip = |link: &NetworkLink| link.send_seconds(model.state_bits) + link.return_seconds(model.state_bits);
    let server_of = |row: usize| {
        let first = problem.library.first_expert(demand.model, row);
        let all = (first..first + model.experts).map(|e| placement.holders(e)).fold(u32::MAX, |a, b| a & b);
        (all != 0).then(|| all.trailing_zeros() as usize)
    };
    let servers: Option<Vec<usize>> = (held..model.rows).map(server_of).collect();
    let beyond = match servers {
        Some(servers) => {
            let farthest = servers.iter().map(|n| round_trip(&site.links[*n])).fold(0.0, f64::max);
            farthest + servers.iter().map(|n| compute(problem.servers[*n].compute)).sum::<f64>()
        }
        None => round_trip(&site.cloud) + away as f64 * compute(problem.cloud_compute),
    };
    own + round_trip(&user.link) + beyond
}
