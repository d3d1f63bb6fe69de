//! One expert after the other, wherever it saves most: Algorithm 1, lazily evaluated.

use std::cmp::Ordering;
use std::collections::{BTreeSet, BinaryHeap};

use super::Placement;
use crate::Problem;
use crate::wants::Worth;

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
struct Offer {
    score: f64,
    server: u32,
    expert: u32,
    changes: u32,
}

impl Eq for Offer {}

impl PartialOrd for Offer {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Offer {
    /// The first expert at the first server wins if several are worth the same.
    fn cmp(&self, other: &Self) -> Ordering {
        let place = |offer: &Offer| (offer.expert, offer.server, offer.changes);
        self.score.total_cmp(&other.score).then_with(|| place(other).cmp(&place(self)))
    }
}

struct Greedy<'a> {
    problem: &'a Problem,
    worth: Worth<'a>,
    score: Score,
    placement: Placement,
    room: Vec<u64>,
    /// What each expert is worth at each server: `[experts, servers]`.
    gains: Vec<f64>,
    /// Worth below this is what rounding has left of nothing.
    nothing: f64,
    /// How often something that an expert is asked for with has been placed.
    changes: Vec<u32>,
    offers: BinaryHeap<Offer>,
}

/// Fills all servers together.
pub(super) fn place(problem: &Problem, score: Score) -> Placement {
    let (experts, servers) = (problem.library.experts(), problem.servers.len());
    let (worth, placement) = (Worth::new(problem), Placement::empty(problem));
    let pairs = (0..experts).flat_map(|expert| (0..servers).map(move |server| (server, expert)));
    let gains: Vec<f64> = pairs.map(|(server, expert)| worth.gain(server, expert, &placement)).collect();
    let mut greedy = Greedy {
        problem,
        worth,
        score,
        placement,
        room: problem.servers.iter().map(|server| server.storage).collect(),
        nothing: 1e-12 * gains.iter().copied().fold(0.0, f64::max),
        gains,
        changes: vec![0; experts],
        offers: BinaryHeap::new(),
    };
    (0..experts).for_each(|expert| greedy.offer(expert));
    while let Some(offer) = greedy.offers.pop() {
        greedy.consider(offer);
    }
    greedy.placement
}

impl Greedy<'_> {
    fn consider(&mut self, offer: Offer) {
        let (server, expert) = (offer.server as usize, offer.expert as usize);
        let bytes = self.problem.library.bytes(expert);
        if bytes > self.room[server] || self.placement.holds(server, expert) {
            return;
        }
        let model = self.problem.library.model_of(expert);
        let alone = self.problem.library.models()[model].top_k == 1;
        if offer.changes < self.changes[expert] {
            // With one expert a token, worth only ever falls, and is not looked at again before it is the greatest.
            // With several it may have grown, and what became of it was offered when it changed.
            if alone {
                let at = expert * self.problem.servers.len() + server;
                self.gains[at] = self.worth.gain(server, expert, &self.placement);
                self.offer_at(server, expert);
            }
            return;
        }
        self.room[server] -= bytes;
        match alone {
            true => {
                self.placement.put(server, expert);
                self.changes[expert] += 1;
            }
            false => self.put(server, expert),
        }
    }

    /// Places an expert and looks again at all that are asked for with it.
    fn put(&mut self, server: usize, expert: usize) {
        let mut beside = BTreeSet::new();
        self.count(expert, -1.0, &mut beside);
        self.placement.put(server, expert);
        self.count(expert, 1.0, &mut beside);
        for other in beside {
            self.changes[other] += 1;
            self.offer(other);
        }
    }

    /// Adds what the wants of an expert give, to all that occur in them.
    fn count(&mut self, expert: usize, sign: f64, beside: &mut BTreeSet<usize>) {
        let servers = self.problem.servers.len();
        for want in self.problem.wants.of(expert) {
            for other in self.problem.wants.experts(want).iter().map(|e| *e as usize) {
                beside.insert(other);
                for server in (0..servers).filter(|n| !self.placement.holds(*n, other)) {
                    let part = self.worth.share_of(want, server, other, &self.placement);
                    self.gains[other * servers + server] += sign * part;
                }
            }
        }
    }

    fn offer(&mut self, expert: usize) {
        (0..self.problem.servers.len()).for_each(|server| self.offer_at(server, expert));
    }

    /// What saves nothing is not offered.
    fn offer_at(&mut self, server: usize, expert: usize) {
        let (gain, bytes) =
            (self.gains[expert * self.problem.servers.len() + server], self.problem.library.bytes(expert));
        if gain > self.nothing && bytes <= self.room[server] && !self.placement.holds(server, expert) {
            let score = match self.score {
                Score::PerByte => gain / bytes as f64,
                Score::Gain => gain,
            };
            let changes = self.changes[expert];
            self.offers.push(Offer { score, server: server as u32, expert: expert as u32, changes });
        }
    }
}
