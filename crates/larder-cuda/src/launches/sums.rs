//! Launches of the choice of experts and of the sums of their outputs.

use super::{Launches, MAX_THREADS, THREADS, pack};
use crate::driver::Argument;
use crate::error::Result;

/// The most warps of the block that chooses experts.
const CHOICE_WARPS: u32 = 16;

/// What an expert adds to the output of a token, as the kernel reads it.
#[derive(Clone, Copy, Debug)]
pub struct ExpertTerm {
    /// `[width]`, or 0 where the place has no expert.
    pub output: u64,
    /// Factor on the output.
    pub weight: f32,
}

/// The sums of the experts of tokens.
#[derive(Clone, Copy, Debug)]
pub struct ExpertSum {
    /// `[tokens, k]`: an [`ExpertTerm`] each.
    pub terms: u64,
    /// `[tokens, width]`, which is added to the sums, or 0.
    pub shared: u64,
    /// `[tokens, width]`, to which the sums are added, or 0.
    pub residual: u64,
    /// `[tokens, width]`
    pub out: u64,
    /// Number of tokens.
    pub tokens: u32,
    /// Experts of a token.
    pub k: u32,
    /// Values of a row.
    pub width: u32,
}

impl ExpertTerm {
    /// Size of the struct in kernels.
    pub const BYTES: usize = 16;

    /// The bytes of the struct in kernels.
    pub fn to_bytes(self) -> [u8; ExpertTerm::BYTES] {
        pack([self.output], [self.weight.to_bits(), 0])
    }
}

impl Launches {
    /// The weighted sums of the experts of tokens.
    pub fn sum_experts(&self, sum: &ExpertSum) -> Result<()> {
        let ExpertSum { terms, shared, residual, out, tokens, k, width } = *sum;
        let ([terms, shared, residual, out], sizes) =
            ([terms, shared, residual, out].map(Argument::Address), [tokens, k, width].map(Argument::Word));
        let arguments = [terms, shared, residual, out, sizes[0], sizes[1], sizes[2]];
        self.launch("sum_experts", [(tokens * width).div_ceil(THREADS), 1], THREADS, &arguments)
    }

    /// As [`sum_experts`](Self::sum_experts), and the RMS norm of each sum as [`rms_norm`](Self::rms_norm).
    pub fn sum_experts_norm(&self, sum: &ExpertSum, [weight, out, blocks]: [u64; 3], eps: f64) -> Result<()> {
        let ExpertSum { terms, shared, residual, out: sums, tokens, k, width } = *sum;
        let [terms, shared, residual, sums] = [terms, shared, residual, sums].map(Argument::Address);
        let [weight, out, blocks] = [weight, out, blocks].map(Argument::Address);
        let (k, of_row) = (Argument::Word(k), Argument::Word(width));
        let arguments = [terms, shared, residual, sums, weight, out, blocks, k, of_row, Argument::Double(eps)];
        let threads = width.next_multiple_of(32).min(MAX_THREADS);
        self.launch("sum_experts_norm", [tokens, 1], threads, &arguments)
    }

    /// The inputs `out [tokens · k, width]` of experts, `x [tokens, width]` times the weight of each, of which those of
    /// a token are `step` values behind those of the one before; quantised into `blocks` too unless that is 0.
    pub fn scale_inputs(&self, [x, weights, out, blocks]: [u64; 4], [tokens, k, width, step]: [u32; 4]) -> Result<()> {
        let [x, weights, out, blocks] = [x, weights, out, blocks].map(Argument::Address);
        let grid = [(tokens * k * width).div_ceil(THREADS), 1];
        let [tokens, k, width, step] = [tokens, k, width, step].map(Argument::Word);
        self.launch("scale_inputs", grid, THREADS, &[x, weights, out, blocks, tokens, k, width, step])
    }

    /// Takes the row of a table `[any, width]` whose number is at an address.
    pub fn take_row(&self, [table, number, out]: [u64; 3], width: u32) -> Result<()> {
        let [table, number, out] = [table, number, out].map(Argument::Address);
        self.launch("take_row", [width.div_ceil(THREADS), 1], THREADS, &[table, number, out, Argument::Word(width)])
    }

    /// Chooses the experts of `tokens` tokens; the arguments were written to address `list`.
    pub fn choose_experts(&self, list: u64, tokens: u32) -> Result<()> {
        self.launch("choose_experts", [1, 1], 32 * tokens.clamp(1, CHOICE_WARPS), &[Argument::Address(list)])
    }
}
