//! The placement problem: models, servers, sites and users.

use crate::placement::machine_cost::{MAX_EXPERTS_PER_TOKEN, MAX_SERVERS, MachineCost, MachineCosts, ServingMode};
use crate::placement::remote_requests::RemoteRequests;
use crate::placement::users::{Site, User};
use crate::placement::{Library, PlacementError};

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
