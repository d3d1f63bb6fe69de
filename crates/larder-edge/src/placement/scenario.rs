//! The scenario of the paper's experiments, generated from a seed. Values that the paper leaves open are marked.

use std::sync::Arc;

use larder_core::Rng;

use crate::placement::radio::dbm;
use crate::placement::users::expert_frequencies;
use crate::placement::{
    Demand, ExpertGroup, Library, ModelProfile, NetworkLink, PlacementError, Problem, Radio, Server, ServingMode, Site,
    User,
};

/// Path loss exponent and noise density of all radio links.
const PATH_LOSS: f64 = 4.0;
const NOISE_DBM: f64 = -174.0;
/// Transmission power of a device in watts.
const USER_POWER: f64 = 0.01;
/// Transmission power of a server in dBm.
const SERVER_DBM: f64 = 38.0;
/// Bandwidth between servers in Hz.
const SERVER_BANDWIDTH: f64 = 100e6;
/// One-way delay between a site and the cloud in seconds.
const CLOUD_DELAY: f64 = 0.01;
/// Speed of a device, a server and the cloud in FLOP/s.
const COMPUTE: [f64; 3] = [50e12, 82.58e12, 312e12];
/// Bytes per number, in experts and hidden states alike. The paper does not state it.
const BYTES_PER_NUMBER: f64 = 2.0;

/// One of the paper's models: name, layers with experts, experts, k, hidden size, width, matrices of an expert.
type Family = (&'static str, usize, usize, usize, usize, usize, usize);

const ST_8: Family = ("ST-b-8", 12, 8, 1, 768, 3072, 2);
const ST_16: Family = ("ST-b-16", 12, 16, 1, 768, 3072, 2);
const ST_32: Family = ("ST-b-32", 12, 32, 1, 768, 3072, 2);
const STABLE: Family = ("MoE-LLaVA-StableLM-1.6B-4e", 12, 4, 2, 2048, 5632, 3);
const QWEN: Family = ("MoE-LLaVA-Qwen-1.8B-4e", 12, 4, 2, 2048, 5504, 3);
const PHI: Family = ("MoE-LLaVA-Phi2-2.7B-4e", 16, 4, 2, 2560, 10240, 2);
const LLAMA: Family = ("LLaMA-MoE-3.5B", 32, 16, 4, 4096, 688, 3);

/// 18 models with 3872 experts. The paper names seven models and the two totals; how often each occurs, as a variant of
/// the same model, is chosen here.
const LIBRARY: [Family; 18] = [
    ST_8, STABLE, ST_16, LLAMA, QWEN, ST_32, PHI, ST_8, STABLE, ST_16, LLAMA, QWEN, ST_32, PHI, ST_8, ST_16, LLAMA,
    ST_32,
];

/// The parameters of a simulated network; the default is the paper's.
#[derive(Clone, PartialEq, Debug)]
pub struct Scenario {
    /// Number of servers, at random positions in the square.
    pub servers: usize,
    /// Number of users, at random positions in the square.
    pub users: usize,
    /// Side of the square in metres.
    pub side_metres: f64,
    /// Bytes for experts on each server.
    pub storage: u64,
    /// Bandwidth of each user in Hz.
    pub bandwidth: f64,
    /// Number of models in the library; beyond 18 the list repeats as further variants.
    pub models: usize,
    /// Fewest and most models that a user runs.
    pub models_per_user: (usize, usize),
    /// Number of experts that a device holds.
    pub device_experts: usize,
    /// Zipf exponent of a user's models: the j-th has a share in proportion to 1 / j^zipf. The paper does not state it.
    pub zipf: f64,
    /// Zipf exponents of the experts of the first and the last layer, interpolated linearly in between. The paper
    /// measures activations and finds that deeper layers are more skewed, but does not print them.
    pub skew: (f64, f64),
    /// Number of prompt datasets; users of one dataset need the same experts of a model. The paper has two.
    pub datasets: usize,
    /// Tokens of each dataset over which activations are counted.
    pub tokens: usize,
}

impl Default for Scenario {
    /// The paper's values, and the choices above where it states none.
    fn default() -> Self {
        Scenario {
            servers: 4,
            users: 20,
            side_metres: 1000.0,
            storage: 5_000_000_000,
            bandwidth: 5e6,
            models: LIBRARY.len(),
            models_per_user: (3, 5),
            device_experts: 200,
            zipf: 0.8,
            skew: (0.5, 1.5),
            datasets: 2,
            tokens: 400,
        }
    }
}

impl Scenario {
    /// Generates positions, demands and activations. Equal seeds give equal problems; parameters that are not varied
    /// keep their random numbers.
    pub fn generate(&self, seed: u64) -> Result<Problem, PlacementError> {
        self.check().map_err(PlacementError::Invalid)?;
        // One random stream per kind, so that more of one kind does not change the others.
        let stream = |n: u64| Rng::new(Rng::new(seed ^ n << 56).bits());
        let (mut server_rng, mut user_rng, mut demand_rng, mut routing_rng) =
            (stream(1), stream(2), stream(3), stream(4));
        let library = Library::new((0..self.models).map(model).collect());
        let rows = self.activations(&library, &mut routing_rng);
        let random_position = |rng: &mut Rng| [rng.unit() * self.side_metres, rng.unit() * self.side_metres];
        let positions: Vec<[f64; 2]> = (0..self.servers).map(|_| random_position(&mut server_rng)).collect();
        let sites = (0..self.servers).map(|n| self.site(n, &positions)).collect();
        let users = (0..self.users)
            .map(|_| {
                let (site, link) = self.associated(random_position(&mut user_rng), &positions);
                let demands = self.demands(&rows, &mut demand_rng);
                let local = self.most_requested(&library, &demands);
                User { site, link, compute: COMPUTE[0], local, demands }
            })
            .collect();
        let servers = vec![Server { storage: self.storage, compute: COMPUTE[1] }; self.servers];
        Problem::new(library, servers, COMPUTE[2], sites, users, ServingMode::Relayed)
    }

    fn check(&self) -> Result<(), String> {
        let sizes = [
            ("servers", self.servers),
            ("users", self.users),
            ("models", self.models),
            ("models per user", self.models_per_user.0),
            ("datasets", self.datasets),
            ("tokens", self.tokens),
        ];
        if let Some((name, _)) = sizes.iter().find(|(_, n)| *n == 0) {
            return Err(format!("invalid scenario: the number of {name} must be at least 1"));
        }
        if self.models_per_user.0 <= self.models_per_user.1 && self.models_per_user.1 <= self.models {
            Ok(())
        } else {
            Err(format!(
                "invalid scenario: users cannot run {} to {} of {} models",
                self.models_per_user.0, self.models_per_user.1, self.models
            ))
        }
    }

    /// The site of server `n`, with its links to the other servers and to the cloud.
    fn site(&self, n: usize, positions: &[[f64; 2]]) -> Site {
        let radio = radio(SERVER_BANDWIDTH, dbm(SERVER_DBM));
        let link = |(other, position): (usize, &[f64; 2])| {
            if other == n {
                NetworkLink::default()
            } else {
                let per_bit = 1.0 / radio.rate(distance(positions[n], *position));
                NetworkLink { per_bit, return_per_bit: per_bit, ..NetworkLink::default() }
            }
        };
        let cloud = NetworkLink { delay: CLOUD_DELAY, return_delay: CLOUD_DELAY, ..NetworkLink::default() };
        Site { associated: Some(n), links: positions.iter().enumerate().map(link).collect(), cloud }
    }

    /// The server with the fastest link in both directions together, and that link.
    fn associated(&self, home: [f64; 2], positions: &[[f64; 2]]) -> (usize, NetworkLink) {
        let (up, down) = (radio(self.bandwidth, USER_POWER), radio(self.bandwidth, dbm(SERVER_DBM)));
        let link = |position: &[f64; 2]| {
            let metres = distance(home, *position);
            NetworkLink {
                per_bit: 1.0 / up.rate(metres),
                return_per_bit: 1.0 / down.rate(metres),
                ..NetworkLink::default()
            }
        };
        let links = positions.iter().map(link).enumerate();
        let slowness = |link: &NetworkLink| link.per_bit + link.return_per_bit;
        links.min_by(|a, b| slowness(&a.1).total_cmp(&slowness(&b.1))).expect("there is at least one server")
    }

    /// The groups of experts that tokens need, by model and dataset, counted over randomly routed tokens.
    fn activations(&self, library: &Library, rng: &mut Rng) -> Vec<Vec<Arc<Vec<Vec<ExpertGroup>>>>> {
        let of = |model: &ModelProfile, rng: &mut Rng| {
            let row = |row: usize, rng: &mut Rng| {
                let depth = row as f64 / (model.rows - 1).max(1) as f64;
                let skew = self.skew.0 + depth * (self.skew.1 - self.skew.0);
                sample_routing(model, skew, self.tokens, rng)
            };
            Arc::new((0..model.rows).map(|at| row(at, rng)).collect::<Vec<_>>())
        };
        let models = library.models().iter();
        models.map(|model| (0..self.datasets).map(|_| of(model, rng)).collect()).collect()
    }

    fn demands(&self, rows: &[Vec<Arc<Vec<Vec<ExpertGroup>>>>], rng: &mut Rng) -> Vec<Demand> {
        let dataset = rng.below(self.datasets);
        // All models are shuffled even if few are used, so that a user with more models keeps the first ones.
        let extra = rng.below(self.models_per_user.1 - self.models_per_user.0 + 1);
        let mut models: Vec<usize> = (0..rows.len()).collect();
        rng.shuffle(&mut models);
        models.truncate(self.models_per_user.0 + extra);
        let weights: Vec<f64> = (1..=models.len()).map(|j| (j as f64).powf(-self.zipf)).collect();
        let sum: f64 = weights.iter().sum();
        let demand =
            |(model, weight): (usize, f64)| Demand { model, share: weight / sum, rows: rows[model][dataset].clone() };
        models.into_iter().zip(weights).map(demand).collect()
    }

    /// The experts that a user needs most often, as many as the device holds.
    fn most_requested(&self, library: &Library, demands: &[Demand]) -> Vec<bool> {
        let frequencies = expert_frequencies(library, demands);
        let mut order: Vec<usize> = (0..frequencies.len()).filter(|e| frequencies[*e] > 0.0).collect();
        order.sort_by(|a, b| frequencies[*b].total_cmp(&frequencies[*a]).then(a.cmp(b)));
        let mut local = vec![false; frequencies.len()];
        order.into_iter().take(self.device_experts).for_each(|expert| local[expert] = true);
        local
    }
}

fn radio(bandwidth: f64, power: f64) -> Radio {
    Radio { bandwidth, power, antenna_gain: 1.0, path_loss_exponent: PATH_LOSS, noise_density: dbm(NOISE_DBM) }
}

fn distance(a: [f64; 2], b: [f64; 2]) -> f64 {
    (a[0] - b[0]).hypot(a[1] - b[1])
}

fn model(at: usize) -> ModelProfile {
    let (name, rows, experts, top_k, hidden, width, matrices) = LIBRARY[at % LIBRARY.len()];
    let numbers = (hidden * width * matrices) as f64;
    ModelProfile {
        name: format!("{name} #{}", at + 1),
        rows,
        experts,
        top_k,
        expert_bytes: (numbers * BYTES_PER_NUMBER) as u64,
        state_bits: hidden as f64 * BYTES_PER_NUMBER * 8.0,
        expert_flops: 2.0 * numbers,
    }
}

/// The groups of distinct experts that randomly routed tokens need, popular experts more often.
fn sample_routing(model: &ModelProfile, skew: f64, tokens: usize, rng: &mut Rng) -> Vec<ExpertGroup> {
    let mut popular: Vec<u16> = (0..model.experts as u16).collect();
    rng.shuffle(&mut popular);
    let weights: Vec<f64> = (1..=model.experts).map(|j| (j as f64).powf(-skew)).collect();
    let mut groups: Vec<Vec<u16>> = (0..tokens)
        .map(|_| {
            let mut ranks: Vec<usize> = (0..model.experts).collect();
            let mut group: Vec<u16> = (0..model.top_k)
                .map(|_| {
                    let sum: f64 = ranks.iter().map(|rank| weights[*rank]).sum();
                    let mut at = rng.unit() * sum;
                    let drawn = ranks.iter().position(|rank| {
                        at -= weights[*rank];
                        at < 0.0
                    });
                    popular[ranks.remove(drawn.unwrap_or(ranks.len() - 1))]
                })
                .collect();
            group.sort_unstable();
            group
        })
        .collect();
    groups.sort_unstable();
    let equal = groups.chunk_by(|a, b| a == b);
    equal.map(|same| ExpertGroup { experts: same[0].clone(), share: same.len() as f64 / tokens as f64 }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::{algorithm, latency};

    #[test]
    fn the_library_has_the_paper_s_size() {
        let problem = Scenario::default().generate(1).unwrap();
        assert_eq!((problem.library.models().len(), problem.library.experts()), (18, 3872));
        for user in &problem.users {
            assert!((3..=5).contains(&user.demands.len()));
            assert!((user.demands.iter().map(|d| d.share).sum::<f64>() - 1.0).abs() < 1e-12);
            assert!((150..=200).contains(&user.local.iter().filter(|held| **held).count()));
            for row in user.demands.iter().flat_map(|d| d.rows.iter()) {
                assert!((row.iter().map(|l| l.share).sum::<f64>() - 1.0).abs() < 1e-9);
            }
        }
    }

    #[test]
    fn equal_seeds_give_equal_problems_and_more_servers_keep_the_demands() {
        let small = Scenario { users: 5, models: 6, tokens: 50, storage: 1_000_000_000, ..Scenario::default() };
        let place = algorithm("accelerated").unwrap();
        let total = |scenario: &Scenario, seed| {
            let problem = scenario.generate(seed).unwrap();
            latency(&problem, &place.place(&problem, 0)).total()
        };
        assert_eq!(total(&small, 1), total(&small, 1));
        assert_ne!(total(&small, 1), total(&small, 2));
        let models = |scenario: &Scenario| -> Vec<usize> {
            scenario.generate(1).unwrap().users.iter().flat_map(|u| u.demands.iter().map(|d| d.model)).collect()
        };
        assert_eq!(models(&small), models(&Scenario { servers: 7, ..small.clone() }));
    }

    /// The reason for which more servers help `lfu` less than the others: docs/edge-placement.md, figure 8a.
    #[test]
    fn ten_servers_by_lfu_hold_few_distinct_experts() {
        let problem =
            crate::placement::simulate::problem(&Scenario { servers: 10, ..Scenario::default() }, 1, 0).unwrap();
        let distinct = |name: &str| {
            let placement = algorithm(name).unwrap().place(&problem, 0);
            let held = (0..problem.library.experts()).filter(|e| (0..10).any(|server| placement.holds(server, *e)));
            let copies: usize = (0..10).map(|server| placement.experts_of(server).count()).sum();
            (held.count(), copies)
        };
        let [lfu, accelerated] = ["lfu", "accelerated"].map(distinct);
        println!("distinct experts and copies: lfu {lfu:?}, accelerated {accelerated:?}");
        assert!(2 * lfu.0 < accelerated.0, "{lfu:?} {accelerated:?}");
    }

    #[test]
    fn invalid_scenarios_are_refused() {
        let error = |scenario: Scenario| scenario.generate(0).unwrap_err().to_string();
        assert!(error(Scenario { servers: 0, ..Scenario::default() }).contains("servers"));
        assert!(error(Scenario { models: 2, ..Scenario::default() }).contains("3 to 5 of 2 models"));
    }
}
