//! Convolutions and recurrences of the double of a device.

use larder_kernels::ThreadPool;

use super::OpsDouble;
use crate::device::{
    DeviceChannelScan, DeviceConvolution, DeviceDelta, DeviceRecurrence, DeviceRows, DeviceScan, StateSpan,
};
use crate::error::Result;
use crate::nn::{Activation, CausalConv, ChannelTokens, DeltaHeads, DeltaTokens, GateFunction, ScanTokens};

impl DeviceRecurrence for OpsDouble {
    fn convolve(&self, convolution: &DeviceConvolution, spans: &[StateSpan]) -> Result<DeviceRows> {
        let DeviceConvolution { inputs, taps, bias, width, dilation, silu } = *convolution;
        let (rows, channels) = (inputs[0].rows, convolution.channels());
        let mut x = Vec::with_capacity(rows * channels);
        let conv = {
            let state = self.lock();
            let row =
                |row: usize, input: &DeviceRows| state.values(*input)[row * input.width..][..input.width].to_vec();
            (0..rows).for_each(|at| inputs.iter().for_each(|input| x.extend(row(at, input))));
            let bias = bias.map(|bias| state.kept[bias].clone());
            CausalConv::with_taps(state.kept[taps].clone(), bias, channels, width).dilated(dilation)
        };
        let mut out = vec![0.0; x.len()];
        self.advance(spans, |span, state, rows| {
            let of_rows = rows.start * channels..rows.end * channels;
            let convolved = conv.forward(&x[of_rows.clone()], &mut state[..span.recurrence_at]);
            out[of_rows].copy_from_slice(&convolved);
            0..span.recurrence_at
        });
        if silu {
            Activation::Silu.apply(&mut out);
        }
        Ok(self.push(channels, out, Ok(())))
    }

    fn write_recurrences(&self, spans: &[StateSpan], values: &[f32]) -> Result<()> {
        let pages = spans.iter().map(|span| span.copies.len() + 1).sum::<usize>();
        let mut each = values.chunks_exact(values.len() / pages);
        for span in spans {
            for page in span.copies.iter().map(|(_, page)| *page).chain([span.page]) {
                self.attention.set_floats(page, span.recurrence_at, each.next().expect("a value for each"));
            }
        }
        Ok(())
    }

    fn delta(&self, delta: &DeviceDelta, spans: &[StateSpan]) -> Result<DeviceRows> {
        let DeviceDelta { heads, qkv, strengths, decay } = *delta;
        let DeltaHeads { v_heads, k_dim, .. } = heads;
        let of = |rows: DeviceRows| self.lock().values(rows).to_vec();
        let (qkv, strengths, products) = (of(qkv), of(strengths), of(decay.products));
        let [bias, rates] = [decay.bias, decay.rates].map(|kept| self.lock().kept[kept].clone());
        let beta: Vec<f32> = strengths.iter().map(|b| GateFunction::Sigmoid.of(*b)).collect();
        let by_channel = bias.len() > v_heads;
        let mut out = vec![0.0; beta.len() / v_heads * heads.values()];
        self.advance(spans, |span, state, rows| {
            let first = rows.start;
            let part = |width: usize| rows.start * width..rows.end * width;
            let fill = |t: usize, head: usize, decays: &mut [f32]| {
                for (i, value) in decays.iter_mut().enumerate() {
                    let at = if by_channel { head * k_dim + i } else { head };
                    *value = decay.form.of(rates[head], products[(first + t) * bias.len() + at] + bias[at]);
                }
            };
            let tokens = DeltaTokens {
                qkv: &qkv[part(heads.mixed())],
                beta: &beta[part(v_heads)],
                decay: &fill,
                finish: &|_, _, _| (),
            };
            let (state, all) = (&mut state[span.recurrence_at..], ThreadPool::single_threaded());
            heads.advance(&tokens, state, &mut out[part(heads.values())], &all);
            span.recurrence_at..span.recurrence_at + state.len()
        });
        Ok(self.push(heads.values(), out, Ok(())))
    }

    fn scan(&self, scan: &DeviceScan, spans: &[StateSpan]) -> Result<DeviceRows> {
        let DeviceScan { heads, convolved, steps, step_bias, rates, skips, limits: [least, most] } = *scan;
        let of = |rows: DeviceRows| self.lock().values(rows).to_vec();
        let (convolved, raw) = (of(convolved), of(steps));
        let [bias, rates, skips] = [step_bias, rates, skips].map(|kept| self.lock().kept[kept].clone());
        let step = |(dt, bias): (&f32, &f32)| GateFunction::Softplus.of(dt + bias).clamp(least, most);
        let steps: Vec<f32> = raw.iter().zip(bias.iter().cycle()).map(step).collect();
        let mut out = vec![0.0; steps.len() / heads.heads * heads.inner()];
        self.advance(spans, |span, state, rows| {
            let part = |width: usize| rows.start * width..rows.end * width;
            let (convolved, steps) = (&convolved[part(heads.channels())], &steps[part(heads.heads)]);
            let tokens = ScanTokens { convolved, steps, rates: &rates, skips: &skips };
            let (state, all) = (&mut state[span.recurrence_at..], ThreadPool::single_threaded());
            heads.advance(&tokens, state, &mut out[part(heads.inner())], &all);
            span.recurrence_at..span.recurrence_at + state.len()
        });
        Ok(self.push(heads.inner(), out, Ok(())))
    }

    fn scan_channels(&self, scan: &DeviceChannelScan, spans: &[StateSpan]) -> Result<DeviceRows> {
        let DeviceChannelScan { x, steps, b, c, rates, skips } = *scan;
        let (channels, width) = (x.width, b.width);
        let [x, steps, b, c] = [x, steps, b, c].map(|rows| self.lock().values(rows).to_vec());
        let steps: Vec<f32> = steps.iter().map(|step| GateFunction::Softplus.of(*step)).collect();
        let [decays, skips] = [rates, skips].map(|kept| self.lock().kept[kept].clone());
        let mut out = vec![0.0; x.len()];
        self.advance(spans, |span, state, rows| {
            let own = rows.start * channels..rows.end * channels;
            let tokens =
                ChannelTokens { x: &x, steps: &steps, b: &b, c: &c, decays: &decays, skips: &skips, channels, width };
            let (state, all) = (&mut state[span.recurrence_at..], ThreadPool::single_threaded());
            tokens.advance(rows, state, &mut out[own], &all);
            span.recurrence_at..span.recurrence_at + state.len()
        });
        Ok(self.push(channels, out, Ok(())))
    }
}
