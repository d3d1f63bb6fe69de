//! Launches of convolutions and the delta rule on recurrent states, and of the norm behind them.

use larder_model::{GateFunction, GateOrder};

use super::rows::norm_grid;
use super::{Launches, THREADS, WARPS, pack};
use crate::driver::Argument;
use crate::error::Result;

/// Rows of a state that the kernel of the delta rule keeps in registers.
const KEPT_ROWS: u32 = 128;

/// Consecutive tokens of a sequence and its state, as kernels read them.
#[derive(Clone, Copy, Debug)]
pub struct StateArgs {
    /// The window of a convolution, then the state of a recurrence.
    pub state: u64,
    /// Row of the first token.
    pub first_row: u32,
    /// Number of tokens.
    pub tokens: u32,
}

/// The arguments of a convolution, as the kernel reads them.
#[derive(Clone, Copy, Debug)]
pub struct ConvolutionArgs {
    /// `[tokens, widths]` each, or 0.
    pub inputs: [u64; 3],
    /// `[width, channels]`
    pub taps: u64,
    /// `[channels]`, or 0.
    pub bias: u64,
    /// `[tokens, channels]`
    pub out: u64,
    /// By span, a [`StateArgs`].
    pub spans: u64,
    /// By token: the state that gets a copy behind it, or 0.
    pub copies: u64,
    /// Of the inputs.
    pub widths: [u32; 3],
    /// Number of channels.
    pub channels: u32,
    /// Inputs that are added up.
    pub width: u32,
    /// Distance of these in tokens.
    pub dilation: u32,
    /// Whether silu follows.
    pub silu: bool,
}

/// The arguments of the convolutions of queries and keys, as the kernel reads them.
#[derive(Clone, Copy, Debug)]
pub struct HeadConvolutionArgs {
    /// `[tokens, widths]` each: queries, keys, and values for the next token.
    pub inputs: [u64; 3],
    /// `[width, channels]`
    pub taps: u64,
    /// `[channels]`
    pub bias: u64,
    /// As a row of the values, or 0.
    pub delayed_bias: u64,
    /// `[tokens, heads, gathered, head_dim]`
    pub out: u64,
    /// `[tokens, half]`
    pub earlier: u64,
    /// By span, a [`StateArgs`].
    pub spans: u64,
    /// By token: the state that gets a copy behind it, or 0.
    pub copies: u64,
    /// Of the inputs.
    pub widths: [u32; 3],
    /// Values of a head.
    pub head_dim: u32,
    /// Inputs that are added up.
    pub width: u32,
    /// Rows that are gathered for a token.
    pub gathered: u32,
}

/// The arguments of the delta rule, as the kernel reads them.
#[derive(Clone, Copy, Debug)]
pub struct DeltaArgs {
    /// `[tokens, mixed]`: queries, keys and values, after the convolution.
    pub qkv: u64,
    /// `[tokens, v_heads]`
    pub strengths: u64,
    /// `[tokens, v_heads · decays_each]`
    pub decays: u64,
    /// As a row of these.
    pub bias: u64,
    /// `[v_heads]`
    pub rates: u64,
    /// `[tokens, v_heads, v_dim]`
    pub out: u64,
    /// By span, a [`StateArgs`].
    pub spans: u64,
    /// By token: the state that gets a copy behind it, or 0.
    pub copies: u64,
    /// Number of key heads and of value heads, and the widths of keys and values.
    pub heads: [u32; 4],
    /// Whether value head `h` uses key head `h % k_heads`.
    pub tiled: bool,
    /// The place of the recurrence in a state.
    pub recurrence_at: u32,
    /// Decays of a head.
    pub decays_each: u32,
    /// Least logarithm of a decay, if there is a bound.
    pub bound: Option<f32>,
    /// Length of a query.
    pub query_length: f32,
    /// Number of spans.
    pub count: u32,
}

/// The arguments of the recurrence of Mamba 2, as the kernel reads them.
#[derive(Clone, Copy, Debug)]
pub struct ScanArgs {
    /// `[tokens, channels]`: `x`, `B` and `C`, after the convolution.
    pub convolved: u64,
    /// `[tokens, heads]`
    pub steps: u64,
    /// `[heads]`, added to these.
    pub step_bias: u64,
    /// `[heads]`: the logarithm of a decay per step.
    pub rates: u64,
    /// `[heads]`: factors on `x`.
    pub skips: u64,
    /// `[tokens, heads, head_dim]`
    pub out: u64,
    /// By span, a [`StateArgs`].
    pub spans: u64,
    /// By token: the state that gets a copy behind it, or 0.
    pub copies: u64,
    /// Heads, rows of a head, groups, and values of a row.
    pub sizes: [u32; 4],
    /// The place of the recurrence in a state.
    pub recurrence_at: u32,
    /// Number of spans.
    pub count: u32,
    /// The smallest and the largest step.
    pub limits: [f32; 2],
}

impl StateArgs {
    /// Size of the struct in kernels.
    pub const BYTES: usize = 16;

    /// The bytes of the struct in kernels.
    pub fn to_bytes(self) -> [u8; StateArgs::BYTES] {
        pack([self.state], [self.first_row, self.tokens])
    }
}

impl ConvolutionArgs {
    /// Size of the struct in kernels.
    pub const BYTES: usize = 96;

    /// The bytes of the struct in kernels.
    pub fn to_bytes(self) -> [u8; ConvolutionArgs::BYTES] {
        let ConvolutionArgs { inputs: [a, b, c], taps, bias, out, spans, copies, widths, channels, .. } = self;
        let ConvolutionArgs { width, dilation, silu, .. } = self;
        let words = [widths[0], widths[1], widths[2], channels, width, dilation, u32::from(silu), 0];
        pack([a, b, c, taps, bias, out, spans, copies], words)
    }
}

impl HeadConvolutionArgs {
    /// Size of the struct in kernels.
    pub const BYTES: usize = 104;

    /// The bytes of the struct in kernels.
    pub fn to_bytes(self) -> [u8; HeadConvolutionArgs::BYTES] {
        let HeadConvolutionArgs { inputs: [a, b, c], taps, bias, delayed_bias, out, earlier, spans, copies, .. } = self;
        let HeadConvolutionArgs { widths: [queries, keys, half], head_dim, width, gathered, .. } = self;
        let addresses = [a, b, c, taps, bias, delayed_bias, out, earlier, spans, copies];
        pack(addresses, [queries, keys, half, head_dim, width, gathered])
    }
}

impl DeltaArgs {
    /// Size of the struct in kernels.
    pub const BYTES: usize = 112;

    /// The bytes of the struct in kernels.
    pub fn to_bytes(self) -> [u8; DeltaArgs::BYTES] {
        let DeltaArgs { qkv, strengths, decays, bias, rates, out, spans, copies, .. } = self;
        let DeltaArgs { heads, tiled, recurrence_at, decays_each, bound, query_length, count, .. } = self;
        let (form, bound) = (u32::from(bound.is_some()), bound.unwrap_or_default().to_bits());
        let mut words = [0; 12];
        words[..4].copy_from_slice(&heads);
        words[4..11].copy_from_slice(&[
            u32::from(tiled),
            recurrence_at,
            decays_each,
            form,
            bound,
            query_length.to_bits(),
            count,
        ]);
        pack([qkv, strengths, decays, bias, rates, out, spans, copies], words)
    }
}

impl ScanArgs {
    /// Size of the struct in kernels.
    pub const BYTES: usize = 96;

    /// The bytes of the struct in kernels.
    pub fn to_bytes(self) -> [u8; ScanArgs::BYTES] {
        let ScanArgs { convolved, steps, step_bias, rates, skips, out, spans, copies, .. } = self;
        let ScanArgs { sizes: [heads, head_dim, groups, state], recurrence_at, count, limits, .. } = self;
        let [least, most] = limits.map(f32::to_bits);
        pack(
            [convolved, steps, step_bias, rates, skips, out, spans, copies],
            [heads, head_dim, groups, state, recurrence_at, count, least, most],
        )
    }
}

/// The arguments of the recurrence of Mamba 1, as the kernel reads them.
#[derive(Clone, Copy, Debug)]
pub struct ChannelScanArgs {
    /// `[tokens, channels]`: what is taken in, and what steps of time are made of.
    pub inputs: [u64; 2],
    /// `[tokens, state]`: B and C.
    pub both: [u64; 2],
    /// `[channels, state]`
    pub rates: u64,
    /// `[channels]`
    pub skips: u64,
    /// `[tokens, channels]`
    pub out: u64,
    /// Address of the list of spans.
    pub spans: u64,
    /// Address of the list of copies.
    pub copies: u64,
    /// Number of channels, and values of a row of the state.
    pub sizes: [u32; 2],
    /// The place of the recurrence in a state.
    pub recurrence_at: u32,
    /// Number of spans.
    pub count: u32,
}

impl ChannelScanArgs {
    /// Size of the struct in kernels.
    pub const BYTES: usize = 88;

    /// The bytes of the struct in kernels.
    pub fn to_bytes(self) -> [u8; ChannelScanArgs::BYTES] {
        let ChannelScanArgs { inputs, both, rates, skips, out, spans, copies, sizes, recurrence_at, count } = self;
        let addresses = [inputs[0], inputs[1], both[0], both[1], rates, skips, out, spans, copies];
        pack(addresses, [sizes[0], sizes[1], recurrence_at, count])
    }
}

/// The number of a function of gates in kernels.
fn number_of(function: GateFunction) -> Argument {
    Argument::Word(match function {
        GateFunction::Sigmoid => 0,
        GateFunction::Silu => 1,
        GateFunction::Softplus => 2,
        GateFunction::Identity => 3,
    })
}

impl Launches {
    /// Convolves the tokens of `spans` spans; the arguments were written to address `list`.
    pub fn convolve(&self, list: u64, channels: u32, spans: u32) -> Result<()> {
        self.launch("convolve", [channels.div_ceil(THREADS), spans], THREADS, &[Argument::Address(list)])
    }

    /// Convolves queries and keys, and gathers the last rows for each token; the arguments were written to address
    /// `list`.
    pub fn convolve_heads(&self, list: u64, columns: u32, spans: u32) -> Result<()> {
        self.launch("convolve_heads", [columns.div_ceil(THREADS), spans], THREADS, &[Argument::Address(list)])
    }

    /// Queries and keys of what was projected and what was convolved; bias and factors are behind these.
    pub fn mix_heads(
        &self,
        [queries, keys, mixed, bias, factors]: [u64; 5],
        [out_queries, out_keys]: [u64; 2],
        [tokens, heads, kv_heads, width]: [u32; 4],
    ) -> Result<()> {
        let [queries, keys, mixed, bias, factors] = [queries, keys, mixed, bias, factors].map(Argument::Address);
        let [out_queries, out_keys] = [out_queries, out_keys].map(Argument::Address);
        let shape = [tokens, heads, kv_heads, width].map(Argument::Word);
        let rows = [queries, keys, mixed, bias, factors, out_queries, out_keys];
        let arguments: Vec<Argument> = rows.into_iter().chain(shape).collect();
        self.launch("mix_heads", [(tokens * kv_heads).div_ceil(WARPS), 1], 32 * WARPS, &arguments)
    }

    /// The delta rule; the arguments were written to address `list`.
    pub fn delta_rule(&self, args: &DeltaArgs, list: u64) -> Result<()> {
        let [_, v_heads, k_dim, v_dim] = args.heads;
        let warps = args.count * v_heads * v_dim.div_ceil(32);
        let kernel = if k_dim <= KEPT_ROWS { "delta_rule" } else { "delta_rule_wide" };
        self.launch(kernel, [warps.div_ceil(WARPS), 1], 32 * WARPS, &[Argument::Address(list)])
    }

    /// The recurrence of Mamba 2; the arguments were written to address `list`.
    pub fn scan(&self, args: &ScanArgs, list: u64) -> Result<()> {
        let [heads, head_dim, ..] = args.sizes;
        let warps = args.count * heads * head_dim;
        self.launch("scan_states", [warps.div_ceil(WARPS), 1], 32 * WARPS, &[Argument::Address(list)])
    }

    /// The recurrence of Mamba 1; the arguments were written to address `list`.
    pub fn scan_channels(&self, args: &ChannelScanArgs, list: u64) -> Result<()> {
        let warps = args.count * args.sizes[0];
        self.launch("scan_channels", [warps.div_ceil(WARPS), 1], 32 * WARPS, &[Argument::Address(list)])
    }

    /// The RMS norm of `parts` parts of `width` values, of which `weights` have weights of their own, with a function
    /// of gates; quantised into `blocks` too unless that is 0.
    pub fn norm_gate(
        &self,
        [x, gates, weight, out, blocks]: [u64; 5],
        [parts, width, weights]: [u32; 3],
        (function, order): (GateFunction, GateOrder),
        eps: f64,
    ) -> Result<()> {
        let [x, gates, weight, out, blocks] = [x, gates, weight, out, blocks].map(Argument::Address);
        let (shape, eps) = ([parts, width, weights].map(Argument::Word), Argument::Double(eps));
        let (function, first) = (number_of(function), Argument::Word(u32::from(order == GateOrder::GateFirst)));
        let arguments = [x, gates, weight, out, blocks, shape[0], shape[1], shape[2], function, first, eps];
        self.launch("norm_gate", norm_grid(parts, width), 32 * WARPS, &arguments)
    }

    /// `x = cap · tanh(x / cap)` of `count` values.
    pub fn softcap(&self, x: u64, count: u32, cap: f32) -> Result<()> {
        let arguments = [Argument::Address(x), Argument::Word(count), Argument::Float(cap)];
        self.launch("softcap", [count.div_ceil(THREADS), 1], THREADS, &arguments)
    }

    /// `count` values times a function of their gates, each of which is for `shared` consecutive values; quantised into
    /// `blocks` too unless that is 0.
    pub fn gate(
        &self,
        [x, gates, out, blocks]: [u64; 4],
        [count, shared]: [u32; 2],
        function: GateFunction,
    ) -> Result<()> {
        let [x, gates, out, blocks] = [x, gates, out, blocks].map(Argument::Address);
        let arguments = [x, gates, out, blocks, Argument::Word(count), Argument::Word(shared), number_of(function)];
        self.launch("gate_values", [count.div_ceil(THREADS), 1], THREADS, &arguments)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(bytes: &[u8]) -> Vec<u32> {
        bytes.as_chunks().0.iter().map(|b| u32::from_ne_bytes(*b)).collect()
    }

    #[test]
    fn the_kernel_keeps_as_many_rows_in_registers() {
        let kernels = include_str!("../../kernels/recurrent.cu");
        assert!(kernels.contains(&format!("static constexpr u32 ROWS = {KEPT_ROWS};")));
    }

    #[test]
    fn arguments_are_written_as_kernels_read_them() {
        let state = StateArgs { state: 1, first_row: 2, tokens: 3 };
        assert_eq!(words(&state.to_bytes()), [1, 0, 2, 3]);
        let addresses: Vec<u32> = (1..9).flat_map(|at| [at, 0]).collect();
        let convolution = ConvolutionArgs {
            inputs: [1, 2, 3],
            taps: 4,
            bias: 5,
            out: 6,
            spans: 7,
            copies: 8,
            widths: [9, 10, 11],
            channels: 12,
            width: 13,
            dilation: 14,
            silu: true,
        };
        assert_eq!(words(&convolution.to_bytes())[..16], addresses);
        assert_eq!(words(&convolution.to_bytes())[16..], [9, 10, 11, 12, 13, 14, 1, 0]);
        let delta = DeltaArgs {
            qkv: 1,
            strengths: 2,
            decays: 3,
            bias: 4,
            rates: 5,
            out: 6,
            spans: 7,
            copies: 8,
            heads: [9, 10, 11, 12],
            tiled: true,
            recurrence_at: 13,
            decays_each: 14,
            bound: Some(1.0),
            query_length: 2.0,
            count: 15,
        };
        let (one, two) = (1.0f32.to_bits(), 2.0f32.to_bits());
        assert_eq!(words(&delta.to_bytes())[..16], addresses);
        assert_eq!(words(&delta.to_bytes())[16..], [9, 10, 11, 12, 1, 13, 14, 1, one, two, 15, 0]);
        let plain = DeltaArgs { bound: None, tiled: false, ..delta };
        assert_eq!(words(&plain.to_bytes())[20..26], [0, 13, 14, 0, 0, two]);
        let scan = ScanArgs {
            convolved: 1,
            steps: 2,
            step_bias: 3,
            rates: 4,
            skips: 5,
            out: 6,
            spans: 7,
            copies: 8,
            sizes: [9, 10, 11, 12],
            recurrence_at: 13,
            count: 14,
            limits: [1.0, 2.0],
        };
        assert_eq!(words(&scan.to_bytes())[..16], addresses);
        assert_eq!(words(&scan.to_bytes())[16..], [9, 10, 11, 12, 13, 14, one, two]);
        let heads = HeadConvolutionArgs {
            inputs: [1, 2, 3],
            taps: 4,
            bias: 5,
            delayed_bias: 6,
            out: 7,
            earlier: 8,
            spans: 9,
            copies: 10,
            widths: [11, 12, 13],
            head_dim: 14,
            width: 15,
            gathered: 16,
        };
        assert_eq!(words(&heads.to_bytes())[..16], addresses);
        assert_eq!(words(&heads.to_bytes())[16..], [9, 0, 10, 0, 11, 12, 13, 14, 15, 16]);
        let channels = ChannelScanArgs {
            inputs: [1, 2],
            both: [3, 4],
            rates: 5,
            skips: 6,
            out: 7,
            spans: 8,
            copies: 9,
            sizes: [10, 11],
            recurrence_at: 12,
            count: 13,
        };
        assert_eq!(words(&channels.to_bytes())[..16], addresses);
        assert_eq!(words(&channels.to_bytes())[16..], [9, 0, 10, 11, 12, 13]);
    }
}
