//! Operations of chains on recurrent states in a device's memory.

use super::DeviceRows;
use crate::nn::{ChannelDecay, DeltaHeads, GateFunction};

/// Consecutive tokens of a sequence, and the state that takes them in.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StateSpan {
    /// Id of the page of the state: the window of a convolution, then the state of a recurrence.
    pub page: usize,
    /// Values of the window.
    pub recurrence_at: usize,
    /// Row of the first token.
    pub first_row: usize,
    /// Number of tokens.
    pub tokens: usize,
    /// Pages that get a copy of the state after this many tokens, which are fewer than all.
    pub copies: Vec<(usize, usize)>,
}

/// A causal depthwise convolution, of which an activation may be taken. Its weights are values that are
/// [kept](super::DeviceOps::keep).
#[derive(Clone, Copy, Debug)]
pub struct DeviceConvolution<'a> {
    /// `[tokens, any]` each, at most [three](Self::MAX_INPUTS), whose columns are the channels.
    pub inputs: &'a [DeviceRows],
    /// `[width, channels]`
    pub taps: usize,
    /// `[channels]`
    pub bias: Option<usize>,
    /// Inputs that are added up.
    pub width: usize,
    /// Whether silu follows.
    pub silu: bool,
}

impl DeviceConvolution<'_> {
    /// The most inputs.
    pub const MAX_INPUTS: usize = 3;

    /// Number of channels.
    pub fn channels(&self) -> usize {
        self.inputs.iter().map(|rows| rows.width).sum()
    }
}

/// The delta rule.
#[derive(Clone, Copy)]
pub struct DeviceDelta {
    /// Heads and widths.
    pub heads: DeltaHeads,
    /// `[tokens, mixed]`: queries, keys and values of all heads, behind the convolution.
    pub qkv: DeviceRows,
    /// `[tokens, v_heads]`: the strength of a correction is the sigmoid of this.
    pub strengths: DeviceRows,
    /// What decays are made of.
    pub decay: DeviceDecay,
}

/// The decays of a delta rule. Weights are values that are [kept](super::DeviceOps::keep).
#[derive(Clone, Copy)]
pub struct DeviceDecay {
    /// `[tokens, v_heads]`, or `[tokens, v_heads · k_dim]` for a decay per channel of the keys.
    pub products: DeviceRows,
    /// As a row of the products; added to them.
    pub bias: usize,
    /// `[v_heads]`
    pub rates: usize,
    /// How decays follow.
    pub form: ChannelDecay,
}

/// An RMS norm of parts of rows, times a function of gates: `weight · (x / sqrt(mean(x²) + eps)) · function(gate)`.
#[derive(Clone, Copy, Debug)]
pub struct NormGate {
    /// The weight, `[width of a part]`, a value that is [kept](super::DeviceOps::keep).
    pub weight: usize,
    /// Values of a part.
    pub width: usize,
    /// Added under the root.
    pub eps: f64,
    /// The function of the gates, which are as many as the values.
    pub function: GateFunction,
}
