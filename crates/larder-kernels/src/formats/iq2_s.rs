//! `iq2_s`: 256 values in groups of sixteen; an f16 scale, 32 bytes that choose eight values each from a code book of
//! 1,024 entries, 32 with the signs, eight with the top two bits of the choices, and eight with 4-bit scales.

use larder_core::{NumberFormat, code_books};

use super::grid::{iq2_levels, iq2_values, negated_runs, octets, with_signs};
use super::iq2_xs::{half_scales, odd_scales};
use super::{BlockFormat, WeightGroup, half, sized};
use crate::simd::Simd;
use crate::simd::blocks::Blocks;
use crate::simd::groups::{Groups, Signed};

/// The code book.
static GRID: [u32; 1024] = octets(&code_books::IQ2_S);

pub struct Iq2S;

impl BlockFormat for Iq2S {
    const KIND: NumberFormat = NumberFormat::Iq2S;

    fn group(block: &[u8], g: usize) -> WeightGroup {
        WeightGroup::in_halves(quants(block, g), odd_scales(half(block, 0), block[74 + g]))
    }

    #[inline(always)]
    fn rows<S: Simd, const INTERLEAVED: bool>(block: Blocks<S, INTERLEAVED>, to: &mut impl Groups<S>) {
        let d = block.simd.mul(block.half(0), block.simd.splat(0.125));
        add_each_group!(add_group(block, &d, to));
    }
}

/// The integers of group `g`, −43 to 43.
fn quants(block: &[u8], g: usize) -> [i8; 32] {
    let (low, tops) = (&block[2 + 4 * g..][..4], block[66 + g] as usize);
    let values = iq2_levels(std::array::from_fn(|l| GRID[low[l] as usize | (tops >> (2 * l) & 3) << 8]));
    with_signs(values, u32::from_le_bytes(*sized(&block[34 + 4 * g..][..4])))
}

#[inline(always)]
fn add_group<S: Simd, const INTERLEAVED: bool>(
    block: Blocks<S, INTERLEAVED>,
    d: &S::Floats,
    g: usize,
    to: &mut impl Groups<S>,
) {
    let (simd, chosen, signs, tops) = (block.simd, block.run(g), block.run(8 + g), block.run(16 + g / 4));
    let mut w = [simd.signed(signs); 8];
    for (l, w) in w.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        let top = simd.bits(tops, 8 - 2 * l as i32 - 8 * (g as i32 % 4), 0x300);
        let entry = simd.entries(&GRID, simd.or(simd.bits(chosen, -8 * l as i32, 0xff), top));
        *w = iq2_values(simd, entry);
    }
    to.add(g, &Signed(negated_runs(simd, w, signs)), half_scales(simd, *d, block.run(18 + g / 4), g), []);
}
