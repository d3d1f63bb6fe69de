//! Expected latency of a token, by where the time is spent: equations 11, 12 and 14 of the paper.

use crate::placement::gains::GainEvaluator;
use crate::placement::machine_cost::{Cost, ServingMode};
use crate::placement::{Placement, Problem, User};

/// Seconds per token of the average user, by where they are spent.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Latency {
    /// Computing on the device.
    pub local: f64,
    /// Transmission between the device and the site where its requests enter.
    pub access: f64,
    /// At the associated server.
    pub associated: Cost,
    /// At other servers.
    pub others: Cost,
    /// At the machine that holds all experts.
    pub cloud: Cost,
    /// Number of experts that each of these computed.
    pub served: Served,
}

/// Experts that one token of the average user needs, by the machine that computes them.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Served {
    /// On the device.
    pub local: f64,
    /// On the associated server.
    pub associated: f64,
    /// On other servers.
    pub others: f64,
    /// On the machine that holds all experts.
    pub cloud: f64,
}

impl Served {
    /// All experts that a token needs.
    pub fn total(&self) -> f64 {
        self.local + self.associated + self.others + self.cloud
    }
}

impl Latency {
    /// Seconds in total.
    pub fn total(&self) -> f64 {
        self.compute() + self.transmission()
    }

    /// Seconds of transmission.
    pub fn transmission(&self) -> f64 {
        self.access + self.associated.transmission + self.others.transmission + self.cloud.transmission
    }

    /// Seconds of computing.
    pub fn compute(&self) -> f64 {
        self.local + self.associated.compute + self.others.compute + self.cloud.compute
    }
}

/// The expected latency of a token.
pub fn latency(problem: &Problem, placement: &Placement) -> Latency {
    let mut found = Latency::default();
    let each = 1.0 / problem.users.len().max(1) as f64;
    problem.users.iter().for_each(|user| add_device_part(problem, user, each, &mut found));
    let gains = GainEvaluator::new(problem);
    for request in problem.requests.all() {
        let costs = gains.costs(request);
        let near = problem.sites[request.site as usize].associated;
        let experts = problem.requests.experts(request).iter();
        let (_, assignment) = costs.assign(experts.map(|e| placement.holders(*e as usize)));
        let mut used = 0u32;
        for machine in assignment.machines() {
            let (machine_cost, is_first) = (costs.of(machine), used >> machine & 1 == 0);
            used |= 1 << machine;
            let (cost, served) = match machine {
                m if m == costs.cloud() => (&mut found.cloud, &mut found.served.cloud),
                m if Some(m) == near => (&mut found.associated, &mut found.served.associated),
                _ => (&mut found.others, &mut found.served.others),
            };
            *served += request.weight;
            *cost += machine_cost.per_expert.times(request.weight);
            if is_first {
                *cost += machine_cost.per_request.times(request.weight);
            }
        }
    }
    found
}

/// The part that does not depend on the placement: experts that the device holds, and its link to the site.
fn add_device_part(problem: &Problem, user: &User, weight: f64, found: &mut Latency) {
    for demand in &user.demands {
        let model = &problem.library.models()[demand.model];
        let compute = problem.serving.compute(model, user.compute);
        let (up, down) = (user.link.send_seconds(model.state_bits), user.link.return_seconds(model.state_bits));
        for (row, groups) in demand.rows.iter().enumerate() {
            let first = problem.library.first_expert(demand.model, row);
            for group in groups {
                let weight = weight * demand.share * group.share;
                let needed = group.experts.len();
                let local = group.experts.iter().filter(|e| user.local[first + **e as usize]).count();
                found.served.local += weight * local as f64;
                found.local += weight
                    * match problem.serving {
                        // Hidden: the device computes these while the servers compute theirs.
                        ServingMode::Relayed if local < needed => 0.0,
                        ServingMode::Relayed => compute,
                        ServingMode::Direct | ServingMode::DirectSeparate => compute * local as f64,
                    };
                if local < needed {
                    found.access += weight * (up + (needed - local) as f64 * down);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::placement::{Demand, ExpertGroup, Library, ModelProfile, NetworkLink, Server, Site};

    fn link(ms: f64) -> NetworkLink {
        NetworkLink { delay: ms / 1e3, return_delay: 2.0 * ms / 1e3, ..NetworkLink::default() }
    }

    /// A device with expert 0, servers at 0, 4 and 8 ms from its site, and a cloud at 100 ms; replies take twice as
    /// long as requests.
    fn problem(groups: &[(&[u16], f64)], serving: ServingMode) -> Problem {
        let model = ModelProfile {
            name: "m".into(),
            rows: 1,
            experts: 4,
            top_k: 2,
            expert_bytes: 1,
            state_bits: 1000.0,
            expert_flops: 1e6,
        };
        let rows =
            groups.iter().map(|(experts, share)| ExpertGroup { experts: experts.to_vec(), share: *share }).collect();
        let demand = Demand { model: 0, share: 1.0, rows: Arc::new(vec![rows]) };
        let access = NetworkLink { per_bit: 1e-6, return_per_bit: 3e-6, ..NetworkLink::default() };
        let local = vec![true, false, false, false];
        let user = User { site: 0, link: access, compute: 4e8, local, demands: vec![demand] };
        let site = Site { associated: Some(0), links: vec![link(0.0), link(4.0), link(8.0)], cloud: link(100.0) };
        let servers = vec![Server { storage: 4, compute: 4e9 }; 3];
        Problem::new(Library::new(vec![model]), servers, 4e10, vec![site], vec![user], serving).unwrap()
    }

    fn ms(problem: &Problem, placement: &Placement) -> f64 {
        1e3 * latency(problem, placement).total()
    }

    #[test]
    fn relayed_latency_matches_hand_calculations() {
        // Computing takes 10 ms on the device, 1 ms on a server and 0.1 ms in the cloud.
        let close = |got: f64, want: f64| assert!((got - want).abs() < 1e-9, "{got} instead of {want}");
        let of = |group: &[u16], placed: &[(usize, usize)]| {
            let problem = problem(&[(group, 1.0)], ServingMode::Relayed);
            let mut placement = Placement::empty(&problem);
            placed.iter().for_each(|(server, expert)| placement.put(*server, *expert));
            ms(&problem, &placement)
        };
        close(of(&[0], &[]), 10.0);
        // Up 1 ms, a reply 3 ms down; to the cloud 100 ms, back 200 ms.
        close(of(&[0, 1], &[]), 1.0 + 3.0 + 100.0 + 0.1 + 200.0);
        close(of(&[1, 2], &[]), 1.0 + 6.0 + 100.0 + 0.1 + 400.0);
        // The associated server computes both at once.
        close(of(&[1, 2], &[(0, 1), (0, 2)]), 1.0 + 6.0 + 1.0);
        close(of(&[1, 2], &[(0, 1), (1, 2)]), 1.0 + 6.0 + 1.0 + (4.0 + 1.0 + 8.0));
        // Both from the farther one would be 41 ms.
        close(of(&[1, 2], &[(1, 1), (2, 1), (2, 2)]), 1.0 + 6.0 + (4.0 + 1.0 + 8.0) + (8.0 + 1.0 + 16.0));
        close(of(&[1, 2], &[(1, 1)]), 1.0 + 6.0 + (4.0 + 1.0 + 8.0) + (100.0 + 0.1 + 200.0));
    }

    #[test]
    fn parts_add_up_and_experts_are_counted_by_machine() {
        let problem = problem(&[(&[0, 1], 0.5), (&[2, 3], 0.25), (&[0], 0.25)], ServingMode::Relayed);
        let mut placement = Placement::empty(&problem);
        [(0, 1), (1, 2)].into_iter().for_each(|(server, expert)| placement.put(server, expert));
        let found = latency(&problem, &placement);
        assert_eq!(found.served, Served { local: 0.75, associated: 0.5, others: 0.25, cloud: 0.25 });
        let near = |got: f64, want: f64| assert!((got - want / 1e3).abs() < 1e-12, "{got}");
        near(found.local, 0.25 * 10.0);
        near(found.access, 0.5 * (1.0 + 3.0) + 0.25 * (1.0 + 6.0));
        near(found.associated.compute, 0.5);
        near(found.others.transmission, 0.25 * 12.0);
        near(found.cloud.total(), 0.25 * 300.1);
        assert_eq!(found.total(), found.transmission() + found.compute());
    }

    #[test]
    fn in_direct_mode_a_server_replies_once() {
        let problem = problem(&[(&[1, 2], 1.0)], ServingMode::Direct);
        let mut placement = Placement::empty(&problem);
        [(1, 1), (1, 2)].into_iter().for_each(|(server, expert)| placement.put(server, expert));
        // To the server 4 ms, back 8 ms, and each expert a quarter of a millisecond.
        let found = latency(&problem, &placement);
        assert!((1e3 * found.others.total() - 12.5).abs() < 1e-9, "{found:?}");
    }
}
