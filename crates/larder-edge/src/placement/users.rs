//! Users, the sites where their requests enter, and the experts that their tokens need.

use std::sync::Arc;

use crate::placement::Library;
use crate::placement::machine_cost::NetworkLink;

/// Experts of one layer that a token needs together, and the share of tokens that need exactly these.
#[derive(Clone, PartialEq, Debug)]
pub struct ExpertGroup {
    /// Indices of the experts within their layer.
    pub experts: Vec<u16>,
    /// Probability of this group; sums to 1 over a layer's groups.
    pub share: f64,
}

/// A user's use of one model.
#[derive(Clone, Debug)]
pub struct Demand {
    /// Index of the model in the library.
    pub model: usize,
    /// The share of the user's tokens that go through it.
    pub share: f64,
    /// The groups of experts that tokens need, for each MoE row.
    pub rows: Arc<Vec<Vec<ExpertGroup>>>,
}

/// Expected number of times that a token with these demands needs each expert.
pub(crate) fn expert_frequencies(library: &Library, demands: &[Demand]) -> Vec<f64> {
    let mut frequencies = vec![0.0; library.experts()];
    for demand in demands {
        for (row, groups) in demand.rows.iter().enumerate() {
            let first = library.first_expert(demand.model, row);
            for group in groups {
                group.experts.iter().for_each(|e| frequencies[first + *e as usize] += demand.share * group.share);
            }
        }
    }
    frequencies
}

/// A user with a device that runs models.
#[derive(Clone, Debug)]
pub struct User {
    /// Index of the site where the device's requests enter.
    pub site: usize,
    /// The link between the device and the site.
    pub link: NetworkLink,
    /// Speed of the device in FLOP/s.
    pub compute: f64,
    /// Whether the device itself holds each expert of the library.
    pub local: Vec<bool>,
    /// The models that the user runs.
    pub demands: Vec<Demand>,
}

/// A point of the network where requests of devices enter.
#[derive(Clone, Debug)]
pub struct Site {
    /// The server at this site, asked before the others in `ServingMode::Relayed`.
    pub associated: Option<usize>,
    /// The link from here to each server.
    pub links: Vec<NetworkLink>,
    /// The link from here to the machine that holds all experts.
    pub cloud: NetworkLink,
}
