//! The strategy `prior`: a bonus for resident experts.

mod bonus;
mod budget;
mod closed_loop;

use larder_core::{Gate, MoeRow};

pub(super) use bonus::Prior;
use budget::Account;
use closed_loop::ClosedLoop;

use super::{KEEP, PHASE, Ranking, RouterInput, RouterReport, Selector, Strategy, StrategyInputs};
use crate::PolicyError;
use crate::spec::{Domain, Knob, SpecOptions};

pub(super) const STRATEGY: Strategy = Strategy {
    name: "prior",
    about: "a bonus of λ·Δ for residents, with a fixed λ or one that keeps to a budget of quality",
    knobs: &[
        Knob {
            name: "lambda",
            about: "the bonus as a share of Δ, the scale of the layer's values",
            domain: Domain::Number(0.0..=f64::MAX),
            default: None,
        },
        Knob {
            name: "budget",
            about: "mean cost allowed per choice, in the unit of 'measure'; λ follows from it",
            domain: Domain::Number(1e-6..=f64::MAX),
            default: None,
        },
        Knob {
            name: "measure",
            about: "the unit of the budget: KL to the model's own choice in nats, or the share of probability lost",
            domain: Domain::Word(&["kl", "mass"]),
            default: None,
        },
        Knob {
            name: "delta",
            about: "the spread of a layer's values: the running mean, of this token, or as calibrated",
            domain: Domain::Word(&["running", "token", "calibrated"]),
            default: Some("running"),
        },
        KEEP,
        PHASE,
    ],
    make,
};

fn make(options: &SpecOptions, inputs: &StrategyInputs) -> Result<Box<dyn Selector>, PolicyError> {
    let prior = Prior::new(options, inputs)?;
    match (options.number("lambda"), options.number("budget")) {
        (Some(_), None) if options.text("measure").is_some() => {
            Err(options.wrong("measure goes with budget, not with lambda".to_owned()))
        }
        (Some(lambda), None) => Ok(Box::new(FixedLambda { lambda, prior })),
        (None, Some(budget)) => {
            let mass = options.text("measure") == Some("mass");
            let accounts = (0..inputs.rows).map(|_| Account::new(budget)).collect();
            Ok(Box::new(ClosedLoop::new(prior, accounts, mass)))
        }
        (None, None) => Err(options.wrong("either lambda or budget is required".to_owned())),
        (Some(_), Some(_)) => Err(options.wrong("lambda and budget exclude each other".to_owned())),
    }
}

/// A prior with one λ for all choices.
struct FixedLambda {
    lambda: f64,
    prior: Prior,
}

impl Selector for FixedLambda {
    fn gate_error(&self, gate: &Gate) -> Option<String> {
        self.prior.gate_error(gate)
    }

    fn observe(&mut self, row: MoeRow, gate: &Gate, ranking: &Ranking) {
        self.prior.observe(row, gate, ranking);
    }

    fn select(&mut self, input: &RouterInput, ranking: &mut Ranking, present: &dyn Fn(usize) -> bool) {
        self.prior.select(input, self.lambda, ranking, present);
    }

    fn report(&self) -> RouterReport {
        let delta = self.prior.deltas();
        RouterReport { lambda: vec![self.lambda; delta.len()], delta, predicted_loss: None }
    }
}
