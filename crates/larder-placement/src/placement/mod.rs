//! Which server holds what, and the algorithms that decide it.

use crate::{Library, Problem};

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
    /// A bit for each server.
    holders: Vec<u32>,
}

impl Placement {
    /// Nothing is anywhere.
    pub fn empty(problem: &Problem) -> Self {
        Placement { holders: vec![0; problem.library.experts()] }
    }

    /// Whether this server holds this expert.
    pub fn holds(&self, server: usize, expert: usize) -> bool {
        self.holders[expert] >> server & 1 == 1
    }

    /// Puts an expert where it was not.
    pub fn put(&mut self, server: usize, expert: usize) {
        self.holders[expert] |= 1 << server;
    }

    /// The experts of a server, ascending.
    pub fn experts_of(&self, server: usize) -> impl Iterator<Item = usize> + '_ {
        (0..self.holders.len()).filter(move |expert| self.holds(server, *expert))
    }

    /// Bytes of what a server holds.
    pub fn bytes(&self, server: usize, library: &Library) -> u64 {
        self.experts_of(server).map(|expert| library.bytes(expert)).sum()
    }

    /// The servers that hold this expert, a bit for each.
    pub(crate) fn holders(&self, expert: usize) -> u32 {
        self.holders[expert]
    }
}

/// A way to decide what lies where.
pub struct Algorithm {
    /// What it is called on the command line.
    pub name: &'static str,
    /// What it does, in a few words.
    pub about: &'static str,
    place: fn(&Problem, u64) -> Placement,
}

impl Algorithm {
    /// Decides. What is drawn at random depends on the seed alone.
    pub fn place(&self, problem: &Problem, seed: u64) -> Placement {
        (self.place)(problem, seed)
    }
}

/// All algorithms.
pub const ALGORITHMS: [Algorithm; 7] = [
    Algorithm {
        name: "accelerated",
        about: "server by server, a knapsack solved by size of experts (the paper's Algorithm 3)",
        place: |problem, _| successive::place(problem, &accelerated::solve),
    },
    Algorithm {
        name: "dp",
        about: "server by server, a knapsack solved expert by expert (Algorithm 2)",
        place: |problem, _| successive::place(problem, &dp::solve),
    },
    Algorithm {
        name: "greedy",
        about: "one expert after the other, the one that saves most for its bytes (Algorithm 1)",
        place: |problem, _| greedy::place(problem, greedy::Score::PerByte),
    },
    Algorithm {
        name: "greedy-gain",
        about: "one expert after the other, the one that saves most whatever its bytes",
        place: |problem, _| greedy::place(problem, greedy::Score::Gain),
    },
    Algorithm {
        name: "lfu",
        about: "each server for itself, what its own users ask for most often",
        place: |problem, _| lfu::place(problem),
    },
    Algorithm { name: "random", about: "whatever comes, as much as fits", place: random::place },
    Algorithm {
        name: "u-shaped",
        about: "each server for itself, whole layers of the models that its users want most",
        place: |problem, _| u_shaped::place(problem),
    },
];

/// No algorithm is called so.
#[derive(Debug, thiserror::Error)]
#[error("'{name}' is no way to place experts; there are {known}")]
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

/// Puts experts on a server in the order given, each that still fits.
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
