//! The expert requests that reach the servers, summed over all users.

use std::collections::BTreeMap;

use crate::placement::Library;
use crate::placement::users::{Site, User};

/// Experts of one layer that devices at one site request together because they do not hold them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RemoteRequest {
    pub site: u32,
    pub model: u32,
    /// Its experts are `members[from..to]` of the [`RemoteRequests`].
    from: u32,
    to: u32,
    /// Expected number of such requests per token of the average user.
    pub weight: f64,
}

/// All remote requests, indexed by expert.
#[derive(Clone, Debug, Default)]
pub(crate) struct RemoteRequests {
    all: Vec<RemoteRequest>,
    members: Vec<u32>,
    /// The requests that contain expert e are `by_expert[starts[e]..starts[e + 1]]`.
    starts: Vec<u32>,
    by_expert: Vec<u32>,
}

impl RemoteRequests {
    /// Sums the requests of all users. The order of the result depends on the order of users only.
    pub fn new(library: &Library, sites: &[Site], users: &[User]) -> Self {
        let mut requests = RemoteRequests::default();
        let mut row_requests: BTreeMap<Vec<u32>, f64> = BTreeMap::new();
        for site in 0..sites.len() {
            let here: Vec<&User> = users.iter().filter(|user| user.site == site).collect();
            for (m, model) in library.models().iter().enumerate() {
                for row in 0..model.rows {
                    let first = library.first_expert(m, row);
                    for user in &here {
                        for demand in user.demands.iter().filter(|d| d.model == m) {
                            let weight = demand.share / users.len() as f64;
                            for group in &demand.rows[row] {
                                let experts = group.experts.iter().map(|e| first + *e as usize);
                                let mut missing: Vec<u32> =
                                    experts.filter(|e| !user.local[*e]).map(|e| e as u32).collect();
                                if !missing.is_empty() {
                                    missing.sort_unstable();
                                    *row_requests.entry(missing).or_default() += weight * group.share;
                                }
                            }
                        }
                    }
                    for (missing, weight) in std::mem::take(&mut row_requests) {
                        let from = requests.members.len() as u32;
                        requests.members.extend(missing);
                        let to = requests.members.len() as u32;
                        requests.all.push(RemoteRequest { site: site as u32, model: m as u32, from, to, weight });
                    }
                }
            }
        }
        requests.index(library.experts());
        requests
    }

    fn index(&mut self, experts: usize) {
        self.starts = vec![0; experts + 1];
        self.members.iter().for_each(|e| self.starts[*e as usize + 1] += 1);
        (0..experts).for_each(|e| self.starts[e + 1] += self.starts[e]);
        let mut next = self.starts.clone();
        self.by_expert = vec![0; self.members.len()];
        for (at, request) in self.all.iter().enumerate() {
            for e in &self.members[request.from as usize..request.to as usize] {
                let place = &mut next[*e as usize];
                self.by_expert[*place as usize] = at as u32;
                *place += 1;
            }
        }
    }

    pub fn all(&self) -> &[RemoteRequest] {
        &self.all
    }

    pub fn experts(&self, request: &RemoteRequest) -> &[u32] {
        &self.members[request.from as usize..request.to as usize]
    }

    /// The requests that contain an expert.
    pub fn of(&self, expert: usize) -> impl Iterator<Item = &RemoteRequest> {
        let positions = &self.by_expert[self.starts[expert] as usize..self.starts[expert + 1] as usize];
        positions.iter().map(|at| &self.all[*at as usize])
    }
}
