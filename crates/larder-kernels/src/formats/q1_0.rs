//! `q1_0`: 128 values; an f16 scale, and a bit for each value: whether it is the scale, or minus the scale.

use larder_core::NumberFormat;

use super::grid::negated_runs;
use super::tq2_0::add_equal;
use super::{BlockFormat, half, sized};
use crate::block::Block;
use crate::simd::Simd;
use crate::simd::blocks::Blocks;
use crate::simd::integers::Signed;
use crate::simd::tile::Tile;

pub struct Q1_0;

impl BlockFormat for Q1_0 {
    const KIND: NumberFormat = NumberFormat::Q1_0;

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
        add_each_group!(add_group, block, &d, tile, 0 1 2 3);
    }
}

/// The integers of a block, −1 or 1.
fn quants(block: &[u8; 18]) -> [i8; 128] {
    std::array::from_fn(|i| (block[2 + i / 8] >> (i % 8) & 1) as i8 * 2 - 1)
}

#[inline(always)]
fn add_group<S: Simd, const INTERLEAVED: bool, const N: usize, const G: usize>(
    block: Blocks<S, INTERLEAVED>,
    d: &S::Floats,
    g: usize,
    tile: &mut Tile<S, N, G>,
) {
    let (simd, bits) = (block.simd, block.run(g));
    // A set bit negates −1.
    let minus_one = simd.signed(simd.minus(simd.bits(bits, 0, 0), 1));
    tile.add(g, &Signed(negated_runs(simd, [minus_one; 8], bits)), *d);
}
