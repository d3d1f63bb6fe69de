//! What the kernels need of a block format.
#![allow(unsafe_code)]

use std::arch::aarch64::*;

use larder_core::NumberFormat;

use super::dots::Dot;
use super::load::{FourBlocks, Runs};
use super::tile::Tile;

/// A block format.
pub trait BlockFormat {
    const KIND: NumberFormat;

    /// Adds the products of a block of every row with the blocks of each token from number `at` on.
    ///
    /// # Safety
    /// The blocks are of this format, the tokens have these blocks, and the processor has the instructions of `D`.
    unsafe fn add<D: Dot, const INTERLEAVED: bool, const N: usize>(
        block: FourBlocks<INTERLEAVED>,
        at: usize,
        tile: &mut Tile<N>,
    );
}

/// The low (0) or the high (1) half of every byte.
#[target_feature(enable = "neon")]
#[inline]
pub fn nibbles(w: Runs, half: usize) -> Runs {
    w.map(|w| if half == 0 { vandq_u8(w, vdupq_n_u8(15)) } else { vshrq_n_u8::<4>(w) })
}
