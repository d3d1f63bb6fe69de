//! One expert after the other, each where its gain is largest: Algorithm 1 of the paper, lazily evaluated.

use std::cmp::Ordering;
use std::collections::{BTreeSet, BinaryHeap};

use super::Placement;
use crate::placement::Problem;
use crate::placement::gains::GainEvaluator;

/// The score by which candidates are ranked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Score {
    /// Seconds saved per byte of the expert.
    PerByte,
    /// Seconds saved.
    Gain,
}

/// An expert on a server with its score; stale once the expert's count of `changes` has grown.
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
    /// Ties go to the lowest expert, then to the lowest server.
    fn cmp(&self, other: &Self) -> Ordering {
        let position = |candidate: &Candidate| (candidate.expert, candidate.server, candidate.changes);
        self.score.total_cmp(&other.score).then_with(|| position(other).cmp(&position(self)))
    }
}

struct Greedy<'a> {
    problem: &'a Problem,
    evaluator: GainEvaluator<'a>,
    score: Score,
    placement: Placement,
    free_bytes: Vec<u64>,
    /// The gain of each expert on each server: `[experts, servers]`.
    gains: Vec<f64>,
    /// Gains below this are rounding errors of zero.
    noise_floor: f64,
    /// For each expert, the number of placements that changed its gain.
    changes: Vec<u32>,
    candidates: BinaryHeap<Candidate>,
}

/// Fills all servers together.
pub(super) fn place(problem: &Problem, score: Score) -> Placement {
    let (experts, servers) = (problem.library.experts(), problem.servers.len());
    let (evaluator, placement) = (GainEvaluator::new(problem), Placement::empty(problem));
    let pairs = (0..experts).flat_map(|expert| (0..servers).map(move |server| (server, expert)));
    let gains: Vec<f64> = pairs.map(|(server, expert)| evaluator.gain(server, expert, &placement)).collect();
    let mut greedy = Greedy {
        problem,
        evaluator,
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
            // With one expert per token, gains only ever fall, so a stale one is recomputed when it comes to the top.
            // With several, gains can also grow, and a new candidate was pushed at each change.
            if alone {
                let at = expert * self.problem.servers.len() + server;
                self.gains[at] = self.evaluator.gain(server, expert, &self.placement);
                self.push_candidate(server, expert);
            }
            return;
        }
        self.free_bytes[server] -= bytes;
        if alone {
            self.placement.put(server, expert);
            self.changes[expert] += 1;
        } else {
            self.place_and_update(server, expert)
        }
    }

    /// Places an expert and updates the gains of all experts that are requested together with it.
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

    /// Adds the gains from the requests that contain an expert, times `sign`, for all experts in those requests.
    fn add_gains(&mut self, expert: usize, sign: f64, affected: &mut BTreeSet<usize>) {
        let servers = self.problem.servers.len();
        for request in self.problem.requests.of(expert) {
            for other in self.problem.requests.experts(request).iter().map(|e| *e as usize) {
                affected.insert(other);
                for server in (0..servers).filter(|n| !self.placement.holds(*n, other)) {
                    let part = self.evaluator.gain_from(request, server, other, &self.placement);
                    self.gains[other * servers + server] += sign * part;
                }
            }
        }
    }

    fn push_candidates(&mut self, expert: usize) {
        (0..self.problem.servers.len()).for_each(|server| self.push_candidate(server, expert));
    }

    /// Experts without a gain, and those that do not fit, are not pushed.
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
