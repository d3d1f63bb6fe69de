//! `q2_0`: 64 values; an f16 scale, and 16 bytes of four values each, two bits from the lowest on. The offset is 1.

use larder_core::NumberFormat;

use super::tq2_0::add_equal;
use super::{BlockFormat, half, sized};
use crate::block::Block;
use crate::simd::Simd;
use crate::simd::blocks::Blocks;
use crate::simd::integers::Unsigned;
use crate::simd::tile::Tile;

pub struct Q2_0;

impl BlockFormat for Q2_0 {
    const KIND: NumberFormat = NumberFormat::Q2_0;

    fn widen(block: &[u8], out: &mut [f32]) {
        let block: &[u8; 18] = sized(block);
        let d = half(block, 0);
        for (o, q) in out.iter_mut().zip(quants(block)) {
            *o = d * f32::from(q);
        }
    }

    fn add(block: &[u8], x: &[Block], sum: f32) -> f32 {
        let block: &[u8; 18] = sized(block);
        add_equal(half(block, 0), quants(block).as_chunks().0, x, sum)
    }

    #[inline(always)]
    fn add_rows<S: Simd, const INTERLEAVED: bool, const N: usize, const G: usize>(
        block: Blocks<S, INTERLEAVED>,
        tile: &mut Tile<S, N, G>,
    ) {
        let d = block.half(0);
        add_each_group!(add_group, block, &d, tile, 0 1);
    }
}

/// The integers of a block, −1 to 2.
fn quants(block: &[u8; 18]) -> [i8; 64] {
    std::array::from_fn(|i| (block[2 + i / 4] >> (2 * (i % 4)) & 3) as i8 - 1)
}

#[inline(always)]
fn add_group<S: Simd, const INTERLEAVED: bool, const N: usize, const G: usize>(
    block: Blocks<S, INTERLEAVED>,
    d: &S::Floats,
    g: usize,
    tile: &mut Tile<S, N, G>,
) {
    let (simd, a, b) = (block.simd, block.run(2 * g), block.run(2 * g + 1));
    let mut w = [a; 8];
    for (k, w) in w.iter_mut().enumerate() {
        *w = simd.pairs(if k < 4 { a } else { b }, k % 4);
    }
    tile.add(g, &Unsigned::<S, 3, 1>(w), *d);
}
