//! `iq3_s`: 256 values in groups of 32; an f16 scale, 64 bytes that choose four values each from a code book of 512
//! entries, eight with the ninth bits of the choices, 32 with the signs, and four with 4-bit scales.

use larder_core::{IQ3_S_LEVELS, NumberFormat, code_books};

use super::grid::{negated_runs, odd, quads, with_signs};
use super::{BlockFormat, WeightGroup, half, sized};
use crate::simd::Simd;
use crate::simd::blocks::Blocks;
use crate::simd::groups::{Groups, Signed};

/// The code book.
static GRID: [u32; 512] = quads(&code_books::IQ3_S, IQ3_S_LEVELS);

pub struct Iq3S;

impl BlockFormat for Iq3S {
    const KIND: NumberFormat = NumberFormat::Iq3S;

    fn group(block: &[u8], g: usize) -> WeightGroup {
        WeightGroup::of(quants(block, g), half(block, 0) * scale(block, g) as f32)
    }

    #[inline(always)]
    fn rows<S: Simd, const INTERLEAVED: bool>(block: Blocks<S, INTERLEAVED>, to: &mut impl Groups<S>) {
        let head = Head::of(block);
        add_each_group!(add_group(block, &head, to));
    }
}

/// The scale of group `g`, an odd number from 1 to 31.
fn scale(block: &[u8], g: usize) -> i32 {
    2 * i32::from(block[106 + g / 2] >> (4 * (g % 2)) & 15) + 1
}

/// The integers of group `g`, −15 to 15.
fn quants(block: &[u8], g: usize) -> [i8; 32] {
    let (low, ninth) = (&block[2 + 8 * g..][..8], block[66 + g]);
    let entry = |k: usize| GRID[low[k] as usize | (ninth as usize >> k & 1) << 8];
    let values = std::array::from_fn(|i| entry(i / 4).to_le_bytes()[i % 4] as i8);
    with_signs(values, u32::from_le_bytes(*sized(&block[74 + 4 * g..][..4])))
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
        let (simd, packed) = (block.simd, block.run(26));
        let (even, odds) = (simd.bits(packed, 1, 0x1e1e_1e1e), simd.bits(packed, -3, 0x1e1e_1e1e));
        Head { scales: [odd(simd, even), odd(simd, odds)], d: block.half(0) }
    }
}

#[inline(always)]
fn add_group<S: Simd, const INTERLEAVED: bool>(
    block: Blocks<S, INTERLEAVED>,
    head: &Head<S>,
    g: usize,
    to: &mut impl Groups<S>,
) {
    let (simd, ninths, signs) = (block.simd, block.run(16 + g / 4), block.run(18 + g));
    let mut w = [simd.signed(signs); 8];
    for (k, w) in w.iter_mut().enumerate() {
        let low = simd.bits(block.run(2 * g + k / 4), -8 * (k as i32 % 4), 0xff);
        let ninth = simd.bits(ninths, 8 - k as i32 - 8 * (g as i32 % 4), 0x100);
        *w = simd.signed(simd.entries(&GRID, simd.or(low, ninth)));
    }
    let scale = simd.mul(head.d, simd.byte(head.scales[g % 2], g / 2));
    to.add(g, &Signed(negated_runs(simd, w, signs)), [scale], []);
}
