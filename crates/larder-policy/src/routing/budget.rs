/// One row's budget: what its choices may cost, and the λ that spends it.
///
/// A choice that costs more than there is on the account is not made, so that the mean cost never exceeds the budget.
/// λ grows while the account fills and shrinks while it empties or when a choice was too dear, so that the budget is
/// spent.
pub(super) struct Account {
    /// What each choice adds.
    budget: f64,
    balance: f64,
    lambda: f64,
    /// Of the λ of all choices.
    sum: f64,
    choices: u64,
}

/// For how many choices the account saves at most.
const SAVES: f64 = 64.0;
/// λ of the first choice.
const FIRST: f64 = 0.05;
/// The range of λ: 1 is the whole spread of a layer's values.
const RANGE: (f64, f64) = (1e-3, 1.0);
/// How far λ moves in one choice, as a power of e, when the account is full or empty, or a choice was too dear.
const PACE: f64 = 0.05;

impl Account {
    pub fn new(budget: f64) -> Self {
        Account { budget, balance: 0.0, lambda: FIRST, sum: 0.0, choices: 0 }
    }

    /// A choice is due: the λ to try first.
    pub fn open(&mut self) -> f64 {
        self.balance = (self.balance + self.budget).min(SAVES * self.budget);
        self.lambda
    }

    /// Whether a choice of this cost can be made.
    pub fn affords(&self, cost: f64) -> bool {
        cost <= self.balance
    }

    /// A choice was made with this λ.
    pub fn pay(&mut self, lambda: f64, cost: f64) {
        self.balance -= cost;
        self.sum += lambda;
        self.choices += 1;
        let full = self.balance / (SAVES * self.budget);
        let pace = if lambda < self.lambda { -1.0 } else { 2.0 * full - 1.0 };
        self.lambda = (self.lambda * (PACE * pace).exp()).clamp(RANGE.0, RANGE.1);
    }

    /// The mean of all λ so far.
    pub fn mean(&self) -> f64 {
        self.sum / self.choices.max(1) as f64
    }
}
