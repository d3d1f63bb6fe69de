//! Sampling: from one row of logits to one token id.
//!
//! The order is that of transformers: penalties, temperature, top-k, top-p, min-p, draw.

mod changes;
mod settings;
#[cfg(test)]
mod tests;

use std::cmp::Ordering;

use larder_core::Xoshiro256;
use larder_model::{BestLogits, LogitChanges, LogitsRow, TokenDraw, TokenLogit};

use crate::choice::{NextDraws, TokenChoice};
use changes::ChangedTokens;
pub use settings::{SamplerError, Sampling};

/// Draws tokens with fixed settings and a seed: equal logits and equal seeds give equal tokens.
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
    rng: Xoshiro256,
    candidates: Vec<Candidate>,
    changed: ChangedTokens,
    /// Tokens of the sequence before the answer, which the frequency and presence penalties ignore.
    prompt: usize,
    /// Added to the logits of these tokens, which are in the order of ids.
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
        let (sampling, rng) = (sampling.checked()?, Xoshiro256::new(seed));
        let (candidates, changed) = (Vec::new(), ChangedTokens::default());
        Ok(Sampler { sampling, rng, candidates, changed, prompt: 0, bias: Vec::new() })
    }

    /// Sets what is added to the logits of these tokens before all else; ids outside the vocabulary are ignored.
    pub fn with_logit_bias(self, mut bias: Vec<(u32, f32)>) -> Self {
        bias.sort_by_key(|(id, _)| *id);
        bias.dedup_by(|(id, more), (before, sum)| {
            id == before && {
                *sum += *more;
                true
            }
        });
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
        check_finite(logits, |index| index)?;
        let vocab = logits.len();
        self.adjust(logits, previous, &|id| Some(id as usize).filter(|id| *id < vocab));
        let best = most_likely(logits).ok_or(SamplerError::NoToken(logits.len()))?;
        if self.sampling.temperature == 0.0 {
            return Ok(best as u32);
        }
        self.collect_top_k(logits);
        Ok(self.draw_candidate(logits[best]))
    }

    /// As [`sample`](Self::sample), from all logits of a row or what [`best`](TokenChoice::best) wants of it.
    pub fn sample_row(&mut self, row: LogitsRow, previous: &[u32]) -> Result<u32, SamplerError> {
        match row {
            LogitsRow::All(logits) => self.sample(logits, previous),
            LogitsRow::Best(best) => self.sample_best(best, previous),
        }
    }

    /// Draws a token from the best of a row.
    fn sample_best(&mut self, tokens: &[TokenLogit], previous: &[u32]) -> Result<u32, SamplerError> {
        let mut logits: Vec<f32> = tokens.iter().map(|token| token.logit).collect();
        check_finite(&logits, |index| tokens[index].id as usize)?;
        self.adjust(&mut logits, previous, &|id| tokens.binary_search_by_key(&id, |token| token.id).ok());
        let best = most_likely(&logits).ok_or(SamplerError::NoToken(tokens.len()))?;
        if self.sampling.temperature == 0.0 {
            return Ok(tokens[best].id);
        }
        let candidates = tokens.iter().zip(&logits);
        self.candidates.clear();
        self.candidates.extend(candidates.map(|(token, &logit)| Candidate { id: token.id, logit, weight: 0.0 }));
        if self.sampling.top_k < tokens.len() {
            self.keep_best(self.sampling.top_k);
        }
        self.candidates.sort_unstable_by(by_rank);
        Ok(self.draw_candidate(logits[best]))
    }

    /// Applies bias and penalties to logits; that of a token is at its `place`.
    fn adjust(&mut self, logits: &mut [f32], previous: &[u32], place: &dyn Fn(u32) -> Option<usize>) {
        let changes = self.changes(&[previous]);
        for token in &changes.tokens {
            place(token.id).into_iter().for_each(|at| logits[at] = changes.apply(token, logits[at]));
        }
    }

    /// How logits behind a text, which has these parts, are changed.
    fn changes(&mut self, text: &[&[u32]]) -> LogitChanges {
        let Sampling { repetition_penalty, frequency_penalty, presence_penalty, .. } = self.sampling;
        let mut changes = LogitChanges {
            repetition: repetition_penalty,
            frequency: frequency_penalty,
            presence: presence_penalty,
            tokens: Vec::new(),
        };
        changes.tokens = self.changed.collect(&changes, text, self.prompt, &self.bias);
        changes
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

    /// Draws one of the candidates, the best of whose logits is `best`.
    fn draw_candidate(&mut self, best: f32) -> u32 {
        self.weigh(best);
        self.keep_top_p();
        self.keep_min_p();
        self.draw()
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

    /// Drops light candidates that are not needed for a weight of `enough`, so that few are left to be sorted: few
    /// tokens usually hold most of the probability.
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

impl TokenChoice for Sampler {
    /// The best tokens, if no others count, and all whose logits are changed.
    fn best(&mut self, tokens: &[&[u32]]) -> Option<BestLogits> {
        let Sampling { temperature, top_k, .. } = self.sampling;
        let count = if temperature == 0.0 { 1 } else { top_k };
        (count > 0).then(|| BestLogits { count, changes: self.changes(tokens) })
    }

    fn draws(&mut self, tokens: &[&[u32]]) -> Option<NextDraws> {
        let (Sampling { temperature, top_k, top_p, min_p, .. }, mut rng) = (self.sampling, self.rng.clone());
        let draws = [(); 2].map(|()| TokenDraw { temperature, top_k, top_p, min_p, unit: rng.unit() });
        Some(NextDraws { draws, changes: self.changes(tokens) })
    }
}

/// Checks that logits are numbers, or minus infinity; `id` is that of the token of a logit.
fn check_finite(logits: &[f32], id: impl Fn(usize) -> usize) -> Result<(), SamplerError> {
    match logits.iter().position(|logit| logit.is_nan() || *logit == f32::INFINITY) {
        Some(index) => Err(SamplerError::Logit { id: id(index), value: logits[index] }),
        None => Ok(()),
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
