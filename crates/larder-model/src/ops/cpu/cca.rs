//! Convolved queries and keys (compressed convolutional attention).

use super::TASK_ACTIVATIONS;
use crate::error::Result;
use crate::ops::{CcaOps, CpuOps, HeadConvolution, HeadMix, Rows, StateSpan, convolve_rows, shift_window, sum};

impl CcaOps for CpuOps {
    fn convolve_heads(&self, convolution: &HeadConvolution, spans: &[StateSpan]) -> Result<[Rows; 2]> {
        let HeadConvolution { queries, keys, delayed, taps, bias, delayed_bias, head_dim, widths } = *convolution;
        let raw = crate::ops::ChoiceOps::beside(self, queries, keys)?;
        let (mut state, rows, channels, half) = (self.lock(), queries.rows, queries.width + keys.width, delayed.width);
        let [first, second] = widths;
        let mut gathered = state.rows.take(rows, second * channels);
        let mut earlier = state.rows.take(rows, half);
        let all = &*state;
        let (raw, delayed, taps, bias) = (all.values(raw), all.values(delayed), all.kept(taps), all.kept(bias));
        let (gathered_values, earlier_values) = (gathered.values(), earlier.values());
        self.advance(spans, |window_len, state, rows| {
            let (window, kept) = state.split_at_mut(window_len);
            let own = &raw[rows.start * channels..rows.end * channels];
            // The window has the inputs of the first convolution before those whose results the second one reads.
            let (before, others) = window.split_at((first - 1) * channels);
            let inputs = [others, own].concat();
            let mut convolved = vec![0.0; inputs.len()];
            let some = TASK_ACTIVATIONS.div_ceil(channels);
            self.pool.run_chunks(&mut convolved, some * channels, &|task, out| {
                convolve_rows([taps, before, &inputs], Some(bias), [first, 1], task * some, out);
            });
            let of_token = second * channels;
            let out = &mut gathered_values[rows.start * of_token..rows.end * of_token];
            self.shared(out.len(), |pool| {
                pool.run_chunks(out, of_token, &|token, out| {
                    for (at, out) in out.chunks_exact_mut(head_dim).enumerate() {
                        let (head, row) = (at / second, at % second);
                        out.copy_from_slice(&convolved[(token + row) * channels + head * head_dim..][..head_dim]);
                    }
                })
            });
            shift_window(own, window);
            for row in rows {
                earlier_values[row * half..][..half].copy_from_slice(&kept[..half]);
                kept[..half].copy_from_slice(&delayed[row * half..][..half]);
            }
            0..window_len + half
        });
        if let Some(bias) = delayed_bias {
            let bias = all.kept(bias).iter().cycle();
            earlier_values.iter_mut().zip(bias).for_each(|(value, bias)| *value += bias);
        }
        Ok([state.rows.push(gathered), state.rows.push(earlier)])
    }

    fn mix_heads(&self, [queries, keys, mixed]: [Rows; 3], mix: &HeadMix) -> Result<[Rows; 2]> {
        let HeadMix { heads, kv_heads, bias, factors } = *mix;
        let mut state = self.lock();
        let mut q = state.rows.take(queries.rows, queries.width);
        let mut k = state.rows.take(keys.rows, keys.width);
        let (all, some) = (&*state, TASK_ACTIVATIONS.div_ceil(mixed.width));
        let of = MixedHeads {
            heads,
            kv_heads,
            head_dim: keys.width / kv_heads,
            bias: all.kept(bias),
            factors: all.kept(factors),
        };
        self.run_pairs((&mut q, some * queries.width), (&mut k, some * keys.width), &|task, q, k| {
            let rows = q.chunks_exact_mut(queries.width).zip(k.chunks_exact_mut(keys.width));
            for (row, (q, k)) in (task * some..).zip(rows) {
                let of_row = |rows: Rows| &all.values(rows)[row * rows.width..][..rows.width];
                of.of([of_row(queries), of_row(keys), of_row(mixed)], [q, k]);
            }
        });
        Ok([state.rows.push(q), state.rows.push(k)])
    }
}

/// How queries and keys are made of what was projected and convolved.
struct MixedHeads<'a> {
    /// Query heads.
    heads: usize,
    /// Key heads.
    kv_heads: usize,
    /// Width of a head.
    head_dim: usize,
    /// `[channels]`, added to what was convolved.
    bias: &'a [f32],
    /// `[kv_heads]`: factors on the lengths of keys.
    factors: &'a [f32],
}

impl MixedHeads<'_> {
    /// Queries and keys of a token, of what was projected, queries and keys, and of what was convolved, which still
    /// lacks its bias.
    fn of(&self, [queries, keys, mixed]: [&[f32]; 3], [q, k]: [&mut [f32]; 2]) {
        let MixedHeads { heads, kv_heads, head_dim, bias, factors } = *self;
        let group = heads / kv_heads;
        let biased = mixed.iter().zip(bias).map(|(value, bias)| value + bias);
        q.iter_mut().chain(&mut *k).zip(biased).for_each(|(out, value)| *out = value);
        for at in 0..kv_heads * head_dim {
            let (head, channel) = (at / head_dim, at % head_dim);
            let mut total = 0.0;
            for query in (head * group..(head + 1) * group).map(|head| head * head_dim + channel) {
                let mean = (queries[query] + keys[at]) * 0.5;
                q[query] += mean;
                total += mean;
            }
            k[at] += total / group as f32;
        }
        q.chunks_exact_mut(head_dim).for_each(|head| normalise(head, 1.0));
        k.chunks_exact_mut(head_dim).zip(factors).for_each(|(head, by)| normalise(head, *by));
    }
}

/// Brings a head to the length that is the root of its width, times `factor`.
fn normalise(head: &mut [f32], factor: f32) {
    let length = sum(head.iter().map(|value| value * value)).sqrt();
    let scale = (head.len() as f32).sqrt() / length.max(f32::EPSILON);
    head.iter_mut().for_each(|value| *value = *value * scale * factor);
}
