//! The setting of the paper's experiments, drawn from a seed. What the paper leaves open is said beside it.

use std::sync::Arc;

use larder_core::Rng;

use crate::problem::expert_frequencies;
use crate::radio::dbm;
use crate::{
    Demand, ExpertGroup, Library, ModelProfile, NetworkLink, PlacementError, Problem, Radio, Server, ServingMode, Site,
    User,
};

/// Path loss and noise of all that is sent over the air.
const PATH_LOSS: f64 = 4.0;
const NOISE_DBM: f64 = -174.0;
/// Watts of a device.
const USER_POWER: f64 = 0.01;
/// Level of a server.
const SERVER_DBM: f64 = 38.0;
/// Hz between servers.
const SERVER_BANDWIDTH: f64 = 100e6;
/// Seconds to the cloud, and from it.
const CLOUD_DELAY: f64 = 0.01;
/// FLOP/s of a device, a server and the cloud.
const COMPUTE: [f64; 3] = [50e12, 82.58e12, 312e12];
/// Bytes of a number, in experts and hidden states alike. The paper does not say.
const NUMBER: f64 = 2.0;

/// One of the paper's models: name, layers with experts, experts, k, hidden size, width, matrices of an expert.
type Family = (&'static str, usize, usize, usize, usize, usize, usize);

const ST_8: Family = ("ST-b-8", 12, 8, 1, 768, 3072, 2);
const ST_16: Family = ("ST-b-16", 12, 16, 1, 768, 3072, 2);
const ST_32: Family = ("ST-b-32", 12, 32, 1, 768, 3072, 2);
const STABLE: Family = ("MoE-LLaVA-StableLM-1.6B-4e", 12, 4, 2, 2048, 5632, 3);
const QWEN: Family = ("MoE-LLaVA-Qwen-1.8B-4e", 12, 4, 2, 2048, 5504, 3);
const PHI: Family = ("MoE-LLaVA-Phi2-2.7B-4e", 16, 4, 2, 2560, 10240, 2);
const LLAMA: Family = ("LLaMA-MoE-3.5B", 32, 16, 4, 4096, 688, 3);

/// 18 models with 3872 experts. The paper names the seven that there are and the two sums; which of them occur how
/// often, as variants of each other, is the choice made here.
const LIBRARY: [Family; 18] = [
    ST_8, STABLE, ST_16, LLAMA, QWEN, ST_32, PHI, ST_8, STABLE, ST_16, LLAMA, QWEN, ST_32, PHI, ST_8, ST_16, LLAMA,
    ST_32,
];

/// What can be varied.
#[derive(Clone, PartialEq, Debug)]
pub struct Scenario {
    /// Servers, anywhere in the square.
    pub servers: usize,
    /// Users, anywhere in the square.
    pub users: usize,
    /// Metres of a side.
    pub side_metres: f64,
    /// Bytes of experts that fit on each server.
    pub storage: u64,
    /// Hz of one user.
    pub bandwidth: f64,
    /// Models in the library; beyond 18 there are further variants.
    pub models: usize,
    /// The fewest and the most models that a user asks.
    pub models_per_user: (usize, usize),
    /// Experts that a device holds.
    pub device_experts: usize,
    /// How unevenly a user asks its models: the j-th goes with 1 / j^zipf. The paper gives no exponent.
    pub zipf: f64,
    /// The same for the experts of the first and the last layer; in between it grows evenly. The paper measures
    /// activations, finds that deeper layers are more uneven, and prints none of it.
    pub skew: (f64, f64),
    /// Sets of prompts; users of the same set ask a model for the same experts. The paper has two.
    pub datasets: usize,
    /// Tokens of each set that activations are counted over.
    pub tokens: usize,
}

impl Default for Scenario {
    /// The paper's.
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
    /// Draws places, requests and activations. Equal seeds give equal problems, and what is not varied stays as it is.
    pub fn draw(&self, seed: u64) -> Result<Problem, PlacementError> {
        self.check().map_err(PlacementError::Invalid)?;
        // A stream for each kind of thing, so that more of one does not change the others.
        let stream = |n: u64| Rng::new(Rng::new(seed ^ n << 56).bits());
        let (mut places, mut homes, mut requests, mut routing) = (stream(1), stream(2), stream(3), stream(4));
        let library = Library::new((0..self.models).map(model).collect());
        let rows = self.activations(&library, &mut routing);
        let random_position = |rng: &mut Rng| [rng.unit() * self.side_metres, rng.unit() * self.side_metres];
        let positions: Vec<[f64; 2]> = (0..self.servers).map(|_| random_position(&mut places)).collect();
        let sites = (0..self.servers).map(|n| self.site(n, &positions)).collect();
        let users = (0..self.users)
            .map(|_| {
                let (site, link) = self.associated(random_position(&mut homes), &positions);
                let demands = self.demands(&rows, &mut requests);
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
            ("models of a user", self.models_per_user.0),
            ("datasets", self.datasets),
            ("tokens", self.tokens),
        ];
        if let Some((name, _)) = sizes.iter().find(|(_, n)| *n == 0) {
            return Err(format!("a scenario needs at least one of its {name}"));
        }
        match self.models_per_user.0 <= self.models_per_user.1 && self.models_per_user.1 <= self.models {
            true => Ok(()),
            false => Err(format!(
                "users cannot ask {} to {} of {} models",
                self.models_per_user.0, self.models_per_user.1, self.models
            )),
        }
    }

    /// The ways from one server to the others and to the cloud.
    fn site(&self, n: usize, positions: &[[f64; 2]]) -> Site {
        let radio = radio(SERVER_BANDWIDTH, dbm(SERVER_DBM));
        let link = |(other, position): (usize, &[f64; 2])| match other == n {
            true => NetworkLink::default(),
            false => {
                let per_bit = 1.0 / radio.rate(distance(positions[n], *position));
                NetworkLink { per_bit, return_per_bit: per_bit, ..NetworkLink::default() }
            }
        };
        let cloud = NetworkLink { delay: CLOUD_DELAY, return_delay: CLOUD_DELAY, ..NetworkLink::default() };
        Site { associated: Some(n), links: positions.iter().enumerate().map(link).collect(), cloud }
    }

    /// The server to and from which a bit travels fastest.
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

    /// Which experts are asked for, by model and dataset: measured on tokens that are drawn.
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
        // The whole order is drawn whatever is used of it, so that users who ask more models ask the same ones first.
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

    /// The experts that a user asks for most often.
    fn most_requested(&self, library: &Library, demands: &[Demand]) -> Vec<bool> {
        let asked = expert_frequencies(library, demands);
        let mut order: Vec<usize> = (0..asked.len()).filter(|e| asked[*e] > 0.0).collect();
        order.sort_by(|a, b| asked[*b].total_cmp(&asked[*a]).then(a.cmp(b)));
        let mut local = vec![false; asked.len()];
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
        expert_bytes: (numbers * NUMBER) as u64,
        state_bits: hidden as f64 * NUMBER * 8.0,
        expert_flops: 2.0 * numbers,
    }
}

/// What so many tokens ask for: distinct experts, the more popular ones more often.
fn sample_routing(model: &ModelProfile, skew: f64, tokens: usize, rng: &mut Rng) -> Vec<ExpertGroup> {
    let mut popular: Vec<u16> = (0..model.experts as u16).collect();
    rng.shuffle(&mut popular);
    let weights: Vec<f64> = (1..=model.experts).map(|j| (j as f64).powf(-skew)).collect();
    let mut groups: Vec<Vec<u16>> = (0..tokens)
        .map(|_| {
            let mut places: Vec<usize> = (0..model.experts).collect();
            let mut group: Vec<u16> = (0..model.top_k)
                .map(|_| {
                    let sum: f64 = places.iter().map(|place| weights[*place]).sum();
                    let mut at = rng.unit() * sum;
                    let drawn = places.iter().position(|place| {
                        at -= weights[*place];
                        at < 0.0
                    });
                    popular[places.remove(drawn.unwrap_or(places.len() - 1))]
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
    use crate::{algorithm, latency};

    #[test]
    fn the_library_is_the_paper_s_size() {
        let problem = Scenario::default().draw(1).unwrap();
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
    fn seeds_repeat_and_differ_and_more_servers_leave_users_where_they_are() {
        let small = Scenario { users: 5, models: 6, tokens: 50, storage: 1_000_000_000, ..Scenario::default() };
        let place = algorithm("accelerated").unwrap();
        let total = |setting: &Scenario, seed| {
            let problem = setting.draw(seed).unwrap();
            latency(&problem, &place.place(&problem, 0)).total()
        };
        assert_eq!(total(&small, 1), total(&small, 1));
        assert_ne!(total(&small, 1), total(&small, 2));
        let models = |setting: &Scenario| -> Vec<usize> {
            setting.draw(1).unwrap().users.iter().flat_map(|u| u.demands.iter().map(|d| d.model)).collect()
        };
        assert_eq!(models(&small), models(&Scenario { servers: 7, ..small.clone() }));
    }

    #[test]
    fn impossible_settings_are_one_sentence() {
        let said = |setting: Scenario| setting.draw(0).unwrap_err().to_string();
        assert!(said(Scenario { servers: 0, ..Scenario::default() }).contains("servers"));
        assert!(said(Scenario { models: 2, ..Scenario::default() }).contains("3 to 5 of 2 models"));
    }
}
