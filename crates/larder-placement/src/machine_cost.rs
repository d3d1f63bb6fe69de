//! What a layer's missing experts cost on their way: equations 7 to 10, for one place where requests enter and one model.

use crate::ModelProfile;

/// Seconds, by what they are spent on.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Cost {
    /// On the way.
    pub transmission: f64,
    /// Computing.
    pub compute: f64,
}

impl Cost {
    /// Both together.
    pub fn total(self) -> f64 {
        self.transmission + self.compute
    }

    /// So many times as much.
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

/// A way between two machines, there and back.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct NetworkLink {
    /// Seconds until the first bit is there.
    pub delay: f64,
    /// Seconds for each further bit.
    pub per_bit: f64,
    /// Seconds until the first bit of the answer is there.
    pub return_delay: f64,
    /// Seconds for each further bit of it.
    pub return_per_bit: f64,
}

impl NetworkLink {
    /// Seconds that a hidden state travels.
    pub fn send_seconds(&self, bits: f64) -> f64 {
        self.delay + bits * self.per_bit
    }

    /// Seconds that an answer travels.
    pub fn return_seconds(&self, bits: f64) -> f64 {
        self.return_delay + bits * self.return_per_bit
    }
}

/// How servers serve.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ServingMode {
    /// As the paper has it: the associated server passes a token on, every expert's output comes back by itself, and a
    /// machine computes all experts of a token at once, each with its share of what the machine can do.
    Relayed,
    /// As `larder run --edge` does it: the device asks whichever servers are fastest, the outputs of a server's experts
    /// come back as one sum, and a machine computes a token's experts one after the other, each with all that it can do.
    Direct,
    /// The same, but every expert's output comes back by itself. With one sum for all, an expert saves nothing as long
    /// as another one of its layer must come from afar; this is what is decided with, then.
    DirectSeparate,
}

impl ServingMode {
    /// Seconds that one expert takes on a machine of so many FLOP/s.
    pub fn compute(self, model: &ModelProfile, flops: f64) -> f64 {
        match self {
            ServingMode::Relayed => model.expert_flops / (flops / model.experts as f64),
            ServingMode::Direct | ServingMode::DirectSeparate => model.expert_flops / flops,
        }
    }
}

/// What it costs to ask one machine.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct MachineCost {
    /// Once for each layer in which it is asked.
    pub per_request: Cost,
    /// For each of its experts.
    pub per_expert: Cost,
}

impl MachineCost {
    /// The toll of a machine at the end of `way`.
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

/// Most experts that one token may ask for in one layer.
pub(crate) const MAX_EXPERTS_PER_TOKEN: usize = 32;
/// Most servers, beside the one that holds all.
pub(crate) const MAX_SERVERS: usize = 31;

/// The tolls of all machines for one place where requests enter and one model.
#[derive(Clone, Debug)]
pub(crate) struct MachineCosts {
    /// Of each server, and behind them of the machine that holds all.
    all: Vec<MachineCost>,
    /// The same as plain seconds.
    per_request: Vec<f64>,
    per_expert: Vec<f64>,
    /// The server that is asked for all that it has, whatever that costs, and with it the others before the machine
    /// that holds all; `None` if whoever is fastest is asked.
    order: Option<u32>,
}

/// Who serves the experts that are asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Assignment {
    count: usize,
    at: [u8; MAX_EXPERTS_PER_TOKEN],
}

impl Assignment {
    /// The machine of each expert.
    pub fn machines(&self) -> impl Iterator<Item = usize> + '_ {
        self.at[..self.count].iter().map(|at| *at as usize)
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
        let order = match serving {
            ServingMode::Relayed => Some(associated.map_or(0, |n| 1 << n)),
            ServingMode::Direct | ServingMode::DirectSeparate => None,
        };
        MachineCosts {
            per_request: servers.iter().map(|t| t.per_request.total()).collect(),
            per_expert: servers.iter().map(|t| t.per_expert.total()).collect(),
            all: servers,
            order,
        }
    }

    /// The number of the machine that holds all.
    pub fn cloud(&self) -> usize {
        self.all.len() - 1
    }

    /// The toll of a machine.
    pub fn of(&self, machine: usize) -> &MachineCost {
        &self.all[machine]
    }

    /// Seconds for experts that lie at `holders`, a bit for each server.
    pub fn cost(&self, holders: impl Iterator<Item = u32>) -> f64 {
        self.share(holders).0
    }

    /// Who is asked for which of these experts, and the seconds that it takes.
    pub fn share(&self, holders: impl Iterator<Item = u32>) -> (f64, Assignment) {
        let cloud = 1 << self.cloud();
        let mut masks = [0; MAX_EXPERTS_PER_TOKEN];
        let mut count = 0;
        for mask in holders {
            masks[count] = match self.order {
                Some(near) if mask & near != 0 => near,
                Some(_) if mask != 0 => mask,
                _ => mask | cloud,
            };
            count += 1;
        }
        let mut shared = Assignment { count, at: [0; MAX_EXPERTS_PER_TOKEN] };
        let mut search = Search {
            per_request: &self.per_request,
            per_expert: &self.per_expert,
            masks: &masks[..count],
            best: f64::INFINITY,
            at: [0; MAX_EXPERTS_PER_TOKEN],
            found: &mut shared.at,
        };
        search.from(0, 0, 0.0);
        (search.best, shared)
    }
}

/// The cheapest way to serve some experts, each of which lies at some servers.
struct Search<'a> {
    per_request: &'a [f64],
    per_expert: &'a [f64],
    masks: &'a [u32],
    best: f64,
    at: [u8; MAX_EXPERTS_PER_TOKEN],
    found: &'a mut [u8; MAX_EXPERTS_PER_TOKEN],
}

impl Search<'_> {
    /// Servers of the experts from `expert` on, `open` of which are asked already.
    fn from(&mut self, expert: usize, open: u32, cost: f64) {
        if cost >= self.best {
            return;
        }
        let Some(mask) = self.masks.get(expert) else {
            self.best = cost;
            *self.found = self.at;
            return;
        };
        // Those that are asked anyway first: what they find makes the search short.
        for part in [mask & open, mask & !open] {
            let mut rest = part;
            while rest != 0 {
                let server = rest.trailing_zeros();
                rest &= rest - 1;
                let n = server as usize;
                let per_request = if open >> server & 1 == 1 { 0.0 } else { self.per_request[n] };
                self.at[expert] = server as u8;
                self.from(expert + 1, open | 1 << server, cost + per_request + self.per_expert[n]);
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
    fn the_order_of_search_is_kept_and_the_rest_is_cheapest() {
        let servers =
            vec![machine_cost(0.5, 0.0), machine_cost(2.0, 1.0), machine_cost(3.0, 1.0), machine_cost(4.0, 0.5)];
        let costs = MachineCosts::new(ServingMode::Relayed, Some(0), servers, machine_cost(100.0, 10.0));
        let cost = |masks: &[u32]| costs.cost(masks.iter().copied());
        assert_eq!(cost(&[]), 0.0);
        // The associated server, though another has it too.
        assert_eq!(cost(&[0b0011]), 0.5);
        // Nobody: the machine that holds all.
        assert_eq!(cost(&[0, 0]), 120.0);
        // One server for both is cheaper than the nearest for each.
        assert_eq!(cost(&[0b1010, 0b1000]), 5.0);
        assert_eq!(cost(&[0b0110, 0b0100, 0b0001, 0]), 5.0 + 0.5 + 110.0);
        // Who asks freely does not ask twice if one machine has all.
        let servers = vec![machine_cost(4.0, 0.0), machine_cost(5.0, 0.0)];
        let free = MachineCosts::new(ServingMode::Direct, Some(0), servers, machine_cost(8.0, 0.0));
        assert_eq!(free.cost([0b01, 0b10].into_iter()), 8.0);
        assert_eq!(free.cost([0b11, 0b10].into_iter()), 5.0);
        assert_eq!(free.cost([0b01, 0].into_iter()), 8.0);
    }

    fn of(machine_cost: MachineCost, experts: f64) -> Cost {
        let mut all = machine_cost.per_expert.times(experts);
        all += machine_cost.per_request;
        all
    }

    #[test]
    fn equations_7_and_10_in_both_ways_of_serving() {
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
        // There 2 ms, back 4 ms for each, and 2e6 FLOP with a quarter of 1e9 FLOP/s.
        assert!((of(relayed, 2.0).transmission - (0.002 + 2.0 * 0.004)).abs() < 1e-12);
        assert!((of(relayed, 2.0).compute - 0.008).abs() < 1e-12);
        let direct = MachineCost::new(ServingMode::Direct, &model, &link, 1e9);
        assert!((of(direct, 2.0).transmission - 0.006).abs() < 1e-12);
        assert!((of(direct, 2.0).compute - 0.004).abs() < 1e-12);
        let apart = MachineCost::new(ServingMode::DirectSeparate, &model, &link, 1e9);
        assert!((of(apart, 2.0).total() - (0.002 + 2.0 * 0.004 + 0.004)).abs() < 1e-12);
    }

    proptest! {
        /// All ways to serve, tried one after the other.
        #[test]
        fn no_way_to_serve_is_cheaper(
            costs in prop::collection::vec((0.0..5.0, 0.0..5.0), 1..5),
            masks in prop::collection::vec(1u32..16, 0..5),
        ) {
            let all = (1u32 << costs.len()) - 1;
            let masks: Vec<u32> = masks.into_iter().map(|m| m & all).filter(|m| *m != 0).collect();
            let servers: Vec<MachineCost> = costs.iter().map(|(per_request, per_expert)| machine_cost(*per_request, *per_expert)).collect();
            let found = MachineCosts::new(ServingMode::Direct, None, servers, machine_cost(1e6, 0.0)).cost(masks.iter().copied());
            let ways = costs.len().pow(masks.len() as u32);
            let mut best = f64::INFINITY;
            for way in 0..ways {
                let at: Vec<usize> = (0..masks.len()).map(|e| way / costs.len().pow(e as u32) % costs.len()).collect();
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
