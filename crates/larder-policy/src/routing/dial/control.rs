//! Holds the mean loss below a budget: decides how far the dial is turned, from predicted losses of all tokens and
//! measured ones of some.

/// The share of the budget that is aimed at. What is between is for what samples cannot tell: with one token in 128
/// measured, the ratio of true to predicted losses is known to a few tens of percent.
pub const TARGET: f64 = 0.75;

/// How far the dial turns for a token whose loss is the target away from the target, in rungs. A rung is some hundreds
/// of tokens, so that the dial follows a topic and not a token.
const GAIN: f64 = 0.02;
/// Of how many measured tokens the calibration counts as many.
const PRIOR_TOKENS: f64 = 48.0;
/// The share that a measured token keeps of its weight at each later one, so that an old topic is forgotten.
const KEPT: f64 = 1.0 - 1.0 / 256.0;
/// A single loss counts as this many times the target at most. A twentieth of the losses' sum is above it, and most of
/// their noise.
const MOST_TIMES: f64 = 20.0;
/// How many rungs below the first are remembered as debts: they take thousands of tokens to pay.
const DEBT: f64 = 64.0;

/// The position of the dial, in rungs: 0 is exact.
#[derive(Clone, Debug)]
pub struct BudgetControl {
    /// The mean loss that is aimed at.
    target: f64,
    /// Below 0 while a debt is left.
    position: f64,
    last: f64,
    /// Sums over measured tokens, of which old ones count less.
    predicted: f64,
    measured: f64,
}

impl BudgetControl {
    /// Begins at `start`, on a dial with rungs up to `last`.
    pub fn new(budget: f64, start: f64, last: f64) -> Self {
        BudgetControl { target: TARGET * budget, position: start, last, predicted: 0.0, measured: 0.0 }
    }

    /// How far the dial is turned, in rungs.
    pub fn position(&self) -> f64 {
        self.position.max(0.0)
    }

    /// The ratio of true to predicted losses, as far as it is known.
    pub fn ratio(&self) -> f64 {
        let prior = PRIOR_TOKENS * self.target;
        (prior + self.measured) / (prior + self.predicted)
    }

    /// A token was decoded with this predicted loss.
    pub fn decoded(&mut self, predicted: f64) {
        let step = GAIN * (1.0 - self.ratio() * predicted / self.target);
        self.position = (self.position + step).clamp(-DEBT, self.last);
    }

    /// The loss of a token with this predicted loss was measured.
    pub fn measured(&mut self, predicted: f64, loss: f64) {
        self.predicted = KEPT * self.predicted + predicted;
        self.measured = KEPT * self.measured + loss.min(MOST_TIMES * self.target);
    }
}

#[cfg(test)]
mod tests {
    use larder_core::Rng;

    use super::*;

    const BUDGETS: [f64; 5] = [0.002, 0.005, 0.01, 0.02, 0.05];
    const RUNGS: usize = 16;

    /// A text whose losses grow by half with each rung, spread over tokens with a heavy tail, and that are not what was
    /// predicted: by a ratio that changes with the topic.
    struct Text {
        random: Rng,
        ratio: f64,
        /// What the tokens cost of this topic, beside another.
        misses: f64,
    }

    impl Text {
        fn unit(&mut self) -> f64 {
            (self.random.below(1 << 30) as f64 + 0.5) / f64::from(1 << 30)
        }

        /// About normal.
        fn normal(&mut self) -> f64 {
            (0..12).map(|_| self.unit()).sum::<f64>() - 6.0
        }

        /// Of the next token: the predicted loss and the true one.
        fn token(&mut self, position: f64) -> (f64, f64) {
            let level = 0.001 * (1.5f64.powf(position) - 1.0) * self.misses;
            let predicted = level * (0.8 * self.normal() - 0.32).exp();
            let noise = (1.2 * self.normal() - 0.72).exp();
            (predicted, predicted * self.ratio * noise)
        }

        fn change(&mut self) {
            self.ratio = (0.15 * self.normal()).exp();
            self.misses = (0.4 * self.normal()).exp();
        }
    }

    /// The mean true loss over a text with four topics, as a share of the budget.
    fn spent(budget: f64, seed: u64, tokens: usize) -> f64 {
        let mut text = Text { random: Rng::new(seed), ratio: 1.0, misses: 1.0 };
        let mut control = BudgetControl::new(budget, 4.0, RUNGS as f64);
        let mut sum = 0.0;
        for token in 0..tokens {
            if token % (tokens / 4) == 0 {
                text.change();
            }
            let (predicted, loss) = text.token(control.position());
            sum += loss;
            if token % 128 == 77 {
                control.measured(predicted, loss);
            }
            control.decoded(predicted);
        }
        sum / tokens as f64 / budget
    }

    #[test]
    fn the_budget_holds_over_topics_with_a_wrong_calibration() {
        for budget in BUDGETS {
            let mut spent: Vec<f64> = (0..200).map(|seed| spent(budget, seed, 20_000)).collect();
            spent.sort_by(f64::total_cmp);
            println!("{budget}: {:.2} to {:.2}, median {:.2}", spent[0], spent[199], spent[100]);
            let beyond = spent.iter().filter(|share| **share > 1.0).count();
            assert!(
                beyond <= 10,
                "{budget}: {beyond} of 200 texts cost more than the budget, {:.2} at most",
                spent[199]
            );
            assert!(spent[10] > 0.5 && spent[100] > 0.65, "{budget}: only {:.2} are spent", spent[10]);
        }
    }

    #[test]
    fn a_change_of_topic_is_followed_within_a_thousand_tokens() {
        for seed in 0..50 {
            let mut text = Text { random: Rng::new(seed), ratio: 1.0, misses: 0.5 };
            let mut control = BudgetControl::new(0.01, 4.0, RUNGS as f64);
            let mut mean = |text: &mut Text, tokens: usize| {
                let losses = (0..tokens).map(|_| {
                    let (predicted, loss) = text.token(control.position());
                    control.decoded(predicted);
                    loss
                });
                losses.sum::<f64>() / tokens as f64
            };
            mean(&mut text, 3000);
            text.misses = 3.0;
            mean(&mut text, 1000);
            let after = mean(&mut text, 4000);
            assert!((after / 0.0075 - 1.0).abs() < 0.25, "seed {seed}: {after}");
        }
    }

    #[test]
    fn nothing_is_saved_up_where_nothing_can_be_spent() {
        let mut control = BudgetControl::new(0.01, 2.0, 5.0);
        (0..100_000).for_each(|_| control.decoded(0.0));
        assert_eq!(control.position(), 5.0);
        // A debt is paid before anything is spent again.
        control.decoded(10.0);
        (0..1000).for_each(|_| control.decoded(0.0));
        assert_eq!(control.position(), 0.0);
        (0..400).for_each(|_| control.decoded(0.0));
        assert!(control.position() > 4.9);
    }
}
