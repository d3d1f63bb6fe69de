//! The prior whose λ follows from a budget.

use larder_core::{Gate, MoeRow};

use super::bonus::Prior;
use super::budget::Account;
use crate::routing::quality::cost;
use crate::routing::{Ranking, RouterInput, RouterReport, Selector};

/// A prior whose λ follows, for each row, from a budget of routing quality.
pub(super) struct ClosedLoop {
    prior: Prior,
    accounts: Vec<Account>,
    /// Whether the budget is of lost mass rather than of KL.
    mass: bool,
    shares: Vec<f32>,
}

/// How often λ is halved for a choice that costs too much before the model's own choice is taken.
const HALVINGS: usize = 4;

impl ClosedLoop {
    pub fn new(prior: Prior, accounts: Vec<Account>, mass: bool) -> Self {
        ClosedLoop { prior, accounts, mass, shares: Vec::new() }
    }
}

impl Selector for ClosedLoop {
    fn gate_error(&self, gate: &Gate) -> Option<String> {
        self.prior.gate_error(gate)
    }

    fn observe(&mut self, row: MoeRow, gate: &Gate, ranking: &Ranking) {
        self.prior.observe(row, gate, ranking);
    }

    fn select(&mut self, input: &RouterInput, ranking: &mut Ranking, present: &dyn Fn(usize) -> bool) {
        input.gate.probabilities(input.logits, &mut self.shares);
        let account = &mut self.accounts[input.row.index()];
        let mut lambda = account.open();
        for _ in 0..=HALVINGS {
            ranking.clear();
            self.prior.select(input, lambda, ranking, present);
            let cost = cost(ranking, input.gate.top_k, &self.shares);
            let cost = if self.mass { cost.lost } else { cost.kl };
            if account.affords(cost) {
                return account.pay(lambda, cost);
            }
            lambda /= 2.0;
        }
        ranking.clear();
        ranking.mark_first(input.gate.top_k);
        account.pay(0.0, 0.0);
    }

    fn report(&self) -> RouterReport {
        let lambda = self.accounts.iter().map(Account::mean).collect();
        RouterReport { lambda, delta: self.prior.deltas(), predicted_loss: None }
    }
}
