//! Convolutions and recurrences on states in main memory.

use std::ops::Range;

use super::TASK_ACTIVATIONS;
use crate::error::Result;
use crate::ops::{
    Activation, ChannelScan, ChannelTokens, Convolution, CpuOps, Decays, Delta, GateFunction, RecurrentOps, Rows, Scan,
    ScanTokens, StateSpan, convolve_rows, shift_window,
};

impl CpuOps {
    /// Takes in the tokens of spans: `step` gets the number of values before the recurrence, the state, and consecutive
    /// rows, and returns the part of the state that it changed.
    pub(super) fn advance(
        &self,
        spans: &[StateSpan],
        mut step: impl FnMut(usize, &mut [f32], Range<usize>) -> Range<usize>,
    ) {
        let mut pages = self.pages.lock();
        for span in spans {
            let (mut state, mut start) = (pages.move_out(span.page), 0);
            for (end, copy) in &span.copies {
                let changed = step(span.recurrence_at, &mut state, span.first_row + start..span.first_row + end);
                pages.page_mut(*copy).values[changed.clone()].copy_from_slice(&state[changed]);
                start = *end;
            }
            step(span.recurrence_at, &mut state, span.first_row + start..span.first_row + span.tokens);
            pages.put_back(span.page, state);
        }
    }
}

impl RecurrentOps for CpuOps {
    fn convolve(&self, convolution: &Convolution, spans: &[StateSpan]) -> Result<Rows> {
        let Convolution { inputs, taps, bias, width, dilation, silu } = *convolution;
        let (mut state, rows, channels) = (self.lock(), inputs[0].rows, convolution.channels());
        let mut joined = if inputs.len() > 1 { Some(state.rows.take(rows, channels)) } else { None };
        let mut out = state.rows.take(rows, channels);
        let all = &*state;
        if let Some(joined) = &mut joined {
            let some = TASK_ACTIVATIONS.div_ceil(channels);
            self.run_chunks(joined, some * channels, &|task, joined| {
                for (i, mut row) in joined.chunks_exact_mut(channels).enumerate() {
                    for input in inputs {
                        let (own, rest) = row.split_at_mut(input.width);
                        own.copy_from_slice(&all.values(*input)[(task * some + i) * input.width..][..input.width]);
                        row = rest;
                    }
                }
            });
        }
        {
            let x = joined.as_mut().map_or_else(|| all.values(inputs[0]), |joined| &*joined.values());
            let (taps, bias, out) = (all.kept(taps), bias.map(|bias| all.kept(bias)), out.values());
            self.advance(spans, |window_len, state, rows| {
                let (window, at) = (&mut state[..window_len], rows.start * channels..rows.end * channels);
                let x = &x[at.clone()];
                let some = TASK_ACTIVATIONS.div_ceil(channels);
                let some_rows = |task: usize, out: &mut [f32]| {
                    convolve_rows([taps, window, x], bias, [width, dilation], task * some, out);
                    if silu {
                        Activation::Silu.apply(out);
                    }
                };
                self.shared(at.len(), |pool| pool.run_chunks(&mut out[at], some * channels, &some_rows));
                shift_window(x, window);
                0..window_len
            });
        }
        joined.into_iter().for_each(|joined| state.rows.give_back(joined));
        Ok(state.rows.push(out))
    }

    fn write_recurrences(&self, spans: &[StateSpan], values: &[f32]) -> Result<()> {
        let pages = spans.iter().map(|span| span.copies.len() + 1).sum::<usize>();
        let (mut each, mut table) = (values.chunks_exact(values.len() / pages), self.pages.lock());
        for span in spans {
            for page in span.copies.iter().map(|(_, page)| *page).chain([span.page]) {
                let values = each.next().expect("a value for each");
                table.page_mut(page).values[span.recurrence_at..][..values.len()].copy_from_slice(values);
            }
        }
        Ok(())
    }

    fn delta(&self, delta: &Delta, spans: &[StateSpan]) -> Result<Rows> {
        let Delta { heads, qkv, strengths, decay } = *delta;
        let (mut state, tokens, of_decays) = (self.lock(), strengths.rows, decay.products.width);
        let width = heads.prepared(of_decays);
        let mut prepared = state.rows.take(tokens, width);
        let mut out = state.rows.take(tokens, heads.values());
        let all = &*state;
        let decays = Decays { form: decay.form, bias: all.kept(decay.bias), rates: all.kept(decay.rates) };
        let (some, inputs) = (TASK_ACTIVATIONS.div_ceil(width), [qkv, strengths, decay.products]);
        self.run_chunks(&mut prepared, some * width, &|task, prepared| {
            for (i, prepared) in prepared.chunks_exact_mut(width).enumerate() {
                let row = |x: Rows| &all.values(x)[(task * some + i) * x.width..][..x.width];
                heads.prepare(inputs.map(row), decays, prepared);
            }
        });
        let (qkv, prepared_values, values) = (all.values(qkv), &*prepared.values(), out.values());
        self.advance(spans, |recurrence_at, state, rows| {
            let part = |width: usize| rows.start * width..rows.end * width;
            let tokens = [&prepared_values[part(width)], &qkv[part(heads.mixed())]];
            let state_len = heads.state_len();
            let (state, out) = (&mut state[recurrence_at..][..state_len], &mut values[part(heads.values())]);
            self.shared(out.len(), |pool| heads.advance(tokens, state, out, pool));
            recurrence_at..recurrence_at + state_len
        });
        state.rows.give_back(prepared);
        Ok(state.rows.push(out))
    }

    fn scan(&self, scan: &Scan, spans: &[StateSpan]) -> Result<Rows> {
        let Scan { heads, convolved, steps: raw, step_bias, rates, skips, limits: [least, most] } = *scan;
        let mut state = self.lock();
        let mut steps = state.rows.take(raw.rows, heads.heads);
        let mut out = state.rows.take(raw.rows, heads.inner());
        let all = &*state;
        let some = TASK_ACTIVATIONS.div_ceil(raw.width) * raw.width;
        self.run_chunks(&mut steps, some, &|task, steps| {
            let biased = all.values(raw)[task * some..].iter().zip(all.kept(step_bias).iter().cycle());
            for (step, (dt, bias)) in steps.iter_mut().zip(biased) {
                *step = GateFunction::Softplus.of(dt + bias).clamp(least, most);
            }
        });
        let (convolved, step_values, values) = (all.values(convolved), &*steps.values(), out.values());
        let (rates, skips) = (all.kept(rates), all.kept(skips));
        self.advance(spans, |recurrence_at, state, rows| {
            let part = |width: usize| rows.start * width..rows.end * width;
            let (convolved, steps) = (&convolved[part(heads.channels())], &step_values[part(heads.heads)]);
            let tokens = ScanTokens { convolved, steps, rates, skips };
            let state_len = heads.state_len();
            let (state, out) = (&mut state[recurrence_at..][..state_len], &mut values[part(heads.inner())]);
            self.shared(out.len(), |pool| heads.advance(&tokens, state, out, pool));
            recurrence_at..recurrence_at + state_len
        });
        state.rows.give_back(steps);
        Ok(state.rows.push(out))
    }

    fn scan_channels(&self, scan: &ChannelScan, spans: &[StateSpan]) -> Result<Rows> {
        let ChannelScan { x, steps: raw, b, c, rates, skips } = *scan;
        let (mut state, channels, width) = (self.lock(), x.width, b.width);
        let mut steps = state.rows.take(x.rows, channels);
        let mut out = state.rows.take(x.rows, channels);
        let all = &*state;
        self.run_chunks(&mut steps, TASK_ACTIVATIONS, &|task, steps| {
            let raw = &all.values(raw)[task * TASK_ACTIVATIONS..];
            steps.iter_mut().zip(raw).for_each(|(step, raw)| *step = GateFunction::Softplus.of(*raw));
        });
        let (decays, skips, values) = (all.kept(rates), all.kept(skips), out.values());
        let tokens = ChannelTokens {
            x: all.values(x),
            steps: &*steps.values(),
            b: all.values(b),
            c: all.values(c),
            decays,
            skips,
            channels,
            width,
        };
        self.advance(spans, |recurrence_at, state, rows| {
            let own = rows.start * channels..rows.end * channels;
            let state = &mut state[recurrence_at..][..channels * width];
            self.shared(own.len(), |pool| tokens.advance(rows, state, &mut values[own], pool));
            recurrence_at..recurrence_at + channels * width
        });
        state.rows.give_back(steps);
        Ok(state.rows.push(out))
    }
}
