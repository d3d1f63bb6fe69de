//! Which experts a token gets. One strategy per file; to add one, copy the nearest file and add its row to the table.
//!
//! A strategy marks experts in the model's own [`Ranking`]; the marked experts come out in the order of that ranking,
//! so that sums run as they would without it. A strategy does not touch weights: they follow from the unmodified
//! logits.

mod change;
mod cumsum;
mod dial;
mod drop;
mod max_rank;
mod misses;
mod original;
mod prior;
mod prune;
pub mod quality;
mod ranking;
mod replace;
mod strategy_router;

use std::fmt;
use std::str::FromStr;

use larder_core::{Gate, MoeRow, Residency};

use strategy_router::{ActiveRule, StrategyRouter};

pub use change::WeightChange;
pub use dial::{DialTable, QUALITY_BUDGETS, Rung, TARGET, parse_quality};
pub use misses::{ExpertChoice, MISS_RULES, MissRuleRow};
pub use ranking::Ranking;

use crate::spec::{Domain, Knob, Named, PolicyError, SpecOptions};

/// The input of a routing choice: one token of one layer.
#[derive(Clone, Copy)]
pub struct RouterInput<'a> {
    /// The layer.
    pub row: MoeRow,
    /// The layer's gate, which turns logits into a choice.
    pub gate: &'a Gate,
    /// One router logit per expert.
    pub logits: &'a [f32],
    /// Whether the token is decoded on its own rather than prefilled with others.
    pub decode: bool,
}

/// Chooses experts with regard to the residency of the cache.
pub trait Router: Send {
    /// Refuses a gate that this strategy cannot work with. Every other method relies on it.
    fn supports(&self, gate: &Gate) -> Result<(), PolicyError>;

    /// Chooses for one token of one layer into `out`, possibly fewer experts than the gate's `top_k`.
    ///
    /// The caller guarantees a supported gate, one logit per expert and a row that exists. The implementation
    /// guarantees distinct experts, at least one, in the order of the model's own ranking, with their weights.
    fn choose(&mut self, input: &RouterInput, residency: &dyn Residency, out: &mut ExpertChoice);

    /// How the choices of the last step of decoded tokens change each row, in sum; empty if that is not known.
    fn changes(&self) -> &[WeightChange] {
        &[]
    }

    /// Tells the loss of the output of the last decoded token, in nats: how far it is from the model's own.
    fn loss_measured(&mut self, loss: f64) {
        let _ = loss;
    }

    /// Statistics of the choices so far.
    fn report(&self) -> RouterReport;
}

/// Statistics of a strategy's choices, one number for each row; empty where it keeps none.
#[derive(Clone, Default, PartialEq, Debug)]
pub struct RouterReport {
    /// The mean λ of all choices.
    pub lambda: Vec<f64>,
    /// The scale of a layer's values, Δ: the input of `delta=calibrated`.
    pub delta: Vec<f64>,
    /// The loss of the output per token, in nats, as far as the strategy predicts it.
    pub predicted_loss: Option<f64>,
}

/// Marks the experts of one token.
trait Selector: Send {
    /// Why the strategy cannot work with a gate, or `None`.
    fn gate_error(&self, gate: &Gate) -> Option<String> {
        let _ = gate;
        None
    }

    /// Sees every token of every phase, whether or not [`select`](Selector::select) follows.
    fn observe(&mut self, row: MoeRow, gate: &Gate, ranking: &Ranking) {
        let _ = (row, gate, ranking);
    }

    /// Marks at least one and at most `top_k` experts in a ranking without marks. `present` experts are resident or in
    /// flight.
    fn select(&mut self, input: &RouterInput, ranking: &mut Ranking, present: &dyn Fn(usize) -> bool);

    /// Changes what is computed for missing experts of a choice, of which it leaves at least one. The weights of the
    /// others stay.
    fn settle(&mut self, input: &RouterInput, present: &dyn Fn(usize) -> bool, choice: &mut ExpertChoice) {
        let _ = (input, present, choice);
    }

    /// A step of `tokens` decoded tokens has ended, whose choices change each row so, in sum.
    fn token_ended(&mut self, changes: &[WeightChange], tokens: usize) {
        let _ = (changes, tokens);
    }

    /// The loss of a token of the last step was measured.
    fn loss_measured(&mut self, changes: &[WeightChange], tokens: usize, loss: f64) {
        let _ = (changes, tokens, loss);
    }

    /// Statistics of the choices so far.
    fn report(&self) -> RouterReport {
        RouterReport::default()
    }
}

/// A strategy by name.
pub struct Strategy {
    /// The name in flags and reports.
    pub name: &'static str,
    /// Its rule, in a few words.
    pub about: &'static str,
    /// Its options.
    pub knobs: &'static [Knob],
    make: Make,
}

type Make = fn(&SpecOptions, &StrategyInputs) -> Result<Box<dyn Selector>, PolicyError>;

/// The inputs of a strategy.
#[derive(Clone, Copy)]
pub struct StrategyInputs<'a> {
    /// Layers with experts.
    pub rows: usize,
    /// Calibrated Δ of each row.
    pub deltas: Option<&'a [f32]>,
    /// Calibrated losses and settings.
    pub dial: Option<&'a DialTable>,
}

impl StrategyInputs<'_> {
    /// Of a model with experts in `rows` layers, and nothing calibrated.
    pub fn of_rows(rows: usize) -> Self {
        StrategyInputs { rows, deltas: None, dial: None }
    }
}

impl Named for Strategy {
    fn name(&self) -> &'static str {
        self.name
    }

    fn knobs(&self) -> &'static [Knob] {
        self.knobs
    }
}

/// Every strategy.
pub const STRATEGIES: &[Strategy] = &[
    original::STRATEGY,
    prune::STRATEGY,
    max_rank::STRATEGY,
    cumsum::STRATEGY,
    prior::STRATEGY,
    replace::STRATEGY,
    drop::STRATEGY,
    dial::STRATEGY,
];

/// Name of the model's own choice, which other strategies are compared with.
pub const ORIGINAL: &str = original::STRATEGY.name;

/// A strategy, and rules for missing experts, with their options: `prior:lambda=0.05+light:tau=0.04`. A rule alone goes
/// with the model's own choice.
#[derive(Clone)]
pub struct RoutingSpec {
    strategy: &'static Strategy,
    options: SpecOptions,
    /// In the order of the table.
    rules: Vec<(&'static MissRuleRow, SpecOptions)>,
}

impl RoutingSpec {
    /// The strategy's name.
    pub fn name(&self) -> &'static str {
        self.strategy.name
    }

    /// Whether every choice is the model's own.
    pub fn is_lossless(&self) -> bool {
        self.strategy.name == ORIGINAL && self.rules.is_empty()
    }

    /// Whether smaller copies of experts are read, which the store must have.
    pub fn reads_small_copies(&self) -> bool {
        self.rules.iter().any(|(rule, _)| rule.reads_small_copies)
    }

    /// λ (cache bias), if the strategy has it as a fixed number; the model's own choice is λ = 0.
    pub fn lambda(&self) -> Option<f64> {
        match self.strategy.name {
            ORIGINAL => Some(0.0),
            name if name == prior::STRATEGY.name => self.options.number("lambda"),
            _ => None,
        }
    }

    /// The strategy `prior` as λ is set and measured unless something else is asked for: without a bonus, and with the
    /// default of every other option.
    pub fn standard_prior() -> RoutingSpec {
        "prior:lambda=0".parse().expect("it is in the table, and its options are valid")
    }

    /// The strategy `prior` with this λ. Its other options are those of this spec if it is `prior`, and else the
    /// standard ones.
    pub fn with_lambda(&self, lambda: &str) -> Result<RoutingSpec, PolicyError> {
        let settings = self.prior_settings().or_else(|| Self::standard_prior().prior_settings()).unwrap_or_default();
        let separator = if settings.is_empty() { "" } else { "," };
        format!("prior:lambda={lambda}{separator}{settings}").parse()
    }

    /// The options of `prior` beside λ and its budget, as in `j=1,delta=token`: J, and those that differ from their
    /// defaults. `None` for other strategies.
    pub fn prior_settings(&self) -> Option<String> {
        if self.strategy.name != prior::STRATEGY.name {
            return None;
        }
        let is_setting = |knob: &&Knob| !["lambda", "budget", "measure"].contains(&knob.name);
        let changed = self.strategy.knobs.iter().filter(is_setting).filter_map(|knob| {
            let is_told = |value: &&str| knob.name == KEEP.name || Some(*value) != knob.default;
            let value = self.options.text(knob.name).filter(is_told)?;
            Some(format!("{}={value}", knob.name))
        });
        let rules = self.rules.iter().map(|(_, options)| format!("+{options}")).collect::<String>();
        Some(changed.collect::<Vec<_>>().join(",") + &rules)
    }

    /// Whether [`make`](Self::make) needs calibrated Δ.
    pub fn needs_calibration(&self) -> bool {
        self.strategy.name == prior::STRATEGY.name && self.options.text("delta") == Some("calibrated")
    }

    /// The budget of output loss that the strategy keeps to, if it has one.
    pub fn quality_budget(&self) -> Option<f64> {
        (self.strategy.name == dial::STRATEGY.name).then(|| self.options.number("budget"))?
    }

    /// The strategy for a model.
    pub fn make(&self, inputs: &StrategyInputs) -> Result<Box<dyn Router>, PolicyError> {
        let all = self.strategy.knobs.iter().any(|k| k.name == PHASE.name) && self.options.text("phase") == Some("all");
        let selector = (self.strategy.make)(&self.options, inputs)?;
        let rule = |(row, options): &(&'static MissRuleRow, SpecOptions)| {
            Ok(ActiveRule { name: row.name, all: options.text("phase") == Some("all"), rule: (row.make)(options)? })
        };
        let rules = self.rules.iter().map(rule).collect::<Result<_, _>>()?;
        Ok(Box::new(StrategyRouter { all, rules, ..StrategyRouter::new(self.strategy.name, selector, inputs.rows) }))
    }
}

/// The model's own choice.
impl Default for RoutingSpec {
    fn default() -> Self {
        ORIGINAL.parse().expect("it is in the table and needs no options")
    }
}

impl FromStr for RoutingSpec {
    type Err = PolicyError;

    fn from_str(spec: &str) -> Result<Self, PolicyError> {
        let mut parts = spec.split('+').peekable();
        let is_rule = |part: &&str| {
            let name = part.split(':').next().unwrap_or_default();
            MISS_RULES.iter().any(|rule| rule.name == name)
        };
        let base = parts.next_if(|part| !is_rule(part)).unwrap_or(ORIGINAL);
        let (strategy, options) = SpecOptions::parse(base, "routing strategy", STRATEGIES)?;
        let mut rules = Vec::new();
        for part in parts {
            rules.push(SpecOptions::parse(part, "rule for missing experts", MISS_RULES)?);
        }
        let place = |name: &str| MISS_RULES.iter().position(|rule| rule.name == name);
        rules.sort_by_key(|(rule, _): &(&'static MissRuleRow, SpecOptions)| place(rule.name));
        if let Some(twice) = rules.windows(2).find(|pair| pair[0].0.name == pair[1].0.name) {
            return Err(twice[0].1.wrong(format!("{} is given twice", twice[0].0.name)));
        }
        let spec = RoutingSpec { strategy, options, rules };
        if spec.quality_budget().is_some() && !spec.rules.is_empty() {
            return Err(spec
                .options
                .wrong("quality decides about missing experts itself; give it without other rules".to_owned()));
        }
        // Faults of the spec that hold for any model are reported now.
        let dial = DialTable {
            substituted: vec![1.0],
            left_out: vec![1.0],
            rungs: vec![Rung { ratio: 1.0, ..Rung::default() }],
            ..DialTable::default()
        };
        spec.make(&StrategyInputs { rows: 1, deltas: Some(&[1.0]), dial: Some(&dial) })?;
        Ok(spec)
    }
}

/// Prints the spec that was parsed.
impl fmt::Display for RoutingSpec {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let is_plain = self.strategy.name == ORIGINAL && !self.rules.is_empty();
        let mut between = "";
        if !is_plain {
            self.options.fmt(f)?;
            between = "+";
        }
        for (_, options) in &self.rules {
            write!(f, "{between}{options}")?;
            between = "+";
        }
        Ok(())
    }
}

/// The option that says where a strategy applies.
const PHASE: Knob = Knob {
    name: "phase",
    about: "decoded tokens only, or those of the prompt too",
    domain: Domain::Word(&["decode", "all"]),
    default: Some("decode"),
};

/// The option that always keeps the best experts, whatever the cache holds.
const KEEP: Knob = Knob {
    name: "j",
    about: "how many of the best experts are always chosen; none where the model chooses one expert",
    domain: Domain::Count(0..=u16::MAX as u64),
    default: Some("1"),
};

/// How many of the best experts are always chosen where nothing else is asked for: one, if the model chooses several.
pub fn kept_experts(top_k: usize) -> usize {
    Keep(1).of(top_k)
}

/// How many of the best experts are always chosen.
#[derive(Clone, Copy)]
struct Keep(usize);

impl Keep {
    fn new(options: &SpecOptions) -> Self {
        Keep(options.count("j").expect("it has a default") as usize)
    }

    /// The number for a model that chooses `top_k`. Keeping the only one would never change a choice.
    fn of(self, top_k: usize) -> usize {
        if top_k > 1 { self.0 } else { 0 }
    }

    /// An error if the gate chooses fewer.
    fn gate_error(self, gate: &Gate) -> Option<String> {
        exceeds_top_k("j", self.of(gate.top_k), gate)
    }
}

/// An error if the gate chooses fewer experts than rank `rank`.
fn exceeds_top_k(what: &str, rank: usize, gate: &Gate) -> Option<String> {
    (rank > gate.top_k).then(|| format!("has {what}={rank}, but the model chooses {} experts", gate.top_k))
}

#[cfg(test)]
mod tests;
