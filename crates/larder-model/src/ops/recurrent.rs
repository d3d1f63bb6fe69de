//! Operations of chains on recurrent states in a device's memory.

use super::Rows;
use crate::error::Result;
use crate::ops::{ChannelDecay, DeltaHeads, GateFunction};

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
/// [kept](super::Ops::keep).
#[derive(Clone, Copy, Debug)]
pub struct Convolution<'a> {
    /// `[tokens, any]` each, at most [three](Self::MAX_INPUTS), whose columns are the channels.
    pub inputs: &'a [Rows],
    /// `[width, channels]`
    pub taps: usize,
    /// `[channels]`
    pub bias: Option<usize>,
    /// Inputs that are added up.
    pub width: usize,
    /// Distance of these in tokens.
    pub dilation: usize,
    /// Whether silu follows.
    pub silu: bool,
}

impl Convolution<'_> {
    /// The most inputs.
    pub const MAX_INPUTS: usize = 3;

    /// Number of channels.
    pub fn channels(&self) -> usize {
        self.inputs.iter().map(|rows| rows.width).sum()
    }
}

/// The delta rule.
#[derive(Clone, Copy)]
pub struct Delta {
    /// Heads and widths.
    pub heads: DeltaHeads,
    /// `[tokens, mixed]`: queries, keys and values of all heads, after the convolution.
    pub qkv: Rows,
    /// `[tokens, v_heads]`: the strength of a correction is the sigmoid of this.
    pub strengths: Rows,
    /// What decays are made of.
    pub decay: Decay,
}

/// The decays of a delta rule. Weights are values that are [kept](super::Ops::keep).
#[derive(Clone, Copy)]
pub struct Decay {
    /// `[tokens, v_heads]`, or `[tokens, v_heads · k_dim]` for a decay per channel of the keys.
    pub products: Rows,
    /// As a row of what the matmul yields; added to it.
    pub bias: usize,
    /// `[v_heads]`
    pub rates: usize,
    /// How decays follow.
    pub form: ChannelDecay,
}

/// The state-space recurrence of Mamba 2. Its weights are values that are [kept](super::Ops::keep).
#[derive(Clone, Copy, Debug)]
pub struct Scan {
    /// Heads and widths.
    pub heads: ScanHeads,
    /// `[tokens, channels]`: `x`, `B` and `C`, after the convolution.
    pub convolved: Rows,
    /// `[tokens, heads]`: what steps of time are made of.
    pub steps: Rows,
    /// `[heads]`, added to these.
    pub step_bias: usize,
    /// `[heads]`: the logarithm of a decay per step.
    pub rates: usize,
    /// `[heads]`: factors on `x` beside the state.
    pub skips: usize,
    /// The least and the largest step.
    pub limits: [f32; 2],
}

/// The state-space recurrence of Mamba 1. Its weights are values that are [kept](super::Ops::keep).
#[derive(Clone, Copy, Debug)]
pub struct ChannelScan {
    /// `[tokens, channels]`, after the convolution.
    pub x: Rows,
    /// `[tokens, channels]`: steps of time are the softplus of these.
    pub steps: Rows,
    /// `[tokens, state]`
    pub b: Rows,
    /// `[tokens, state]`
    pub c: Rows,
    /// `[channels, state]`: the logarithm of a decay per step.
    pub rates: usize,
    /// `[channels]`: factors on `x` beside the state.
    pub skips: usize,
}

/// Heads and widths of the recurrence of Mamba 2.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ScanHeads {
    /// Heads.
    pub heads: usize,
    /// Rows of a head.
    pub head_dim: usize,
    /// Groups of heads with the same `B` and `C`.
    pub groups: usize,
    /// Values of a row of the state.
    pub state: usize,
}

impl ScanHeads {
    /// Width of all heads.
    pub fn inner(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of `x`, `B` and `C`.
    pub fn channels(&self) -> usize {
        self.inner() + 2 * self.groups * self.state
    }

    /// Values of the state, `[heads, head_dim, state]`.
    pub fn state_len(&self) -> usize {
        self.inner() * self.state
    }
}

/// An RMS norm of parts of rows, and a function of gates, which are as many as the values.
#[derive(Clone, Copy, Debug)]
pub struct NormGate {
    /// The weight, for one part or for all parts of a row, a value that is [kept](super::Ops::keep).
    pub weight: usize,
    /// Values of a part.
    pub width: usize,
    /// Added under the root.
    pub eps: f64,
    /// The function of the gates.
    pub function: GateFunction,
    /// Whether gates are before the norm or behind it.
    pub order: GateOrder,
}

/// The order of a norm and gates.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GateOrder {
    /// `norm(x) · function(gate)`, with one weight for each part.
    NormFirst,
    /// `norm(x · function(gate))`, with a weight for all parts of a row.
    GateFirst,
}

/// Convolutions and recurrences of the tokens of spans, all rows of the inputs, on states in pages of the KV cache.
pub trait RecurrentOps {
    /// A causal convolution of the tokens of these spans, all rows of the inputs; updates the windows.
    fn convolve(&self, convolution: &Convolution, spans: &[StateSpan]) -> Result<Rows>;

    /// Writes recurrences that the host knows: for each span those of its copies and then that of its state,
    /// `[all of them, any]`.
    fn write_recurrences(&self, spans: &[StateSpan], values: &[f32]) -> Result<()>;

    /// The delta rule for the tokens of these spans, all rows of the inputs: `[tokens, v_heads · v_dim]`; updates the
    /// states.
    fn delta(&self, delta: &Delta, spans: &[StateSpan]) -> Result<Rows>;

    /// The recurrence of Mamba 2 for the tokens of these spans, all rows of the inputs: `[tokens, heads · head_dim]`;
    /// updates the states.
    fn scan(&self, scan: &Scan, spans: &[StateSpan]) -> Result<Rows>;

    /// The recurrence of Mamba 1 for the tokens of these spans, all rows of the inputs: `[tokens, channels]`; updates
    /// the states.
    fn scan_channels(&self, scan: &ChannelScan, spans: &[StateSpan]) -> Result<Rows>;
}
