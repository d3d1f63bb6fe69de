//! Whole layers instead of experts: how split inference would place a model, and what a token takes then.

use super::Placement;
use crate::machine_cost::{NetworkLink, ServingMode};
use crate::{Demand, Problem, User};

/// Each server for itself: layers of the models that its own users want most, from the first layer on, as long as whole
/// ones fit.
pub(super) fn place(problem: &Problem) -> Placement {
    let mut placement = Placement::empty(problem);
    let models = problem.library.models();
    for (server, about) in problem.servers.iter().enumerate() {
        let wanted = wanted(problem, server);
        let mut order: Vec<usize> = (0..models.len()).filter(|m| wanted[*m] > 0.0).collect();
        order.sort_by(|a, b| wanted[*b].total_cmp(&wanted[*a]));
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

/// How much of each model is asked for by the users of a server; by all users, if it has none.
fn wanted(problem: &Problem, server: usize) -> Vec<f64> {
    let count = |own: bool| {
        let mut wanted = vec![0.0; problem.library.models().len()];
        let here = |user: &&User| !own || problem.sites[user.site].associated == Some(server);
        for demand in problem.users.iter().filter(here).flat_map(|user| &user.demands) {
            wanted[demand.model] += demand.share;
        }
        wanted
    };
    let own = count(true);
    match own.iter().any(|share| *share > 0.0) {
        true => own,
        false => count(false),
    }
}

/// What of a placement can be used if a token goes to the servers for all layers or for none: that of models which the
/// servers together hold whole.
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

/// Seconds for a token of the average user if a hidden state leaves the device once and not for each layer: what split
/// inference is built for. Devices hold as many whole layers as have the experts that they hold. A model whose other
/// layers are not all on servers is computed by the machine that holds all.
pub fn split_inference_seconds(problem: &Problem, placement: &Placement) -> f64 {
    let of_user = |user: &User| -> f64 {
        let demands = user.demands.iter().zip(layers_held(problem, user));
        demands.map(|(demand, held)| demand.share * of_model(problem, placement, user, demand, held)).sum()
    };
    problem.users.iter().map(of_user).sum::<f64>() / problem.users.len().max(1) as f64
}

/// Layers of each demand that the device holds, the most wanted models first.
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
    // What is computed one after the other counts as often as it is chosen.
    let chosen = match problem.serving {
        ServingMode::Relayed => 1.0,
        ServingMode::Direct | ServingMode::DirectSeparate => model.top_k as f64,
    };
    let compute = |flops| chosen * problem.serving.compute(model, flops);
    let own = held as f64 * compute(user.compute);
    if away == 0 {
        return own;
    }
    let there_and_back =
        |link: &NetworkLink| link.send_seconds(model.state_bits) + link.return_seconds(model.state_bits);
    let server_of = |row: usize| {
        let first = problem.library.first_expert(demand.model, row);
        let all = (first..first + model.experts).map(|e| placement.holders(e)).fold(u32::MAX, |a, b| a & b);
        (all != 0).then(|| all.trailing_zeros() as usize)
    };
    let servers: Option<Vec<usize>> = (held..model.rows).map(server_of).collect();
    let beyond = match servers {
        Some(servers) => {
            let farthest = servers.iter().map(|n| there_and_back(&site.links[*n])).fold(0.0, f64::max);
            farthest + servers.iter().map(|n| compute(problem.servers[*n].compute)).sum::<f64>()
        }
        None => there_and_back(&site.cloud) + away as f64 * compute(problem.cloud_compute),
    };
    own + there_and_back(&user.link) + beyond
}
