//! One expert after the other, wherever it saves most: Algorithm 1, lazily evaluated.

use std::cmp::Ordering;
use std::collections::{BTreeSet, BinaryHeap};

use super::Placement;
use crate::Problem;
use crate::remote_requests::GainEvaluator;

/// What is compared.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Score {
    /// What an expert saves for each of its bytes.
    PerByte,
    /// What it saves.
    Gain,
}

/// An expert at a server, and what it was worth after so many changes beside it.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Candidate {
    score: f64,
    server: u32,
    expert: u32,
    changes: u32,
}

impl Eq for Candidate {}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Candidate {
    /// The first expert at the first server wins if several are worth the same.
    fn cmp(&self, other: &Self) -> Ordering {
        let place = |candidate: &Candidate| (candidate.expert, candidate.server, candidate.changes);
        self.score.total_cmp(&other.score).then_with(|| place(other).cmp(&place(self)))
    }
}

struct Greedy<'a> {
    problem: &'a Problem,
    worth: GainEvaluator<'a>,
    score: Score,
    placement: Placement,
    free_bytes: Vec<u64>,
    /// What each expert is worth at each server: `[experts, servers]`.
    gains: Vec<f64>,
    /// GainEvaluator below this is what rounding has left of nothing.
    noise_floor: f64,
    /// How often something that an expert is asked for with has been placed.
    changes: Vec<u32>,
    candidates: BinaryHeap<Candidate>,
}

/// Fills all servers together.
pub(super) fn place(problem: &Problem, score: Score) -> Placement {
    let (experts, servers) = (problem.library.experts(), problem.servers.len());
    let (worth, placement) = (GainEvaluator::new(problem), Placement::empty(problem));
    let pairs = (0..experts).flat_map(|expert| (0..servers).map(move |server| (server, expert)));
    let gains: Vec<f64> = pairs.map(|(server, expert)| worth.gain(server, expert, &placement)).collect();
    let mut greedy = Greedy {
        problem,
        worth,
        score,
        placement,
        free_bytes: problem.servers.iter().map(|server| server.storage).collect(),
        noise_floor: 1e-12 * gains.iter().copied().fold(0.0, f64::max),
        gains,
        changes: vec![0; experts],
        candidates: BinaryHeap::new(),
    };
    (0..experts).for_each(|expert| greedy.push_candidates(expert));
    while let Some(candidate) = greedy.candidates.pop() {
        greedy.consider(candidate);
    }
    greedy.placement
}

impl Greedy<'_> {
    fn consider(&mut self, candidate: Candidate) {
        let (server, expert) = (candidate.server as usize, candidate.expert as usize);
        let bytes = self.problem.library.bytes(expert);
        if bytes > self.free_bytes[server] || self.placement.holds(server, expert) {
            return;
        }
        let model = self.problem.library.model_of(expert);
        let alone = self.problem.library.models()[model].top_k == 1;
        if candidate.changes < self.changes[expert] {
            // With one expert a token, worth only ever falls, and is not looked at again before it is the greatest.
            // With several it may have grown, and what became of it was offered when it changed.
            if alone {
                let at = expert * self.problem.servers.len() + server;
                self.gains[at] = self.worth.gain(server, expert, &self.placement);
                self.push_candidate(server, expert);
            }
            return;
        }
        self.free_bytes[server] -= bytes;
        match alone {
            true => {
                self.placement.put(server, expert);
                self.changes[expert] += 1;
            }
            false => self.place_and_update(server, expert),
        }
    }

    /// Places an expert and looks again at all that are asked for with it.
    fn place_and_update(&mut self, server: usize, expert: usize) {
        let mut affected = BTreeSet::new();
        self.add_gains(expert, -1.0, &mut affected);
        self.placement.put(server, expert);
        self.add_gains(expert, 1.0, &mut affected);
        for other in affected {
            self.changes[other] += 1;
            self.push_candidates(other);
        }
    }

    /// Adds what the wants of an expert give, to all that occur in them.
    fn add_gains(&mut self, expert: usize, sign: f64, affected: &mut BTreeSet<usize>) {
        let servers = self.problem.servers.len();
        for request in self.problem.requests.of(expert) {
            for other in self.problem.requests.experts(request).iter().map(|e| *e as usize) {
                affected.insert(other);
                for server in (0..servers).filter(|n| !self.placement.holds(*n, other)) {
                    let part = self.worth.gain_from(request, server, other, &self.placement);
                    self.gains[other * servers + server] += sign * part;
                }
            }
        }
    }

    fn push_candidates(&mut self, expert: usize) {
        (0..self.problem.servers.len()).for_each(|server| self.push_candidate(server, expert));
    }

    /// What saves nothing is not offered.
    fn push_candidate(&mut self, server: usize, expert: usize) {
        let (gain, bytes) =
            (self.gains[expert * self.problem.servers.len() + server], self.problem.library.bytes(expert));
        if gain > self.noise_floor && bytes <= self.free_bytes[server] && !self.placement.holds(server, expert) {
            let score = match self.score {
                Score::PerByte => gain / bytes as f64,
                Score::Gain => gain,
            };
            let changes = self.changes[expert];
            self.candidates.push(Candidate { score, server: server as u32, expert: expert as u32, changes });
        }
    }
}
