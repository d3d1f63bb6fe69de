use std::sync::Arc;

use crate::machine_cost::{MAX_EXPERTS_PER_TOKEN, MAX_SERVERS, MachineCost, MachineCosts, NetworkLink, ServingMode};
use crate::remote_requests::RemoteRequests;
use crate::{Library, PlacementError};

/// Experts of one layer that a token asks for together, and the share of tokens that do.
#[derive(Clone, PartialEq, Debug)]
pub struct ExpertGroup {
    /// The experts, counted within their layer.
    pub experts: Vec<u16>,
    /// How likely they are; over all of a layer this sums to 1.
    pub share: f64,
}

/// What a user asks of one model.
#[derive(Clone, Debug)]
pub struct Demand {
    /// The model.
    pub model: usize,
    /// The share of the user's tokens that go through it.
    pub share: f64,
    /// What is asked for in each of its layers.
    pub rows: Arc<Vec<Vec<ExpertGroup>>>,
}

/// How many of each expert a token asks for, on average over these demands.
pub(crate) fn expert_frequencies(library: &Library, demands: &[Demand]) -> Vec<f64> {
    let mut asked = vec![0.0; library.experts()];
    for demand in demands {
        for (row, likely) in demand.rows.iter().enumerate() {
            let first = library.first_expert(demand.model, row);
            for likely in likely {
                likely.experts.iter().for_each(|e| asked[first + *e as usize] += demand.share * likely.share);
            }
        }
    }
    asked
}

/// Somebody whose device asks.
#[derive(Clone, Debug)]
pub struct User {
    /// Where the requests enter.
    pub site: usize,
    /// The way between the device and there.
    pub link: NetworkLink,
    /// FLOP/s of the device.
    pub compute: f64,
    /// The experts that the device holds itself.
    pub local: Vec<bool>,
    /// What is asked for.
    pub demands: Vec<Demand>,
}

/// A place where requests enter.
#[derive(Clone, Debug)]
pub struct Site {
    /// The server that is asked before the others.
    pub associated: Option<usize>,
    /// The way from here to each server.
    pub links: Vec<NetworkLink>,
    /// The way from here to the machine that holds all.
    pub cloud: NetworkLink,
}

/// A machine that has room for some experts.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Server {
    /// Bytes of experts that fit.
    pub storage: u64,
    /// FLOP/s.
    pub compute: f64,
}

/// Everything that a placement depends on.
#[derive(Clone, Debug)]
pub struct Problem {
    /// The models.
    pub library: Library,
    /// The machines whose storage is to be filled.
    pub servers: Vec<Server>,
    /// FLOP/s of the machine that holds all.
    pub cloud_compute: f64,
    /// Where requests enter.
    pub sites: Vec<Site>,
    /// Who asks.
    pub users: Vec<User>,
    /// How servers serve.
    pub serving: ServingMode,
    pub(crate) requests: RemoteRequests,
}

impl Problem {
    /// Puts the parts together. Users whose requests enter at the same place are told apart no more.
    pub fn new(
        library: Library,
        servers: Vec<Server>,
        cloud_compute: f64,
        sites: Vec<Site>,
        users: Vec<User>,
        serving: ServingMode,
    ) -> Result<Self, PlacementError> {
        let impossible = |why: String| Err(PlacementError::Invalid(why));
        if servers.len() > MAX_SERVERS {
            return impossible(format!(
                "{} servers are more than the {MAX_SERVERS} that can be planned",
                servers.len()
            ));
        }
        if let Some(model) = library.models().iter().find(|m| m.top_k > MAX_EXPERTS_PER_TOKEN) {
            let (name, k) = (&model.name, model.top_k);
            return impossible(format!(
                "{name} asks for {k} experts a layer, and up to {MAX_EXPERTS_PER_TOKEN} can be planned"
            ));
        }
        if u32::try_from(library.experts()).is_err() {
            return impossible("there are more experts than are counted".into());
        }
        let requests = RemoteRequests::new(&library, &sites, &users);
        Ok(Problem { library, servers, cloud_compute, sites, users, serving, requests })
    }

    /// What the machines cost for each place and model: `[sites, models]`.
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

    /// Layers with experts that a token goes through, on average over users and models.
    pub fn layers_per_token(&self) -> f64 {
        let layers = |user: &User| -> f64 {
            user.demands.iter().map(|d| d.share * self.library.models()[d.model].rows as f64).sum()
        };
        self.users.iter().map(layers).sum::<f64>() / self.users.len().max(1) as f64
    }
}
