//! The frame of every strategy: ranks the experts, lets the strategy choose, applies the rules for missing experts, and
//! sums up what the choices change.

use larder_core::{Gate, MoeRow, Presence, Residency};

use super::change::ChangeMeter;
use super::misses::MissRule;
use super::{ExpertChoice, Ranking, Router, RouterInput, RouterReport, Selector, WeightChange};
use crate::spec::PolicyError;

/// A rule that acts on choices.
pub(super) struct ActiveRule {
    pub name: &'static str,
    /// Whether it also acts in prefill.
    pub all: bool,
    pub rule: Box<dyn MissRule>,
}

/// Ranks the experts, lets a strategy mark some where it applies, and returns those.
pub(super) struct StrategyRouter {
    pub name: &'static str,
    pub selector: Box<dyn Selector>,
    /// Whether the strategy also applies in prefill.
    pub all: bool,
    pub rules: Vec<ActiveRule>,
    pub ranking: Ranking,
    pub step: StepChanges,
}

/// Changes by the choices of the current step of decoded tokens, or of the last one while none is computed.
#[derive(Default)]
pub(super) struct StepChanges {
    rows: Vec<WeightChange>,
    /// Tokens whose first layer was chosen for.
    tokens: usize,
    last_row: usize,
    meter: ChangeMeter,
}

impl StepChanges {
    /// Whether a choice for this row is the first of another step.
    fn begins_with(&self, row: MoeRow) -> bool {
        self.tokens > 0 && row.index() == 0 && (self.last_row > 0 || self.rows.len() == 1)
    }

    fn add(&mut self, row: MoeRow, change: WeightChange) {
        self.rows[row.index()] += change;
        self.tokens += usize::from(row.index() == 0);
        self.last_row = row.index();
    }
}

impl StrategyRouter {
    /// A strategy without rules for missing experts, that leaves prefill as it is.
    pub fn new(name: &'static str, selector: Box<dyn Selector>, rows: usize) -> Self {
        let step = StepChanges { rows: vec![WeightChange::default(); rows], ..StepChanges::default() };
        StrategyRouter { name, selector, all: false, rules: Vec::new(), ranking: Ranking::default(), step }
    }
}

impl Router for StrategyRouter {
    fn supports(&self, gate: &Gate) -> Result<(), PolicyError> {
        let of_rules = self.rules.iter().map(|active| (active.name, active.rule.gate_error(gate)));
        for (name, problem) in std::iter::once((self.name, self.selector.gate_error(gate))).chain(of_rules) {
            if let Some(problem) = problem {
                return Err(PolicyError::Unsuitable { name, problem });
            }
        }
        Ok(())
    }

    fn choose(&mut self, input: &RouterInput, residency: &dyn Residency, out: &mut ExpertChoice) {
        if input.decode && self.step.begins_with(input.row) {
            self.selector.token_ended(&self.step.rows, self.step.tokens);
            self.step.rows.fill(WeightChange::default());
            self.step.tokens = 0;
        }
        self.ranking.rank(input.gate, input.logits);
        self.selector.observe(input.row, input.gate, &self.ranking);
        let present = |expert: usize| residency.presence(input.row.expert(expert)) != Presence::Absent;
        if input.decode || self.all {
            self.selector.select(input, &mut self.ranking, &present);
        } else {
            self.ranking.mark_first(input.gate.top_k);
        }
        self.ranking.marked(&mut out.experts);
        out.weigh(input.gate, input.logits);
        if input.decode || self.all {
            self.selector.settle(input, &present, out);
        }
        for active in self.rules.iter_mut().filter(|active| input.decode || active.all) {
            active.rule.apply(input, &self.ranking, &present, out);
        }
        if input.decode {
            let change = self.step.meter.measure(input.gate, input.logits, &self.ranking, out);
            self.step.add(input.row, change);
        }
    }

    fn changes(&self) -> &[WeightChange] {
        &self.step.rows
    }

    fn loss_measured(&mut self, loss: f64) {
        self.selector.loss_measured(&self.step.rows, self.step.tokens, loss);
    }

    fn report(&self) -> RouterReport {
        self.selector.report()
    }
}
