//! The budget of one row for the closed-loop prior.

/// One row's budget: an account of what its choices may cost, and the λ that spends it.
///
/// A choice that costs more than the balance is not made, so that the mean cost never exceeds the budget. λ grows while
/// the account fills and shrinks while it empties or when a choice was too expensive, so that the budget is spent.
pub(super) struct Account {
    /// Added to the balance at each choice.
    budget: f64,
    balance: f64,
    lambda: f64,
    /// The sum of λ over all choices.
    sum: f64,
    choices: u64,
}

/// The balance is at most the budget of this many choices.
const SAVED_CHOICES_MAX: f64 = 64.0;
/// λ of the first choice.
const LAMBDA_START: f64 = 0.05;
/// The range of λ: 1 is the whole spread of a layer's values.
const LAMBDA_RANGE: (f64, f64) = (1e-3, 1.0);
/// How far λ moves in one choice, as a power of e, when the account is full or empty, or a choice was too expensive.
const LAMBDA_STEP: f64 = 0.05;

impl Account {
    pub fn new(budget: f64) -> Self {
        Account { budget, balance: 0.0, lambda: LAMBDA_START, sum: 0.0, choices: 0 }
    }

    /// A choice is due: credits the budget and returns the λ to try first.
    pub fn open(&mut self) -> f64 {
        self.balance = (self.balance + self.budget).min(SAVED_CHOICES_MAX * self.budget);
        self.lambda
    }

    /// Whether the balance covers a choice of this cost.
    pub fn affords(&self, cost: f64) -> bool {
        cost <= self.balance
    }

    /// A choice was made with this λ.
    pub fn pay(&mut self, lambda: f64, cost: f64) {
        self.balance -= cost;
        self.sum += lambda;
        self.choices += 1;
        let full = self.balance / (SAVED_CHOICES_MAX * self.budget);
        let pace = if lambda < self.lambda { -1.0 } else { 2.0 * full - 1.0 };
        self.lambda = (self.lambda * (LAMBDA_STEP * pace).exp()).clamp(LAMBDA_RANGE.0, LAMBDA_RANGE.1);
    }

    /// The mean of all λ so far.
    pub fn mean(&self) -> f64 {
        self.sum / self.choices.max(1) as f64
    }
}
