//! `q4_0`: 32 values; an f16 scale, and nibbles with an offset of 8.

use larder_core::NumberFormat;

use super::{BlockFormat, half, integer_dot, nibbles, sized};
use crate::block::Block;
use crate::simd::Simd;
use crate::simd::blocks::{Blocks, row_nibbles};
use crate::simd::integers::Unsigned;
use crate::simd::tile::Tile;

pub struct Q4_0;

impl BlockFormat for Q4_0 {
    const KIND: NumberFormat = NumberFormat::Q4_0;

    fn widen(block: &[u8], out: &mut [f32]) {
        let d = half(block, 0);
        for (o, q) in out.iter_mut().zip(quants(sized(block))) {
            *o = d * q as f32;
        }
    }

    fn add(block: &[u8], x: &[Block], sum: f32) -> f32 {
        sum + integer_dot(&quants(sized(block)), &x[0].q) as f32 * (half(block, 0) * x[0].d)
    }

    #[inline(always)]
    fn add_rows<S: Simd, const INTERLEAVED: bool, const N: usize, const G: usize>(
        block: Blocks<S, INTERLEAVED>,
        tile: &mut Tile<S, N, G>,
    ) {
        let w = row_nibbles(block.simd, block.runs(0));
        tile.add(0, &Unsigned::<S, 15, 8>(w), block.half(0));
    }
}

/// The integers of a block, −8 to 7.
fn quants(block: &[u8; 18]) -> [i8; 32] {
    nibbles(&block[2..]).map(|q| q as i8 - 8)
}
