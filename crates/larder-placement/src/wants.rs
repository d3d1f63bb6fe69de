//! What is asked of the servers, all users together.

use std::collections::BTreeMap;

use crate::problem::{Site, User};
use crate::toll::Tolls;
use crate::{Library, Placement, Problem};

/// Experts of one layer that are asked for together from one place, by devices that do not have them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Want {
    pub site: u32,
    pub model: u32,
    from: u32,
    to: u32,
    /// How often, for one token of the average user.
    pub weight: f64,
}

/// All that is asked for, found by expert.
#[derive(Clone, Debug, Default)]
pub(crate) struct Wants {
    all: Vec<Want>,
    members: Vec<u32>,
    /// The wants of expert e are those listed from `starts[e]` to `starts[e + 1]`.
    starts: Vec<u32>,
    listed: Vec<u32>,
}

impl Wants {
    /// Adds up what users ask for. Order does not depend on anything but the order of users.
    pub fn new(library: &Library, sites: &[Site], users: &[User]) -> Self {
        let mut wants = Wants::default();
        let mut row_wants: BTreeMap<Vec<u32>, f64> = BTreeMap::new();
        for site in 0..sites.len() {
            let here: Vec<&User> = users.iter().filter(|user| user.site == site).collect();
            for (m, model) in library.models().iter().enumerate() {
                for row in 0..model.rows {
                    let first = library.first(m, row);
                    for user in &here {
                        for demand in user.demands.iter().filter(|d| d.model == m) {
                            let weight = demand.share / users.len() as f64;
                            for likely in &demand.rows[row] {
                                let experts = likely.experts.iter().map(|e| first + *e as usize);
                                let mut missing: Vec<u32> =
                                    experts.filter(|e| !user.local[*e]).map(|e| e as u32).collect();
                                if !missing.is_empty() {
                                    missing.sort_unstable();
                                    *row_wants.entry(missing).or_default() += weight * likely.share;
                                }
                            }
                        }
                    }
                    for (missing, weight) in std::mem::take(&mut row_wants) {
                        let from = wants.members.len() as u32;
                        wants.members.extend(missing);
                        let to = wants.members.len() as u32;
                        wants.all.push(Want { site: site as u32, model: m as u32, from, to, weight });
                    }
                }
            }
        }
        wants.index(library.experts());
        wants
    }

    fn index(&mut self, experts: usize) {
        self.starts = vec![0; experts + 1];
        self.members.iter().for_each(|e| self.starts[*e as usize + 1] += 1);
        (0..experts).for_each(|e| self.starts[e + 1] += self.starts[e]);
        let mut next = self.starts.clone();
        self.listed = vec![0; self.members.len()];
        for (at, want) in self.all.iter().enumerate() {
            for e in &self.members[want.from as usize..want.to as usize] {
                let place = &mut next[*e as usize];
                self.listed[*place as usize] = at as u32;
                *place += 1;
            }
        }
    }

    pub fn all(&self) -> &[Want] {
        &self.all
    }

    pub fn experts(&self, want: &Want) -> &[u32] {
        &self.members[want.from as usize..want.to as usize]
    }

    /// The wants in which an expert occurs.
    pub fn of(&self, expert: usize) -> impl Iterator<Item = &Want> {
        let listed = &self.listed[self.starts[expert] as usize..self.starts[expert + 1] as usize];
        listed.iter().map(|at| &self.all[*at as usize])
    }
}

/// What one more expert at a server would be worth, beside a placement.
pub(crate) struct Worth<'a> {
    problem: &'a Problem,
    tolls: Vec<Tolls>,
}

impl<'a> Worth<'a> {
    pub fn new(problem: &'a Problem) -> Self {
        Worth { problem, tolls: problem.tolls() }
    }

    pub fn tolls(&self, want: &Want) -> &Tolls {
        &self.tolls[want.site as usize * self.problem.library.models().len() + want.model as usize]
    }

    /// Seconds that a want takes.
    pub fn cost(&self, want: &Want, placement: &Placement) -> f64 {
        let experts = self.problem.wants.experts(want);
        self.tolls(want).cost(experts.iter().map(|e| placement.holders(*e as usize)))
    }

    /// Seconds for a token of the average user that it saves if this server holds this expert, too.
    pub fn gain(&self, server: usize, expert: usize, placement: &Placement) -> f64 {
        self.problem.wants.of(expert).map(|want| self.share_of(want, server, expert, placement)).sum()
    }

    /// The part of a gain that comes from one want.
    pub fn share_of(&self, want: &Want, server: usize, expert: usize, placement: &Placement) -> f64 {
        let experts = self.problem.wants.experts(want).iter().map(|e| *e as usize);
        let with = |e: usize| placement.holders(e) | if e == expert { 1 << server } else { 0 };
        want.weight * (self.cost(want, placement) - self.tolls(want).cost(experts.map(with)))
    }
}
