//! `q4_1`: 32 values; an f16 scale, an f16 minimum, and nibbles.

use larder_core::NumberFormat;

use super::{BlockFormat, half, integer_dot, nibbles, sized};
use crate::block::Block;
use crate::simd::Simd;
use crate::simd::blocks::{Blocks, row_nibbles};
use crate::simd::integers::Unsigned;
use crate::simd::tile::Tile;

pub struct Q4_1;

impl BlockFormat for Q4_1 {
    const KIND: NumberFormat = NumberFormat::Q4_1;

    fn widen(block: &[u8], out: &mut [f32]) {
        widen_above(block, &quants(sized(block)), out);
    }

    fn add(block: &[u8], x: &[Block], sum: f32) -> f32 {
        add_above(block, &quants(sized(block)), &x[0], sum)
    }

    #[inline(always)]
    fn add_rows<S: Simd, const INTERLEAVED: bool, const N: usize, const G: usize>(
        block: Blocks<S, INTERLEAVED>,
        tile: &mut Tile<S, N, G>,
    ) {
        let w = row_nibbles(block.simd, block.runs(0));
        tile.add_above(0, &Unsigned::<S, 15, 0>(w), block.half(0), negative(block.simd, block.half(1)));
    }
}

/// The integers of a block, 0 to 15.
fn quants(block: &[u8; 20]) -> [i8; 32] {
    nibbles(&block[4..]).map(|q| q as i8)
}

/// Widens a block that begins with an f16 scale and an f16 minimum.
pub fn widen_above(block: &[u8], quants: &[i8; 32], out: &mut [f32]) {
    let (d, min) = (half(block, 0), half(block, 2));
    for (o, q) in out.iter_mut().zip(quants) {
        *o = d * *q as f32 + min;
    }
}

/// Adds the product of a block that begins with an f16 scale and an f16 minimum.
pub fn add_above(block: &[u8], quants: &[i8; 32], x: &Block, sum: f32) -> f32 {
    let (d, min) = (half(block, 0), half(block, 2));
    sum + (integer_dot(quants, &x.q) as f32 * (d * x.d) + min * x.d_sum)
}

/// Minima that are added and not subtracted.
#[inline(always)]
pub fn negative<S: Simd>(simd: S, minima: S::Floats) -> S::Floats {
    simd.mul(minima, simd.splat(-1.0))
}
