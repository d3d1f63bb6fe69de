//! `iq2_xxs`: 256 values in groups of 32; an f16 scale, and for each group four bytes that choose eight values each
//! from a code book of 256 entries, and four with four times seven signs and, in the top bits, a 4-bit scale.

use larder_core::{NumberFormat, code_books};

use super::grid::{even_signs, even_signs_of, iq2_levels, iq2_values, negated_runs, octets, odd, sevens, with_signs};
use super::{BlockFormat, half, integer_dot, sized};
use crate::block::Block;
use crate::simd::Simd;
use crate::simd::blocks::Blocks;
use crate::simd::integers::SignedScaled;
use crate::simd::tile::Tile;

/// The code book.
static GRID: [u32; 256] = octets(&code_books::IQ2_XXS);

pub struct Iq2Xxs;

impl BlockFormat for Iq2Xxs {
    const KIND: NumberFormat = NumberFormat::Iq2Xxs;

    fn widen(block: &[u8], out: &mut [f32]) {
        let block: &[u8; 66] = sized(block);
        let d = half(block, 0) * 0.125;
        for (g, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let d = d * scale(block, g) as f32;
            for (o, q) in out.iter_mut().zip(quants(block, g)) {
                *o = d * q as f32;
            }
        }
    }

    fn add(block: &[u8], x: &[Block], mut sum: f32) -> f32 {
        let block: &[u8; 66] = sized(block);
        let d = half(block, 0) * 0.125;
        for (g, x) in x.iter().enumerate() {
            // 31 · 32 · 43 · 127 is below 2^24.
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
        let d = block.simd.mul(block.half(0), block.simd.splat(0.125));
        add_each_group!(add_group(block, &d, tile));
    }
}

/// The signs of group `g`, and above them its scale.
fn packed(block: &[u8; 66], g: usize) -> u32 {
    u32::from_le_bytes(*sized(&block[6 + 8 * g..][..4]))
}

/// The scale of group `g`, an odd number from 1 to 31.
fn scale(block: &[u8; 66], g: usize) -> i32 {
    2 * (packed(block, g) >> 28) as i32 + 1
}

/// The integers of group `g`, −43 to 43.
fn quants(block: &[u8; 66], g: usize) -> [i8; 32] {
    let packed = packed(block, g);
    let values = iq2_levels(std::array::from_fn(|l| GRID[block[2 + 8 * g + l] as usize]));
    with_signs(values, even_signs([packed, packed >> 7, packed >> 14, packed >> 21]))
}

#[inline(always)]
fn add_group<S: Simd, const INTERLEAVED: bool, const N: usize, const G: usize>(
    block: Blocks<S, INTERLEAVED>,
    d: &S::Floats,
    g: usize,
    tile: &mut Tile<S, N, G>,
) {
    let (simd, chosen, packed) = (block.simd, block.run(2 * g), block.run(2 * g + 1));
    let signs = even_signs_of(simd, sevens(simd, packed));
    let mut w = [simd.signed(signs); 8];
    for (l, w) in w.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        let entry = simd.entries(&GRID, simd.bits(chosen, -8 * l as i32, 0xff));
        *w = iq2_values(simd, entry);
    }
    let scale = odd(simd, simd.bits(packed, -27, 0x1e));
    tile.add(g, &SignedScaled(negated_runs(simd, w, signs), simd.small_scale(scale, 0)), *d);
}
