//! The paper's figures: the parameter that each varies, and the result of one run.

use crate::placement::{Algorithm, Placement, PlacementError, Problem, Scenario, latency, u_shaped};

/// One parameter of the scenario varied, all others fixed.
#[derive(Clone, Debug)]
pub struct Sweep {
    /// Name of the sweep, as in the CSV file.
    pub name: &'static str,
    /// The paper's figure of latencies, if there is one.
    pub latency_figure: Option<&'static str>,
    /// The paper's figure of running times, if there is one.
    pub time_figure: Option<&'static str>,
    /// The varied parameter with its unit, as the label of the x axis.
    pub x_label: &'static str,
    /// The values of the parameter, and the scenario with each.
    pub points: Vec<(f64, Scenario)>,
}

/// The sweeps of all figures, as variations of `base`.
pub fn sweeps(base: &Scenario) -> Vec<Sweep> {
    let vary = |values: &[f64], set: fn(&mut Scenario, f64)| {
        let point = |x: &f64| {
            let mut scenario = base.clone();
            set(&mut scenario, *x);
            (*x, scenario)
        };
        values.iter().map(point).collect::<Vec<_>>()
    };
    let sweep = |name, latency_figure, time_figure, x_label, points| Sweep {
        name,
        latency_figure,
        time_figure,
        x_label,
        points,
    };
    vec![
        sweep(
            "storage",
            Some("6a"),
            Some("9a"),
            "storage per server, GB",
            vary(&[1.25, 2.5, 3.75, 5.0, 6.25, 7.5], |s, x| s.storage = (x * 1e9) as u64),
        ),
        sweep(
            "local",
            Some("6b"),
            None,
            "experts per device",
            vary(&[100.0, 150.0, 200.0, 250.0, 300.0], |s, x| s.device_experts = x as usize),
        ),
        sweep(
            "asked",
            Some("7a"),
            None,
            "models per user",
            vary(&[2.0, 3.0, 4.0, 5.0, 6.0], |s, x| s.models_per_user = (x as usize, x as usize)),
        ),
        sweep(
            "bandwidth",
            Some("7b"),
            None,
            "bandwidth per user, MHz",
            vary(&[1.0, 2.5, 5.0, 7.5, 10.0], |s, x| s.bandwidth = x * 1e6),
        ),
        sweep(
            "servers",
            Some("8a"),
            Some("10a"),
            "servers",
            vary(&[2.0, 4.0, 6.0, 8.0, 10.0], |s, x| s.servers = x as usize),
        ),
        sweep(
            "users",
            Some("8b"),
            Some("10b"),
            "users, sharing the bandwidth",
            vary(&[10.0, 20.0, 30.0, 40.0, 50.0], |s, x| {
                s.bandwidth *= s.users as f64 / x;
                s.users = x as usize;
            }),
        ),
        sweep(
            "models",
            None,
            Some("9b"),
            "models in the library",
            vary(&[6.0, 9.0, 12.0, 15.0, 18.0], |s, x| s.models = x as usize),
        ),
    ]
}

/// The latency that a placement achieves.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct PlacementOutcome {
    /// Seconds per token.
    pub seconds: f64,
    /// Seconds per token with split inference, where the hidden state leaves the device once. Only for an algorithm
    /// that places whole layers.
    pub split_inference_seconds: Option<f64>,
    /// Number of layers with experts that a token passes.
    pub layers: f64,
    /// Share of the experts that a token needs that are computed in the cloud.
    pub cloud: f64,
}

/// The latency of a placement by this algorithm. If it places whole layers, only models that the servers hold as a
/// whole count.
pub fn outcome(problem: &Problem, algorithm: &Algorithm, placement: &Placement) -> PlacementOutcome {
    let found = if algorithm.whole_layers {
        latency(problem, &u_shaped::usable(problem, placement))
    } else {
        latency(problem, placement)
    };
    PlacementOutcome {
        seconds: found.total(),
        split_inference_seconds: algorithm.whole_layers.then(|| u_shaped::split_inference_seconds(problem, placement)),
        layers: problem.layers_per_token(),
        cloud: found.served.cloud / found.served.total(),
    }
}

/// The problem of one point and repetition. A repetition has the same random numbers at all points.
pub fn problem(scenario: &Scenario, seed: u64, repetition: u64) -> Result<Problem, PlacementError> {
    scenario.generate(seed.wrapping_mul(1_000_003).wrapping_add(repetition))
}
