//! From a topology and routing statistics to a placement.

use std::collections::BTreeMap;
use std::sync::Arc;

use larder_core::{Coactivation, ExpertActivations, Geometry};

use crate::placement::users::expert_frequencies;
use crate::placement::{
    Algorithm, Demand, ExpertGroup, ExpertLists, Latency, Library, ModelProfile, NetworkLink, Placement,
    PlacementError, PlacementFile, Problem, Server, ServerEntry, ServingMode, Site, Topology, User, latency,
};

/// Number format of hidden states on the network.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WireFormat {
    /// 32-bit floats.
    F32,
    /// 16-bit brain floats.
    Bf16,
}

impl WireFormat {
    /// Bits per number.
    pub fn bits(self) -> f64 {
        match self {
            WireFormat::F32 => 32.0,
            WireFormat::Bf16 => 16.0,
        }
    }
}

/// A model that the device runs, and how much.
#[derive(Clone, Copy, Debug)]
pub struct ModelUsage<'a> {
    /// Routing statistics of the model.
    pub activations: &'a ExpertActivations,
    /// Its part of all tokens, relative to the shares of the other models.
    pub share: f64,
}

/// A computed placement with its expected latency.
#[derive(Clone, Debug)]
pub struct PlacementPlan {
    /// The problem that was solved.
    pub problem: Problem,
    /// Names of the problem's servers.
    pub servers: Vec<String>,
    /// Name of the machine that holds all experts.
    pub cloud: String,
    /// Name of the server that the device is attached to.
    pub associated: String,
    /// The experts of each server.
    pub placement: Placement,
    /// The name of the algorithm whose placement it is: one of several if the best of them was wanted.
    pub placed_by: &'static str,
    /// The placement as a file, with the device's experts.
    pub file: PlacementFile,
    /// Expected latency of a token.
    pub latency: Latency,
    /// Expected latency of a token if the servers held no experts.
    pub baseline: Latency,
}

/// Computes which experts of these models the device and the servers hold.
pub fn plan(
    topology: &Topology,
    models: &[ModelUsage],
    serving: ServingMode,
    wire: WireFormat,
    algorithm: &Algorithm,
    seed: u64,
) -> Result<PlacementPlan, PlacementError> {
    let machines = ResolvedTopology::of(topology)?;
    let library = Library::new(models.iter().map(|a| model(a.activations, wire)).collect());
    let demands = demands(models)?;
    let local = most_requested(&library, &demands, machines.storage);
    let site = machines.site(serving);
    let link = match serving {
        ServingMode::Relayed => machines.link(machines.associated),
        ServingMode::Direct | ServingMode::DirectSeparate => NetworkLink::default(),
    };
    let user = User { site: 0, link, compute: machines.compute, local, demands };
    let cloud_compute = machines.flops[machines.cloud];
    let problem = Problem::new(library, machines.servers(), cloud_compute, vec![site], vec![user], serving)?;
    let (placed_by, placement) = match serving {
        ServingMode::Direct => {
            let separate = Problem { serving: ServingMode::DirectSeparate, ..problem.clone() };
            algorithm.place_for(&separate, &problem, seed)
        }
        ServingMode::Relayed | ServingMode::DirectSeparate => algorithm.place_for(&problem, &problem, seed),
    };
    let file = file(&problem, &placement, &machines, models);
    Ok(PlacementPlan {
        latency: latency(&problem, &placement),
        baseline: latency(&problem, &Placement::empty(&problem)),
        servers: machines.placed.iter().map(|n| topology.servers[*n].name.clone()).collect(),
        cloud: topology.servers[machines.cloud].name.clone(),
        associated: topology.servers[machines.associated].name.clone(),
        problem,
        placement,
        placed_by,
        file,
    })
}

/// The values of a topology that planning needs, checked to be present.
struct ResolvedTopology<'a> {
    entries: &'a [ServerEntry],
    /// Indices of the entries whose storage the algorithm fills.
    placed: Vec<usize>,
    cloud: usize,
    associated: usize,
    storage: u64,
    compute: f64,
    /// Speed of each entry in FLOP/s.
    flops: Vec<f64>,
    links: Vec<NetworkLink>,
}

impl<'a> ResolvedTopology<'a> {
    fn of(topology: &'a Topology) -> Result<Self, PlacementError> {
        let missing =
            |owner: &str, what: &str| PlacementError::Topology(format!("the topology lacks the {what} of {owner}"));
        let entries = &topology.servers;
        let mut flops = Vec::new();
        let mut links = Vec::new();
        for entry in entries {
            let owner = format!("'{}'", entry.name);
            let number = |value: Option<f64>, what| value.ok_or_else(|| missing(&owner, what));
            flops.push(number(entry.compute, "compute")?);
            links.push(NetworkLink {
                delay: entry.delay / 2.0,
                per_bit: 1.0 / number(entry.uplink, "uplink")?,
                return_delay: entry.delay / 2.0,
                return_per_bit: 1.0 / number(entry.downlink, "downlink")?,
            });
            if !entry.all && entry.storage.is_none() {
                return Err(missing(&owner, "storage"));
            }
        }
        // Links are compared by the round trip of 65536 bits, a hidden state of a few thousand numbers.
        let round_trip = |n: &usize| links[*n].send_seconds(65536.0) + links[*n].return_seconds(65536.0);
        let nearest = |all: &mut dyn Iterator<Item = usize>| all.min_by(|a, b| round_trip(a).total_cmp(&round_trip(b)));
        let cloud = nearest(&mut (0..entries.len()).filter(|n| entries[*n].all)).ok_or_else(|| {
            let reason = "no server of the topology holds all experts; set `all = true` for the one that does";
            PlacementError::Topology(reason.into())
        })?;
        let marked = entries.iter().position(|entry| entry.associated);
        let associated = marked.or_else(|| nearest(&mut (0..entries.len()))).unwrap_or(cloud);
        Ok(ResolvedTopology {
            entries,
            placed: (0..entries.len()).filter(|n| !entries[*n].all).collect(),
            cloud,
            associated,
            storage: topology.device.storage.ok_or_else(|| missing("the device", "storage"))?,
            compute: topology.device.compute.ok_or_else(|| missing("the device", "compute"))?,
            flops,
            links,
        })
    }

    fn link(&self, entry: usize) -> NetworkLink {
        self.links[entry]
    }

    /// The link from the site to a machine. In relayed mode the site is the associated server itself.
    fn link_from_site(&self, entry: usize, serving: ServingMode) -> NetworkLink {
        if serving == ServingMode::Relayed && entry == self.associated {
            NetworkLink::default()
        } else {
            self.link(entry)
        }
    }

    fn site(&self, serving: ServingMode) -> Site {
        Site {
            associated: self.placed.iter().position(|n| *n == self.associated),
            links: self.placed.iter().map(|n| self.link_from_site(*n, serving)).collect(),
            cloud: self.link_from_site(self.cloud, serving),
        }
    }

    fn servers(&self) -> Vec<Server> {
        let server = |n: &usize| Server { storage: self.entries[*n].storage.unwrap_or(0), compute: self.flops[*n] };
        self.placed.iter().map(server).collect()
    }
}

fn model(activations: &ExpertActivations, wire: WireFormat) -> ModelProfile {
    let Geometry { moe_layers, experts, top_k, hidden, inter, .. } = &activations.geometry;
    ModelProfile {
        name: activations.model.clone(),
        rows: moe_layers.len(),
        experts: *experts,
        top_k: *top_k,
        expert_bytes: activations.expert_bytes,
        state_bits: *hidden as f64 * wire.bits(),
        // Gate, up and down, each a multiplication and an addition for every weight.
        expert_flops: 6.0 * *hidden as f64 * *inter as f64,
    }
}

fn demands(models: &[ModelUsage]) -> Result<Vec<Demand>, PlacementError> {
    let invalid = |reason: String| Err(PlacementError::Invalid(reason));
    let sum: f64 = models.iter().map(|a| a.share).sum();
    if models.is_empty() || models.iter().any(|a| a.share < 0.0) || !(sum > 0.0 && sum.is_finite()) {
        return invalid("the shares of the models must be 0 or more, and at least one above 0".into());
    }
    for (at, one) in models.iter().enumerate() {
        let name = &one.activations.model;
        if models[..at].iter().any(|other| other.activations.model == *name) {
            return invalid(format!(
                "two statistics files are for the model '{name}'; make one file from all of its traces"
            ));
        }
    }
    let demand = |(model, usage): (usize, &ModelUsage)| {
        let tokens = usage.activations.tokens as f64;
        let group = |Coactivation(experts, count): &Coactivation| ExpertGroup {
            experts: experts.clone(),
            share: *count as f64 / tokens,
        };
        let rows = usage.activations.layers.iter().map(|groups| groups.iter().map(group).collect()).collect();
        Demand { model, share: usage.share / sum, rows: Arc::new(rows) }
    };
    Ok(models.iter().enumerate().map(demand).collect())
}

/// The experts that the device keeps: those with the most requests per byte that fit into its storage.
fn most_requested(library: &Library, demands: &[Demand], storage: u64) -> Vec<bool> {
    let frequencies = expert_frequencies(library, demands);
    let per_byte = |expert: usize| frequencies[expert] / library.bytes(expert) as f64;
    let mut order: Vec<usize> = (0..frequencies.len()).filter(|expert| frequencies[*expert] > 0.0).collect();
    order.sort_by(|a, b| per_byte(*b).total_cmp(&per_byte(*a)).then(a.cmp(b)));
    let mut local = vec![false; frequencies.len()];
    let mut free_bytes = storage;
    for expert in order {
        let bytes = library.bytes(expert);
        if bytes <= free_bytes {
            local[expert] = true;
            free_bytes -= bytes;
        }
    }
    local
}

fn file(problem: &Problem, placement: &Placement, machines: &ResolvedTopology, models: &[ModelUsage]) -> PlacementFile {
    let held = |holds: &dyn Fn(usize) -> bool| -> BTreeMap<String, ExpertLists> {
        let of_model = |(m, usage): (usize, &ModelUsage)| {
            let geometry = &usage.activations.geometry;
            let mut experts = vec![Vec::new(); geometry.layers];
            for (row, layer) in geometry.moe_layers.iter().enumerate() {
                let first = problem.library.first_expert(m, row);
                experts[layer.index()] = (0..geometry.experts).filter(|e| holds(first + e)).map(|e| e as u16).collect();
            }
            (usage.activations.model.clone(), ExpertLists { experts })
        };
        models.iter().enumerate().map(of_model).collect()
    };
    let server =
        |(at, n): (usize, &usize)| (machines.entries[*n].name.clone(), held(&|expert| placement.holds(at, expert)));
    let servers = machines.placed.iter().enumerate().map(server).collect();
    PlacementFile::new(servers, held(&|expert| problem.users[0].local[expert]))
}
