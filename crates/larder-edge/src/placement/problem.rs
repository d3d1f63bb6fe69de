//! The placement problem: models, servers, sites and users.

use std::sync::Arc;

use crate::placement::machine_cost::{
    MAX_EXPERTS_PER_TOKEN, MAX_SERVERS, MachineCost, MachineCosts, NetworkLink, ServingMode,
};
use crate::placement::remote_requests::RemoteRequests;
use crate::placement::{Library, PlacementError};

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
    /// The server at this site, asked before the others in [`ServingMode::Relayed`].
    pub associated: Option<usize>,
    /// The link from here to each server.
    pub links: Vec<NetworkLink>,
    /// The link from here to the machine that holds all experts.
    pub cloud: NetworkLink,
}

/// A machine that can hold some experts.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Server {
    /// Bytes available for experts.
    pub storage: u64,
    /// Speed in FLOP/s.
    pub compute: f64,
}

/// The input of a placement algorithm.
#[derive(Clone, Debug)]
pub struct Problem {
    /// The models whose experts are placed.
    pub library: Library,
    /// The machines whose storage the algorithm fills.
    pub servers: Vec<Server>,
    /// Speed of the machine that holds all experts, in FLOP/s.
    pub cloud_compute: f64,
    /// The points where requests enter.
    pub sites: Vec<Site>,
    /// The users, weighted equally.
    pub users: Vec<User>,
    /// How requests travel and how a machine computes several experts.
    pub serving: ServingMode,
    pub(crate) requests: RemoteRequests,
}

impl Problem {
    /// Checks the limits and sums the requests of users at the same site.
    pub fn new(
        library: Library,
        servers: Vec<Server>,
        cloud_compute: f64,
        sites: Vec<Site>,
        users: Vec<User>,
        serving: ServingMode,
    ) -> Result<Self, PlacementError> {
        let invalid = |reason: String| Err(PlacementError::Invalid(reason));
        if servers.len() > MAX_SERVERS {
            return invalid(format!(
                "the topology has {} servers to place experts on; at most {MAX_SERVERS} are supported",
                servers.len()
            ));
        }
        if let Some(model) = library.models().iter().find(|m| m.top_k > MAX_EXPERTS_PER_TOKEN) {
            let (name, k) = (&model.name, model.top_k);
            return invalid(format!(
                "{name} uses {k} experts per layer and token; at most {MAX_EXPERTS_PER_TOKEN} are supported"
            ));
        }
        if u32::try_from(library.experts()).is_err() {
            return invalid("the models have more than 4294967295 experts in all".into());
        }
        let requests = RemoteRequests::new(&library, &sites, &users);
        Ok(Problem { library, servers, cloud_compute, sites, users, serving, requests })
    }

    /// The costs of the machines for each site and model: `[sites, models]`.
    pub(crate) fn costs(&self) -> Vec<MachineCosts> {
        let cost = |site: &Site, model| {
            let servers = self.servers.iter().zip(&site.links);
            let servers =
                servers.map(|(server, link)| MachineCost::new(self.serving, model, link, server.compute)).collect();
            MachineCosts::new(
                self.serving,
                site.associated,
                servers,
                MachineCost::new(self.serving, model, &site.cloud, self.cloud_compute),
            )
        };
        self.sites.iter().flat_map(|site| self.library.models().iter().map(move |model| cost(site, model))).collect()
    }

    /// Number of layers with experts that a token passes, on average over users and models.
    pub fn layers_per_token(&self) -> f64 {
        let layers = |user: &User| -> f64 {
            user.demands.iter().map(|d| d.share * self.library.models()[d.model].rows as f64).sum()
        };
        self.users.iter().map(layers).sum::<f64>() / self.users.len().max(1) as f64
    }
}
