//! From machines and statistics to a placement.

use std::collections::BTreeMap;
use std::sync::Arc;

use larder_core::{Coactivation, ExpertActivations, Geometry};

use crate::problem::expert_frequencies;
use crate::{
    Algorithm, Demand, ExpertGroup, ExpertLists, Latency, Library, ModelProfile, NetworkLink, Placement,
    PlacementError, PlacementFile, Problem, Server, ServerEntry, ServingMode, Site, Topology, User, latency,
};

/// How numbers of hidden states travel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WireFormat {
    /// As they are.
    F32,
    /// In half as many bits.
    Bf16,
}

impl WireFormat {
    /// Bits of a number.
    pub fn bits(self) -> f64 {
        match self {
            WireFormat::F32 => 32.0,
            WireFormat::Bf16 => 16.0,
        }
    }
}

/// A model that the device runs.
#[derive(Clone, Copy, Debug)]
pub struct ModelUsage<'a> {
    /// Its statistics.
    pub activations: &'a ExpertActivations,
    /// How much of all tokens go through it, beside the shares of the others.
    pub share: f64,
}

/// What lies where, and what it gives.
#[derive(Clone, Debug)]
pub struct PlacementPlan {
    /// What was decided upon.
    pub problem: Problem,
    /// The servers of the problem, by name.
    pub servers: Vec<String>,
    /// The machine that holds all.
    pub cloud: String,
    /// Where requests enter: the server that is asked first.
    pub associated: String,
    /// What was decided.
    pub placement: Placement,
    /// The same, to be written.
    pub file: PlacementFile,
    /// What a token takes.
    pub latency: Latency,
    /// What it would take if the servers held nothing.
    pub baseline: Latency,
}

/// Decides what the device and the servers hold of these models.
pub fn plan(
    topology: &Topology,
    asked: &[ModelUsage],
    serving: ServingMode,
    wire: WireFormat,
    algorithm: &Algorithm,
    seed: u64,
) -> Result<PlacementPlan, PlacementError> {
    let machines = ResolvedTopology::of(topology)?;
    let library = Library::new(asked.iter().map(|a| model(a.activations, wire)).collect());
    let demands = demands(asked)?;
    let local = most_requested(&library, &demands, machines.storage);
    let site = machines.site(serving);
    let link = match serving {
        ServingMode::Relayed => machines.link(machines.associated),
        ServingMode::Direct | ServingMode::DirectSeparate => NetworkLink::default(),
    };
    let user = User { site: 0, link, compute: machines.compute, local, demands };
    let cloud_compute = machines.flops[machines.cloud];
    let problem = Problem::new(library, machines.servers(), cloud_compute, vec![site], vec![user], serving)?;
    let placement = match serving {
        ServingMode::Direct => {
            algorithm.place(&Problem { serving: ServingMode::DirectSeparate, ..problem.clone() }, seed)
        }
        ServingMode::Relayed | ServingMode::DirectSeparate => algorithm.place(&problem, seed),
    };
    let file = file(&problem, &placement, &machines, asked);
    Ok(PlacementPlan {
        latency: latency(&problem, &placement),
        baseline: latency(&problem, &Placement::empty(&problem)),
        servers: machines.placed.iter().map(|n| topology.servers[*n].name.clone()).collect(),
        cloud: topology.servers[machines.cloud].name.clone(),
        associated: topology.servers[machines.associated].name.clone(),
        problem,
        placement,
        file,
    })
}

/// What of a topology matters here, all of which is there.
struct ResolvedTopology<'a> {
    entries: &'a [ServerEntry],
    /// Those whose storage is to be filled.
    placed: Vec<usize>,
    cloud: usize,
    associated: usize,
    storage: u64,
    compute: f64,
    /// Of each entry.
    flops: Vec<f64>,
    links: Vec<NetworkLink>,
}

impl<'a> ResolvedTopology<'a> {
    fn of(topology: &'a Topology) -> Result<Self, PlacementError> {
        let lacks = |owner: &str, what: &str| {
            PlacementError::Topology(format!("the topology does not say the {what} of {owner}"))
        };
        let entries = &topology.servers;
        let mut flops = Vec::new();
        let mut links = Vec::new();
        for entry in entries {
            let owner = format!("'{}'", entry.name);
            let number = |value: Option<f64>, what| value.ok_or_else(|| lacks(&owner, what));
            flops.push(number(entry.compute, "compute")?);
            links.push(NetworkLink {
                delay: entry.delay / 2.0,
                per_bit: 1.0 / number(entry.uplink, "uplink")?,
                return_delay: entry.delay / 2.0,
                return_per_bit: 1.0 / number(entry.downlink, "downlink")?,
            });
            if !entry.all && entry.storage.is_none() {
                return Err(lacks(&owner, "storage"));
            }
        }
        // A state of some thousand numbers tells near from far.
        let far = |n: &usize| links[*n].send_seconds(65536.0) + links[*n].return_seconds(65536.0);
        let nearest = |all: &mut dyn Iterator<Item = usize>| all.min_by(|a, b| far(a).total_cmp(&far(b)));
        let cloud = nearest(&mut (0..entries.len()).filter(|n| entries[*n].all)).ok_or_else(|| {
            let why = "no server of the topology holds every expert; say `all = true` of the one that does";
            PlacementError::Topology(why.into())
        })?;
        let said = entries.iter().position(|entry| entry.associated);
        let associated = said.or_else(|| nearest(&mut (0..entries.len()))).unwrap_or(cloud);
        Ok(ResolvedTopology {
            entries,
            placed: (0..entries.len()).filter(|n| !entries[*n].all).collect(),
            cloud,
            associated,
            storage: topology.device.storage.ok_or_else(|| lacks("the device", "storage"))?,
            compute: topology.device.compute.ok_or_else(|| lacks("the device", "compute"))?,
            flops,
            links,
        })
    }

    fn link(&self, entry: usize) -> NetworkLink {
        self.links[entry]
    }

    /// What a machine is from where requests enter. When they are passed on, that is at the associated server itself.
    fn link_from_site(&self, entry: usize, serving: ServingMode) -> NetworkLink {
        match serving == ServingMode::Relayed && entry == self.associated {
            true => NetworkLink::default(),
            false => self.link(entry),
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

fn demands(asked: &[ModelUsage]) -> Result<Vec<Demand>, PlacementError> {
    let impossible = |why: String| Err(PlacementError::Invalid(why));
    let sum: f64 = asked.iter().map(|a| a.share).sum();
    if asked.is_empty() || asked.iter().any(|a| a.share < 0.0) || !(sum > 0.0 && sum.is_finite()) {
        return impossible("the shares of the models must be at least 0, and one above it".into());
    }
    for (at, one) in asked.iter().enumerate() {
        let name = &one.activations.model;
        if asked[..at].iter().any(|other| other.activations.model == *name) {
            return impossible(format!("two files are about a model called '{name}'; count its traces together"));
        }
    }
    let demand = |(model, asked): (usize, &ModelUsage)| {
        let tokens = asked.activations.tokens as f64;
        let likely = |Coactivation(experts, count): &Coactivation| ExpertGroup {
            experts: experts.clone(),
            share: *count as f64 / tokens,
        };
        let rows = asked.activations.layers.iter().map(|groups| groups.iter().map(likely).collect()).collect();
        Demand { model, share: asked.share / sum, rows: Arc::new(rows) }
    };
    Ok(asked.iter().enumerate().map(demand).collect())
}

/// The experts that the device keeps: those that are asked for most often for their bytes.
fn most_requested(library: &Library, demands: &[Demand], storage: u64) -> Vec<bool> {
    let asked = expert_frequencies(library, demands);
    let worth = |expert: usize| asked[expert] / library.bytes(expert) as f64;
    let mut order: Vec<usize> = (0..asked.len()).filter(|expert| asked[*expert] > 0.0).collect();
    order.sort_by(|a, b| worth(*b).total_cmp(&worth(*a)).then(a.cmp(b)));
    let mut local = vec![false; asked.len()];
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

fn file(problem: &Problem, placement: &Placement, machines: &ResolvedTopology, asked: &[ModelUsage]) -> PlacementFile {
    let held = |holds: &dyn Fn(usize) -> bool| -> BTreeMap<String, ExpertLists> {
        let of_model = |(m, asked): (usize, &ModelUsage)| {
            let geometry = &asked.activations.geometry;
            let mut experts = vec![Vec::new(); geometry.layers];
            for (row, layer) in geometry.moe_layers.iter().enumerate() {
                let first = problem.library.first_expert(m, row);
                experts[layer.index()] = (0..geometry.experts).filter(|e| holds(first + e)).map(|e| e as u16).collect();
            }
            (asked.activations.model.clone(), ExpertLists { experts })
        };
        asked.iter().enumerate().map(of_model).collect()
    };
    let server =
        |(at, n): (usize, &usize)| (machines.entries[*n].name.clone(), held(&|expert| placement.holds(at, expert)));
    let servers = machines.placed.iter().enumerate().map(server).collect();
    PlacementFile::new(servers, held(&|expert| problem.users[0].local[expert]))
}
