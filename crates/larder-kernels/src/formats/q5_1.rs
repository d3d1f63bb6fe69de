//! `q5_1`: 32 values; an f16 scale, an f16 minimum, four bytes with the fifth bit of each value, and nibbles.

use larder_core::NumberFormat;

use super::q4_1::{add_above, negative, widen_above};
use super::q5_0::{five_bits, with_fifths};
use super::{BlockFormat, sized};
use crate::block::Block;
use crate::simd::Simd;
use crate::simd::blocks::Blocks;
use crate::simd::integers::Unsigned;
use crate::simd::tile::Tile;

pub struct Q5_1;

impl BlockFormat for Q5_1 {
    const KIND: NumberFormat = NumberFormat::Q5_1;

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
        let w = Unsigned::<S, 31, 0>(five_bits(block));
        tile.add_above(0, &w, block.half(0), negative(block.simd, block.half(1)));
    }
}

/// The integers of a block, 0 to 31.
fn quants(block: &[u8; 24]) -> [i8; 32] {
    with_fifths(&block[4..])
}
