//! Launches of the search for the best logits.

use super::{Launches, THREADS, WARPS, pack};
use crate::driver::Argument;
use crate::error::Result;

/// The most slices of a row, in each of which the best value is found first. The kernels have the same number.
const SLICES: u32 = 1024;
/// The least values of a slice.
const LEAST: u32 = 8;
/// Warps that collect the best values of a row. The kernels have the same number.
const COLLECTORS: u32 = 8;
/// The most values of a draw. The kernel has the same number.
const DRAWN_AMONG: u32 = 128;

/// Arguments of the search for the best values of rows.
#[derive(Clone, Copy, Debug)]
pub struct BestArgs {
    /// `[rows, width]`
    pub x: u64,
    /// `[rows, slices]`
    pub maxima: u64,
    /// `[rows, 1 + 2 · most]`
    pub found: u64,
    /// Number of rows.
    pub rows: u32,
    /// Values of a row.
    pub width: u32,
    /// How many of the best are wanted.
    pub best: u32,
    /// The most that are returned.
    pub most: u32,
}

impl BestArgs {
    /// Values of a slice of a row, and the number of slices.
    fn slices(&self) -> [u32; 2] {
        let each = self.width.div_ceil(SLICES).max(LEAST);
        [each, self.width.div_ceil(each)]
    }

    /// Bytes of the sum of the weights of each slice.
    pub fn sums_bytes(&self) -> usize {
        8 * self.slices()[1] as usize
    }

    /// Bytes of the best value of each slice.
    pub fn maxima_bytes(&self) -> usize {
        4 * (self.rows * self.slices()[1]) as usize
    }
}

/// What a token is drawn by, as the kernel reads it.
#[derive(Clone, Copy, Debug)]
pub struct DrawArgs {
    /// From 0 to below 1.
    pub unit: f64,
    /// 0 for the best.
    pub temperature: f32,
    /// Share of the probability that the tokens have together that may be drawn.
    pub top_p: f32,
    /// The least probability, relative to that of the best.
    pub min_p: f32,
    /// How many of the best may be drawn.
    pub top_k: u32,
}

impl DrawArgs {
    /// Size of the struct in kernels.
    pub const BYTES: usize = 24;

    /// The bytes of the struct in kernels.
    pub fn to_bytes(self) -> [u8; DrawArgs::BYTES] {
        let floats = [self.temperature, self.top_p, self.min_p].map(f32::to_bits);
        let [temperature, top_p, min_p] = floats;
        pack([self.unit.to_bits()], [temperature, top_p, min_p, self.top_k])
    }
}

/// Where a draw reads and writes, beside the values that were found.
#[derive(Clone, Copy, Debug)]
pub struct DrawPlaces {
    /// The [settings](DrawArgs).
    pub draw: u64,
    /// The sum of the weights of each slice; 0 if the token is not drawn from all of the row.
    pub sums: u64,
    /// The row that `change_logits` has written.
    pub changed: u64,
    /// Words of that.
    pub changed_words: u32,
    /// The id, what was found, what was changed.
    pub out: u64,
    /// The id.
    pub last: u64,
}

/// Arguments of a change of logits.
#[derive(Clone, Copy, Debug)]
pub struct ChangeArgs {
    /// `[width]`
    pub x: u64,
    /// The tokens, each of four words.
    pub tokens: u64,
    /// The token that was drawn last, or 0.
    pub drawn: u64,
    /// `[count + 2]`
    pub out: u64,
    /// Values of the row.
    pub width: u32,
    /// Number of tokens.
    pub count: u32,
    /// For a repetition, for each occurrence in the answer, and for the first one.
    pub penalties: [f32; 3],
}

impl Launches {
    /// Changes the logits of some tokens.
    pub fn change_logits(&self, args: &ChangeArgs) -> Result<()> {
        let [x, tokens, drawn, out] = [args.x, args.tokens, args.drawn, args.out].map(Argument::Address);
        let ([width, count], [repetition, frequency, presence]) =
            ([args.width, args.count].map(Argument::Word), args.penalties.map(Argument::Float));
        let arguments = [x, tokens, drawn, out, width, count, repetition, frequency, presence];
        self.launch("change_logits", [args.count.div_ceil(THREADS) + 1, 1], THREADS, &arguments)
    }

    /// Draws a token among the found values of a row, or from all of it.
    pub fn draw_token(&self, args: &BestArgs, places: &DrawPlaces) -> Result<()> {
        let [each, slices] = args.slices();
        let [x, found, draw, sums] = [args.x, args.found, places.draw, places.sums].map(Argument::Address);
        let [out, last, changed] = [places.out, places.last, places.changed].map(Argument::Address);
        let [width, slice_count, each, most] = [args.width, slices, each, args.most].map(Argument::Word);
        let mut all = Argument::Address(0);
        if places.sums != 0 {
            all = x;
            let arguments = [x, found, draw, sums, width, slice_count, each, most];
            self.launch("weigh_slices", [slices.div_ceil(WARPS), 1], 32 * WARPS, &arguments)?;
        }
        let words = Argument::Word(places.changed_words);
        let arguments = [found, draw, out, last, most, changed, words, all, sums, width, slice_count, each];
        self.launch("draw_token", [1, 1], DRAWN_AMONG, &arguments)
    }

    /// Takes `count` values out of each row.
    pub fn take_out(&self, [x, places, out]: [u64; 3], [rows, width, count]: [u32; 3]) -> Result<()> {
        let [x, places, out] = [x, places, out].map(Argument::Address);
        let [rows_of, width, count_of] = [rows, width, count].map(Argument::Word);
        let grid = [(rows * count).div_ceil(THREADS), 1];
        self.launch("take_out", grid, THREADS, &[x, places, out, rows_of, width, count_of])
    }

    /// Finds the best values of rows.
    pub fn find_best(&self, args: &BestArgs) -> Result<()> {
        let [each, slices] = args.slices();
        let [x, maxima, found] = [args.x, args.maxima, args.found].map(Argument::Address);
        let [rows, width, slice_count, each] = [args.rows, args.width, slices, each].map(Argument::Word);
        let step = Argument::Word(1 + 2 * args.most);
        let arguments = [x, maxima, found, rows, width, slice_count, each, step];
        self.launch("best_of_slices", [(args.rows * slices).div_ceil(WARPS), 1], 32 * WARPS, &arguments)?;
        let (best, most) = (Argument::Word(args.best), Argument::Word(args.most));
        let arguments = [x, maxima, found, rows, width, slice_count, each, best, most];
        self.launch("collect_best", [(args.rows * COLLECTORS).div_ceil(WARPS), 1], 32 * WARPS, &arguments)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_have_the_same_numbers() {
        let kernels = include_str!("../../kernels/sampling.cu");
        assert!(kernels.contains(&format!("constexpr u32 SLICES = {SLICES};")));
        assert!(kernels.contains(&format!("constexpr u32 COLLECTORS = {COLLECTORS};")));
        assert!(kernels.contains(&format!("constexpr u32 DRAWN_AMONG = {DRAWN_AMONG};")));
    }
}
