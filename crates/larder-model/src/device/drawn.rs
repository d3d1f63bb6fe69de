//! The token that a device draws, so that the next step begins before the host knows it.

use super::DeviceRows;
use crate::error::Result;

/// What a token is drawn by: top-k, top-p, min-p and a draw, in this order.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct TokenDraw {
    /// 0 for the best.
    pub temperature: f32,
    /// How many of the best may be drawn, and those equal to the last of them; 0 for all.
    pub top_k: usize,
    /// Share of the probability of these that those have together which may be drawn.
    pub top_p: f32,
    /// The least probability, relative to that of the best.
    pub min_p: f32,
    /// A random number from 0 to below 1.
    pub unit: f64,
}

/// Draws a token and begins the step behind it. The host draws again when it knows the logits, and its token counts: the exponential
/// function of a device may differ in the last bit, and with top-p and without top-k the tokens may be more than a device looks at.
pub trait DeviceDraw {
    /// Draws a token from a row of [`find_best`](super::DeviceOps::find_best) or, without top-k, from `all` of the row. A row of the result has
    /// the bits of its id, and behind them what was found.
    fn draw(&self, found: DeviceRows, all: Option<DeviceRows>, draw: &TokenDraw) -> Result<DeviceRows>;

    /// The row of a matrix whose number is the first value of `number`, as bits; `matrix` is an id of
    /// [`DeviceProducts::upload`](super::DeviceProducts::upload).
    fn row_of(&self, matrix: usize, number: DeviceRows) -> Result<DeviceRows>;

    /// Begins to copy rows back behind the operations so far, and returns the number of the copy. At most four are in flight.
    fn begin_copy(&self, rows: DeviceRows) -> Result<usize>;

    /// Waits for a copy, and not for what was begun behind it.
    fn end_copy(&self, copy: usize, out: &mut [f32]) -> Result<()>;

    /// How often the host has waited for operations so far.
    fn waits(&self) -> u64;
}
