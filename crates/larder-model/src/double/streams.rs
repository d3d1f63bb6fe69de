//! Residual streams of the double of a device.

use super::OpsDouble;
use crate::device::{DeviceRows, DeviceStreams, ManifoldWeights, ScaledSides, StreamGate, StreamMix};
use crate::error::Result;
use crate::nn::{finish_weights, gate_of_key, rms_row, sigmoid, silu};

impl DeviceStreams for OpsDouble {
    fn rms_groups(&self, x: DeviceRows, groups: usize, weight: Option<usize>, eps: f64) -> Result<DeviceRows> {
        let mut state = self.lock();
        let (width, mut values) = (x.width / groups, state.values(x).to_vec());
        for (group, part) in values.chunks_exact_mut(width).enumerate() {
            let ones = vec![1.0; width];
            let weight = weight.map(|weight| &state.kept[weight][group % groups * width..][..width]);
            rms_row(part, weight.unwrap_or(&ones), eps);
        }
        Ok(state.push(x.width, values))
    }

    fn stream_weights(&self, products: DeviceRows, count: usize, weights: &ManifoldWeights) -> Result<DeviceRows> {
        let mut state = self.lock();
        let mut values = state.values(products).to_vec();
        let ManifoldWeights { scale, base, eps, iterations } = *weights;
        let each = values.chunks_exact_mut(products.width);
        each.for_each(|row| finish_weights(row, count, (&state.kept[base], scale), (eps, iterations)));
        Ok(state.push(products.width, values))
    }

    fn read_streams(&self, streams: DeviceRows, count: usize, weights: Option<DeviceRows>) -> Result<DeviceRows> {
        let mut state = self.lock();
        let hidden = streams.width / count;
        let mut read = vec![0.0; streams.rows * hidden];
        for (token, (own, sum)) in
            state.values(streams).chunks_exact(streams.width).zip(read.chunks_exact_mut(hidden)).enumerate()
        {
            for (stream, values) in own.chunks_exact(hidden).enumerate() {
                let weight = weights.map(|weights| state.values(weights)[token * weights.width + stream]);
                let term = |value: f32| weight.map_or(value, |weight| weight * value);
                sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += term(*value));
            }
            if weights.is_none() {
                sum.iter_mut().for_each(|sum| *sum /= count as f32);
            }
        }
        Ok(state.push(hidden, read))
    }

    fn write_streams(&self, streams: DeviceRows, y: DeviceRows, mix: (DeviceRows, StreamMix)) -> Result<DeviceRows> {
        let mut state = self.lock();
        let (hidden, count, (rows, form)) = (y.width, streams.width / y.width, mix);
        let (own, outputs, mix) = (state.values(streams), state.values(y), state.values(rows));
        let value = |at: usize| {
            let (token, stream, i) = (at / streams.width, at / hidden % count, at % hidden);
            let mix = &mix[token * rows.width..][..rows.width];
            let output = outputs[token * hidden + i];
            match form {
                StreamMix::Weights => own[at] + output * mix[stream],
                StreamMix::Matrix => {
                    let from =
                        |from: usize| mix[2 * count + from * count + stream] * own[(token * count + from) * hidden + i];
                    (0..count).fold(0.0, |sum, stream| sum + from(stream)) + mix[count + stream] * output
                }
            }
        };
        let written = (0..own.len()).map(value).collect();
        Ok(state.push(streams.width, written))
    }

    fn add_scaled_sides(&self, stream: DeviceRows, y: DeviceRows, sides: &ScaledSides) -> Result<DeviceRows> {
        let mut state = self.lock();
        let side = |at: usize, value: f32, [scale, bias]: [usize; 2]| {
            (value + state.kept[bias][at % y.width]) * state.kept[scale][at % y.width]
        };
        let both = state.values(y).iter().zip(state.values(stream)).enumerate();
        let sums = both.map(|(at, (y, stream))| side(at, *y, sides.y) + side(at, *stream, sides.stream)).collect();
        Ok(state.push(y.width, sums))
    }

    fn gate_by_keys(&self, [keys, queries, values]: [DeviceRows; 3], count: usize) -> Result<DeviceRows> {
        let mut state = self.lock();
        let hidden = values.width;
        let streams = state.values(keys).chunks_exact(hidden).zip(state.values(queries).chunks_exact(hidden));
        let gated = streams.enumerate().flat_map(|(at, (key, query))| {
            let gate = gate_of_key(key, query);
            state.values(values)[at / count * hidden..][..hidden].iter().map(move |value| gate * value)
        });
        let gated = gated.collect();
        Ok(state.push(count * hidden, gated))
    }

    fn stream_gates(&self, x: DeviceRows, count: usize, gate: StreamGate) -> Result<DeviceRows> {
        let mut state = self.lock();
        let of = |x: &f32| match gate {
            StreamGate::Silu => silu(x / count as f32),
            StreamGate::TwiceSigmoid => 2.0 * sigmoid(x / count as f32),
        };
        let gates = state.values(x).iter().map(of).collect();
        Ok(state.push(x.width, gates))
    }

    fn gated_mean(&self, x: DeviceRows, gates: DeviceRows, count: usize) -> Result<DeviceRows> {
        let mut state = self.lock();
        let hidden = x.width / count;
        let (values, gates) = (state.values(x), state.values(gates));
        let term = |at: usize| sigmoid(gates[at]) * values[at];
        let mean = |at: usize| {
            let first = at / hidden * x.width + at % hidden;
            (0..count).fold(0.0, |sum, stream| sum + term(first + stream * hidden)) / count as f32
        };
        let means = (0..x.rows * hidden).map(mean).collect();
        Ok(state.push(hidden, means))
    }
}
