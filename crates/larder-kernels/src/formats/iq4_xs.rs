//! `iq4_xs`: 256 values in groups of 32; the f16 scale of the scales, two bytes with the high two bits of the eight
//! 6-bit scales, four with their low four bits, and nibbles as in `iq4_nl`. The offset of the scales is 32.

use larder_core::{IQ4_NL_LEVELS, NumberFormat};

use super::iq4_nl::levels;
use super::{BlockFormat, WeightGroup, half, nibbles, sized};
use crate::simd::Simd;
use crate::simd::blocks::{Blocks, high, low};
use crate::simd::groups::{Groups, Signed};

pub struct Iq4Xs;

impl BlockFormat for Iq4Xs {
    const KIND: NumberFormat = NumberFormat::Iq4Xs;

    fn group(block: &[u8], g: usize) -> WeightGroup {
        let q = nibbles(&block[8 + 16 * g..][..16]).map(|q| IQ4_NL_LEVELS[q as usize]);
        WeightGroup::of(q, half(block, 0) * scale(block, g) as f32)
    }

    #[inline(always)]
    fn rows<S: Simd, const INTERLEAVED: bool>(block: Blocks<S, INTERLEAVED>, to: &mut impl Groups<S>) {
        let head = Head::of(block);
        add_each_group!(add_group(block, &head, to));
    }
}

/// The scale of group `g`, −32 to 31.
fn scale(block: &[u8], g: usize) -> i32 {
    let high = u16::from_le_bytes(*sized(&block[2..4])) >> (2 * g) & 3;
    let low = block[4 + g / 2] >> (4 * (g % 2)) & 15;
    (low as i32 | (high as i32) << 4) - 32
}

/// The scales of the groups, and their scale.
struct Head<S: Simd> {
    /// A byte for each of the even, and of the odd groups.
    scales: [S::Bytes; 2],
    d: S::Floats,
}

impl<S: Simd> Head<S> {
    #[inline(always)]
    fn of<const INTERLEAVED: bool>(block: Blocks<S, INTERLEAVED>) -> Self {
        let (simd, packed, tops) = (block.simd, block.run(0), block.raw_scale(1));
        // Two bits for each of eight groups: first the bits of four groups, then those of two, in a byte.
        let tops = simd.or(simd.bits(tops, 0, 0xff), simd.bits(tops, 8, 0x00ff_0000));
        let tops = simd.or(simd.bits(tops, 0, 0x000f_000f), simd.bits(tops, 4, 0x0f00_0f00));
        let even = simd.or(low(simd, packed), simd.bits(tops, 4, 0x3030_3030));
        let odd = simd.or(high(simd, packed), simd.bits(tops, 2, 0x3030_3030));
        Head { scales: [simd.minus(even, 32), simd.minus(odd, 32)], d: block.half(0) }
    }
}

#[inline(always)]
fn add_group<S: Simd, const INTERLEAVED: bool>(
    block: Blocks<S, INTERLEAVED>,
    head: &Head<S>,
    g: usize,
    to: &mut impl Groups<S>,
) {
    let simd = block.simd;
    let scale = simd.mul(head.d, simd.signed_byte(head.scales[g % 2], g / 2));
    to.add(g, &Signed(levels(simd, block.runs(1 + 4 * g))), [scale], []);
}
