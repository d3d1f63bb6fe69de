//! The algorithms compared with all possible placements, on instances small enough to enumerate.

use std::sync::Arc;

use larder_core::Rng;
use proptest::prelude::*;

use super::*;
use crate::placement::gains::GainEvaluator;
use crate::placement::{Demand, ExpertGroup, ModelProfile, NetworkLink, Server, ServingMode, Site, User, latency};

/// Models of one layer with three experts: k and bytes per expert of each model.
type Shape = [(usize, u64)];

/// A random problem: servers near each other and a cloud far from all. Computing takes almost no time.
fn random_problem(seed: u64, shape: &Shape, servers: usize, storage: u64) -> Problem {
    let mut rng = Rng::new(seed);
    let model = |(top_k, expert_bytes): &(usize, u64)| ModelProfile {
        name: "m".into(),
        rows: 1,
        experts: 3,
        top_k: *top_k,
        expert_bytes: *expert_bytes,
        state_bits: 1.0,
        expert_flops: 1.0,
    };
    let library = Library::new(shape.iter().map(model).collect());
    let link = |seconds: f64| NetworkLink { delay: seconds, return_delay: seconds, ..NetworkLink::default() };
    // Links between servers are symmetric.
    let between: Vec<f64> = (0..servers * servers).map(|_| 1.0 + 4.0 * rng.unit()).collect();
    let site = |n: usize| {
        let to = |other: usize| link(if n == other { 0.0 } else { between[n.min(other) * servers + n.max(other)] });
        Site { associated: Some(n), links: (0..servers).map(to).collect(), cloud: link(100.0) }
    };
    let users = (0..3).map(|_| {
        let demands = shape.iter().enumerate().map(|(model, (k, _))| Demand {
            model,
            share: 1.0 / shape.len() as f64,
            rows: Arc::new(vec![groups(*k, &mut rng)]),
        });
        let demands = demands.collect();
        let mut local = vec![false; 3 * shape.len()];
        local[rng.below(3 * shape.len())] = true;
        User { site: rng.below(servers), link: link(1.0), compute: 1e6, local, demands }
    });
    let users = users.collect();
    let servers: Vec<Server> = (0..servers).map(|_| Server { storage, compute: 1e6 }).collect();
    let sites = (0..servers.len()).map(site).collect();
    Problem::new(library, servers, 1e6, sites, users, ServingMode::Relayed).unwrap()
}

/// Every group of k of three experts, with random shares.
fn groups(k: usize, rng: &mut Rng) -> Vec<ExpertGroup> {
    let all: &[&[u16]] = match k {
        1 => &[&[0], &[1], &[2]],
        2 => &[&[0, 1], &[0, 2], &[1, 2]],
        _ => &[&[0, 1, 2]],
    };
    let weights: Vec<f64> = all.iter().map(|_| rng.unit().powi(2)).collect();
    let sum: f64 = weights.iter().sum();
    all.iter().zip(weights).map(|(e, w)| ExpertGroup { experts: e.to_vec(), share: w / sum }).collect()
}

/// Seconds that a placement saves: the paper's F.
fn saved(problem: &Problem, placement: &Placement) -> f64 {
    latency(problem, &Placement::empty(problem)).total() - latency(problem, placement).total()
}

fn fits(problem: &Problem, placement: &Placement) -> bool {
    problem.servers.iter().enumerate().all(|(n, s)| placement.bytes(n, &problem.library) <= s.storage)
}

/// The most seconds that any placement saves.
fn optimum(problem: &Problem) -> f64 {
    let experts = problem.library.experts();
    let choices = 1u64 << problem.servers.len();
    (0..choices.pow(experts as u32))
        .map(|at| Placement { holders: (0..experts as u32).map(|e| (at / choices.pow(e) % choices) as u32).collect() })
        .filter(|placement| fits(problem, placement))
        .map(|placement| saved(problem, &placement))
        .fold(0.0, f64::max)
}

/// The curvature of the gain of server n's experts, given the experts of the servers before it (definition 4).
fn curvature(problem: &Problem, placement: &Placement, n: usize) -> f64 {
    let gains = GainEvaluator::new(problem);
    let before = |expert: usize| placement.holders(expert) & ((1 << n) - 1);
    let base = Placement { holders: (0..problem.library.experts()).map(before).collect() };
    let several = |e: &usize| problem.library.models()[problem.library.model_of(*e)].top_k > 1;
    let ratio = |expert: usize| {
        let mut rest = base.clone();
        (0..problem.library.experts()).filter(|e| *e != expert).for_each(|e| rest.put(n, e));
        let last = gains.gain(n, expert, &rest);
        (last > 1e-9).then(|| gains.gain(n, expert, &base) / last)
    };
    1.0 - (0..problem.library.experts()).filter(several).filter_map(ratio).fold(1.0, f64::min)
}

fn place(name: &str, problem: &Problem) -> Placement {
    algorithm(name).unwrap().place(problem, 7)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn placements_fit_the_storage_and_never_add_latency(
        seed: u64,
        shape in prop::collection::vec((1usize..4, 1u64..9), 1..5),
        servers in 1usize..5,
        storage in 0u64..40,
    ) {
        let problem = random_problem(seed, &shape, servers, storage);
        for algorithm in &ALGORITHMS {
            let placement = algorithm.place(&problem, seed);
            prop_assert!(fits(&problem, &placement), "{}", algorithm.name);
            prop_assert_eq!(&placement, &algorithm.place(&problem, seed), "{}", algorithm.name);
            prop_assert!(saved(&problem, &placement) > -1e-9, "{}", algorithm.name);
        }
    }

    /// Holds for experts of one size; with several sizes, one large expert can gain more than all that fit beside it.
    #[test]
    fn with_top_1_models_greedy_reaches_its_bound(seed: u64, storage in 1u64..4) {
        let problem = random_problem(seed, &[(1, 1), (1, 1)], 2, storage);
        let (best, found) = (optimum(&problem), saved(&problem, &place("greedy", &problem)));
        prop_assert!(found >= (1.0 - (-1f64).exp()) * best - 1e-9, "{found} of {best}");
    }

    #[test]
    fn both_knapsacks_agree_and_keep_the_bound_of_theorem_1(
        seed: u64,
        ks in (1usize..4, 1usize..4),
        bytes in (1u64..4, 1u64..4),
        servers in 1usize..3,
        storage in 1u64..8,
    ) {
        let problem = random_problem(seed, &[(ks.0, bytes.0), (ks.1, bytes.1)], servers, storage);
        let placement = place("accelerated", &problem);
        let found = saved(&problem, &placement);
        // Of choices with equal value for a server they may take different ones.
        let (gains, empty) = (GainEvaluator::new(&problem), Placement::empty(&problem));
        let first = |placement: &Placement| placement.experts_of(0).map(|e| gains.gain(0, e, &empty)).sum::<f64>();
        let other = place("dp", &problem);
        prop_assert!((first(&placement) - first(&other)).abs() < 1e-9);
        prop_assert!(ks.0 == 3 || ks.1 == 3 || (found - saved(&problem, &other)).abs() < 1e-9);
        let best = optimum(&problem);
        let curved = (0..servers).map(|n| curvature(&problem, &placement, n)).fold(0.0, f64::max);
        let bound = (1.0 - curved) / if servers == 1 { 1.0 } else { 2.0 };
        prop_assert!(found >= bound * best - 1e-9, "{found} of {best}, curvature {curved}");
        // Links are symmetric and computing takes almost no time: proposition 6.
        let least = if servers == 1 { 0.5 } else { 0.25 };
        prop_assert!(found >= least * best - 1e-9, "{found} of {best}");
    }

    /// The incrementally updated gains equal gains computed from scratch.
    #[test]
    fn greedy_takes_the_largest_gain_at_every_step(seed: u64, k in 1usize..4, storage in 1u64..6) {
        let problem = random_problem(seed, &[(k, 1), (2, 2)], 2, storage);
        let gains = GainEvaluator::new(&problem);
        let mut placement = Placement::empty(&problem);
        loop {
            let candidates = (0..problem.library.experts()).flat_map(|expert| (0..2).map(move |n| (n, expert)));
            let candidates = candidates.filter(|(n, expert)| {
                let mut with = placement.clone();
                with.put(*n, *expert);
                !placement.holds(*n, *expert) && fits(&problem, &with)
            });
            let gain = |(n, expert): &(usize, usize)| {
                gains.gain(*n, *expert, &placement) / problem.library.bytes(*expert) as f64
            };
            let best = candidates.max_by(|a, b| gain(a).total_cmp(&gain(b)));
            let Some((n, expert)) = best.filter(|candidate| gain(candidate) > 1e-9) else { break };
            placement.put(n, expert);
        }
        let (found, want) = (saved(&problem, &place("greedy", &problem)), saved(&problem, &placement));
        prop_assert!((found - want).abs() < 1e-6, "{found} instead of {want}");
    }
}

#[test]
fn accelerated_beats_lfu_and_random() {
    // Two top-1 models; each server can hold three of the six experts.
    let problems: Vec<Problem> = (0..20).map(|seed| random_problem(seed, &[(1, 1), (1, 1)], 2, 3)).collect();
    let all = |name| -> f64 { problems.iter().map(|p| latency(p, &place(name, p)).total()).sum() };
    assert!(all("accelerated") < 0.9 * all("lfu") && all("accelerated") < all("random"));
    assert!(algorithm("fastest").err().unwrap().to_string().contains("accelerated, dp, greedy"));
}

#[test]
fn u_shaped_places_whole_layers() {
    let problem = random_problem(5, &[(2, 2), (1, 1)], 2, 7);
    let placement = place("u-shaped", &problem);
    let layers: Vec<u32> = (0..6).map(|e| placement.holders(e)).collect();
    assert!(layers[..3].iter().all(|h| *h == layers[0] && *h != 0) && layers[3..].iter().all(|h| *h == layers[3]));
    // Each server can hold one of the two layers: both hold the same one, or together they hold both.
    let usable = u_shaped::usable(&problem, &placement);
    assert!((0..6).all(|e| usable.holders(e) == placement.holders(e)));
    let mut incomplete = placement.clone();
    incomplete.holders[0] = 0;
    assert!((0..3).all(|e| u_shaped::usable(&problem, &incomplete).holders(e) == 0));
    // Without its expert 0 the first model is computed in the cloud, 100 s away in each direction.
    assert!(
        u_shaped::split_inference_seconds(&problem, &incomplete)
            > 90.0 + u_shaped::split_inference_seconds(&problem, &placement)
    );
}

/// Small instances of mixed sizes, by seed: an expert that fills most of a server beside small ones.
fn mixed_problem(seed: u64) -> Problem {
    let mut rng = Rng::new(seed);
    let ks = [1 + rng.below(2), 1 + rng.below(2)];
    let large = 3 + rng.below(8) as u64;
    random_problem(seed, &[(ks[0], 1), (ks[1], large)], 1 + rng.below(2), large + rng.below(3) as u64)
}

/// Prints the smallest share of the optimum of each form; `cargo test -p larder-placement mixed -- --nocapture` shows
/// it.
#[test]
fn on_mixed_sizes_the_better_greedy_is_far_above_either_form() {
    let names = ["greedy", "greedy-gain", BEST_GREEDY];
    let mut worst = [(1.0, 0); 3];
    for seed in 0..2000 {
        let problem = mixed_problem(seed);
        let best = optimum(&problem);
        let shares = names.map(|name| saved(&problem, &place(name, &problem)) / best);
        assert!(shares[2] >= shares[0].max(shares[1]) - 1e-12, "seed {seed}: {shares:?}");
        for (worst, share) in worst.iter_mut().zip(shares) {
            *worst = if share < worst.0 { (share, seed) } else { *worst };
        }
    }
    names
        .iter()
        .zip(worst)
        .for_each(|(name, (share, seed))| println!("{name}: {share:.3} of the optimum, seed {seed}"));
    assert!(worst[2].0 > worst[0].0.max(worst[1].0) + 0.1, "{worst:?}");
    // Half of 1 - 1/e: the classical bound of the better form for one knapsack and gains that only fall.
    assert!(worst[2].0 > 0.5 * (1.0 - (-1f64).exp()), "{worst:?}");
}
