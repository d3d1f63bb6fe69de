//! `tq2_0`: 256 values; 64 bytes of values, two bits each, and an f16 scale. The offset is 1.

use larder_core::NumberFormat;

use super::{BlockFormat, bit_pairs, half, integer_dot, sized};
use crate::block::Block;
use crate::simd::Simd;
use crate::simd::blocks::Blocks;
use crate::simd::integers::Unsigned;
use crate::simd::tile::Tile;

pub struct Tq2_0;

impl BlockFormat for Tq2_0 {
    const KIND: NumberFormat = NumberFormat::Tq2_0;

    fn widen(block: &[u8], out: &mut [f32]) {
        let block: &[u8; 66] = sized(block);
        let d = half(block, 64);
        for (o, q) in out.iter_mut().zip(bit_pairs(&block[..64])) {
            *o = d * f32::from(q - 1);
        }
    }

    fn add(block: &[u8], x: &[Block], sum: f32) -> f32 {
        let block: &[u8; 66] = sized(block);
        add_equal(half(block, 64), bit_pairs(&block[..64]).map(|q| q - 1).as_chunks().0, x, sum)
    }

    #[inline(always)]
    fn add_rows<S: Simd, const INTERLEAVED: bool, const N: usize, const G: usize>(
        block: Blocks<S, INTERLEAVED>,
        tile: &mut Tile<S, N, G>,
    ) {
        let d = block.half(0);
        add_each_group!(add_group(block, &d, tile));
    }
}

/// Adds the product of groups of 32 values that have the same scale.
pub fn add_equal(d: f32, quants: &[[i8; 32]], x: &[Block], mut sum: f32) -> f32 {
    for (q, x) in quants.iter().zip(x) {
        sum += integer_dot(q, &x.q) as f32 * (d * x.d);
    }
    sum
}

#[inline(always)]
fn add_group<S: Simd, const INTERLEAVED: bool, const N: usize, const G: usize>(
    block: Blocks<S, INTERLEAVED>,
    d: &S::Floats,
    g: usize,
    tile: &mut Tile<S, N, G>,
) {
    let mut w = block.eight_runs(8 * (g / 4));
    for w in &mut w {
        *w = block.simd.bits(*w, -2 * (g as i32 % 4), 0x0303_0303);
    }
    tile.add(g, &Unsigned::<S, 3, 1>(w), *d);
}
