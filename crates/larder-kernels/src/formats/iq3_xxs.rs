//! `iq3_xxs`: 256 values in groups of 32; an f16 scale, 64 bytes that choose four values each from a code book of 256
//! entries, and for each group four bytes with four times seven signs and, in the top bits, a 4-bit scale.

use larder_core::{IQ3_XXS_LEVELS, NumberFormat, code_books};

use super::grid::{even_signs, even_signs_of, negated_runs, odd, quads, sevens, with_signs};
use super::{BlockFormat, half, integer_dot, sized};
use crate::block::Block;
use crate::simd::Simd;
use crate::simd::blocks::Blocks;
use crate::simd::integers::SignedScaled;
use crate::simd::tile::Tile;

/// The code book.
static GRID: [u32; 256] = quads(&code_books::IQ3_XXS, IQ3_XXS_LEVELS);

pub struct Iq3Xxs;

impl BlockFormat for Iq3Xxs {
    const KIND: NumberFormat = NumberFormat::Iq3Xxs;

    fn widen(block: &[u8], out: &mut [f32]) {
        let block: &[u8; 98] = sized(block);
        let d = half(block, 0) * 0.25;
        for (g, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let d = d * scale(block, g) as f32;
            for (o, q) in out.iter_mut().zip(quants(block, g)) {
                *o = d * q as f32;
            }
        }
    }

    fn add(block: &[u8], x: &[Block], mut sum: f32) -> f32 {
        let block: &[u8; 98] = sized(block);
        let d = half(block, 0) * 0.25;
        for (g, x) in x.iter().enumerate() {
            // 31 · 32 · 62 · 127 is below 2^24.
            let dot = scale(block, g) * integer_dot(&quants(block, g), &x.q);
            sum += dot as f32 * (d * x.d);
        }
        sum
    }

    #[inline(always)]
    fn add_rows<S: Simd, const INTERLEAVED: bool, const N: usize, const G: usize>(
        block: Blocks<S, INTERLEAVED>,
        tile: &mut Tile<S, N, G>,
    ) {
        let head = block.simd.mul(block.half(0), block.simd.splat(0.25));
        add_each_group!(add_group(block, &head, tile));
    }
}

/// The signs of group `g`, and above them its scale.
fn packed(block: &[u8; 98], g: usize) -> u32 {
    u32::from_le_bytes(*sized(&block[66 + 4 * g..][..4]))
}

/// The scale of group `g`, an odd number from 1 to 31.
fn scale(block: &[u8; 98], g: usize) -> i32 {
    2 * (packed(block, g) >> 28) as i32 + 1
}

/// The integers of group `g`, −62 to 62.
fn quants(block: &[u8; 98], g: usize) -> [i8; 32] {
    let packed = packed(block, g);
    let chosen = &block[2 + 8 * g..][..8];
    let values = std::array::from_fn(|i| GRID[chosen[i / 4] as usize].to_le_bytes()[i % 4] as i8);
    with_signs(values, even_signs([packed, packed >> 7, packed >> 14, packed >> 21]))
}

#[inline(always)]
fn add_group<S: Simd, const INTERLEAVED: bool, const N: usize, const G: usize>(
    block: Blocks<S, INTERLEAVED>,
    d: &S::Floats,
    g: usize,
    tile: &mut Tile<S, N, G>,
) {
    let (simd, packed) = (block.simd, block.run(16 + g));
    let signs = even_signs_of(simd, sevens(simd, packed));
    let mut w = [simd.signed(signs); 8];
    for (k, w) in w.iter_mut().enumerate() {
        let chosen = simd.bits(block.run(2 * g + k / 4), -8 * (k as i32 % 4), 0xff);
        *w = simd.signed(simd.entries(&GRID, chosen));
    }
    let scale = odd(simd, simd.bits(packed, -27, 0x1e));
    tile.add(g, &SignedScaled(negated_runs(simd, w, signs), simd.small_scale(scale, 0)), *d);
}
