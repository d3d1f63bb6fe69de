//! What the kernels need of a block format.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use larder_core::NumberFormat;

use super::tile::Tile;
use crate::eight_rows::EightBlocks;

/// A block format.
pub trait BlockFormat {
    const KIND: NumberFormat;

    /// Adds the products of a block of every row with the blocks of each token from number `at` on.
    ///
    /// # Safety
    /// The blocks are of this format, and the tokens have these blocks.
    unsafe fn add<const INTERLEAVED: bool, const N: usize>(
        block: EightBlocks<INTERLEAVED>,
        at: usize,
        tile: &mut Tile<N>,
    );
}

/// The low (0) or the high (1) half of every byte.
#[target_feature(enable = "avx2")]
#[inline]
pub fn nibbles<const K: usize>(mut w: [__m256i; K], half: usize) -> [__m256i; K] {
    for w in &mut w {
        let half = if half == 0 { *w } else { _mm256_srli_epi16::<4>(*w) };
        *w = _mm256_and_si256(half, _mm256_set1_epi8(15));
    }
    w
}
