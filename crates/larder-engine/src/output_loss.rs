//! How far the outputs of a lossy routing strategy are from the model's own, measured while it runs: some tokens are
//! computed a second time, exactly, from the same keys and values, and the distributions of the next token are
//! compared.

use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_core::Xoshiro256;
use larder_model::{Decoder, ExactExperts, ExpertPath};
use parking_lot::Mutex;

use crate::sequence::{Sequence, exact_logits};

/// Of how many decoded tokens one is computed twice, unless something else is asked for.
pub const MEASURE_EVERY: u32 = 128;

/// Differences of the outputs from exact ones, over tokens that were computed twice.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub struct OutputLoss {
    /// Tokens that were decoded.
    pub tokens: u64,
    /// Tokens of these that were computed twice.
    pub measured: u64,
    /// Tokens that were to be computed twice and could not, because a read failed or the KV cache was full.
    pub failed: u64,
    /// Tokens after which both distributions have the same likeliest token.
    pub agreeing: u64,
    /// Sum of the KL divergences, in nats, from the exact distribution.
    pub kl: f64,
    /// Sum of their squares.
    pub squares: f64,
    /// Time that the exact computations took.
    pub time: Duration,
}

larder_core::fieldwise!(OutputLoss { tokens, measured, failed, agreeing, kl, squares, time });

impl OutputLoss {
    /// The mean KL divergence in nats; `None` without a measured token.
    pub fn mean_kl(&self) -> Option<f64> {
        (self.measured > 0).then(|| self.kl / self.measured as f64)
    }

    /// Half of the 95 % interval of the mean by Student's distribution, which takes tokens as independent. `None` for
    /// fewer than two.
    pub fn half_interval(&self) -> Option<f64> {
        let n = self.measured as f64;
        let spread = (self.squares - self.kl * self.kl / n).max(0.0) / (n - 1.0);
        (self.measured > 1).then(|| student(self.measured - 1) * (spread / n).sqrt())
    }

    /// The share of tokens after which the likeliest token is the same; `None` without a measured token.
    pub fn agreement(&self) -> Option<f64> {
        (self.measured > 0).then(|| self.agreeing as f64 / self.measured as f64)
    }

    /// Adds a token, and returns its KL divergence.
    fn add(&mut self, exact: &[f32], lossy: &[f32]) -> f64 {
        let kl = kl_divergence(exact, lossy);
        self.measured += 1;
        self.kl += kl;
        self.squares += kl * kl;
        self.agreeing += u64::from(likeliest(exact) == likeliest(lossy));
        kl
    }
}

/// The 97.5 % quantile of Student's distribution, at most 1 % too large.
fn student(degrees: u64) -> f64 {
    const FEW: [f64; 10] = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228];
    let n = degrees as f64;
    FEW.get(degrees as usize - 1).copied().unwrap_or(1.96 + 2.4 / n + 2.8 / (n * n))
}

/// The KL divergence in nats of the distribution of the logits `other` from that of `exact`.
fn kl_divergence(exact: &[f32], other: &[f32]) -> f64 {
    let total = log_sum_exp(exact);
    // Rounding may leave a little less than nothing.
    kl_divergence_from(exact.iter().map(|own| f64::from(*own) - total), other).max(0.0)
}

/// The KL divergence in nats of the distribution of the logits `other` from one that is given by the logarithms of its
/// probabilities.
pub fn kl_divergence_from(own: impl Iterator<Item = f64>, other: &[f32]) -> f64 {
    let total = log_sum_exp(other);
    let term = |(own, logit): (f64, &f32)| {
        let probability = own.exp();
        if probability > 0.0 { probability * (own - (f64::from(*logit) - total)) } else { 0.0 }
    };
    own.zip(other).map(term).sum()
}

/// The logarithm of the sum of the exponentials.
pub fn log_sum_exp(logits: &[f32]) -> f64 {
    let largest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    logits.iter().map(|l| (f64::from(*l) - largest).exp()).sum::<f64>().ln() + largest
}

fn likeliest(logits: &[f32]) -> Option<usize> {
    (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b]).then(b.cmp(a)))
}

/// Draws the tokens that are computed twice, and sums up what they show. Shared by all sequences of an engine.
#[derive(Clone)]
pub struct LossMeter(Arc<Mutex<Meter>>);

struct Meter {
    every: u32,
    seed: u64,
    random: Xoshiro256,
    /// Tokens of the current block of `every` that are still to come.
    left: u32,
    /// At how many tokens left the block's token is drawn.
    drawn: u32,
    /// Of the drawn tokens.
    loss: OutputLoss,
    /// Of all tokens, if all are measured.
    all: Option<OutputLoss>,
}

/// The exact logits of a token that is now computed as routing has it.
pub struct ExactLogits {
    logits: Vec<f32>,
    /// Whether the token was drawn, and is not measured only because all are.
    is_drawn: bool,
}

impl LossMeter {
    /// Computes one token of each `every` twice: at a place that is drawn from `seed`, whatever the tokens and the time
    /// they take.
    pub fn new(every: u32, seed: u64) -> Self {
        LossMeter(Arc::new(Mutex::new(Meter::new(every, seed))))
    }

    /// As [`new`](Self::new), but all tokens are computed twice, for [`loss_of_all`](Self::loss_of_all): what the drawn
    /// tokens tell is compared with the truth. Routing learns of the drawn ones alone.
    pub fn of_all(every: u32, seed: u64) -> Self {
        let all = Some(OutputLoss::default());
        LossMeter(Arc::new(Mutex::new(Meter { all, ..Meter::new(every, seed) })))
    }

    /// The losses of all tokens; `None` if only some are measured.
    pub fn loss_of_all(&self) -> Option<OutputLoss> {
        self.0.lock().all
    }

    /// The losses measured so far.
    pub fn loss(&self) -> OutputLoss {
        self.0.lock().loss
    }

    /// Forgets the losses measured so far: another strategy is in use from now on.
    pub fn restart(&self) {
        let mut meter = self.0.lock();
        meter.loss = OutputLoss::default();
        meter.all = meter.all.map(|_| OutputLoss::default());
    }

    /// Draws the tokens from now on as from the beginning, so that what follows is measured at the same places.
    pub fn redraw(&self) {
        let mut meter = self.0.lock();
        (meter.random, meter.left) = (Xoshiro256::new(meter.seed), 0);
    }

    /// Counts a token that is about to be decoded, the one pending token of `sequence`. If it is to be measured, it is
    /// computed exactly, and is pending again; [`compare`](Self::compare) takes the result. Nothing happens where
    /// experts are computed exactly anyway.
    pub fn before_token(
        &self,
        decoder: &Decoder,
        experts: &mut dyn ExpertPath,
        sequence: &mut Sequence,
    ) -> Option<ExactLogits> {
        let experts = experts.exact()?;
        let (is_drawn, measures_all) = self.0.lock().next_token();
        if !is_drawn && !measures_all {
            return None;
        }
        let start = Instant::now();
        let exact = exact_logits(decoder, &mut ExactExperts(experts), sequence);
        let mut meter = self.0.lock();
        meter.loss.time += start.elapsed();
        meter.loss.failed += u64::from(exact.is_err());
        exact.ok().map(|logits| ExactLogits { logits, is_drawn })
    }

    /// Compares the exact logits of the token that `experts` computed last with those of the routing in use, which
    /// learns of the difference.
    pub fn compare(&self, exact: &ExactLogits, lossy: &[f32], experts: &mut dyn ExpertPath) {
        let mut meter = self.0.lock();
        if let Some(all) = &mut meter.all {
            all.add(&exact.logits, lossy);
        }
        if exact.is_drawn {
            let kl = meter.loss.add(&exact.logits, lossy);
            drop(meter);
            experts.exact().into_iter().for_each(|path| path.loss_measured(kl));
        }
    }
}

impl Meter {
    fn new(every: u32, seed: u64) -> Self {
        let (random, loss) = (Xoshiro256::new(seed), OutputLoss::default());
        Meter { every: every.max(1), seed, random, left: 0, drawn: 0, loss, all: None }
    }

    /// Counts a token. Returns whether it is the drawn one of its block, and whether all tokens are measured.
    fn next_token(&mut self) -> (bool, bool) {
        if self.left == 0 {
            self.left = self.every;
            self.drawn = (self.random.unit() * f64::from(self.every)) as u32;
        }
        self.left -= 1;
        self.loss.tokens += 1;
        (self.left == self.drawn, self.all.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_divergence_is_that_of_the_definition() {
        // ¾ and ¼ against ½ and ½.
        let (exact, other) = ([3f32.ln() + 2.0, 2.0], [-1.0, -1.0]);
        let wanted = 0.75 * 1.5f64.ln() + 0.25 * 0.5f64.ln();
        assert!((kl_divergence(&exact, &other) - wanted).abs() < 1e-7);
        assert_eq!(kl_divergence(&exact, &exact), 0.0);
        assert_eq!(kl_divergence(&[f32::NEG_INFINITY, 0.0], &[f32::NEG_INFINITY, 5.0]), 0.0);
    }

    #[test]
    fn one_token_of_each_block_is_drawn_and_the_seed_decides_which() {
        for every in [1, 2, 7, 128] {
            let drawn = |seed| {
                let mut meter = Meter::new(every, seed);
                (0..20 * every).filter(|_| meter.next_token().0).count()
            };
            assert_eq!((drawn(1), drawn(2)), (20, 20), "one of {every}");
        }
        let places = |seed| {
            let mut meter = Meter::new(50, seed);
            (0..1000).filter(|_| meter.next_token().0).collect::<Vec<_>>()
        };
        assert_eq!(places(3), places(3));
        assert_ne!(places(3), places(4));
        let tenths = (0..2000).flat_map(places).fold([0; 10], |mut sums, at| {
            sums[at % 50 / 5] += 1;
            sums
        });
        assert!(tenths.iter().all(|n| (3500..4500).contains(n)), "evenly: {tenths:?}");
    }

    #[test]
    fn means_have_intervals() {
        let mut loss = OutputLoss::default();
        assert_eq!((loss.mean_kl(), loss.half_interval(), loss.agreement()), (None, None, None));
        loss.add(&[3f32.ln(), 0.0], &[0.0, 0.1]);
        assert!(loss.mean_kl().unwrap() > 0.1 && loss.half_interval().is_none() && loss.agreement() == Some(0.0));
        (0..3).for_each(|_| assert_eq!(loss.add(&[1.0, 0.0], &[1.0, 0.0]), 0.0));
        assert_eq!((loss.measured, loss.agreement()), (4, Some(0.75)));
        // Of x, 0, 0, 0 the mean is x/4, the standard deviation x/2 and its error x/4.
        assert!((loss.half_interval().unwrap() - 3.182 * loss.mean_kl().unwrap()).abs() < 1e-9);
        assert!((student(30) - 2.042).abs() < 0.01 && (student(10_000) - 1.960).abs() < 0.001);
    }
}
