//! `iq2_xs`: 256 values in groups of sixteen; an f16 scale, 32 times two bytes with nine bits that choose eight values
//! from a code book of 512 entries and, above them, seven signs, and eight bytes with 4-bit scales.

use larder_core::{NumberFormat, code_books};

use super::grid::{even_signs, even_signs_of, iq2_levels, iq2_values, negated_runs, octets, odd, with_signs};
use super::{BlockFormat, WeightGroup, half, sized, two_bytes};
use crate::simd::Simd;
use crate::simd::blocks::Blocks;
use crate::simd::groups::{Groups, Signed};

/// The code book.
static GRID: [u32; 512] = octets(&code_books::IQ2_XS);

pub struct Iq2Xs;

impl BlockFormat for Iq2Xs {
    const KIND: NumberFormat = NumberFormat::Iq2Xs;

    fn group(block: &[u8], g: usize) -> WeightGroup {
        WeightGroup::in_halves(quants(block, g), odd_scales(half(block, 0), block[66 + g]))
    }

    #[inline(always)]
    fn rows<S: Simd, const INTERLEAVED: bool>(block: Blocks<S, INTERLEAVED>, to: &mut impl Groups<S>) {
        let d = block.simd.mul(block.half(0), block.simd.splat(0.125));
        add_each_group!(add_group(block, &d, to));
    }
}

/// The scales of both halves of a group: odd numbers from 1 to 31, the first in the low nibble, times `d` / 8.
pub fn odd_scales(d: f32, packed: u8) -> [f32; 2] {
    [packed & 15, packed >> 4].map(|scale| d * 0.125 * f32::from(2 * scale + 1))
}

/// The integers of group `g`, −43 to 43.
fn quants(block: &[u8], g: usize) -> [i8; 32] {
    let packed: [u32; 4] = std::array::from_fn(|l| u16::from_le_bytes(*sized(&block[2 + 8 * g + 2 * l..][..2])).into());
    with_signs(iq2_levels(packed.map(|p| GRID[p as usize & 511])), even_signs(packed.map(|p| p >> 9)))
}

/// The scales of both halves of group `g`, whose byte is in the run `packed`, times `d`.
#[inline(always)]
pub fn half_scales<S: Simd>(simd: S, d: S::Floats, packed: S::Bytes, g: usize) -> [S::Floats; 2] {
    let right = 8 * (g as i32 % 4);
    let doubled = simd.or(simd.bits(packed, 1 - right, 0x1e), simd.bits(packed, 5 - right, 0x1e00));
    two_bytes(simd, d, odd(simd, doubled), 0)
}

#[inline(always)]
fn add_group<S: Simd, const INTERLEAVED: bool>(
    block: Blocks<S, INTERLEAVED>,
    d: &S::Floats,
    g: usize,
    to: &mut impl Groups<S>,
) {
    let (simd, a, b) = (block.simd, block.run(2 * g), block.run(2 * g + 1));
    // Seven signs from bit 9 on, and from bit 25 on.
    let first = simd.or(simd.bits(a, -9, 0x7f), simd.bits(a, -17, 0x7f00));
    let last = simd.or(simd.bits(b, 7, 0x007f_0000), simd.bits(b, -1, 0x7f00_0000));
    let signs = even_signs_of(simd, simd.or(first, last));
    let mut w = [simd.signed(signs); 8];
    for (l, w) in w.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        let entry = simd.entries(&GRID, simd.bits(if l < 2 { a } else { b }, -16 * (l as i32 % 2), 0x1ff));
        *w = iq2_values(simd, entry);
    }
    to.add(g, &Signed(negated_runs(simd, w, signs)), half_scales(simd, *d, block.run(16 + g / 4), g), []);
}
