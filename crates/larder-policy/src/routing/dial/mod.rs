//! The strategy `quality`: all levers together, so far that the mean loss of the output stays below a budget.
//!
//! Each missing expert has a price, and each way to do without it a loss, which a calibration predicts from the weight
//! of the expert and its layer. What costs least together is done: the expert is read, or its smaller copy, or neither.
//! The higher the price, the less is read. Price and λ of the bonus for resident experts are those of a dial, which is
//! turned while losses stay below the budget.

mod control;

use larder_core::{Gate, MoeRow};

pub use control::{BudgetControl, TARGET};

use super::misses::retain_unmarked;
use super::prior::Prior;
use super::{ExpertChoice, KEEP, Keep, Ranking, RouterInput, RouterReport, Selector, Strategy, StrategyInputs};
use super::{RoutingSpec, StrategyRouter, WeightChange};
use crate::routing::Router;
use crate::spec::{Domain, Knob, PolicyError, SpecOptions};

pub(super) const STRATEGY: Strategy = Strategy {
    name: "quality",
    about: "as few reads as a budget of output loss allows, by all levers together; needs `larder tune`",
    knobs: &[
        Knob {
            name: "budget",
            about: "the most that outputs may be away from the model's own, on average: KL divergence in nats per token",
            domain: Domain::Number(1e-6..=10.0),
            default: None,
        },
        KEEP,
    ],
    make,
};

/// Budgets that have names, in nats per token.
pub const QUALITY_BUDGETS: [(&str, f64); 3] = [("light", 0.005), ("balanced", 0.01), ("fast", 0.02)];

/// The strategy that keeps to a budget of output loss, given as a number or by its name; `off` is the model's own
/// routing.
pub fn parse_quality(text: &str) -> Result<RoutingSpec, String> {
    if text == "off" {
        return Ok(RoutingSpec::default());
    }
    let named = QUALITY_BUDGETS.iter().find(|(name, _)| *name == text).map(|(_, budget)| budget.to_string());
    let budget = named.as_deref().unwrap_or(text);
    format!("quality:budget={budget}")
        .parse()
        .map_err(|_| "must be off, light, balanced, fast, or a number from 0.000001 to 10".to_owned())
}

/// The calibration of a model: the losses of leaving experts out, and the settings that the dial goes through.
#[derive(Clone, PartialEq, Default, Debug)]
pub struct DialTable {
    /// For each row, the loss in nats per squared weight of experts in whose place others are computed, and of those
    /// others.
    pub substituted: Vec<f64>,
    /// For each row, the loss in nats per squared weight of experts in whose place nothing is computed.
    pub left_out: Vec<f64>,
    /// For each row, the loss in nats per squared weight of experts computed from smaller copies; empty without smaller
    /// copies.
    pub small: Vec<f64>,
    /// Bytes of a smaller copy, as a share of those of the expert.
    pub small_share: f64,
    /// Settings with rising loss; before the first is the model's own choice.
    pub rungs: Vec<Rung>,
}

/// One setting of the dial.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub struct Rung {
    /// λ of the bonus for resident experts.
    pub lambda: f64,
    /// The price of reading an expert, in nats.
    pub price: f64,
    /// The mean loss that was measured with it, in nats per token.
    pub loss: f64,
    /// That loss divided by the predicted one.
    pub ratio: f64,
}

impl DialTable {
    /// The loss of a token whose layers changed so.
    pub fn predict(&self, changes: &[WeightChange]) -> f64 {
        let sum = |losses: &[f64], of: fn(&WeightChange) -> f64| -> f64 {
            losses.iter().zip(changes).map(|(loss, change)| loss * of(change)).sum()
        };
        sum(&self.substituted, |change| change.substituted)
            + sum(&self.left_out, |change| change.left_out)
            + sum(&self.small, |change| change.small)
    }

    /// The setting between two rungs.
    fn at(&self, position: f64) -> Rung {
        let exact = Rung { ratio: self.rungs[0].ratio, ..Rung::default() };
        let rung = |at: usize| at.checked_sub(1).map_or(exact, |at| self.rungs[at.min(self.rungs.len() - 1)]);
        let (below, part) = (position.floor(), position.fract());
        let (from, to) = (rung(below as usize), rung(below as usize + 1));
        let between = |from: f64, to: f64| from + part * (to - from);
        Rung {
            lambda: between(from.lambda, to.lambda),
            price: between(from.price, to.price),
            loss: between(from.loss, to.loss),
            ratio: between(from.ratio, to.ratio),
        }
    }

    /// Where the dial has this loss, by the calibration.
    fn position_of(&self, loss: f64) -> f64 {
        let above = self.rungs.iter().position(|rung| rung.loss >= loss);
        let Some(above) = above else { return self.rungs.len() as f64 };
        let before = if above == 0 { 0.0 } else { self.rungs[above - 1].loss };
        above as f64 + (loss - before) / (self.rungs[above].loss - before).max(f64::MIN_POSITIVE)
    }

    /// A router whose dial stays at one setting.
    pub fn fixed(&self, rows: usize, setting: Rung) -> Box<dyn Router> {
        let dial = Dial::new(self, setting, None, Keep(1), rows);
        Box::new(StrategyRouter::new(STRATEGY.name, Box::new(dial), rows))
    }

    /// Why it cannot be used for a model with experts in `rows` layers, or `None`.
    pub fn problem(&self, rows: usize) -> Option<&'static str> {
        let is_loss = |loss: &f64| loss.is_finite() && *loss > 0.0;
        let of_experts = [&self.substituted, &self.left_out];
        let wrong_rows =
            of_experts.iter().any(|losses| losses.len() != rows) || !self.small.is_empty() && self.small.len() != rows;
        let rises = self.rungs.is_sorted_by(|a, b| a.loss <= b.loss && a.price <= b.price && a.lambda <= b.lambda);
        let is_number = |n: &f64| n.is_finite() && *n >= 0.0;
        let numbers = |rung: &Rung| [rung.lambda, rung.price, rung.loss].iter().all(is_number) && is_loss(&rung.ratio);
        match () {
            () if wrong_rows => Some("was calibrated for another number of layers"),
            () if !of_experts.into_iter().chain([&self.small]).flatten().all(is_loss) => {
                Some("has a calibrated loss that is none")
            }
            () if self.rungs.is_empty() || !rises || !self.rungs.iter().all(numbers) => {
                Some("has calibrated settings that do not rise")
            }
            () if !(0.0..=1.0).contains(&self.small_share) => Some("has a calibrated share that is none"),
            () => None,
        }
    }
}

fn make(options: &SpecOptions, inputs: &StrategyInputs) -> Result<Box<dyn Selector>, PolicyError> {
    let budget = options.required("budget", options.number("budget"))?;
    let unsuitable = |problem: &str| PolicyError::Unsuitable { name: STRATEGY.name, problem: problem.to_owned() };
    let table = inputs.dial.ok_or_else(|| unsuitable("needs a calibration, which `larder tune` makes"))?;
    if let Some(problem) = table.problem(inputs.rows) {
        return Err(unsuitable(problem));
    }
    let (start, last) = (table.position_of(TARGET * budget), table.rungs.len() as f64);
    let control = BudgetControl::new(budget, start, last);
    let setting = table.at(control.position());
    Ok(Box::new(Dial::new(table, setting, Some(control), Keep::new(options), inputs.rows)))
}

/// Chooses by the current setting, and turns the dial after each token.
struct Dial {
    table: DialTable,
    /// `None` if the dial is not turned.
    control: Option<BudgetControl>,
    setting: Rung,
    keep: Keep,
    prior: Prior,
    /// The sum of λ over all choices, and their number.
    lambdas: (f64, u64),
    /// The sum of the predicted losses of tokens, and their number.
    predicted: (f64, u64),
}

/// The ways to deal with a missing expert.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Remedy {
    Read,
    ReadSmall,
    LeaveOut,
}

impl Dial {
    /// A dial at `setting`, which `control` turns from there.
    fn new(table: &DialTable, setting: Rung, control: Option<BudgetControl>, keep: Keep, rows: usize) -> Self {
        Dial {
            setting,
            table: table.clone(),
            control,
            keep,
            prior: Prior::with_running_spread(keep, rows),
            lambdas: (0.0, 0),
            predicted: (0.0, 0),
        }
    }

    /// The predicted loss of each of `tokens` tokens of a step.
    fn predict(&self, changes: &[WeightChange], tokens: usize) -> f64 {
        self.setting.ratio * self.table.predict(changes) / tokens.max(1) as f64
    }

    /// The way of least cost for a missing expert of this weight.
    fn remedy(&self, row: MoeRow, weight: f32) -> Remedy {
        let square = f64::from(weight) * f64::from(weight);
        let Rung { price, .. } = self.setting;
        let mut best = (price, Remedy::Read);
        if let Some(loss) = self.table.small.get(row.index()) {
            let cost = loss * square + price * self.table.small_share;
            if cost < best.0 {
                best = (cost, Remedy::ReadSmall);
            }
        }
        let cost = self.table.left_out[row.index()] * square;
        if cost < best.0 { Remedy::LeaveOut } else { best.1 }
    }
}

impl Selector for Dial {
    fn gate_error(&self, gate: &Gate) -> Option<String> {
        self.keep.gate_error(gate)
    }

    fn observe(&mut self, row: MoeRow, gate: &Gate, ranking: &Ranking) {
        self.prior.observe(row, gate, ranking);
    }

    fn select(&mut self, input: &RouterInput, ranking: &mut Ranking, present: &dyn Fn(usize) -> bool) {
        self.lambdas = (self.lambdas.0 + self.setting.lambda, self.lambdas.1 + 1);
        self.prior.select(input, self.setting.lambda, ranking, present);
    }

    fn settle(&mut self, input: &RouterInput, present: &dyn Fn(usize) -> bool, choice: &mut ExpertChoice) {
        let keep = self.keep.of(input.gate.top_k).max(1);
        let remedy = |at: usize| {
            if at >= keep && !present(choice.experts[at].index()) {
                self.remedy(input.row, choice.weights[at])
            } else {
                Remedy::Read
            }
        };
        let remedies: Vec<Remedy> = (0..choice.experts.len()).map(remedy).collect();
        choice.small.extend(remedies.iter().map(|remedy| *remedy == Remedy::ReadSmall));
        let left_out: Vec<bool> = remedies.iter().map(|remedy| *remedy == Remedy::LeaveOut).collect();
        retain_unmarked(&mut choice.experts, &left_out);
        retain_unmarked(&mut choice.weights, &left_out);
        retain_unmarked(&mut choice.small, &left_out);
        if !choice.small.contains(&true) {
            choice.small.clear();
        }
    }

    fn token_ended(&mut self, changes: &[WeightChange], tokens: usize) {
        let predicted = self.predict(changes, tokens);
        let ratio = self.control.as_ref().map_or(1.0, BudgetControl::ratio);
        self.predicted = (self.predicted.0 + ratio * predicted * tokens as f64, self.predicted.1 + tokens as u64);
        if let Some(control) = &mut self.control {
            (0..tokens).for_each(|_| control.decoded(predicted));
            self.setting = self.table.at(control.position());
        }
    }

    fn loss_measured(&mut self, changes: &[WeightChange], tokens: usize, loss: f64) {
        let predicted = self.predict(changes, tokens);
        if let Some(control) = &mut self.control {
            control.measured(predicted, loss);
        }
    }

    fn report(&self) -> RouterReport {
        let delta = self.prior.deltas();
        let (sum, choices) = self.lambdas;
        let (losses, tokens) = self.predicted;
        let predicted_loss = (tokens > 0).then(|| losses / tokens as f64);
        RouterReport { lambda: vec![sum / choices.max(1) as f64; delta.len()], delta, predicted_loss }
    }
}
