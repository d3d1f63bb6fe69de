//! Residual streams, several of which are side by side in a row.

use larder_kernels::exp;

use super::{TASK_ACTIVATIONS, TASK_VALUES, part};
use crate::error::Result;
use crate::ops::{
    CpuOps, HyperConnectionOps, ManifoldWeights, Rows, ScaledSides, StreamGate, StreamMix, rms_row, scale, sigmoid,
    silu, sum,
};

/// The least absolute value of a gate's root.
const LEAST: f32 = 1e-6;

impl HyperConnectionOps for CpuOps {
    fn rms_groups(&self, x: Rows, groups: usize, weight: Option<usize>, eps: f64) -> Result<Rows> {
        let width = x.width / groups;
        Ok(self.make_rows([x.rows, x.width], TASK_VALUES, |state, first, out| {
            out.copy_from_slice(part(state.values(x), first * x.width, out.len()));
            match weight {
                Some(weight) => {
                    let weights = state.kept(weight).chunks_exact(width).cycle();
                    out.chunks_exact_mut(width).zip(weights).for_each(|(part, weight)| rms_row(part, weight, eps));
                }
                None => out.chunks_exact_mut(width).for_each(|part| scale(part, eps)),
            }
        }))
    }

    fn stream_weights(&self, products: Rows, count: usize, weights: &ManifoldWeights) -> Result<Rows> {
        let ManifoldWeights { scale, base, eps, iterations } = *weights;
        Ok(self.make_rows([products.rows, products.width], TASK_ACTIVATIONS / 8, |state, first, out| {
            out.copy_from_slice(part(state.values(products), first * products.width, out.len()));
            let each = out.chunks_exact_mut(products.width);
            each.for_each(|row| finish_weights(row, count, (state.kept(base), scale), (eps, iterations)));
        }))
    }

    fn read_streams(&self, streams: Rows, count: usize, weights: Option<Rows>) -> Result<Rows> {
        let hidden = streams.width / count;
        Ok(self.make_rows([streams.rows, hidden], TASK_VALUES / count, |state, first, out| {
            out.fill(0.0);
            let own = state.values(streams)[first * streams.width..].chunks_exact(streams.width);
            for ((token, sum), own) in (first..).zip(out.chunks_exact_mut(hidden)).zip(own) {
                for (stream, values) in own.chunks_exact(hidden).enumerate() {
                    match weights {
                        Some(weights) => {
                            let weight = state.values(weights)[token * weights.width + stream];
                            sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += weight * value);
                        }
                        None => sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += value),
                    }
                }
                if weights.is_none() {
                    sum.iter_mut().for_each(|sum| *sum /= count as f32);
                }
            }
        }))
    }

    fn write_streams(&self, streams: Rows, y: Rows, mix: (Rows, StreamMix)) -> Result<Rows> {
        let (hidden, count, (rows, form)) = (y.width, streams.width / y.width, mix);
        Ok(self.make_rows([streams.rows, streams.width], TASK_VALUES / count, |state, first, out| {
            let (own, outputs, mix) = (state.values(streams), state.values(y), state.values(rows));
            for (i, out) in out.chunks_exact_mut(hidden).enumerate() {
                let (token, stream) = (first + i / count, i % count);
                let (mix, output) = (&mix[token * rows.width..][..rows.width], &outputs[token * hidden..][..hidden]);
                let own = &own[token * streams.width..][..streams.width];
                match form {
                    StreamMix::Weights => {
                        let both = own[stream * hidden..].iter().zip(output);
                        out.iter_mut().zip(both).for_each(|(out, (own, y))| *out = own + y * mix[stream]);
                    }
                    StreamMix::Matrix => {
                        out.fill(0.0);
                        for (from, own) in own.chunks_exact(hidden).enumerate() {
                            let weight = mix[2 * count + from * count + stream];
                            out.iter_mut().zip(own).for_each(|(out, own)| *out += weight * own);
                        }
                        out.iter_mut().zip(output).for_each(|(out, y)| *out += mix[count + stream] * y);
                    }
                }
            }
        }))
    }

    fn add_scaled_sides(&self, stream: Rows, y: Rows, sides: &ScaledSides) -> Result<Rows> {
        Ok(self.make_rows([y.rows, y.width], TASK_VALUES, |state, first, out| {
            let side = |at: usize, value: f32, [scale, bias]: [usize; 2]| {
                (value + state.kept(bias)[at]) * state.kept(scale)[at]
            };
            let at = first * y.width;
            let both = state.values(y)[at..].iter().zip(&state.values(stream)[at..]).enumerate();
            out.iter_mut().zip(both).for_each(|(out, (at, (y_value, stream)))| {
                let channel = at % y.width;
                *out = side(channel, *y_value, sides.y) + side(channel, *stream, sides.stream);
            });
        }))
    }

    fn gate_by_keys(&self, [keys, queries, values]: [Rows; 3], count: usize) -> Result<Rows> {
        let hidden = values.width;
        Ok(self.make_rows([values.rows, count * hidden], TASK_VALUES / 2, |state, first, out| {
            let at = first * count * hidden;
            let streams = state.values(keys)[at..].chunks_exact(hidden).zip(state.values(queries)[at..].chunks(hidden));
            for ((i, out), (key, query)) in out.chunks_exact_mut(hidden).enumerate().zip(streams) {
                let gate = gate_of_key(key, query);
                let values = &state.values(values)[(first + i / count) * hidden..][..hidden];
                out.iter_mut().zip(values).for_each(|(out, value)| *out = gate * value);
            }
        }))
    }

    fn stream_gates(&self, x: Rows, count: usize, gate: StreamGate) -> Result<Rows> {
        Ok(self.change(x, &[], TASK_ACTIVATIONS, |_, _, out| {
            let of = |x: f32| match gate {
                StreamGate::Silu => silu(x / count as f32),
                StreamGate::TwiceSigmoid => 2.0 * sigmoid(x / count as f32),
            };
            out.iter_mut().for_each(|value| *value = of(*value));
        }))
    }

    fn gated_mean(&self, x: Rows, gates: Rows, count: usize) -> Result<Rows> {
        let hidden = x.width / count;
        Ok(self.make_rows([x.rows, hidden], TASK_ACTIVATIONS / count, |state, first, out| {
            out.fill(0.0);
            let at = first * x.width;
            let tokens = state.values(x)[at..].chunks_exact(x.width).zip(state.values(gates)[at..].chunks(x.width));
            for (out, (x, gates)) in out.chunks_exact_mut(hidden).zip(tokens) {
                for (x, gates) in x.chunks_exact(hidden).zip(gates.chunks_exact(hidden)) {
                    out.iter_mut().zip(x).zip(gates).for_each(|((sum, x), gate)| *sum += sigmoid(*gate) * x);
                }
                out.iter_mut().for_each(|sum| *sum /= count as f32);
            }
        }))
    }
}

/// Turns what a matmul yields for one token into weights of `count` streams: of each stream to read it, and if there
/// are more, of each stream to write it, and the matrix `[from, to]` that mixes them.
fn finish_weights(
    weights: &mut [f32],
    count: usize,
    (base, scale): (&[f32], [f32; 3]),
    (eps, iterations): (f32, usize),
) {
    let kind = |at: usize| (at / count).min(2);
    weights.iter_mut().zip(base).enumerate().for_each(|(at, (w, base))| *w = *w * scale[kind(at)] + base);
    let (read, others) = weights.split_at_mut(count);
    read.iter_mut().for_each(|weight| *weight = sigmoid(*weight) + eps);
    if !others.is_empty() {
        let (write, matrix) = others.split_at_mut(count);
        write.iter_mut().for_each(|weight| *weight = 2.0 * sigmoid(*weight));
        balance(matrix, count, eps, iterations);
    }
}

/// Makes the sums of rows and of columns of the softmax of each row one, or nearly so.
fn balance(matrix: &mut [f32], count: usize, eps: f32, iterations: usize) {
    for row in matrix.chunks_exact_mut(count) {
        let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        row.iter_mut().for_each(|value| *value = exp(*value - most));
        let sum: f32 = row.iter().sum();
        row.iter_mut().for_each(|value| *value = *value / sum + eps);
    }
    normalise_columns(matrix, count, eps);
    for _ in 1..iterations {
        for row in matrix.chunks_exact_mut(count) {
            let sum = row.iter().sum::<f32>() + eps;
            row.iter_mut().for_each(|value| *value /= sum);
        }
        normalise_columns(matrix, count, eps);
    }
}

fn normalise_columns(matrix: &mut [f32], count: usize, eps: f32) {
    for column in 0..count {
        let sum = matrix[column..].iter().step_by(count).sum::<f32>() + eps;
        matrix[column..].iter_mut().step_by(count).for_each(|value| *value /= sum);
    }
}

/// The gate of a stream.
fn gate_of_key(key: &[f32], query: &[f32]) -> f32 {
    let product = sum(key.iter().zip(query).map(|(k, q)| k * q)) / (key.len() as f32).sqrt();
    let root = product.abs().max(LEAST).sqrt();
    sigmoid(if product > 0.0 {
        root
    } else if product < 0.0 {
        -root
    } else {
        0.0
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gates_have_the_sign_of_the_product_and_its_root() {
        let of = |product: f32| gate_of_key(&[product, 0.0, 0.0, 0.0], &[2.0, 5.0, 0.0, 0.0]);
        assert_eq!((of(0.0), of(4.0)), (0.5, sigmoid(2.0)));
        assert_eq!((of(-4.0), of(1e-9)), (sigmoid(-2.0), sigmoid(1e-3)));
    }
}
