//! Convolved queries and keys of the double of a device.

use super::OpsDouble;
use crate::device::{DeviceConvolvedHeads, DeviceHeadConvolution, DeviceRows, HeadMix, StateSpan};
use crate::error::Result;
use crate::nn::{CausalConv, MixedHeads, gather_convolved};

impl DeviceConvolvedHeads for OpsDouble {
    fn convolve_heads(&self, convolution: &DeviceHeadConvolution, spans: &[StateSpan]) -> Result<[DeviceRows; 2]> {
        let DeviceHeadConvolution { queries, keys, delayed, taps, bias, delayed_bias, head_dim, widths } = *convolution;
        let (raw, channels, half) = (self.side_by_side(queries, keys), queries.width + keys.width, delayed.width);
        let (conv, delayed, delayed_bias) = {
            let state = self.lock();
            let conv =
                CausalConv::with_taps(state.kept[taps].clone(), Some(state.kept[bias].clone()), channels, widths[0]);
            (conv, state.values(delayed).to_vec(), delayed_bias.map(|bias| state.kept[bias].clone()))
        };
        let (mut gathered, mut earlier) = (Vec::new(), Vec::new());
        self.advance(spans, |span, state, rows| {
            let (window, kept) = state.split_at_mut(span.recurrence_at);
            let own = &raw[rows.start * channels..rows.end * channels];
            gathered.extend(gather_convolved(&conv, [widths[1], head_dim], own, window));
            conv.shift(own, window);
            for row in rows {
                earlier.extend_from_slice(kept);
                kept.copy_from_slice(&delayed[row * half..][..half]);
            }
            0..state.len()
        });
        if let Some(bias) = delayed_bias {
            earlier.iter_mut().zip(bias.iter().cycle()).for_each(|(value, bias)| *value += bias);
        }
        Ok([self.push(widths[1] * channels, gathered, Ok(())), self.push(half, earlier, Ok(()))])
    }

    fn mix_heads(&self, [queries, keys, mixed]: [DeviceRows; 3], mix: &HeadMix) -> Result<[DeviceRows; 2]> {
        let (raw, HeadMix { heads, kv_heads, bias, factors }) = (self.side_by_side(queries, keys), *mix);
        let (q, k) = {
            let state = self.lock();
            let (bias, factors) = (&state.kept[bias][..], &state.kept[factors][..]);
            let of = MixedHeads { heads, kv_heads, head_dim: keys.width / kv_heads, bias, factors };
            of.of(&raw, state.values(mixed).to_vec())
        };
        Ok([self.push(queries.width, q, Ok(())), self.push(keys.width, k, Ok(()))])
    }
}
