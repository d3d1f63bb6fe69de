//! How good the router's expert at one rank is: every other expert is tried in its place.

use larder_core::{Gate, Geometry, LayerIdx, MoeRow};
use larder_model::{Decoder, ExpertPath, KvCache, LogitsFor, ModelError, Routed, Span, Tap, TokenOrigin, TokenPhase};
use larder_policy::routing::Ranking;
use serde::Serialize;

use super::agreement::MoeRows;
use super::{ExpertSwap, SwapHandle, loss};

/// How often the router's expert at a rank was the best choice, in one layer.
#[derive(Clone, Copy, PartialEq, Default, Debug, Serialize)]
pub struct RankOptimality {
    /// Tokens for which all experts were tried.
    pub tokens: u64,
    /// Tokens for which no other expert gave a smaller loss of the next token.
    pub best: u64,
    /// Experts tried, the router's own included, summed over tokens.
    pub tried: u64,
    /// Experts better than the router's, summed over tokens.
    pub better: u64,
    /// Nats that the best expert would have saved, summed over tokens.
    pub saved: f64,
}

impl RankOptimality {
    /// Share of tokens for which the router's choice was the best.
    pub fn best_share(&self) -> f64 {
        self.best as f64 / self.tokens.max(1) as f64
    }

    /// The same share for a random choice.
    pub fn chance(&self) -> f64 {
        self.tokens as f64 / self.tried.max(1) as f64
    }

    /// Mean rank of the router's choice among the experts tried, 1 being the best.
    pub fn mean_rank(&self) -> f64 {
        1.0 + self.better as f64 / self.tokens.max(1) as f64
    }

    /// Adds the counts of another layer or of other tokens.
    pub fn add(&mut self, other: &RankOptimality) {
        self.tokens += other.tokens;
        self.best += other.best;
        self.tried += other.tried;
        self.better += other.better;
        self.saved += other.saved;
    }

    /// Counts a token: the loss of the next one with the router's expert, and with each other expert.
    fn record(&mut self, own: f64, others: &[f64]) {
        let smallest = others.iter().copied().fold(own, f64::min);
        self.tokens += 1;
        self.tried += 1 + others.len() as u64;
        self.better += others.iter().filter(|l| **l < own).count() as u64;
        self.best += u64::from(own <= smallest);
        self.saved += own - smallest;
    }
}

/// Tries every expert at one rank, one layer at a time; all other choices are the router's own.
pub struct RankProbe<'a, P> {
    /// The model.
    pub decoder: &'a Decoder,
    /// Its experts, routed by a [`ForcedRouter`](super::ForcedRouter) that `swaps` controls.
    pub experts: &'a mut P,
    /// The handle of that router.
    pub swaps: SwapHandle,
    /// The rank to try, 1 being the best.
    pub rank: usize,
    /// Tokens before a position that are computed in one step, at least one.
    pub prefill_tokens: usize,
}

impl<P: ExpertPath> RankProbe<'_, P> {
    /// Number of forward passes for `tokens` tokens, if every expert is eligible in every layer.
    pub fn passes(&self, tokens: usize) -> usize {
        tokens * self.decoder.gates().map(|gate| gate.experts - gate.top_k).sum::<usize>()
    }

    /// Tries at the positions `at` of `ids`, which ascend and are not the last. `on_pass` is called after every pass.
    pub fn run(
        &mut self,
        ids: &[u32],
        at: &[usize],
        on_pass: &mut dyn FnMut(),
    ) -> Result<Vec<RankOptimality>, ModelError> {
        let gates: Vec<&Gate> = self.decoder.gates().collect();
        let mut found = vec![RankOptimality::default(); gates.len()];
        let mut state = self.decoder.new_kv_cache();
        for position in at {
            self.swaps.set(None);
            let end = position + 1;
            for piece in ids[state.len..*position].chunks(self.prefill_tokens) {
                let (before, horizon, logits_for) = (&ids[..state.len], ids.len(), LogitsFor::None);
                let span = Span { before, horizon, logits_for, ..Span::new(piece, &mut state) };
                self.decoder.step(&mut [span], self.experts, &mut ())?;
            }
            let mut seen = RouterLogits::new(self.decoder.geometry(), gates.len());
            let step = (&ids[..end], ids[end], ids.len());
            let own = self.pass(step, &state, &mut seen)?;
            for (row, gate) in gates.iter().enumerate() {
                let mut others = Vec::new();
                for expert in candidates(gate, &seen.logits[row]) {
                    self.swaps.set(Some(ExpertSwap { rank: self.rank, expert: MoeRow(row).expert(expert) }));
                    others.push(self.pass(step, &state, &mut ())?);
                    on_pass();
                }
                found[row].record(own, &others);
            }
        }
        self.swaps.set(None);
        Ok(found)
    }

    /// The loss of the token `next` after `tokens`, whose last one is computed, in a sequence of `horizon` tokens.
    fn pass(
        &mut self,
        (tokens, next, horizon): (&[u32], u32, usize),
        state: &KvCache,
        tap: &mut dyn Tap,
    ) -> Result<f64, ModelError> {
        let mut state = state.clone();
        let origin = TokenOrigin { phase: TokenPhase::Decode, ..TokenOrigin::default() };
        let (before, token) = tokens.split_at(state.len);
        let span = Span { before, horizon, origin, ..Span::new(token, &mut state) };
        let logits = self.decoder.step(&mut [span], self.experts, tap)?;
        if logits.len() > next as usize {
            Ok(loss(&logits, next))
        } else {
            Err(ModelError::Request(format!(
                "token id {next} is out of range: the vocabulary has {} tokens",
                logits.len()
            )))
        }
    }
}

/// Eligible experts that the router did not choose.
fn candidates(gate: &Gate, logits: &[f32]) -> Vec<usize> {
    let mut ranking = Ranking::default();
    ranking.rank(gate, logits);
    ranking.order().skip(gate.top_k).filter(|e| ranking.is_eligible(*e)).collect()
}

/// A tap that keeps the router logits of each row for one token.
struct RouterLogits {
    rows: MoeRows,
    logits: Vec<Vec<f32>>,
}

impl RouterLogits {
    fn new(geometry: &Geometry, rows: usize) -> Self {
        RouterLogits { rows: MoeRows::new(geometry), logits: vec![Vec::new(); rows] }
    }
}

impl Tap for RouterLogits {
    fn wants_routing(&self) -> bool {
        true
    }

    fn routed(&mut self, layer: LayerIdx, logits: &[f32], _: &Routed) {
        if let Some(row) = self.rows.of(layer) {
            self.logits[row.index()] = logits.to_vec();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_ranks_and_savings_add_up() {
        let mut found = RankOptimality::default();
        found.record(1.0, &[2.0, 1.5, 1.0]);
        found.record(3.0, &[2.0, 1.5, 9.0]);
        assert_eq!((found.best_share(), found.chance(), found.mean_rank(), found.saved), (0.5, 0.25, 2.0, 1.5));
        let mut twice = found;
        twice.add(&found);
        assert_eq!((twice.tokens, twice.best_share(), twice.mean_rank()), (4, 0.5, 2.0));
    }

    #[test]
    fn chosen_experts_are_no_candidates() {
        let gate = Gate::softmax(4, 2, false);
        assert_eq!(candidates(&gate, &[0.0, 3.0, 1.0, 2.0]), [2, 0]);
    }
}
