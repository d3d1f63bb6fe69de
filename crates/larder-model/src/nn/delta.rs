//! Gated DeltaNet, the linear attention of Qwen3-Next.

use candle_core::{Device, Tensor};
use larder_core::Rng;

use super::activation::{sigmoid, silu, softplus};
use super::{CausalConv, ForwardPass, LayerKv, LayerShape, Mixer, StateLens, TokenScratch};
use crate::error::Result;
use crate::matrix::{Linear, with_f32};
use crate::step::LayerStates;
use crate::weights::WeightLoader;

/// Heads and widths of the gated delta rule.
#[derive(Clone, Copy)]
pub struct DeltaShape {
    /// Query and key heads.
    pub k_heads: usize,
    /// Value heads, a multiple of `k_heads`.
    pub v_heads: usize,
    /// Width of a key.
    pub k_dim: usize,
    /// Width of a value.
    pub v_dim: usize,
    /// Width of the convolution.
    pub conv: usize,
    /// How the products of the input are stored.
    pub form: DeltaForm,
    /// Value head `h` uses key head `h % k_heads`, as in GGUF, and not `h / (v_heads / k_heads)`.
    pub tiled: bool,
}

/// How the products of the input are stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeltaForm {
    /// One has queries, keys, values and output gates, and another the strengths and decays, both grouped by key head.
    Grouped,
    /// As `Grouped`, but the output gates are apart, and they and the others in the order of the heads, as in GGUF.
    SplitGates,
    /// As `SplitGates`, with strengths and decays apart too, in the order of the heads.
    Separate,
}

/// Gated DeltaNet: a recurrent state `[k_dim, v_dim]` per head, which decays and is corrected with each token.
pub struct GatedDeltaNet {
    shape: DeltaShape,
    input: Input,
    rates: Rates,
    conv: CausalConv,
    decay: Vec<f32>,   // [v_heads], e^A_log
    dt_bias: Vec<f32>, // [v_heads]
    norm: Vec<f32>,    // [v_dim]
    eps: f32,
    output: Linear, // [hidden, v_heads · v_dim]
}

/// The product of queries, keys, values and output gates.
enum Input {
    /// `[2 · k_heads · k_dim + 2 · v_heads · v_dim, hidden]`, grouped by key head.
    Grouped(Linear),
    /// `qkv [2 · k_heads · k_dim + v_heads · v_dim, hidden]` and `z [v_heads · v_dim, hidden]`.
    Split { qkv: Linear, z: Linear },
}

/// The products of the strength of the update and of the decay.
enum Rates {
    /// `[2 · v_heads, hidden]`, grouped by key head.
    Grouped(Linear),
    /// `[v_heads, hidden]` each.
    Separate { strength: Linear, decay: Linear },
}

/// Inputs of the recurrence for one token.
struct TokenInputs<'a> {
    qkv: &'a [f32],  // queries, keys, values of all heads
    z: &'a [f32],    // [v_heads, v_dim]
    beta: &'a [f32], // [v_heads]
    g: &'a [f32],    // [v_heads]
}

impl GatedDeltaNet {
    /// Loads the tensors below `prefix`.
    pub fn new(weights: &mut WeightLoader, prefix: &str, hidden: usize, shape: DeltaShape, eps: f64) -> Result<Self> {
        let DeltaShape { k_heads, v_heads, k_dim, v_dim, conv, form, .. } = shape;
        let name = |part: &str| format!("{prefix}.{part}");
        let (keys, values) = (k_heads * k_dim, v_heads * v_dim);
        let decay = weights.vector(&name("A_log"), &[v_heads])?.into_iter().map(f32::exp).collect();
        let mut linear = |part: &str, rows| weights.linear(&name(part), rows, hidden, false);
        let input = match form {
            DeltaForm::Grouped => Input::Grouped(linear("in_proj_qkvz", 2 * keys + 2 * values)?),
            _ => Input::Split { qkv: linear("in_proj_qkv", 2 * keys + values)?, z: linear("in_proj_z", values)? },
        };
        let rates = match form {
            DeltaForm::Separate => {
                Rates::Separate { strength: linear("in_proj_b", v_heads)?, decay: linear("in_proj_a", v_heads)? }
            }
            _ => Rates::Grouped(linear("in_proj_ba", 2 * v_heads)?),
        };
        Ok(GatedDeltaNet {
            shape,
            input,
            rates,
            conv: CausalConv::new(weights, &name("conv1d"), 2 * keys + values, conv, false)?,
            decay,
            dt_bias: weights.vector(&name("dt_bias"), &[v_heads])?,
            norm: weights.vector(&name("norm.weight"), &[v_dim])?,
            eps: eps as f32,
            output: weights.linear(&name("out_proj"), hidden, values, false)?,
        })
    }

    fn state_lens(&self) -> StateLens {
        let DeltaShape { v_heads, k_dim, v_dim, .. } = self.shape;
        StateLens { window: self.conv.window_len(), recurrence: v_heads * k_dim * v_dim }
    }

    /// Queries, keys, values and gates of all heads, for the tokens of `x [n, hidden]`.
    fn inputs(&self, x: &Tensor) -> Result<Inputs> {
        let DeltaShape { k_heads, v_heads, k_dim, v_dim, .. } = self.shape;
        let mut inputs = Inputs::default();
        match &self.input {
            Input::Grouped(qkvz) => {
                let width = 2 * k_heads * k_dim + 2 * v_heads * v_dim;
                with_f32(&qkvz.forward(x)?, |qkvz| {
                    qkvz.chunks_exact(width).for_each(|token| self.ungroup(token, &mut inputs))
                })?;
            }
            Input::Split { qkv, z } => {
                inputs.qkv = with_f32(&qkv.forward(x)?, <[f32]>::to_vec)?;
                inputs.z = with_f32(&z.forward(x)?, <[f32]>::to_vec)?;
            }
        }
        match &self.rates {
            Rates::Grouped(both) => with_f32(&both.forward(x)?, |both| {
                both.chunks_exact(2 * v_heads).for_each(|token| self.grouped_rates(token, &mut inputs))
            })?,
            Rates::Separate { strength, decay } => {
                let [strength, decay] = Linear::forward_all([strength, decay], x)?;
                with_f32(&strength, |all| inputs.beta.extend(all.iter().map(|b| sigmoid(*b))))?;
                with_f32(&decay, |all| {
                    inputs.g.extend(all.iter().enumerate().map(|(i, a)| self.log_decay(i % v_heads, *a)))
                })?;
            }
        }
        Ok(inputs)
    }

    /// Splits one token's row, which is grouped by key head, into queries, keys, values and output gates of all heads.
    fn ungroup(&self, qkvz: &[f32], out: &mut Inputs) {
        let DeltaShape { k_heads, v_heads, k_dim, v_dim, .. } = self.shape;
        let per = v_heads / k_heads;
        let groups = qkvz.chunks_exact(2 * k_dim + 2 * per * v_dim);
        for group in groups.clone() {
            out.qkv.extend_from_slice(&group[..k_dim]);
        }
        for group in groups.clone() {
            out.qkv.extend_from_slice(&group[k_dim..2 * k_dim]);
        }
        for group in groups {
            let (v, z) = group[2 * k_dim..].split_at(per * v_dim);
            out.qkv.extend_from_slice(v);
            out.z.extend_from_slice(z);
        }
    }

    /// The strength of the update and the decay of each value head, from one token's row, grouped by key head.
    fn grouped_rates(&self, ba: &[f32], out: &mut Inputs) {
        let per = self.shape.v_heads / self.shape.k_heads;
        for (head, ba) in ba.chunks_exact(2 * per).enumerate() {
            for (i, (b, a)) in ba[..per].iter().zip(&ba[per..]).enumerate() {
                let at = head * per + i;
                out.beta.push(sigmoid(*b));
                out.g.push(self.log_decay(at, *a));
            }
        }
    }

    /// The logarithm of the decay of value head `head`, from its product.
    fn log_decay(&self, head: usize, a: f32) -> f32 {
        -self.decay[head] * softplus(a + self.dt_bias[head])
    }

    /// Updates the recurrent state `[v_heads, k_dim, v_dim]` with one token, and reads the output: `out [v_heads,
    /// v_dim]`.
    fn step(&self, token: &TokenInputs, state: &mut [f32], out: &mut [f32]) {
        let DeltaShape { k_heads, v_heads, k_dim, v_dim, .. } = self.shape;
        let (q, rest) = token.qkv.split_at(k_heads * k_dim);
        let (k, v) = rest.split_at(k_heads * k_dim);
        for head in 0..v_heads {
            let of_key = if self.shape.tiled { head % k_heads } else { head / (v_heads / k_heads) } * k_dim;
            let q = unit(&q[of_key..][..k_dim], 1.0 / (k_dim as f32).sqrt());
            let k = unit(&k[of_key..][..k_dim], 1.0);
            let v = &v[head * v_dim..][..v_dim];
            let state = &mut state[head * k_dim * v_dim..][..k_dim * v_dim];
            let out = &mut out[head * v_dim..][..v_dim];

            let keep = token.g[head].exp();
            state.iter_mut().for_each(|m| *m *= keep);
            read_state(state, &k, out);
            let delta: Vec<f32> = v.iter().zip(&*out).map(|(v, known)| (v - known) * token.beta[head]).collect();
            for (row, k) in state.chunks_exact_mut(v_dim).zip(&k) {
                row.iter_mut().zip(&delta).for_each(|(m, d)| *m += k * d);
            }
            read_state(state, &q, out);
            self.gated_norm(out, &token.z[head * v_dim..][..v_dim]);
        }
    }

    fn gated_norm(&self, x: &mut [f32], z: &[f32]) {
        let mean = x.iter().map(|v| v * v).sum::<f32>() / x.len() as f32;
        let scale = 1.0 / (mean + self.eps).sqrt();
        for ((x, w), z) in x.iter_mut().zip(&self.norm).zip(z) {
            *x = w * (*x * scale) * silu(*z);
        }
    }
}

/// Inputs of the recurrence for all tokens of a step, one token after the other as in [`TokenInputs`].
#[derive(Default)]
struct Inputs {
    qkv: Vec<f32>,
    z: Vec<f32>,
    beta: Vec<f32>,
    g: Vec<f32>,
}

impl Mixer for GatedDeltaNet {
    fn forward(&self, x: &Tensor, states: &mut LayerStates, pass: &ForwardPass) -> Result<Tensor> {
        let DeltaShape { k_heads, v_heads, k_dim, v_dim, .. } = self.shape;
        let (n, mixed, values) = (pass.tokens(), 2 * k_heads * k_dim + v_heads * v_dim, v_heads * v_dim);
        let all = self.inputs(x)?;
        let mut out = vec![0.0; n * values];
        for (i, span) in pass.spans.iter().enumerate() {
            let span_qkv = span.rows(&all.qkv, mixed);
            states.of_mut(i).recurrent.advance(span.tokens, self.state_lens(), |state, piece| {
                let mut qkv = self.conv.forward(&span_qkv[piece.start * mixed..piece.end * mixed], &mut state.window);
                qkv.iter_mut().for_each(|v| *v = silu(*v));
                for (t, qkv) in piece.zip(qkv.chunks_exact(mixed)) {
                    let row = span.first_row + t;
                    let token = TokenInputs {
                        qkv,
                        z: &all.z[row * values..][..values],
                        beta: &all.beta[row * v_heads..][..v_heads],
                        g: &all.g[row * v_heads..][..v_heads],
                    };
                    self.step(&token, &mut state.recurrence, &mut out[row * values..][..values]);
                }
            })?;
        }
        self.output.forward(&Tensor::from_vec(out, (n, values), &Device::Cpu)?)
    }

    fn layer_shape(&self) -> LayerShape {
        LayerShape::recurrent(self.state_lens())
    }

    fn fill(&self, state: &mut LayerKv, tokens: usize, rng: &mut Rng) -> Result<()> {
        state.recurrent.fill(tokens, self.state_lens(), rng)
    }

    fn scratch(&self, hidden: usize) -> TokenScratch {
        let DeltaShape { k_heads, v_heads, k_dim, v_dim, .. } = self.shape;
        let (keys, values) = (k_heads * k_dim, v_heads * v_dim);
        let (products, ungrouped) = (2 * keys + 2 * values + 2 * v_heads, 2 * keys + 2 * values + 2 * v_heads);
        // The convolution's input with its window and its output, at most the whole step at once.
        let convolved = 2 * (2 * keys + values);
        TokenScratch { floats: 2 * hidden + products + ungrouped + convolved + values, input: hidden.max(values) }
    }
}

/// `out[j] = Σ_i at[i] · state[i, j]`
fn read_state(state: &[f32], at: &[f32], out: &mut [f32]) {
    out.fill(0.0);
    for (row, a) in state.chunks_exact(out.len()).zip(at) {
        out.iter_mut().zip(row).for_each(|(o, m)| *o += a * m);
    }
}

fn unit(x: &[f32], scale: f32) -> Vec<f32> {
    let norm = (x.iter().map(|v| v * v).sum::<f32>() + 1e-6).sqrt();
    x.iter().map(|v| v / norm * scale).collect()
}
