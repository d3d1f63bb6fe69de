//! `iq2_s`: 256 values in groups of sixteen; an f16 scale, 32 bytes that choose eight values each from a code book of
//! 1,024 entries, 32 with the signs, eight with the top two bits of the choices, and eight with 4-bit scales.

use larder_core::{NumberFormat, code_books};

use super::grid::{iq2_levels, iq2_values, negated_runs, octets, with_signs};
use super::iq2_xs::{add_halves, half_scales, widen_halves};
use super::{BlockFormat, half, sized};
use crate::block::Block;
use crate::simd::Simd;
use crate::simd::blocks::Blocks;
use crate::simd::integers::SignedHalfScaled;
use crate::simd::tile::Tile;

/// The code book.
static GRID: [u32; 1024] = octets(&code_books::IQ2_S);

pub struct Iq2S;

impl BlockFormat for Iq2S {
    const KIND: NumberFormat = NumberFormat::Iq2S;

    fn widen(block: &[u8], out: &mut [f32]) {
        let block: &[u8; 82] = sized(block);
        widen_halves(half(block, 0), &block[74..82], |g| quants(block, g), out);
    }

    fn add(block: &[u8], x: &[Block], sum: f32) -> f32 {
        let block: &[u8; 82] = sized(block);
        add_halves(half(block, 0), &block[74..82], |g| quants(block, g), x, sum)
    }

    #[inline(always)]
    fn add_rows<S: Simd, const INTERLEAVED: bool, const N: usize, const G: usize>(
        block: Blocks<S, INTERLEAVED>,
        tile: &mut Tile<S, N, G>,
    ) {
        let d = block.simd.mul(block.half(0), block.simd.splat(0.125));
        add_each_group!(add_group(block, &d, tile));
    }
}

/// The integers of group `g`, −43 to 43.
fn quants(block: &[u8; 82], g: usize) -> [i8; 32] {
    let (low, tops) = (&block[2 + 4 * g..][..4], block[66 + g] as usize);
    let values = iq2_levels(std::array::from_fn(|l| GRID[low[l] as usize | (tops >> (2 * l) & 3) << 8]));
    with_signs(values, u32::from_le_bytes(*sized(&block[34 + 4 * g..][..4])))
}

#[inline(always)]
fn add_group<S: Simd, const INTERLEAVED: bool, const N: usize, const G: usize>(
    block: Blocks<S, INTERLEAVED>,
    d: &S::Floats,
    g: usize,
    tile: &mut Tile<S, N, G>,
) {
    let (simd, chosen, signs, tops) = (block.simd, block.run(g), block.run(8 + g), block.run(16 + g / 4));
    let mut w = [simd.signed(signs); 8];
    for (l, w) in w.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        let top = simd.bits(tops, 8 - 2 * l as i32 - 8 * (g as i32 % 4), 0x300);
        let entry = simd.entries(&GRID, simd.or(simd.bits(chosen, -8 * l as i32, 0xff), top));
        *w = iq2_values(simd, entry);
    }
    let scales = half_scales(simd, block.run(18 + g / 4), g);
    tile.add(g, &SignedHalfScaled(negated_runs(simd, w, signs), scales), *d);
}
