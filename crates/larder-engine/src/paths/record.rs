//! Recording the routing of a run as a trace.

use std::collections::BTreeMap;

use half::f16;
use larder_core::{CapacityAt, ExpertId, Geometry, Trace, TraceError, TracePass, TraceToken};
use larder_model::{Decoder, MoeCall, Routed, TokenOrigin, TokenPhase};

/// Collects the choices of every MoE layer into a trace, pass by pass.
pub struct Recorder {
    trace: Trace,
    /// MoE row of each decoder layer.
    rows: Vec<Option<usize>>,
    with_logits: bool,
    starts_sequence: bool,
    /// Numbers within the trace of the sequences so far.
    sequences: BTreeMap<u64, u32>,
    /// The current pass: `[rows, tokens, k]`, and `[rows, tokens, experts]` if logits are recorded.
    ids: Vec<u16>,
    weights: Vec<f16>,
    logits: Vec<f32>,
    failed: Option<TraceError>,
}

impl Recorder {
    /// An empty recorder for a model of this geometry.
    pub fn new(geometry: &Geometry, with_logits: bool) -> Self {
        let mut rows = vec![None; geometry.layers];
        geometry.moe_layers.iter().enumerate().for_each(|(row, layer)| rows[layer.index()] = Some(row));
        let trace = Trace::new(geometry.moe_layers.len(), geometry.experts, geometry.top_k);
        let (sequences, ids, weights, logits) = Default::default();
        Recorder { trace, rows, with_logits, starts_sequence: true, sequences, ids, weights, logits, failed: None }
    }

    /// An empty recorder for this model, which must not have tokens without experts.
    pub fn of_decoder(decoder: &Decoder, with_logits: bool) -> Result<Self, TraceError> {
        if decoder.may_skip_experts() {
            Err(TraceError::WithoutExperts)
        } else {
            Ok(Recorder::new(decoder.geometry(), with_logits))
        }
    }

    /// The next pass begins a sequence.
    pub fn new_sequence(&mut self) {
        // Before its first pass, a sequence that begins again changes nothing.
        if !std::mem::replace(&mut self.starts_sequence, true) {
            let pass = self.trace.passes.len() as u32;
            let changes = self.trace.capacities.iter_mut().rev().take_while(|change| change.pass == pass);
            changes.for_each(|change| change.before_sequence = true);
        }
    }

    /// Records that the cache has `slots` slots per pool from the next pass on.
    pub fn capacity(&mut self, slots: usize) {
        let pass = self.trace.passes.len() as u32;
        self.trace.capacities.push(CapacityAt { pass, slots: slots as u32, before_sequence: false });
    }

    /// Records the choice of a layer, without experts that were computed from smaller copies. A pass that fails before
    /// its last layer is left out.
    pub fn record(&mut self, call: &MoeCall, routed: &Routed) {
        let Some(row) = self.rows[call.layer.index()] else { return };
        if row == 0 {
            self.ids.clear();
            self.weights.clear();
            self.logits.clear();
        }
        if self.ids.len() != row * call.origins.len() * self.trace.top_k {
            self.failed.get_or_insert(TraceError::WithoutExperts);
        }
        for (token, ids) in routed.ids.chunks_exact(self.trace.top_k).enumerate() {
            let first = token * self.trace.top_k;
            let whole = (0..ids.len()).filter(|place| !routed.is_small(ids[*place]));
            self.ids.extend(whole.clone().map(|place| ids[place].0));
            self.weights.extend(whole.map(|place| f16::from_f32(routed.weights[first + place])));
            let places = self.ids.len().next_multiple_of(self.trace.top_k);
            self.ids.resize(places, ExpertId::NONE.0);
            self.weights.resize(places, f16::ZERO);
        }
        if self.with_logits {
            self.logits.extend_from_slice(call.logits);
        }
        if row + 1 == self.trace.rows {
            self.finish_pass(call.origins);
        }
    }

    fn finish_pass(&mut self, origins: &[TokenOrigin]) {
        let tokens = origins.len();
        let origins: Vec<TraceToken> = origins.iter().map(|origin| self.number(origin)).collect();
        let Trace { rows, experts, top_k, .. } = self.trace;
        if self.failed.is_some() {
            return;
        }
        let ids = by_token(&self.ids, rows, tokens, top_k);
        let weights = by_token(&self.weights, rows, tokens, top_k);
        let logits = if self.with_logits { by_token(&self.logits, rows, tokens, experts) } else { vec![] };
        let starts_sequence = std::mem::take(&mut self.starts_sequence);
        let pass = TracePass { ids: &ids, weights: &weights, logits: &logits, origins: &origins, starts_sequence };
        if let Err(error) = self.trace.push(&pass) {
            self.failed.get_or_insert(error);
        }
    }

    /// The origin of a token, with sequences numbered in the order in which they begin.
    fn number(&mut self, origin: &TokenOrigin) -> TraceToken {
        let next = self.sequences.len() as u32;
        let sequence = *self.sequences.entry(origin.sequence).or_insert(next);
        TraceToken { sequence, decode: origin.phase == TokenPhase::Decode }
    }

    /// Sets an entry of the trace's metadata.
    pub fn set_meta(&mut self, key: &str, value: String) {
        self.trace.meta.insert(key.to_owned(), value);
    }

    /// The trace of all complete passes.
    pub fn into_trace(self) -> Result<Trace, TraceError> {
        self.failed.map_or(Ok(self.trace), Err)
    }
}

/// `[rows, tokens, width]` → `[tokens, rows, width]`
fn by_token<T: Copy>(values: &[T], rows: usize, tokens: usize, width: usize) -> Vec<T> {
    let at = |token: usize, row: usize| &values[(row * tokens + token) * width..][..width];
    (0..tokens).flat_map(|token| (0..rows).flat_map(move |row| at(token, row))).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_become_tokens() {
        // Two rows of three tokens with two numbers each.
        let values = [0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15];
        assert_eq!(by_token(&values, 2, 3, 2), [0, 1, 10, 11, 2, 3, 12, 13, 4, 5, 14, 15]);
    }
}
