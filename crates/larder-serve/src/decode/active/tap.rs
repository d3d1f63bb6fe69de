//! The observer of a step: it ends a step that no client wants, tells clients how far their prompts have come, and sums
//! hidden states for embeddings.

use std::ops::Range;
use std::rc::Rc;

use larder_engine::HiddenSum;
use larder_model::Tap;

use super::client::ClientWatch;
use super::reporter::ProgressReporter;

/// Observes a step: ends it at the next layer once no request of it is wanted any more, reports the progress of
/// prompts, and sums hidden states.
pub struct StepTap {
    /// The requests of the step; empty if it is not worth ending.
    watches: Vec<ClientWatch>,
    /// What reports the progress of a prompt, the tokens of it before the step, and those of the step.
    prompts: Vec<(Rc<ProgressReporter>, usize, usize)>,
    /// Tokens of the step.
    tokens: usize,
    /// The stage behind the final norm.
    stage: usize,
    /// The rows of tokens of the step whose states are summed, with the sums.
    sums: Vec<(Range<usize>, HiddenSum)>,
}

impl StepTap {
    /// For a step of a decoder of `layers` layers.
    pub fn new(watches: Vec<ClientWatch>, layers: usize) -> Self {
        StepTap { watches, prompts: vec![], tokens: 0, stage: layers, sums: vec![] }
    }

    /// Adds a request with `tokens` tokens of the step, which sums their states if it has a `sum`.
    pub fn add(&mut self, tokens: usize, sum: Option<HiddenSum>) {
        let rows = self.tokens..self.tokens + tokens;
        self.tokens = rows.end;
        self.sums.extend(sum.map(|sum| (rows, sum)));
    }

    /// Adds a prompt of which the step computes `tokens` tokens behind the first `before`.
    pub fn add_prompt(&mut self, reporter: Rc<ProgressReporter>, before: usize, tokens: usize) {
        self.prompts.push((reporter, before, tokens));
    }

    /// The sums, in the order of the requests that have one.
    pub fn into_sums(self) -> impl Iterator<Item = HiddenSum> {
        self.sums.into_iter().map(|(_, sum)| sum)
    }
}

impl Tap for StepTap {
    fn wants_more(&mut self) -> bool {
        self.watches.is_empty() || self.watches.iter().any(ClientWatch::is_wanted)
    }

    fn progress(&mut self, done: usize, of: usize) {
        self.prompts.iter().for_each(|(reporter, before, tokens)| reporter.computing(before + tokens * done / of));
    }

    fn wants_hidden(&self) -> bool {
        !self.sums.is_empty()
    }

    fn hidden(&mut self, stage: usize, x: &[f32]) {
        if stage != self.stage || self.tokens == 0 {
            return;
        }
        let hidden = x.len() / self.tokens;
        for (rows, sum) in &mut self.sums {
            sum.add(&x[rows.start * hidden..rows.end * hidden], hidden);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_of_any_sizes_give_the_same_embedding() {
        let (hidden, tokens) = (5, 23);
        let states: Vec<f32> = (0..hidden * tokens).map(|i| ((i * i) as f32 * 0.731).sin() / 3.0).collect();
        let embedding = |sizes: &[usize]| {
            let (mut sum, mut at) = (HiddenSum::default(), 0);
            for size in sizes {
                // Another request has the first and the last token of the step.
                let mut tap = StepTap::new(vec![], 7);
                tap.add(1, None);
                tap.add(*size, Some(sum));
                tap.add(1, None);
                let own = &states[at * hidden..(at + size) * hidden];
                tap.hidden(6, &vec![9.0; (size + 2) * hidden]);
                tap.hidden(7, &[&[8.0; 5], own, &[8.0; 5]].concat());
                sum = tap.into_sums().next().unwrap();
                at += size;
            }
            sum.embedding()
        };
        let whole = embedding(&[23]);
        for sizes in [&[1; 23][..], &[8, 8, 7], &[22, 1]] {
            assert_eq!(embedding(sizes), whole);
        }
        let length: f32 = whole.iter().map(|x| x * x).sum();
        assert!((length - 1.0).abs() < 1e-5);
    }
}
