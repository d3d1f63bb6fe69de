//! The time that a layer's remote experts take: equations 7 to 10 of the paper, for one site and one model.

use crate::placement::ModelProfile;

/// Seconds, by what they are spent on.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Cost {
    /// Seconds of transmission.
    pub transmission: f64,
    /// Seconds of computing.
    pub compute: f64,
}

impl Cost {
    /// Seconds in total.
    pub fn total(self) -> f64 {
        self.transmission + self.compute
    }

    /// Both parts multiplied by a factor.
    pub fn times(self, factor: f64) -> Cost {
        Cost { transmission: self.transmission * factor, compute: self.compute * factor }
    }
}

impl std::ops::AddAssign for Cost {
    fn add_assign(&mut self, more: Cost) {
        self.transmission += more.transmission;
        self.compute += more.compute;
    }
}

/// A network link between two machines, in both directions.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct NetworkLink {
    /// Seconds until the first bit of a request arrives.
    pub delay: f64,
    /// Seconds for each further bit of a request.
    pub per_bit: f64,
    /// Seconds until the first bit of a reply arrives.
    pub return_delay: f64,
    /// Seconds for each further bit of a reply.
    pub return_per_bit: f64,
}

impl NetworkLink {
    /// Seconds of transmission for a request of this many bits.
    pub fn send_seconds(&self, bits: f64) -> f64 {
        self.delay + bits * self.per_bit
    }

    /// Seconds of transmission for a reply of this many bits.
    pub fn return_seconds(&self, bits: f64) -> f64 {
        self.return_delay + bits * self.return_per_bit
    }
}

/// How requests travel, and how a machine computes several experts of a token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ServingMode {
    /// The paper's model: the associated server forwards requests to others, every expert's output is returned
    /// separately, and a machine computes all experts of a token at once, each with a share of the machine's speed.
    Relayed,
    /// The behaviour of `larder run --edge`: the device asks the fastest servers itself, the outputs of a server's
    /// experts are returned as one sum, and a machine computes a token's experts one after the other, each at full
    /// speed.
    Direct,
    /// As `Direct`, but every expert's output is returned separately. Algorithms use this mode in place of `Direct`:
    /// with one sum for all, an expert saves nothing as long as another one of its layer has to be computed far away.
    DirectSeparate,
}

impl ServingMode {
    /// Seconds that one expert takes on a machine with a speed of `flops` FLOP/s.
    pub fn compute(self, model: &ModelProfile, flops: f64) -> f64 {
        match self {
            ServingMode::Relayed => model.expert_flops / (flops / model.experts as f64),
            ServingMode::Direct | ServingMode::DirectSeparate => model.expert_flops / flops,
        }
    }
}

/// The time that requests to one machine take.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct MachineCost {
    /// Once for each layer in which the machine is asked.
    pub per_request: Cost,
    /// For each of its experts that a token needs.
    pub per_expert: Cost,
}

impl MachineCost {
    /// The cost of a machine with `flops` FLOP/s at the end of `link`.
    pub fn new(serving: ServingMode, model: &ModelProfile, link: &NetworkLink, flops: f64) -> Self {
        let (go, back) = (link.send_seconds(model.state_bits), link.return_seconds(model.state_bits));
        let compute = serving.compute(model, flops);
        let cost = |transmission, compute| Cost { transmission, compute };
        match serving {
            ServingMode::Relayed => MachineCost { per_request: cost(go, compute), per_expert: cost(back, 0.0) },
            ServingMode::Direct => MachineCost { per_request: cost(go + back, 0.0), per_expert: cost(0.0, compute) },
            ServingMode::DirectSeparate => MachineCost { per_request: cost(go, 0.0), per_expert: cost(back, compute) },
        }
    }
}

/// Most experts that one token may need in one layer.
pub(crate) const MAX_EXPERTS_PER_TOKEN: usize = 32;
/// Most servers besides the one that holds all experts: placements are bit masks of 32 bits.
pub(crate) const MAX_SERVERS: usize = 31;

/// The costs of all machines for one site and one model.
#[derive(Clone, Debug)]
pub(crate) struct MachineCosts {
    /// One per server, then the machine that holds all experts.
    all: Vec<MachineCost>,
    /// Totals of `all`, in seconds.
    per_request: Vec<f64>,
    per_expert: Vec<f64>,
    /// The mask of the associated server, which computes all that it holds at any cost, before other servers and those
    /// before the machine that holds all experts. `None` if the cheapest machines are asked.
    preferred: Option<u32>,
}

/// The machine that computes each expert of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Assignment {
    count: usize,
    machines: [u8; MAX_EXPERTS_PER_TOKEN],
}

impl Assignment {
    /// The index of the machine for each expert, in the request's order.
    pub fn machines(&self) -> impl Iterator<Item = usize> + '_ {
        self.machines[..self.count].iter().map(|at| *at as usize)
    }
}

impl MachineCosts {
    pub fn new(
        serving: ServingMode,
        associated: Option<usize>,
        mut servers: Vec<MachineCost>,
        cloud: MachineCost,
    ) -> Self {
        servers.push(cloud);
        let preferred = match serving {
            ServingMode::Relayed => Some(associated.map_or(0, |n| 1 << n)),
            ServingMode::Direct | ServingMode::DirectSeparate => None,
        };
        MachineCosts {
            per_request: servers.iter().map(|t| t.per_request.total()).collect(),
            per_expert: servers.iter().map(|t| t.per_expert.total()).collect(),
            all: servers,
            preferred,
        }
    }

    /// The index of the machine that holds all experts.
    pub fn cloud(&self) -> usize {
        self.all.len() - 1
    }

    /// The cost of one machine.
    pub fn of(&self, machine: usize) -> &MachineCost {
        &self.all[machine]
    }

    /// Seconds for a request whose experts are on `holders`, one bit per server.
    pub fn cost(&self, holders: impl Iterator<Item = u32>) -> f64 {
        self.assign(holders).0
    }

    /// The cheapest assignment of a request's experts to machines, and the seconds that it takes.
    pub fn assign(&self, holders: impl Iterator<Item = u32>) -> (f64, Assignment) {
        let cloud = 1 << self.cloud();
        let mut masks = [0; MAX_EXPERTS_PER_TOKEN];
        let mut count = 0;
        for mask in holders {
            masks[count] = match self.preferred {
                Some(near) if mask & near != 0 => near,
                Some(_) if mask != 0 => mask,
                _ => mask | cloud,
            };
            count += 1;
        }
        let mut assignment = Assignment { count, machines: [0; MAX_EXPERTS_PER_TOKEN] };
        let mut search = Search {
            per_request: &self.per_request,
            per_expert: &self.per_expert,
            masks: &masks[..count],
            best: f64::INFINITY,
            chosen: [0; MAX_EXPERTS_PER_TOKEN],
            found: &mut assignment.machines,
        };
        search.extend(0, 0, 0.0);
        (search.best, assignment)
    }
}

/// Branch and bound over the assignments of experts to the machines that hold them.
struct Search<'a> {
    per_request: &'a [f64],
    per_expert: &'a [f64],
    masks: &'a [u32],
    best: f64,
    chosen: [u8; MAX_EXPERTS_PER_TOKEN],
    found: &'a mut [u8; MAX_EXPERTS_PER_TOKEN],
}

impl Search<'_> {
    /// Assigns the experts from `expert` on; the machines in `open` are asked already, at a total cost of `cost`.
    fn extend(&mut self, expert: usize, open: u32, cost: f64) {
        if cost >= self.best {
            return;
        }
        let Some(mask) = self.masks.get(expert) else {
            self.best = cost;
            *self.found = self.chosen;
            return;
        };
        // Machines that are asked already come first: their low bound prunes the search.
        for part in [mask & open, mask & !open] {
            let mut rest = part;
            while rest != 0 {
                let server = rest.trailing_zeros();
                rest &= rest - 1;
                let n = server as usize;
                let per_request = if open >> server & 1 == 1 { 0.0 } else { self.per_request[n] };
                self.chosen[expert] = server as u8;
                self.extend(expert + 1, open | 1 << server, cost + per_request + self.per_expert[n]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn machine_cost(per_request: f64, per_expert: f64) -> MachineCost {
        let cost = |transmission| Cost { transmission, compute: 0.0 };
        MachineCost { per_request: cost(per_request), per_expert: cost(per_expert) }
    }

    #[test]
    fn relayed_requests_prefer_the_associated_server_and_direct_ones_the_cheapest() {
        let servers =
            vec![machine_cost(0.5, 0.0), machine_cost(2.0, 1.0), machine_cost(3.0, 1.0), machine_cost(4.0, 0.5)];
        let costs = MachineCosts::new(ServingMode::Relayed, Some(0), servers, machine_cost(100.0, 10.0));
        let cost = |masks: &[u32]| costs.cost(masks.iter().copied());
        assert_eq!(cost(&[]), 0.0);
        // The associated server, although another server has the expert too.
        assert_eq!(cost(&[0b0011]), 0.5);
        // On no server: the machine that holds all experts.
        assert_eq!(cost(&[0, 0]), 120.0);
        // One server for both is cheaper than the nearest for each.
        assert_eq!(cost(&[0b1010, 0b1000]), 5.0);
        assert_eq!(cost(&[0b0110, 0b0100, 0b0001, 0]), 5.0 + 0.5 + 110.0);
        // A direct request goes to one machine if that machine has all experts.
        let servers = vec![machine_cost(4.0, 0.0), machine_cost(5.0, 0.0)];
        let direct = MachineCosts::new(ServingMode::Direct, Some(0), servers, machine_cost(8.0, 0.0));
        assert_eq!(direct.cost([0b01, 0b10].into_iter()), 8.0);
        assert_eq!(direct.cost([0b11, 0b10].into_iter()), 5.0);
        assert_eq!(direct.cost([0b01, 0].into_iter()), 8.0);
    }

    fn request_cost(machine_cost: MachineCost, experts: f64) -> Cost {
        let mut all = machine_cost.per_expert.times(experts);
        all += machine_cost.per_request;
        all
    }

    #[test]
    fn equations_7_and_10_in_all_serving_modes() {
        let model = ModelProfile {
            name: "m".into(),
            rows: 1,
            experts: 4,
            top_k: 2,
            expert_bytes: 1,
            state_bits: 1000.0,
            expert_flops: 2e6,
        };
        let link = NetworkLink { delay: 0.001, per_bit: 1e-6, return_delay: 0.002, return_per_bit: 2e-6 };
        let relayed = MachineCost::new(ServingMode::Relayed, &model, &link, 1e9);
        // To the machine 2 ms, back 4 ms for each, and 2e6 FLOP with a quarter of 1e9 FLOP/s.
        assert!((request_cost(relayed, 2.0).transmission - (0.002 + 2.0 * 0.004)).abs() < 1e-12);
        assert!((request_cost(relayed, 2.0).compute - 0.008).abs() < 1e-12);
        let direct = MachineCost::new(ServingMode::Direct, &model, &link, 1e9);
        assert!((request_cost(direct, 2.0).transmission - 0.006).abs() < 1e-12);
        assert!((request_cost(direct, 2.0).compute - 0.004).abs() < 1e-12);
        let separate = MachineCost::new(ServingMode::DirectSeparate, &model, &link, 1e9);
        assert!((request_cost(separate, 2.0).total() - (0.002 + 2.0 * 0.004 + 0.004)).abs() < 1e-12);
    }

    proptest! {
        /// Compares with every assignment.
        #[test]
        fn no_assignment_is_cheaper(
            costs in prop::collection::vec((0.0..5.0, 0.0..5.0), 1..5),
            masks in prop::collection::vec(1u32..16, 0..5),
        ) {
            let all = (1u32 << costs.len()) - 1;
            let masks: Vec<u32> = masks.into_iter().map(|m| m & all).filter(|m| *m != 0).collect();
            let servers: Vec<MachineCost> = costs.iter().map(|(per_request, per_expert)| machine_cost(*per_request, *per_expert)).collect();
            let found = MachineCosts::new(ServingMode::Direct, None, servers, machine_cost(1e6, 0.0)).cost(masks.iter().copied());
            let assignments = costs.len().pow(masks.len() as u32);
            let mut best = f64::INFINITY;
            for assignment in 0..assignments {
                let at: Vec<usize> = (0..masks.len()).map(|e| assignment / costs.len().pow(e as u32) % costs.len()).collect();
                if at.iter().zip(&masks).any(|(n, mask)| mask >> n & 1 == 0) {
                    continue;
                }
                let per_request: f64 = (0..costs.len()).filter(|n| at.contains(n)).map(|n| costs[n].0).sum();
                best = f64::min(best, per_request + at.iter().map(|n| costs[*n].1).sum::<f64>());
            }
            prop_assert!((found - best).abs() < 1e-9, "{found} instead of {best}");
        }
    }
}
