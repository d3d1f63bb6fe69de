//! Causal convolutions: the depthwise kernel, and LFM2's gated short convolution.

use std::fmt::Display;

use larder_core::Rng;

use crate::error::Result;
use crate::kv::{LayerKv, LayerShape, StateLens};
use crate::nn::{Mixer, TokenScratch};
use crate::ops::{Activation, Constant, Convolution, GateFunction, Ops, Rows, StateSpan};
use crate::step::{ForwardPass, LayerStates};
use crate::weights::{Linear, WeightLoader};

/// A causal depthwise convolution.
pub struct CausalConv {
    taps: Vec<f32>, // [width, channels]
    bias: Option<Vec<f32>>,
    channels: usize,
    width: usize,
    /// Distance in tokens of the inputs that are added up.
    dilation: usize,
    taps_copy: Constant,
    bias_copy: Constant,
}

impl CausalConv {
    /// `prefix.weight [channels, 1, width]`, `prefix.bias [channels]` if `bias`
    pub fn new(weights: &mut WeightLoader, prefix: &str, channels: usize, width: usize, bias: bool) -> Result<Self> {
        let conv = CausalConv::joined(weights, &[prefix], channels, width)?;
        let bias = if bias { Some(weights.vector(&format!("{prefix}.bias"), &[channels])?) } else { None };
        Ok(CausalConv { bias, ..conv })
    }

    /// Of `taps [width, channels]` and `bias [channels]`.
    fn with_taps(taps: Vec<f32>, bias: Option<Vec<f32>>, channels: usize, width: usize) -> Self {
        let (taps_copy, bias_copy) = Default::default();
        CausalConv { taps, bias, channels, width, dilation: 1, taps_copy, bias_copy }
    }

    /// The same weights for inputs that are `dilation` tokens apart.
    pub fn dilated(self, dilation: usize) -> Self {
        CausalConv { dilation, ..self }
    }

    /// Several convolutions of `channels` channels each as one, the channels of the first before those of the second;
    /// without biases.
    pub fn joined(
        weights: &mut WeightLoader,
        prefixes: &[impl Display],
        channels: usize,
        width: usize,
    ) -> Result<Self> {
        let mut kernel = Vec::new();
        for prefix in prefixes {
            kernel.extend(weights.vector(&format!("{prefix}.weight"), &[channels, 1, width])?);
        }
        Ok(CausalConv::of(&kernel, channels * prefixes.len(), width))
    }

    /// Of `kernel [channels, width]`, without a bias.
    fn of(kernel: &[f32], channels: usize, width: usize) -> Self {
        let column = |tap: usize| kernel.iter().skip(tap).step_by(width).copied();
        CausalConv::with_taps((0..width).flat_map(column).collect(), None, channels, width)
    }

    /// The convolution of inputs that are side by side, and its activation. Updates the windows of the states.
    pub(in crate::nn) fn forward(
        &self,
        inputs: &[Rows],
        spans: &[StateSpan],
        act: Option<Activation>,
        ops: &dyn Ops,
    ) -> Result<Rows> {
        let silu = act == Some(Activation::Silu);
        let (taps, bias) = self.weights(ops)?;
        let out =
            ops.convolve(&Convolution { inputs, taps, bias, width: self.width, dilation: self.dilation, silu }, spans)?;
        act.filter(|_| !silu).map_or(Ok(out), |act| ops.activate(act, out))
    }

    /// The ids of taps and bias, which these operations keep.
    pub(in crate::nn) fn weights(&self, ops: &dyn Ops) -> Result<(usize, Option<usize>)> {
        let bias = self.bias.as_ref().map(|bias| self.bias_copy.of(bias, ops)).transpose()?;
        Ok((self.taps_copy.of(&self.taps, ops)?, bias))
    }

    /// Values of the window that is kept between passes.
    pub fn window_len(&self) -> usize {
        (self.width - 1) * self.dilation * self.channels
    }
}

/// LFM2's gated short convolution: `out(c · conv(b · x))`.
pub struct ShortConv {
    /// The matmuls that yield b, c and x, `[hidden, hidden]` each.
    pub inputs: [Linear; 3],
    /// Over `hidden` channels.
    pub conv: CausalConv,
    /// `[hidden, hidden]`
    pub output: Linear,
}

impl Mixer for ShortConv {
    fn forward(&self, x: Rows, states: &mut LayerStates, pass: &ForwardPass, ops: &dyn Ops) -> Result<Rows> {
        let [b, c, x] = Linear::forward_all(self.inputs.each_ref(), x, ops)?;
        let times = |x: Rows, y| ops.gate(x, y, GateFunction::Identity, x.width);
        let spans = states.extend_recurrent(pass, self.state_lens())?;
        let conv = self.conv.forward(&[times(b, x)?], &spans, None, ops)?;
        self.output.forward(times(c, conv)?, ops)
    }

    fn layer_shape(&self) -> LayerShape {
        LayerShape::recurrent(self.state_lens())
    }

    fn fill(&self, state: &mut LayerKv, tokens: usize, rng: &mut Rng) -> Result<()> {
        state.fill_recurrent(tokens, self.state_lens(), rng)
    }

    fn scratch(&self, hidden: usize) -> TokenScratch {
        // Input and output; the three matmuls; the gated one; the convolved one with its input and window, gated
        // again.
        TokenScratch { floats: (2 + 3 + 1 + 3) * hidden, input: hidden }
    }
}

impl ShortConv {
    fn state_lens(&self) -> StateLens {
        StateLens { window: self.conv.window_len(), recurrence: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nn::sampled::{HIDDEN, RandomWeights, check};
    use crate::ops::{convolve_rows, shift_window};
    use crate::weights::RowGroups;

    /// The convolution of some inputs, which the window takes in.
    fn forward(conv: &CausalConv, x: &[f32], window: &mut [f32]) -> Vec<f32> {
        let mut out = vec![0.0; x.len()];
        convolve_rows([&conv.taps, window, x], conv.bias.as_deref(), [conv.width, conv.dilation], 0, &mut out);
        shift_window(x, window);
        out
    }

    #[test]
    fn chunks_give_the_bits_of_one_call() {
        let conv = CausalConv::of(&[0.5, -1.0, 2.0, 1.0, 0.25, -0.5], 2, 3);
        let conv = CausalConv { bias: Some(vec![0.1, -0.2]), ..conv };
        let x: Vec<f32> = (0..14).map(|i| (i as f32).cos()).collect();
        let whole = forward(&conv, &x, &mut [0.0; 4]);
        // The first output depends on the first input only: the kernel's last weight, plus the bias.
        assert_eq!(whole[0], 2.0f32.mul_add(x[0], 0.1));
        let mut window = [0.0; 4];
        let parts: Vec<f32> =
            [0..2, 2..8, 8..14].into_iter().flat_map(|r| forward(&conv, &x[r], &mut window)).collect();
        assert_eq!(whole, parts);
        let mut later = vec![0.0; 8];
        convolve_rows([&conv.taps, &[0.0; 4], &x], conv.bias.as_deref(), [3, 1], 3, &mut later);
        assert_eq!(later, whole[6..]);
    }

    #[test]
    fn a_short_convolution_follows_the_definition_in_chunks_of_any_size() {
        let build = |weights: &mut WeightLoader| {
            let parts = RowGroups::consecutive(3 * HIDDEN, [HIDDEN; 3]);
            let parts = parts.each_ref().map(std::slice::from_ref);
            Ok(ShortConv {
                inputs: weights.linear_parts("m.in_proj", 3 * HIDDEN, HIDDEN, true, parts)?,
                conv: CausalConv::new(weights, "m.conv", HIDDEN, 3, true)?,
                output: weights.linear("m.out_proj", HIDDEN, HIDDEN, true)?,
            })
        };
        let plain = |weights: &RandomWeights, tokens: &[Vec<f64>]| {
            let rows: Vec<Vec<f64>> = tokens.iter().map(|x| weights.product("m.in_proj", x)).collect();
            let (kernel, bias) = (weights.f64("m.conv.weight"), weights.f64("m.conv.bias"));
            let value = |c: usize| {
                let gated = |row: &Vec<f64>| row[c] * row[2 * HIDDEN + c];
                let taps = kernel[3 * c..][..3].iter().rev().zip(rows.iter().rev().map(gated));
                let sum = taps.map(|(tap, x)| tap * x).sum::<f64>() + bias[c];
                rows[rows.len() - 1][HIDDEN + c] * sum
            };
            weights.product("m.out_proj", &(0..HIDDEN).map(value).collect::<Vec<_>>())
        };
        check(build, plain);
    }

    #[test]
    fn inputs_of_a_dilated_convolution_are_apart() {
        let conv = CausalConv::of(&[0.5, -1.0, 2.0], 1, 3).dilated(3);
        let x: Vec<f32> = (0..20).map(|i| (i as f32 * 1.3).sin()).collect();
        let at = |i: usize, back: usize| if i < back { 0.0 } else { x[i - back] };
        let want: Vec<f32> = (0..20).map(|i| 0.5 * at(i, 6) - at(i, 3) + 2.0 * x[i]).collect();
        for chunk in [1, 4, 20] {
            let mut window = [0.0; 6];
            let got: Vec<f32> = x.chunks(chunk).flat_map(|x| forward(&conv, x, &mut window)).collect();
            assert_eq!((got, conv.window_len()), (want.clone(), 6));
        }
    }
}
