//! From machines and statistics to a placement.

use std::collections::BTreeMap;
use std::sync::Arc;

use larder_core::{Coactivation, ExpertActivations, Geometry};

use crate::problem::asked;
use crate::{
    Algorithm, Demand, EdgeError, Held, Latency, Library, Likely, Model, Placement, PlacementFile, Problem, Server,
    ServerEntry, Serving, Site, Topology, User, Way, latency,
};

/// How numbers of hidden states travel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wire {
    /// As they are.
    F32,
    /// In half as many bits.
    Bf16,
}

impl Wire {
    /// Bits of a number.
    pub fn bits(self) -> f64 {
        match self {
            Wire::F32 => 32.0,
            Wire::Bf16 => 16.0,
        }
    }
}

/// A model that the device runs.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// Its statistics.
    pub activations: &'a ExpertActivations,
    /// How much of all tokens go through it, beside the shares of the others.
    pub share: f64,
}

/// What lies where, and what it gives.
#[derive(Clone, Debug)]
pub struct Plan {
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
    pub bare: Latency,
}

/// Decides what the device and the servers hold of these models.
pub fn plan(
    topology: &Topology,
    asked: &[Asked],
    serving: Serving,
    wire: Wire,
    algorithm: &Algorithm,
    seed: u64,
) -> Result<Plan, EdgeError> {
    let machines = Machines::of(topology)?;
    let library = Library::new(asked.iter().map(|a| model(a.activations, wire)).collect());
    let demands = demands(asked)?;
    let local = favourites(&library, &demands, machines.storage);
    let site = machines.site(serving);
    let way = match serving {
        Serving::Relayed => machines.way(machines.associated),
        Serving::Direct | Serving::Apart => Way::default(),
    };
    let user = User { site: 0, way, compute: machines.compute, local, demands };
    let cloud_compute = machines.flops[machines.cloud];
    let problem = Problem::new(library, machines.servers(), cloud_compute, vec![site], vec![user], serving)?;
    let placement = match serving {
        Serving::Direct => algorithm.place(&Problem { serving: Serving::Apart, ..problem.clone() }, seed),
        Serving::Relayed | Serving::Apart => algorithm.place(&problem, seed),
    };
    let file = file(&problem, &placement, &machines, asked);
    Ok(Plan {
        latency: latency(&problem, &placement),
        bare: latency(&problem, &Placement::empty(&problem)),
        servers: machines.placed.iter().map(|n| topology.servers[*n].name.clone()).collect(),
        cloud: topology.servers[machines.cloud].name.clone(),
        associated: topology.servers[machines.associated].name.clone(),
        problem,
        placement,
        file,
    })
}

/// What of a topology matters here, all of which is there.
struct Machines<'a> {
    entries: &'a [ServerEntry],
    /// Those whose storage is to be filled.
    placed: Vec<usize>,
    cloud: usize,
    associated: usize,
    storage: u64,
    compute: f64,
    /// Of each entry.
    flops: Vec<f64>,
    ways: Vec<Way>,
}

impl<'a> Machines<'a> {
    fn of(topology: &'a Topology) -> Result<Self, EdgeError> {
        let lacks =
            |owner: &str, what: &str| EdgeError::Topology(format!("the topology does not say the {what} of {owner}"));
        let entries = &topology.servers;
        let mut flops = Vec::new();
        let mut ways = Vec::new();
        for entry in entries {
            let owner = format!("'{}'", entry.name);
            let number = |value: Option<f64>, what| value.ok_or_else(|| lacks(&owner, what));
            flops.push(number(entry.compute, "compute")?);
            ways.push(Way {
                delay: entry.delay / 2.0,
                per_bit: 1.0 / number(entry.uplink, "uplink")?,
                back_delay: entry.delay / 2.0,
                back_per_bit: 1.0 / number(entry.downlink, "downlink")?,
            });
            if !entry.all && entry.storage.is_none() {
                return Err(lacks(&owner, "storage"));
            }
        }
        // A state of some thousand numbers tells near from far.
        let far = |n: &usize| ways[*n].go(65536.0) + ways[*n].back(65536.0);
        let nearest = |all: &mut dyn Iterator<Item = usize>| all.min_by(|a, b| far(a).total_cmp(&far(b)));
        let cloud = nearest(&mut (0..entries.len()).filter(|n| entries[*n].all)).ok_or_else(|| {
            let why = "no server of the topology holds every expert; say `all = true` of the one that does";
            EdgeError::Topology(why.into())
        })?;
        let said = entries.iter().position(|entry| entry.associated);
        let associated = said.or_else(|| nearest(&mut (0..entries.len()))).unwrap_or(cloud);
        Ok(Machines {
            entries,
            placed: (0..entries.len()).filter(|n| !entries[*n].all).collect(),
            cloud,
            associated,
            storage: topology.device.storage.ok_or_else(|| lacks("the device", "storage"))?,
            compute: topology.device.compute.ok_or_else(|| lacks("the device", "compute"))?,
            flops,
            ways,
        })
    }

    fn way(&self, entry: usize) -> Way {
        self.ways[entry]
    }

    /// What a machine is from where requests enter. When they are passed on, that is at the associated server itself.
    fn beyond_entry(&self, entry: usize, serving: Serving) -> Way {
        match serving == Serving::Relayed && entry == self.associated {
            true => Way::default(),
            false => self.way(entry),
        }
    }

    fn site(&self, serving: Serving) -> Site {
        Site {
            associated: self.placed.iter().position(|n| *n == self.associated),
            ways: self.placed.iter().map(|n| self.beyond_entry(*n, serving)).collect(),
            cloud: self.beyond_entry(self.cloud, serving),
        }
    }

    fn servers(&self) -> Vec<Server> {
        let server = |n: &usize| Server { storage: self.entries[*n].storage.unwrap_or(0), compute: self.flops[*n] };
        self.placed.iter().map(server).collect()
    }
}

fn model(activations: &ExpertActivations, wire: Wire) -> Model {
    let Geometry { moe_layers, experts, top_k, hidden, inter, .. } = &activations.geometry;
    Model {
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

fn demands(asked: &[Asked]) -> Result<Vec<Demand>, EdgeError> {
    let impossible = |why: String| Err(EdgeError::Impossible(why));
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
    let demand = |(model, asked): (usize, &Asked)| {
        let tokens = asked.activations.tokens as f64;
        let likely = |Coactivation(experts, count): &Coactivation| Likely {
            experts: experts.clone(),
            share: *count as f64 / tokens,
        };
        let rows = asked.activations.layers.iter().map(|groups| groups.iter().map(likely).collect()).collect();
        Demand { model, share: asked.share / sum, rows: Arc::new(rows) }
    };
    Ok(asked.iter().enumerate().map(demand).collect())
}

/// The experts that the device keeps: those that are asked for most often for their bytes.
fn favourites(library: &Library, demands: &[Demand], storage: u64) -> Vec<bool> {
    let asked = asked(library, demands);
    let worth = |expert: usize| asked[expert] / library.bytes(expert) as f64;
    let mut order: Vec<usize> = (0..asked.len()).filter(|expert| asked[*expert] > 0.0).collect();
    order.sort_by(|a, b| worth(*b).total_cmp(&worth(*a)).then(a.cmp(b)));
    let mut local = vec![false; asked.len()];
    let mut room = storage;
    for expert in order {
        let bytes = library.bytes(expert);
        if bytes <= room {
            local[expert] = true;
            room -= bytes;
        }
    }
    local
}

fn file(problem: &Problem, placement: &Placement, machines: &Machines, asked: &[Asked]) -> PlacementFile {
    let held = |holds: &dyn Fn(usize) -> bool| -> BTreeMap<String, Held> {
        let of_model = |(m, asked): (usize, &Asked)| {
            let geometry = &asked.activations.geometry;
            let mut experts = vec![Vec::new(); geometry.layers];
            for (row, layer) in geometry.moe_layers.iter().enumerate() {
                let first = problem.library.first(m, row);
                experts[layer.index()] = (0..geometry.experts).filter(|e| holds(first + e)).map(|e| e as u16).collect();
            }
            (asked.activations.model.clone(), Held { experts })
        };
        asked.iter().enumerate().map(of_model).collect()
    };
    let server =
        |(at, n): (usize, &usize)| (machines.entries[*n].name.clone(), held(&|expert| placement.holds(at, expert)));
    let servers = machines.placed.iter().enumerate().map(server).collect();
    PlacementFile::new(servers, held(&|expert| problem.users[0].local[expert]))
}
