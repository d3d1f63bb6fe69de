//! The savings of a placement on the requests that reach the servers.

use crate::placement::machine_cost::MachineCosts;
use crate::placement::remote_requests::RemoteRequest;
use crate::placement::{Placement, Problem};

/// Computes the latency that one more expert on a server saves, given a placement.
pub(crate) struct GainEvaluator<'a> {
    problem: &'a Problem,
    costs: Vec<MachineCosts>,
}

impl<'a> GainEvaluator<'a> {
    pub fn new(problem: &'a Problem) -> Self {
        GainEvaluator { problem, costs: problem.costs() }
    }

    pub fn costs(&self, request: &RemoteRequest) -> &MachineCosts {
        &self.costs[request.site as usize * self.problem.library.models().len() + request.model as usize]
    }

    /// Seconds that a request takes.
    pub fn cost(&self, request: &RemoteRequest, placement: &Placement) -> f64 {
        let experts = self.problem.requests.experts(request);
        self.costs(request).cost(experts.iter().map(|e| placement.holders(*e as usize)))
    }

    /// Seconds per token of the average user that are saved if this server also holds this expert.
    pub fn gain(&self, server: usize, expert: usize, placement: &Placement) -> f64 {
        self.problem.requests.of(expert).map(|request| self.gain_from(request, server, expert, placement)).sum()
    }

    /// The part of a gain that comes from one request.
    pub fn gain_from(&self, request: &RemoteRequest, server: usize, expert: usize, placement: &Placement) -> f64 {
        let experts = self.problem.requests.experts(request).iter().map(|e| *e as usize);
        let with = |e: usize| placement.holders(e) | if e == expert { 1 << server } else { 0 };
        request.weight * (self.cost(request, placement) - self.costs(request).cost(experts.map(with)))
    }
}
