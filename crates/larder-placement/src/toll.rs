//! What a layer's missing experts cost on their way: equations 7 to 10, for one place where requests enter and one model.

use crate::Model;

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
pub struct Way {
    /// Seconds until the first bit is there.
    pub delay: f64,
    /// Seconds for each further bit.
    pub per_bit: f64,
    /// Seconds until the first bit of the answer is there.
    pub back_delay: f64,
    /// Seconds for each further bit of it.
    pub back_per_bit: f64,
}

impl Way {
    /// Seconds that a hidden state travels.
    pub fn go(&self, bits: f64) -> f64 {
        self.delay + bits * self.per_bit
    }

    /// Seconds that an answer travels.
    pub fn back(&self, bits: f64) -> f64 {
        self.back_delay + bits * self.back_per_bit
    }
}

/// How servers serve.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Serving {
    /// As the paper has it: the associated server passes a token on, every expert's output comes back by itself, and a
    /// machine computes all experts of a token at once, each with its share of what the machine can do.
    Relayed,
    /// As `larder run --edge` does it: the device asks whichever servers are fastest, the outputs of a server's experts
    /// come back as one sum, and a machine computes a token's experts one after the other, each with all that it can do.
    Direct,
    /// The same, but every expert's output comes back by itself. With one sum for all, an expert saves nothing as long
    /// as another one of its layer must come from afar; this is what is decided with, then.
    Apart,
}

impl Serving {
    /// Seconds that one expert takes on a machine of so many FLOP/s.
    pub fn compute(self, model: &Model, flops: f64) -> f64 {
        match self {
            Serving::Relayed => model.expert_flops / (flops / model.experts as f64),
            Serving::Direct | Serving::Apart => model.expert_flops / flops,
        }
    }
}

/// What it costs to ask one machine.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Toll {
    /// Once for each layer in which it is asked.
    pub enter: Cost,
    /// For each of its experts.
    pub each: Cost,
}

impl Toll {
    /// The toll of a machine at the end of `way`.
    pub fn new(serving: Serving, model: &Model, way: &Way, flops: f64) -> Self {
        let (go, back) = (way.go(model.state_bits), way.back(model.state_bits));
        let compute = serving.compute(model, flops);
        let cost = |transmission, compute| Cost { transmission, compute };
        match serving {
            Serving::Relayed => Toll { enter: cost(go, compute), each: cost(back, 0.0) },
            Serving::Direct => Toll { enter: cost(go + back, 0.0), each: cost(0.0, compute) },
            Serving::Apart => Toll { enter: cost(go, 0.0), each: cost(back, compute) },
        }
    }
}

/// Most experts that one token may ask for in one layer.
pub(crate) const ASKED_MAX: usize = 32;
/// Most servers, beside the one that holds all.
pub(crate) const SERVERS_MAX: usize = 31;

/// The tolls of all machines for one place where requests enter and one model.
#[derive(Clone, Debug)]
pub(crate) struct Tolls {
    /// Of each server, and behind them of the machine that holds all.
    all: Vec<Toll>,
    /// The same as plain seconds.
    enter: Vec<f64>,
    each: Vec<f64>,
    /// The server that is asked for all that it has, whatever that costs, and with it the others before the machine
    /// that holds all; `None` if whoever is fastest is asked.
    order: Option<u32>,
}

/// Who serves the experts that are asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shared {
    count: usize,
    at: [u8; ASKED_MAX],
}

impl Shared {
    /// The machine of each expert.
    pub fn machines(&self) -> impl Iterator<Item = usize> + '_ {
        self.at[..self.count].iter().map(|at| *at as usize)
    }
}

impl Tolls {
    pub fn new(serving: Serving, associated: Option<usize>, mut servers: Vec<Toll>, cloud: Toll) -> Self {
        servers.push(cloud);
        let order = match serving {
            Serving::Relayed => Some(associated.map_or(0, |n| 1 << n)),
            Serving::Direct | Serving::Apart => None,
        };
        Tolls {
            enter: servers.iter().map(|t| t.enter.total()).collect(),
            each: servers.iter().map(|t| t.each.total()).collect(),
            all: servers,
            order,
        }
    }

    /// The number of the machine that holds all.
    pub fn cloud(&self) -> usize {
        self.all.len() - 1
    }

    /// The toll of a machine.
    pub fn of(&self, machine: usize) -> &Toll {
        &self.all[machine]
    }

    /// Seconds for experts that lie at `holders`, a bit for each server.
    pub fn cost(&self, holders: impl Iterator<Item = u32>) -> f64 {
        self.share(holders).0
    }

    /// Who is asked for which of these experts, and the seconds that it takes.
    pub fn share(&self, holders: impl Iterator<Item = u32>) -> (f64, Shared) {
        let cloud = 1 << self.cloud();
        let mut masks = [0; ASKED_MAX];
        let mut count = 0;
        for mask in holders {
            masks[count] = match self.order {
                Some(near) if mask & near != 0 => near,
                Some(_) if mask != 0 => mask,
                _ => mask | cloud,
            };
            count += 1;
        }
        let mut shared = Shared { count, at: [0; ASKED_MAX] };
        let mut search = Search {
            enter: &self.enter,
            each: &self.each,
            masks: &masks[..count],
            best: f64::INFINITY,
            at: [0; ASKED_MAX],
            found: &mut shared.at,
        };
        search.from(0, 0, 0.0);
        (search.best, shared)
    }
}

/// The cheapest way to serve some experts, each of which lies at some servers.
struct Search<'a> {
    enter: &'a [f64],
    each: &'a [f64],
    masks: &'a [u32],
    best: f64,
    at: [u8; ASKED_MAX],
    found: &'a mut [u8; ASKED_MAX],
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
                let enter = if open >> server & 1 == 1 { 0.0 } else { self.enter[n] };
                self.at[expert] = server as u8;
                self.from(expert + 1, open | 1 << server, cost + enter + self.each[n]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn toll(enter: f64, each: f64) -> Toll {
        let cost = |transmission| Cost { transmission, compute: 0.0 };
        Toll { enter: cost(enter), each: cost(each) }
    }

    #[test]
    fn the_order_of_search_is_kept_and_the_rest_is_cheapest() {
        let servers = vec![toll(0.5, 0.0), toll(2.0, 1.0), toll(3.0, 1.0), toll(4.0, 0.5)];
        let tolls = Tolls::new(Serving::Relayed, Some(0), servers, toll(100.0, 10.0));
        let cost = |masks: &[u32]| tolls.cost(masks.iter().copied());
        assert_eq!(cost(&[]), 0.0);
        // The associated server, though another has it too.
        assert_eq!(cost(&[0b0011]), 0.5);
        // Nobody: the machine that holds all.
        assert_eq!(cost(&[0, 0]), 120.0);
        // One server for both is cheaper than the nearest for each.
        assert_eq!(cost(&[0b1010, 0b1000]), 5.0);
        assert_eq!(cost(&[0b0110, 0b0100, 0b0001, 0]), 5.0 + 0.5 + 110.0);
        // Who asks freely does not ask twice if one machine has all.
        let servers = vec![toll(4.0, 0.0), toll(5.0, 0.0)];
        let free = Tolls::new(Serving::Direct, Some(0), servers, toll(8.0, 0.0));
        assert_eq!(free.cost([0b01, 0b10].into_iter()), 8.0);
        assert_eq!(free.cost([0b11, 0b10].into_iter()), 5.0);
        assert_eq!(free.cost([0b01, 0].into_iter()), 8.0);
    }

    fn of(toll: Toll, experts: f64) -> Cost {
        let mut all = toll.each.times(experts);
        all += toll.enter;
        all
    }

    #[test]
    fn equations_7_and_10_in_both_ways_of_serving() {
        let model = Model {
            name: "m".into(),
            rows: 1,
            experts: 4,
            top_k: 2,
            expert_bytes: 1,
            state_bits: 1000.0,
            expert_flops: 2e6,
        };
        let way = Way { delay: 0.001, per_bit: 1e-6, back_delay: 0.002, back_per_bit: 2e-6 };
        let relayed = Toll::new(Serving::Relayed, &model, &way, 1e9);
        // There 2 ms, back 4 ms for each, and 2e6 FLOP with a quarter of 1e9 FLOP/s.
        assert!((of(relayed, 2.0).transmission - (0.002 + 2.0 * 0.004)).abs() < 1e-12);
        assert!((of(relayed, 2.0).compute - 0.008).abs() < 1e-12);
        let direct = Toll::new(Serving::Direct, &model, &way, 1e9);
        assert!((of(direct, 2.0).transmission - 0.006).abs() < 1e-12);
        assert!((of(direct, 2.0).compute - 0.004).abs() < 1e-12);
        let apart = Toll::new(Serving::Apart, &model, &way, 1e9);
        assert!((of(apart, 2.0).total() - (0.002 + 2.0 * 0.004 + 0.004)).abs() < 1e-12);
    }

    proptest! {
        /// All ways to serve, tried one after the other.
        #[test]
        fn no_way_to_serve_is_cheaper(
            tolls in prop::collection::vec((0.0..5.0, 0.0..5.0), 1..5),
            masks in prop::collection::vec(1u32..16, 0..5),
        ) {
            let all = (1u32 << tolls.len()) - 1;
            let masks: Vec<u32> = masks.into_iter().map(|m| m & all).filter(|m| *m != 0).collect();
            let servers: Vec<Toll> = tolls.iter().map(|(enter, each)| toll(*enter, *each)).collect();
            let found = Tolls::new(Serving::Direct, None, servers, toll(1e6, 0.0)).cost(masks.iter().copied());
            let ways = tolls.len().pow(masks.len() as u32);
            let mut best = f64::INFINITY;
            for way in 0..ways {
                let at: Vec<usize> = (0..masks.len()).map(|e| way / tolls.len().pow(e as u32) % tolls.len()).collect();
                if at.iter().zip(&masks).any(|(n, mask)| mask >> n & 1 == 0) {
                    continue;
                }
                let enter: f64 = (0..tolls.len()).filter(|n| at.contains(n)).map(|n| tolls[n].0).sum();
                best = f64::min(best, enter + at.iter().map(|n| tolls[*n].1).sum::<f64>());
            }
            prop_assert!((found - best).abs() < 1e-9, "{found} instead of {best}");
        }
    }
}
