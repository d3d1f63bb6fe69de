//! `iq2_xxs`: 256 values in groups of 32; an f16 scale, and for each group four bytes that choose eight values each
//! from a code book of 256 entries, and four with four times seven signs and, in the top bits, a 4-bit scale.

use larder_core::{NumberFormat, code_books};

use super::grid::{even_signs, even_signs_of, iq2_levels, iq2_values, negated_runs, octets, odd, sevens, with_signs};
use super::{BlockFormat, WeightGroup, half, sized};
use crate::simd::Simd;
use crate::simd::blocks::Blocks;
use crate::simd::groups::{Groups, Signed};

/// The code book.
static GRID: [u32; 256] = octets(&code_books::IQ2_XXS);

pub struct Iq2Xxs;

impl BlockFormat for Iq2Xxs {
    const KIND: NumberFormat = NumberFormat::Iq2Xxs;

    fn group(block: &[u8], g: usize) -> WeightGroup {
        WeightGroup::of(quants(block, g), half(block, 0) * 0.125 * scale(block, g) as f32)
    }

    #[inline(always)]
    fn rows<S: Simd, const INTERLEAVED: bool>(block: Blocks<S, INTERLEAVED>, to: &mut impl Groups<S>) {
        let d = block.simd.mul(block.half(0), block.simd.splat(0.125));
        add_each_group!(add_group(block, &d, to));
    }
}

/// The signs of group `g`, and above them its scale.
fn packed(block: &[u8], g: usize) -> u32 {
    u32::from_le_bytes(*sized(&block[6 + 8 * g..][..4]))
}

/// The scale of group `g`, an odd number from 1 to 31.
fn scale(block: &[u8], g: usize) -> i32 {
    2 * (packed(block, g) >> 28) as i32 + 1
}

/// The integers of group `g`, −43 to 43.
fn quants(block: &[u8], g: usize) -> [i8; 32] {
    let packed = packed(block, g);
    let values = iq2_levels(std::array::from_fn(|l| GRID[block[2 + 8 * g + l] as usize]));
    with_signs(values, even_signs([packed, packed >> 7, packed >> 14, packed >> 21]))
}

#[inline(always)]
fn add_group<S: Simd, const INTERLEAVED: bool>(
    block: Blocks<S, INTERLEAVED>,
    d: &S::Floats,
    g: usize,
    to: &mut impl Groups<S>,
) {
    let (simd, chosen, packed) = (block.simd, block.run(2 * g), block.run(2 * g + 1));
    let signs = even_signs_of(simd, sevens(simd, packed));
    let mut w = [simd.signed(signs); 8];
    for (l, w) in w.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        let entry = simd.entries(&GRID, simd.bits(chosen, -8 * l as i32, 0xff));
        *w = iq2_values(simd, entry);
    }
    let scale = odd(simd, simd.bits(packed, -27, 0x1e));
    to.add(g, &Signed(negated_runs(simd, w, signs)), [simd.mul(*d, simd.byte(scale, 0))], []);
}
