//! Sampling: from one row of logits to one token id.
//!
//! The order is that of transformers: penalties, temperature, top-k, top-p, min-p, draw.

use std::cmp::Ordering;

use crate::grammar::GrammarError;
use crate::rng::Xoshiro256;

/// Settings of sampling. The default is greedy.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sampling {
    /// Divides the logits; 0 is greedy, with the lowest id among equal logits.
    pub temperature: f32,
    /// Keeps the `top_k` most likely tokens, and those equal to the last of them; 0 keeps all.
    pub top_k: usize,
    /// Keeps the most likely tokens whose probabilities first reach `top_p`; 1 keeps all.
    pub top_p: f32,
    /// Keeps tokens with at least `min_p` times the highest probability; 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens that occur in the sequence, once each; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted from a token's logit for each of its occurrences in the answer; 0 is off.
    pub frequency_penalty: f32,
    /// Subtracted once from the logit of every token that occurs in the answer; 0 is off.
    pub presence_penalty: f32,
}

impl Default for Sampling {
    /// Greedy, without penalties.
    fn default() -> Self {
        Sampling {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
        }
    }
}

/// Invalid settings or logits.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SamplerError {
    /// The temperature is negative or not finite.
    #[error("temperature is {0}; it must be 0 or more")]
    Temperature(f32),
    /// top-p is not a probability above 0.
    #[error("top-p is {0}; it must be above 0 and at most 1")]
    TopP(f32),
    /// min-p is not a probability.
    #[error("min-p is {0}; it must be from 0 to 1")]
    MinP(f32),
    /// The repetition penalty is zero, negative or not finite.
    #[error("repetition penalty is {0}; it must be above 0")]
    RepetitionPenalty(f32),
    /// The frequency or presence penalty is not finite.
    #[error("{0} penalty is {1}; it must be a finite number")]
    Penalty(&'static str, f32),
    /// The model computed NaN or infinity.
    #[error("the model's logit for token {id} is {value}; it must be finite")]
    Logit {
        /// Id of the token.
        id: usize,
        /// The logit.
        value: f32,
    },
    /// Every logit is minus infinity, or there are no logits.
    #[error("no token can be sampled: all {0} logits are minus infinity")]
    NoToken(usize),
    /// The text cannot be kept to its grammar.
    #[error("structured output failed: {0}")]
    Grammar(#[from] GrammarError),
}

impl Sampling {
    /// Checks that every setting is in its range.
    pub fn checked(self) -> Result<Self, SamplerError> {
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return Err(SamplerError::Temperature(self.temperature));
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return Err(SamplerError::TopP(self.top_p));
        }
        if !(0.0..=1.0).contains(&self.min_p) {
            return Err(SamplerError::MinP(self.min_p));
        }
        if !(self.repetition_penalty > 0.0 && self.repetition_penalty.is_finite()) {
            return Err(SamplerError::RepetitionPenalty(self.repetition_penalty));
        }
        for (name, penalty) in [("frequency", self.frequency_penalty), ("presence", self.presence_penalty)] {
            if !penalty.is_finite() {
                return Err(SamplerError::Penalty(name, penalty));
            }
        }
        Ok(self)
    }
}

/// Draws tokens with fixed settings and a seed: equal logits and equal seeds give equal tokens.
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
    rng: Xoshiro256,
    seen: Vec<bool>,
    candidates: Vec<Candidate>,
    /// Tokens of the sequence before the answer, which the frequency and presence penalties ignore.
    prompt: usize,
    /// Added to the logits of these tokens.
    bias: Vec<(u32, f32)>,
}

#[derive(Clone, Copy, Debug)]
struct Candidate {
    id: u32,
    logit: f32,
    /// Probability relative to that of the most likely token.
    weight: f64,
}

impl Sampler {
    /// A sampler; an error if a setting is out of range.
    pub fn new(sampling: Sampling, seed: u64) -> Result<Self, SamplerError> {
        let (seen, candidates) = (Vec::new(), Vec::new());
        Ok(Sampler {
            sampling: sampling.checked()?,
            rng: Xoshiro256::new(seed),
            seen,
            candidates,
            prompt: 0,
            bias: Vec::new(),
        })
    }

    /// Sets what is added to the logits of these tokens before all else; ids outside the vocabulary are ignored.
    pub fn with_logit_bias(self, bias: Vec<(u32, f32)>) -> Self {
        Sampler { bias, ..self }
    }

    /// Starts the draws anew with another seed.
    pub fn with_seed(self, seed: u64) -> Self {
        Sampler { rng: Xoshiro256::new(seed), ..self }
    }

    /// Sets the number of tokens at the start of the sequence that are not part of the answer.
    pub fn with_prompt_len(self, prompt: usize) -> Self {
        Sampler { prompt, ..self }
    }

    /// Takes note that the `dropped` tokens behind the first `keep` are no longer in the sequence.
    pub fn shifted(&mut self, keep: usize, dropped: usize) {
        self.prompt -= self.prompt.saturating_sub(keep).min(dropped);
    }

    /// Draws the token after `previous` (prompt and answer so far) from `logits`, to which penalties are applied in
    /// place.
    pub fn sample(&mut self, logits: &mut [f32], previous: &[u32]) -> Result<u32, SamplerError> {
        if let Some((id, &value)) = logits.iter().enumerate().find(|(_, l)| l.is_nan() || **l == f32::INFINITY) {
            return Err(SamplerError::Logit { id, value });
        }
        for (id, bias) in &self.bias {
            logits.get_mut(*id as usize).into_iter().for_each(|logit| *logit += bias);
        }
        self.penalise(logits, previous);
        self.penalise_answer(logits, previous.get(self.prompt..).unwrap_or_default());
        let best = most_likely(logits).ok_or(SamplerError::NoToken(logits.len()))?;
        if self.sampling.temperature == 0.0 {
            return Ok(best as u32);
        }
        self.collect_top_k(logits);
        self.weigh(logits[best]);
        self.keep_top_p();
        self.keep_min_p();
        Ok(self.draw())
    }

    fn penalise(&mut self, logits: &mut [f32], previous: &[u32]) {
        let penalty = self.sampling.repetition_penalty;
        if penalty == 1.0 {
            return;
        }
        self.seen.clear();
        self.seen.resize(logits.len(), false);
        for &id in previous {
            let Some(seen) = self.seen.get_mut(id as usize) else { continue };
            if !std::mem::replace(seen, true) {
                let logit = &mut logits[id as usize];
                *logit = if *logit < 0.0 { *logit * penalty } else { *logit / penalty };
            }
        }
    }

    fn penalise_answer(&mut self, logits: &mut [f32], answer: &[u32]) {
        let Sampling { frequency_penalty, presence_penalty, .. } = self.sampling;
        if frequency_penalty == 0.0 && presence_penalty == 0.0 {
            return;
        }
        self.seen.clear();
        self.seen.resize(logits.len(), false);
        for &id in answer {
            let Some(seen) = self.seen.get_mut(id as usize) else { continue };
            let first = !std::mem::replace(seen, true);
            logits[id as usize] -= frequency_penalty + if first { presence_penalty } else { 0.0 };
        }
    }

    /// Makes candidates of all tokens or, with top-k, of the best ones, sorted.
    fn collect_top_k(&mut self, logits: &[f32]) {
        let candidate = |(id, &logit): (usize, &f32)| Candidate { id: id as u32, logit, weight: 0.0 };
        let (k, all) = (self.sampling.top_k, logits.iter().enumerate().map(candidate));
        self.candidates.clear();
        if k == 0 || k >= logits.len() {
            return self.candidates.extend(all);
        }
        // The best so far are kept beside new ones until there are twice as many.
        let (mut least, mut limit) = (f32::NEG_INFINITY, 2 * k);
        for candidate in all {
            if candidate.logit < least {
                continue;
            }
            self.candidates.push(candidate);
            if self.candidates.len() > limit {
                least = self.keep_best(k);
                limit = 2 * self.candidates.len();
            }
        }
        self.keep_best(k);
        self.candidates.sort_unstable_by(by_rank);
    }

    /// Keeps the best `k` candidates and those equal to the last of them, whose logit is returned.
    fn keep_best(&mut self, k: usize) -> f32 {
        let (_, last, _) = self.candidates.select_nth_unstable_by(k - 1, by_rank);
        let least = last.logit;
        self.candidates.retain(|candidate| candidate.logit >= least);
        least
    }

    fn weigh(&mut self, best: f32) {
        let temperature = f64::from(self.sampling.temperature);
        for Candidate { logit, weight, .. } in &mut self.candidates {
            *weight = ((f64::from(*logit) - f64::from(best)) / temperature).exp();
        }
    }

    fn keep_top_p(&mut self) {
        if self.sampling.top_p == 1.0 {
            return;
        }
        let enough = f64::from(self.sampling.top_p) * self.candidates.iter().map(|c| c.weight).sum::<f64>();
        self.keep_heavy(enough);
        self.candidates.sort_unstable_by(by_rank);
        let mut before = 0.0;
        let reached = self.candidates.iter().position(|candidate| {
            let full = before >= enough;
            before += candidate.weight;
            full
        });
        self.candidates.truncate(reached.unwrap_or(self.candidates.len()));
    }

    /// Drops light candidates that are not needed for a weight of `enough`, so that few are left to be sorted: few tokens
    /// usually hold most of the probability.
    fn keep_heavy(&mut self, enough: f64) {
        // More than enough by what the order of a sum can change.
        let enough = enough * (1.0 + 1e-9);
        for least in [1e-1, 1e-2, 1e-3, 1e-4, 1e-6] {
            let heavy = |candidate: &Candidate| candidate.weight >= least;
            if self.candidates.iter().filter(|c| heavy(c)).map(|c| c.weight).sum::<f64>() >= enough {
                return self.candidates.retain(heavy);
            }
        }
    }

    fn keep_min_p(&mut self) {
        let least = f64::from(self.sampling.min_p);
        if least == 0.0 {
            return;
        }
        self.candidates.retain(|candidate| candidate.weight >= least);
    }

    fn draw(&mut self) -> u32 {
        let total: f64 = self.candidates.iter().map(|c| c.weight).sum();
        let mut left = self.rng.unit() * total;
        let drawn = self.candidates.iter().find(|candidate| {
            left -= candidate.weight;
            left < 0.0
        });
        // A remainder from rounding belongs to the last token with a probability above 0.
        let last = self.candidates.iter().rfind(|candidate| candidate.weight > 0.0);
        drawn.or(last).map_or(0, |candidate| candidate.id)
    }
}

/// Index of the highest logit, the first of equal ones; `None` if all are minus infinity.
fn most_likely(logits: &[f32]) -> Option<usize> {
    let better = |best: usize, id: usize| if logits[id] > logits[best] { id } else { best };
    let best = (0..logits.len()).reduce(better)?;
    (logits[best] > f32::NEG_INFINITY).then_some(best)
}

/// Higher logits first, then lower ids.
fn by_rank(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.total_cmp(&a.logit).then(a.id.cmp(&b.id))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const DRAWING: Sampling = Sampling {
        temperature: 1.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        repetition_penalty: 1.0,
        frequency_penalty: 0.0,
        presence_penalty: 0.0,
    };

    fn sampler(sampling: Sampling) -> Sampler {
        Sampler::new(sampling, 1).unwrap()
    }

    /// The probabilities by definition: each step is a mask over a plain softmax.
    fn naive(sampling: Sampling, logits: &[f32]) -> Vec<f64> {
        let scaled: Vec<f64> = logits.iter().map(|&l| f64::from(l) / f64::from(sampling.temperature)).collect();
        let mut keep = vec![true; logits.len()];
        let mut ranks: Vec<usize> = (0..logits.len()).collect();
        ranks.sort_by(|&a, &b| scaled[b].total_cmp(&scaled[a]).then(a.cmp(&b)));
        if sampling.top_k > 0 {
            let least = scaled[ranks[sampling.top_k.min(logits.len()) - 1]];
            (0..logits.len()).for_each(|i| keep[i] &= scaled[i] >= least);
        }
        let softmax = |keep: &[bool]| {
            let weight = |i: usize| if keep[i] { scaled[i].exp() } else { 0.0 };
            let total: f64 = (0..logits.len()).map(weight).sum();
            (0..logits.len()).map(|i| weight(i) / total).collect::<Vec<f64>>()
        };
        let p = softmax(&keep);
        for (rank, &i) in ranks.iter().enumerate() {
            let below: f64 = ranks[rank..].iter().map(|&j| p[j]).sum();
            keep[i] &= below > 1.0 - f64::from(sampling.top_p) || rank == 0;
        }
        let p = softmax(&keep);
        (0..logits.len()).for_each(|i| keep[i] &= p[i] >= f64::from(sampling.min_p) * p[ranks[0]]);
        softmax(&keep)
    }

    proptest! {
        #[test]
        fn the_candidates_have_the_naive_probabilities(
            logits in prop::collection::vec(-40i32..40, 1..600),
            temperature in 0.3f32..2.0,
            top_k in 0usize..40,
            top_p in prop_oneof![Just(1.0f32), 0.05f32..0.99],
            min_p in prop_oneof![Just(0.0f32), 0.01f32..0.9],
        ) {
            let sampling = Sampling { temperature, top_k, top_p, min_p, ..DRAWING };
            let mut logits: Vec<f32> = logits.into_iter().map(|l| l as f32 / 8.0).collect();
            let want = naive(sampling, &logits);
            let mut sampler = sampler(sampling);
            let drawn = sampler.sample(&mut logits, &[]).unwrap();
            let total: f64 = sampler.candidates.iter().map(|c| c.weight).sum();
            let mut got = vec![0.0; logits.len()];
            sampler.candidates.iter().for_each(|c| got[c.id as usize] = c.weight / total);
            let away = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            prop_assert!(away < 1e-9, "{away}");
            prop_assert!(got[drawn as usize] > 0.0);
        }
    }

    #[test]
    fn tokens_are_drawn_with_their_probabilities() {
        let sampling = Sampling { temperature: 0.8, top_k: 4, ..DRAWING };
        let logits = [0.0, 1.0, 2.0, 0.5, -3.0];
        let mut sampler = sampler(sampling);
        let mut counts = [0.0; 5];
        for _ in 0..40_000 {
            counts[sampler.sample(&mut logits.clone(), &[]).unwrap() as usize] += 1.0 / 40_000.0;
        }
        let away = counts.iter().zip(naive(sampling, &logits)).map(|(a, b)| (a - b).abs());
        assert!(away.fold(0.0, f64::max) < 0.01, "{counts:?}");
        assert_eq!(counts[4], 0.0);
    }

    #[test]
    fn zero_temperature_takes_the_lowest_id_of_equal_logits() {
        let mut greedy = sampler(Sampling::default());
        assert_eq!(greedy.sample(&mut [1.0, 3.0, 3.0, f32::NEG_INFINITY], &[]), Ok(1));
    }

    #[test]
    fn a_bias_is_added_to_a_tokens_logit() {
        let mut biased = sampler(Sampling::default()).with_logit_bias(vec![(0, 2.0), (1, -100.0), (9, 5.0)]);
        let mut logits = [1.5, 3.0, 2.0];
        assert_eq!(biased.sample(&mut logits, &[]), Ok(0));
        assert_eq!(logits, [3.5, -97.0, 2.0]);
    }

    #[test]
    fn earlier_tokens_are_penalised_once() {
        let mut logits = [2.0, -2.0, 1.5, 0.0];
        let penalty = Sampling { repetition_penalty: 2.0, ..Sampling::default() };
        assert_eq!(sampler(penalty).sample(&mut logits, &[0, 1, 0, 3, 99]), Ok(2));
        assert_eq!(logits, [1.0, -4.0, 1.5, 0.0]);
    }

    #[test]
    fn answer_tokens_are_penalised_by_their_number_of_occurrences() {
        let mut logits = [3.0, 3.0, 3.0, 0.5];
        let penalties = Sampling { frequency_penalty: 1.0, presence_penalty: 0.5, ..Sampling::default() };
        let mut sampler = sampler(penalties).with_prompt_len(2);
        assert_eq!(sampler.sample(&mut logits, &[2, 2, 0, 1, 0, 99]), Ok(2));
        assert_eq!(logits, [0.5, 1.5, 3.0, 0.5]);
    }

    #[test]
    fn after_a_shift_the_answer_begins_earlier() {
        let prompt_after = |keep, dropped| {
            let mut sampler = sampler(Sampling::default()).with_prompt_len(10);
            sampler.shifted(keep, dropped);
            sampler.prompt
        };
        assert_eq!((prompt_after(4, 3), prompt_after(4, 9), prompt_after(12, 5)), (7, 4, 10));
    }

    #[test]
    fn equal_seeds_give_equal_tokens() {
        let draw = |seed| -> Vec<u32> {
            let mut sampler = Sampler::new(DRAWING, seed).unwrap();
            (0..12).map(|_| sampler.sample(&mut [0.0; 10], &[]).unwrap()).collect()
        };
        assert_eq!(draw(42), GOLDEN);
        assert_ne!(draw(43), GOLDEN);
    }

    const GOLDEN: [u32; 12] = [8, 3, 9, 7, 7, 5, 1, 6, 2, 9, 5, 8];

    #[test]
    fn logits_that_are_not_finite_are_errors() {
        let mut greedy = sampler(Sampling::default());
        let error = greedy.sample(&mut [0.0, f32::NAN], &[]).unwrap_err();
        assert_eq!(error.to_string(), "the model's logit for token 1 is NaN; it must be finite");
        assert!(greedy.sample(&mut [f32::INFINITY], &[]).is_err());
        assert_eq!(greedy.sample(&mut [f32::NEG_INFINITY; 2], &[]), Err(SamplerError::NoToken(2)));
        assert_eq!(greedy.sample(&mut [], &[]), Err(SamplerError::NoToken(0)));
    }

    #[test]
    fn settings_out_of_range_are_errors() {
        let bad = |sampling: Sampling| sampling.checked().unwrap_err().to_string();
        assert!(bad(Sampling { temperature: -1.0, ..DRAWING }).contains("temperature is -1"));
        assert!(bad(Sampling { temperature: f32::NAN, ..DRAWING }).contains("temperature"));
        assert!(bad(Sampling { top_p: 0.0, ..DRAWING }).contains("top-p"));
        assert!(bad(Sampling { top_p: 1.1, ..DRAWING }).contains("top-p"));
        assert!(bad(Sampling { min_p: -0.1, ..DRAWING }).contains("min-p"));
        assert!(bad(Sampling { repetition_penalty: 0.0, ..DRAWING }).contains("penalty"));
        assert!(bad(Sampling { presence_penalty: f32::NAN, ..DRAWING }).contains("presence penalty"));
        assert!(DRAWING.checked().is_ok());
    }
}
