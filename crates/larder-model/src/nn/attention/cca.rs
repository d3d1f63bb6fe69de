//! The inputs of compressed convolutional attention (CCA), of ZAYA: queries and keys are mixed with those of the tokens
//! before by two causal convolutions, and half of the values are those of the token before.
//!
//! ```text
//! raw     = [q(x), k(x)]
//! mixed   = grouped(depthwise(raw))         the second convolution mixes the channels of a head
//! mean    = (q + k of the head's group) / 2
//! queries = unit(mixed + mean)              times the root of the head's width
//! keys    = unit(mixed + mean of the group's means) · factor of the head
//! values  = [current(x), delayed(x before)]
//! ```

use crate::config::config_error;
use crate::error::Result;
use crate::kv::StateLens;
use crate::nn::{CausalConv, TokenScratch};
use crate::ops::{Constant, HeadConvolution, HeadMix, Ops, Rows};
use crate::step::{ForwardPass, LayerStates};
use crate::weights::{Linear, PlacedMatrix, WeightLoader};

/// Upper limit of the values of a layer's state, far above any model.
const MAX_STATE: usize = 1 << 32;

/// Heads, widths and options.
#[derive(Clone, Copy)]
pub struct CcaShape {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Widths of the depthwise and of the grouped convolution.
    pub taps: [usize; 2],
    /// Whether the matmuls have biases.
    pub bias: bool,
}

/// What yields the queries, keys and values of one layer.
pub struct CcaInputs {
    shape: CcaShape,
    q: Linear,       // [heads · head_dim, hidden]
    k: Linear,       // [kv_heads · head_dim, hidden]
    current: Linear, // [kv_heads · head_dim / 2, hidden]
    /// As `current`; its bias is added when the next token takes the value, because the first token gets the bias
    /// alone.
    delayed: Linear,
    delayed_bias: Option<Vec<f32>>,
    depthwise: CausalConv,
    grouped: Vec<PlacedMatrix>, // for each head, [head_dim, taps · head_dim]
    grouped_bias: Vec<f32>,
    factors: Vec<f32>, // [kv_heads], of the keys
    /// Of the biases of values and of the grouped convolution, and of the factors.
    copies: [Constant; 3],
}

impl CcaShape {
    /// Channels that are convolved.
    fn channels(&self) -> usize {
        (self.heads + self.kv_heads) * self.head_dim
    }

    /// Values that a token hands to the next one.
    fn half(&self) -> usize {
        self.kv_heads * self.head_dim / 2
    }

    /// The same shape, if its sizes allow the layer.
    fn checked(self) -> Result<Self> {
        if !(self.kv_heads * self.head_dim).is_multiple_of(2) {
            return Err(config_error(
                "num_key_value_heads times head_dim is odd; half of the values are of another token",
            ));
        }
        match self.channels().checked_mul(self.taps[0] + self.taps[1]) {
            Some(values) if values <= MAX_STATE => Ok(self),
            _ => Err(config_error(format!("a convolution of {} channels is too large", self.channels()))),
        }
    }
}

impl CcaInputs {
    /// Loads the tensors below `prefix.qkv_proj`, and `prefix.qk_norm.temp`.
    pub fn load(weights: &mut WeightLoader, prefix: &str, shape: CcaShape) -> Result<Self> {
        let shape = shape.checked()?;
        let CcaShape { hidden, heads, kv_heads, head_dim, taps, bias } = shape;
        let (channels, half) = (shape.channels(), shape.half());
        let name = |part: &str| format!("{prefix}.qkv_proj.{part}");
        let grouped = name("conv_qk_grouped");
        Ok(CcaInputs {
            shape,
            q: weights.linear(&name("q_proj"), heads * head_dim, hidden, bias)?,
            k: weights.linear(&name("k_proj"), kv_heads * head_dim, hidden, bias)?,
            current: weights.linear(&name("v_proj_current"), half, hidden, bias)?,
            delayed: weights.linear(&name("v_proj_delayed"), half, hidden, false)?,
            delayed_bias: if bias { Some(weights.vector(&name("v_proj_delayed.bias"), &[half])?) } else { None },
            depthwise: CausalConv::new(weights, &name("conv_qk_depthwise"), channels, taps[0], true)?,
            grouped: weights.grouped_kernel(&format!("{grouped}.weight"), heads + kv_heads, head_dim, taps[1])?,
            grouped_bias: weights.vector(&format!("{grouped}.bias"), &[channels])?,
            factors: weights.vector(&format!("{prefix}.qk_norm.temp"), &[kv_heads])?,
            copies: Default::default(),
        })
    }

    /// Lengths of the state: the last inputs of the convolutions, and what the last token hands to the next one.
    pub fn state_lens(&self) -> StateLens {
        let [first, second] = self.shape.taps;
        StateLens { window: (first - 1 + second - 1) * self.shape.channels(), recurrence: self.shape.half() }
    }

    /// The matmuls with the input of attention.
    pub(super) fn products(&self) -> [&Linear; 4] {
        [&self.q, &self.k, &self.current, &self.delayed]
    }

    /// Queries `[n, heads · head_dim]`, keys and values `[n, kv_heads · head_dim]` of its [`products`](Self::products).
    pub(super) fn forward(
        &self,
        [q, k, current, delayed]: [Rows; 4],
        states: &mut LayerStates,
        pass: &ForwardPass,
        ops: &dyn Ops,
    ) -> Result<[Rows; 3]> {
        let [of_values, of_grouped, factors] = &self.copies;
        let (taps, bias) = self.depthwise.weights(ops)?;
        let convolution = HeadConvolution {
            queries: q,
            keys: k,
            delayed,
            taps,
            bias: bias.expect("the convolution has a bias"),
            delayed_bias: self.delayed_bias.as_ref().map(|bias| of_values.of(bias, ops)).transpose()?,
            head_dim: self.shape.head_dim,
            widths: self.shape.taps,
        };
        let spans = states.extend_recurrent(pass, self.state_lens())?;
        let [gathered, earlier] = ops.convolve_heads(&convolution, &spans)?;
        let mixed = ops.matmul_heads(gathered, &self.grouped)?;
        let mix = HeadMix {
            heads: self.shape.heads,
            kv_heads: self.shape.kv_heads,
            bias: of_grouped.of(&self.grouped_bias, ops)?,
            factors: factors.of(&self.factors, ops)?,
        };
        let [q, k] = ops.mix_heads([q, k, mixed], &mix)?;
        Ok([q, k, ops.beside(current, earlier)?])
    }

    /// What [`forward`](Self::forward) allocates per token beside queries, keys and values.
    pub fn scratch(&self) -> TokenScratch {
        let (channels, taps) = (self.shape.channels(), self.shape.taps[1]);
        // Matmuls and both side by side; the convolution's input with its window, twice, and its output; what the
        // second one gets and yields, by head and by token, twice; values and those of the token before.
        let floats = 2 * channels + 3 * channels + taps * channels + 3 * channels + 4 * self.shape.half();
        TokenScratch { floats, input: taps * channels }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::AttentionMask;
    use crate::nn::sampled::{HIDDEN, RandomWeights, check};
    use crate::nn::{Attention, AttentionShape, InputProducts, OutputGate, QkNorm};

    const SHAPE: CcaShape = CcaShape { hidden: HIDDEN, heads: 4, kv_heads: 2, head_dim: 5, taps: [3, 2], bias: true };

    fn attention(shape: CcaShape) -> impl Fn(&mut WeightLoader) -> Result<Attention> {
        let CcaShape { hidden, heads, kv_heads, head_dim, .. } = shape;
        move |weights| {
            Ok(Attention {
                shape: AttentionShape { heads, kv_heads, head_dim, value_dim: head_dim },
                inputs: InputProducts::Cca(Box::new(CcaInputs::load(weights, "m", shape)?)),
                o: weights.linear("m.o_proj", hidden, heads * head_dim, false)?,
                norm: QkNorm::None,
                value_norm: None,
                value_scale: 1.0,
                clip: None,
                rotary: None,
                mask: AttentionMask::Causal,
                scale: 0.4,
                sinks: None,
                temperature: None,
                output_gate: OutputGate::None,
                indexer: None,
            })
        }
    }

    /// What both convolutions yield for the last of the inputs `raw`; before the first there are zeros.
    fn mixed(drawn: &RandomWeights, shape: CcaShape, raw: &[Vec<f64>]) -> Vec<f64> {
        let ([first, second], width, channels) = (shape.taps, shape.head_dim, shape.channels());
        let (kernel, bias) =
            (drawn.f64("m.qkv_proj.conv_qk_depthwise.weight"), drawn.f64("m.qkv_proj.conv_qk_depthwise.bias"));
        let depthwise = |back: usize, c: usize| {
            let tap = |tap: usize| match raw.len().checked_sub(back + first - tap) {
                Some(at) => raw[at][c] * kernel[c * first + tap],
                None => 0.0,
            };
            (0..first).map(tap).sum::<f64>() + bias[c]
        };
        let (kernel, bias) =
            (drawn.f64("m.qkv_proj.conv_qk_grouped.weight"), drawn.f64("m.qkv_proj.conv_qk_grouped.bias"));
        let grouped = |c: usize| {
            let terms = (0..width).flat_map(|i| (0..second).map(move |tap| (i, tap)));
            let term =
                |(i, tap)| kernel[(c * width + i) * second + tap] * depthwise(second - 1 - tap, c / width * width + i);
            terms.map(term).sum::<f64>() + bias[c]
        };
        (0..channels).map(grouped).collect()
    }

    /// Queries, keys and values of the last of the tokens `x`.
    fn inputs(drawn: &RandomWeights, shape: CcaShape, x: &[Vec<f64>]) -> [Vec<f64>; 3] {
        let CcaShape { heads, kv_heads, head_dim: width, .. } = shape;
        let product = |part: &str, x: &[f64]| drawn.product(&format!("m.qkv_proj.{part}"), x);
        let raw: Vec<Vec<f64>> = x.iter().map(|x| [product("q_proj", x), product("k_proj", x)].concat()).collect();
        let mut mixed = mixed(drawn, shape, &raw);
        let (raw, group) = (&raw[x.len() - 1], heads / kv_heads);
        let mean = |head: usize, i: usize| (raw[head * width + i] + raw[(heads + head / group) * width + i]) / 2.0;
        for (at, value) in mixed.iter_mut().enumerate() {
            let (head, i) = (at / width, at % width);
            *value += match head.checked_sub(heads) {
                None => mean(head, i),
                Some(kv) => (kv * group..(kv + 1) * group).map(|head| mean(head, i)).sum::<f64>() / group as f64,
            };
        }
        for (head, values) in mixed.chunks_exact_mut(width).enumerate() {
            let factor = head.checked_sub(heads).map_or(1.0, |kv| drawn.f64("m.qk_norm.temp")[kv]);
            let length = values.iter().map(|v| v * v).sum::<f64>().sqrt();
            values.iter_mut().for_each(|v| *v *= factor * (width as f64).sqrt() / length);
        }
        let (current, before) = x.split_last().map(|(last, rest)| (last, rest.last())).unwrap();
        let zeros = vec![0.0; HIDDEN];
        let delayed = product("v_proj_delayed", before.unwrap_or(&zeros));
        let keys = mixed.split_off(heads * width);
        [mixed, keys, [product("v_proj_current", current), delayed].concat()]
    }

    /// The attention of the last of the tokens `x`.
    fn plain(drawn: &RandomWeights, shape: CcaShape, x: &[Vec<f64>]) -> Vec<f64> {
        let CcaShape { heads, kv_heads, head_dim: width, .. } = shape;
        let all: Vec<_> = (1..=x.len()).map(|len| inputs(drawn, shape, &x[..len])).collect();
        let mut out = vec![0.0; heads * width];
        for (head, out) in out.chunks_exact_mut(width).enumerate() {
            let (own, kv) = (head * width..(head + 1) * width, head * kv_heads / heads * width);
            let query = &all[x.len() - 1][0][own];
            let score = |k: &[f64]| (query.iter().zip(&k[kv..]).map(|(q, k)| q * k).sum::<f64>() * 0.4).exp();
            let weights: Vec<f64> = all.iter().map(|[_, k, _]| score(k)).collect();
            for ([_, _, v], weight) in all.iter().zip(&weights) {
                let share = weight / weights.iter().sum::<f64>();
                out.iter_mut().zip(&v[kv..]).for_each(|(out, v)| *out += v * share);
            }
        }
        drawn.product("m.o_proj", &out)
    }

    #[test]
    fn attention_over_convolved_inputs_follows_the_definition() {
        let multi_query = CcaShape { heads: 3, kv_heads: 1, head_dim: 4, bias: false, taps: [1, 4], ..SHAPE };
        for shape in [SHAPE, multi_query, CcaShape { taps: [1, 1], kv_heads: 4, ..SHAPE }] {
            check(attention(shape), |drawn, x| plain(drawn, shape, x));
        }
    }

    #[test]
    fn sizes_are_checked() {
        assert!(CcaShape { kv_heads: 1, ..SHAPE }.checked().is_err(), "half of five values");
        assert!(CcaShape { heads: 1 << 24, head_dim: 1 << 24, ..SHAPE }.checked().is_err());
        assert!(SHAPE.checked().is_ok());
    }
}
