//! Features of n-grams as a part of chains on a device: the CPU knows the tokens, and reads the rows of the table.

use super::{NGramFeatures, NGramShape, remember, tokens_of};
use crate::device::{DeviceOps, DeviceRows, StateSpan};
use crate::error::Result;
use crate::hidden::Hidden;
use crate::matrix::Linear;
use crate::nn::{Activation, ChainedMixer, ForwardPass, SpanPositions};
use crate::step::LayerStates;

impl NGramFeatures {
    /// Whether all of it is computed on a device.
    pub(super) fn is_on_device(&self) -> bool {
        let norms = self.norms.iter().all(|norm| norm.as_rms_of_groups().is_some());
        norms && self.key.is_on_device() && self.value.is_on_device()
    }

    /// The last tokens before a span: those that its step names, else those of the state, for which it may have to wait.
    fn tokens_before(&self, states: &LayerStates, span: usize, positions: &SpanPositions) -> Result<Vec<u32>> {
        match states.tokens_before(span, positions) {
            Some(before) => Ok(before[before.len().saturating_sub(self.shape.longest - 1)..].to_vec()),
            None => Ok(tokens_of(&states.of(span).recurrent.recurrence(self.state_lens())?)),
        }
    }

    /// One of the norms, over each stream.
    fn begin_norm(&self, which: usize, x: DeviceRows, ops: &dyn DeviceOps) -> Result<DeviceRows> {
        let (weight, eps) = self.norms[which].as_rms_of_groups().expect("it is for devices");
        ops.rms_groups(x, self.shape.streams, Some(self.norm_copies[which].of(weight, ops)?), eps)
    }

    /// The last tokens behind a span, and behind its tokens up to each checkpoint, in the order in which they are written.
    fn tokens_behind(&self, before: &[u32], tokens: &[u32], span: &StateSpan) -> Vec<f32> {
        let ends = span.copies.iter().map(|(taken_in, _)| *taken_in).chain([span.tokens]);
        let state = |end: usize| {
            let mut state = vec![0.0; self.shape.longest - 1];
            remember(&mut state, before);
            remember(&mut state, &tokens[..end]);
            state
        };
        ends.flat_map(state).collect()
    }
}

impl ChainedMixer for NGramFeatures {
    fn begin(
        &self,
        x: &Hidden,
        states: &mut LayerStates,
        pass: &ForwardPass,
        ops: &dyn DeviceOps,
    ) -> Result<DeviceRows> {
        let NGramShape { streams, .. } = self.shape;
        let spans = pass.spans.iter().enumerate();
        let before: Vec<Vec<u32>> =
            spans.map(|(i, span)| self.tokens_before(states, i, span)).collect::<Result<_>>()?;
        let x = x.on_device(ops)?;
        let embedded = self.embed(&before, pass)?;
        let embedded = ops.send(&embedded, self.shape.embedded())?;
        let products = Linear::begin_all([&self.key, &self.value], embedded, ops)?;
        let [key, value] = products.expect("the products are on the device");
        let (key, query) = (self.begin_norm(0, key, ops)?, self.begin_norm(1, x, ops)?);
        let values = ops.gate_by_keys([key, query, value], streams)?;
        let normed = self.begin_norm(2, values, ops)?;
        let of_states = states.extend_recurrent(pass, self.state_lens())?;
        let convolved = self.conv.begin(&[normed], &of_states, Some(Activation::Silu), ops)?;
        let spans = of_states.iter().zip(pass.spans.iter().zip(&before));
        let behind =
            spans.flat_map(|(state, (span, before))| self.tokens_behind(before, span.rows(&pass.tokens, 1), state));
        ops.write_recurrences(&of_states, &behind.collect::<Vec<_>>())?;
        ops.add(values, convolved, 1.0)
    }
}
