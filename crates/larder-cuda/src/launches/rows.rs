//! Launches of sums and norms of rows.

use super::{Launches, THREADS, WARPS};
use crate::driver::Argument;
use crate::error::Result;

/// The most values of a row that has a warp for each 32 of them.
const WIDE: u32 = 8192;
/// Warps of a wider row.
const WARPS_OF_WIDE: u32 = 32;

impl Launches {
    /// `out = x + factor · y` of `count` values, with 0 for `x` at address 0; `y` has `period` values, which repeat.
    pub fn add_scaled(&self, [x, y, out]: [u64; 3], count: u32, period: u32, factor: f32) -> Result<()> {
        let [x, y, out] = [x, y, out].map(Argument::Address);
        let arguments = [x, y, out, Argument::Word(count), Argument::Word(period), Argument::Float(factor)];
        self.launch("add_scaled", [count.div_ceil(THREADS), 1], THREADS, &arguments)
    }

    /// The RMS norm of each row, times `weight [kinds, width]` unless that is 0, of which rows have one after another
    /// in turns; quantised into `blocks` too unless that is 0.
    pub fn rms_norm(&self, [x, weight, out, blocks]: [u64; 4], [rows, width, kinds]: [u32; 3], eps: f64) -> Result<()> {
        let [x, weight, out, blocks] = [x, weight, out, blocks].map(Argument::Address);
        let [rows_of, width_of, kinds] = [rows, width, kinds].map(Argument::Word);
        // Each warp finds the scale of its row: in wide rows, each writes several parts.
        let warps = width.div_ceil(32).min(if width > WIDE { WARPS_OF_WIDE } else { u32::MAX });
        let arguments =
            [x, weight, out, blocks, rows_of, width_of, Argument::Double(eps), kinds, Argument::Word(warps)];
        self.launch("rms_norm", [(rows * warps).div_ceil(WARPS), 1], 32 * WARPS, &arguments)
    }

    /// `sum = x + factor · y`, and into `out` the RMS norm of each row of it, times `weight`; quantised into `blocks`
    /// too unless that is 0.
    pub fn add_norm(
        &self,
        [x, y, sum, weight, out, blocks]: [u64; 6],
        [rows, width]: [u32; 2],
        factor: f32,
        eps: f64,
    ) -> Result<()> {
        let [x, y, sum, weight, out, blocks] = [x, y, sum, weight, out, blocks].map(Argument::Address);
        let shape = [rows, width].map(Argument::Word);
        let (factor, eps) = (Argument::Float(factor), Argument::Double(eps));
        let arguments = [x, y, sum, weight, out, blocks, shape[0], shape[1], factor, eps];
        self.launch("add_norm", norm_grid(rows, width), 32 * WARPS, &arguments)
    }

    /// The layer norm of each row, times `weight` plus `bias`; quantised into `blocks` too unless that is 0.
    pub fn layer_norm(
        &self,
        [x, weight, bias, out, blocks]: [u64; 5],
        [rows, width]: [u32; 2],
        eps: f64,
    ) -> Result<()> {
        let [x, weight, bias, out, blocks] = [x, weight, bias, out, blocks].map(Argument::Address);
        let shape = [rows, width].map(Argument::Word);
        let arguments = [x, weight, bias, out, blocks, shape[0], shape[1], Argument::Double(eps)];
        self.launch("layer_norm", norm_grid(rows, width), 32 * WARPS, &arguments)
    }

    /// Rows of `x`, each followed by that of `y`.
    pub fn side_by_side(&self, [x, y, out]: [u64; 3], [rows, x_width, y_width]: [u32; 3]) -> Result<()> {
        let [x, y, out] = [x, y, out].map(Argument::Address);
        let shape = [rows, x_width, y_width].map(Argument::Word);
        let arguments = [x, y, out, shape[0], shape[1], shape[2]];
        self.launch("side_by_side", [(rows * (x_width + y_width)).div_ceil(THREADS), 1], THREADS, &arguments)
    }

    /// `out = x · factors` of `count` values, in rows of `width`, with the same factors for each row.
    pub fn scale_columns(&self, [x, factors, out]: [u64; 3], count: u32, width: u32) -> Result<()> {
        let [x, factors, out] = [x, factors, out].map(Argument::Address);
        let arguments = [x, factors, out, Argument::Word(count), Argument::Word(width)];
        self.launch("scale_columns", [count.div_ceil(THREADS), 1], THREADS, &arguments)
    }
}

/// Blocks of a norm: a warp has 32 values of a row.
pub(super) fn norm_grid(rows: u32, width: u32) -> [u32; 2] {
    [(rows * width.div_ceil(32)).div_ceil(WARPS), 1]
}
