//! `iq3_xxs`: 256 values in groups of 32; an f16 scale, 64 bytes that choose four values each from a code book of 256
//! entries, and for each group four bytes with four times seven signs and, in the top bits, a 4-bit scale.

use larder_core::{IQ3_XXS_LEVELS, NumberFormat, code_books};

use super::grid::{even_signs, even_signs_of, negated_runs, odd, quads, sevens, with_signs};
use super::{BlockFormat, WeightGroup, half, sized};
use crate::simd::Simd;
use crate::simd::blocks::Blocks;
use crate::simd::groups::{Groups, Signed};

/// The code book.
static GRID: [u32; 256] = quads(&code_books::IQ3_XXS, IQ3_XXS_LEVELS);

pub struct Iq3Xxs;

impl BlockFormat for Iq3Xxs {
    const KIND: NumberFormat = NumberFormat::Iq3Xxs;

    fn group(block: &[u8], g: usize) -> WeightGroup {
        WeightGroup::of(quants(block, g), half(block, 0) * 0.25 * scale(block, g) as f32)
    }

    #[inline(always)]
    fn rows<S: Simd, const INTERLEAVED: bool>(block: Blocks<S, INTERLEAVED>, to: &mut impl Groups<S>) {
        let head = block.simd.mul(block.half(0), block.simd.splat(0.25));
        add_each_group!(add_group(block, &head, to));
    }
}

/// The signs of group `g`, and above them its scale.
fn packed(block: &[u8], g: usize) -> u32 {
    u32::from_le_bytes(*sized(&block[66 + 4 * g..][..4]))
}

/// The scale of group `g`, an odd number from 1 to 31.
fn scale(block: &[u8], g: usize) -> i32 {
    2 * (packed(block, g) >> 28) as i32 + 1
}

/// The integers of group `g`, −62 to 62.
fn quants(block: &[u8], g: usize) -> [i8; 32] {
    let packed = packed(block, g);
    let chosen = &block[2 + 8 * g..][..8];
    let values = std::array::from_fn(|i| GRID[chosen[i / 4] as usize].to_le_bytes()[i % 4] as i8);
    with_signs(values, even_signs([packed, packed >> 7, packed >> 14, packed >> 21]))
}

#[inline(always)]
fn add_group<S: Simd, const INTERLEAVED: bool>(
    block: Blocks<S, INTERLEAVED>,
    d: &S::Floats,
    g: usize,
    to: &mut impl Groups<S>,
) {
    let (simd, packed) = (block.simd, block.run(16 + g));
    let signs = even_signs_of(simd, sevens(simd, packed));
    let mut w = [simd.signed(signs); 8];
    for (k, w) in w.iter_mut().enumerate() {
        let chosen = simd.bits(block.run(2 * g + k / 4), -8 * (k as i32 % 4), 0xff);
        *w = simd.signed(simd.entries(&GRID, chosen));
    }
    let scale = odd(simd, simd.bits(packed, -27, 0x1e));
    to.add(g, &Signed(negated_runs(simd, w, signs)), [simd.mul(*d, simd.byte(scale, 0))], []);
}
