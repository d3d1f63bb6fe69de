//! Which server holds which experts, and the algorithms that decide it.

use crate::placement::{Library, Problem, latency};

mod accelerated;
mod dp;
mod greedy;
mod grid;
mod lfu;
mod random;
mod successive;
#[cfg(test)]
mod tests;
pub mod u_shaped;

/// Which servers hold each expert.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Placement {
    /// For each expert, a bit per server.
    holders: Vec<u32>,
}

impl Placement {
    /// A placement without any expert.
    pub fn empty(problem: &Problem) -> Self {
        Placement { holders: vec![0; problem.library.experts()] }
    }

    /// Whether this server holds this expert.
    pub fn holds(&self, server: usize, expert: usize) -> bool {
        self.holders[expert] >> server & 1 == 1
    }

    /// Places an expert on a server.
    pub fn put(&mut self, server: usize, expert: usize) {
        self.holders[expert] |= 1 << server;
    }

    /// The experts that a server holds, ascending.
    pub fn experts_of(&self, server: usize) -> impl Iterator<Item = usize> + '_ {
        (0..self.holders.len()).filter(move |expert| self.holds(server, *expert))
    }

    /// Bytes of the experts that a server holds.
    pub fn bytes(&self, server: usize, library: &Library) -> u64 {
        self.experts_of(server).map(|expert| library.bytes(expert)).sum()
    }

    /// The servers that hold this expert, one bit each.
    pub(crate) fn holders(&self, expert: usize) -> u32 {
        self.holders[expert]
    }
}

/// A placement algorithm.
pub struct Algorithm {
    /// Its name on the command line.
    pub name: &'static str,
    /// Its description in a few words.
    pub about: &'static str,
    /// Whether it places whole layers, so that a server can only be used for models that it holds completely.
    pub whole_layers: bool,
    /// Whether it is slow and gives the result of another algorithm: for comparisons with the paper.
    pub reference: bool,
    how: Placer,
}

/// How an algorithm computes a placement.
enum Placer {
    /// By itself.
    Own(fn(&Problem, u64) -> Placement),
    /// By the best of the algorithms of these names.
    BestOf(&'static [&'static str]),
}

impl Algorithm {
    /// Computes a placement. Random choices depend on the seed alone.
    pub fn place(&self, problem: &Problem, seed: u64) -> Placement {
        self.place_for(problem, problem, seed).1
    }

    /// Computes a placement of one problem that is used in another, which differs from it in the way of serving alone:
    /// an algorithm that takes the best of several decides by the latency there. The name is that of the algorithm
    /// whose placement it is.
    pub fn place_for(&self, problem: &Problem, used: &Problem, seed: u64) -> (&'static str, Placement) {
        let names = match self.how {
            Placer::Own(place) => return (self.name, place(problem, seed)),
            Placer::BestOf(names) => names,
        };
        let all = ALGORITHMS.iter().filter(|algorithm| names.contains(&algorithm.name));
        let placed = all.map(|algorithm| {
            let (name, placement) = algorithm.place_for(problem, used, seed);
            (latency(used, &placement).total(), name, placement)
        });
        let best = placed.min_by(|a, b| a.0.total_cmp(&b.0)).expect("the names are in the table");
        (best.1, best.2)
    }

    /// Whether it takes the best placement of other algorithms.
    pub fn is_best_of_others(&self) -> bool {
        matches!(self.how, Placer::BestOf(_))
    }
}

/// The name of the algorithm that plans use by default.
pub const BEST_GREEDY: &str = "best-greedy";

/// All placement algorithms.
pub const ALGORITHMS: [Algorithm; 8] = [
    Algorithm {
        name: "accelerated",
        about: "one server after the other, each as a knapsack solved by size of experts (the paper's Algorithm 3)",
        whole_layers: false,
        reference: false,
        how: Placer::Own(|problem, _| successive::place(problem, &accelerated::solve)),
    },
    Algorithm {
        name: "dp",
        about: "one server after the other, each as a knapsack solved expert by expert (Algorithm 2)",
        whole_layers: false,
        reference: true,
        how: Placer::Own(|problem, _| successive::place(problem, &dp::solve)),
    },
    Algorithm {
        name: "greedy",
        about: "one expert after the other, the one with the largest gain per byte (Algorithm 1)",
        whole_layers: false,
        reference: false,
        how: Placer::Own(|problem, _| greedy::place(problem, greedy::Score::PerByte)),
    },
    Algorithm {
        name: "greedy-gain",
        about: "one expert after the other, the one with the largest gain",
        whole_layers: false,
        reference: false,
        how: Placer::Own(|problem, _| greedy::place(problem, greedy::Score::Gain)),
    },
    Algorithm {
        name: "lfu",
        about: "each server on its own, the experts that its users need most often",
        whole_layers: false,
        reference: false,
        how: Placer::Own(|problem, _| lfu::place(problem)),
    },
    Algorithm {
        name: "random",
        about: "random experts, as many as fit",
        whole_layers: false,
        reference: false,
        how: Placer::Own(random::place),
    },
    Algorithm {
        name: "u-shaped",
        about: "each server on its own, whole layers of the models that its users run most",
        whole_layers: true,
        reference: false,
        how: Placer::Own(|problem, _| u_shaped::place(problem)),
    },
    Algorithm {
        name: BEST_GREEDY,
        about: "the better of greedy and greedy-gain",
        whole_layers: false,
        reference: false,
        how: Placer::BestOf(&["greedy", "greedy-gain"]),
    },
];

/// There is no algorithm of this name.
#[derive(Debug, thiserror::Error)]
#[error("'{name}' is not a placement algorithm; choose one of {known}")]
pub struct UnknownAlgorithm {
    name: String,
    known: String,
}

/// The algorithm of this name.
pub fn algorithm(name: &str) -> Result<&'static Algorithm, UnknownAlgorithm> {
    const ALL: &[Algorithm] = &ALGORITHMS;
    ALL.iter().find(|a| a.name == name).ok_or_else(|| UnknownAlgorithm {
        name: name.to_owned(),
        known: ALL.iter().map(|a| a.name).collect::<Vec<_>>().join(", "),
    })
}

/// Places experts on a server in the order given, skipping those that do not fit.
fn fill_in_order(problem: &Problem, server: usize, experts: impl Iterator<Item = usize>, placement: &mut Placement) {
    let mut free_bytes = problem.servers[server].storage - placement.bytes(server, &problem.library);
    for expert in experts {
        let bytes = problem.library.bytes(expert);
        if bytes <= free_bytes && !placement.holds(server, expert) {
            placement.put(server, expert);
            free_bytes -= bytes;
        }
    }
}
