//! `iq1_m`: 256 values in groups of sixteen; 32 bytes that choose eight values each from the code book of `iq1_s`,
//! sixteen with a nibble for each choice (three more bits, and the sign of the eighth by which its values are moved),
//! and four times two bytes with 3-bit scales of four groups and, above them, four bits of the f16 scale of the scales.

use half::f16;
use larder_core::NumberFormat;

use super::grid::odd;
use super::iq1_s::{GRID, everywhere, moved, moved_levels};
use super::{BlockFormat, WeightGroup, sized, two_bytes};
use crate::simd::Simd;
use crate::simd::blocks::Blocks;
use crate::simd::groups::{Groups, Signed};

pub struct Iq1M;

impl BlockFormat for Iq1M {
    const KIND: NumberFormat = NumberFormat::Iq1M;

    fn group(block: &[u8], g: usize) -> WeightGroup {
        let d = scale_of_scales(block) * 0.125;
        WeightGroup::in_halves(quants(block, g), scales(block, g).map(|scale| d * scale as f32))
    }

    #[inline(always)]
    fn rows<S: Simd, const INTERLEAVED: bool>(block: Blocks<S, INTERLEAVED>, to: &mut impl Groups<S>) {
        let (simd, a, b) = (block.simd, block.run(12), block.run(13));
        let first = simd.or(simd.bits(a, -12, 0x000f), simd.bits(a, -24, 0x00f0));
        let last = simd.or(simd.bits(b, -4, 0x0f00), simd.bits(b, -16, 0xf000));
        let d = simd.mul(simd.half_of_lanes(simd.or(first, last)), simd.splat(0.125));
        add_each_group!(add_group(block, &d, to));
    }
}

/// The bits of the scales of groups `4 · i` to `4 · i + 3`, and four of the scale of the scales.
fn packed(block: &[u8], i: usize) -> u16 {
    u16::from_le_bytes(*sized(&block[48 + 2 * i..][..2]))
}

fn scale_of_scales(block: &[u8]) -> f32 {
    let bits = (0..4).map(|i| packed(block, i) >> 12 << (4 * i)).sum();
    f16::from_bits(bits).to_f32()
}

/// The scales of both halves of the 32 values with number `g`, odd numbers from 1 to 15.
fn scales(block: &[u8], g: usize) -> [i32; 2] {
    [0, 3].map(|at| 2 * i32::from(packed(block, g / 2) >> (6 * (g % 2) + at) & 7) + 1)
}

/// The integers with number `g` of 32 values, −9 to 9.
fn quants(block: &[u8], g: usize) -> [i8; 32] {
    let chosen = std::array::from_fn::<_, 4, _>(|l| {
        let nibble = (block[32 + 2 * g + l / 2] >> (4 * (l % 2)) & 15) as usize;
        moved_levels(GRID[block[4 * g + l] as usize | (nibble & 7) << 8], nibble / 8)
    });
    std::array::from_fn(|i| chosen[i / 8][i % 8])
}

#[inline(always)]
fn add_group<S: Simd, const INTERLEAVED: bool>(
    block: Blocks<S, INTERLEAVED>,
    d: &S::Floats,
    g: usize,
    to: &mut impl Groups<S>,
) {
    let (simd, chosen, nibbles) = (block.simd, block.run(g), block.run(8 + g / 2));
    let mut w = [simd.signed(chosen); 8];
    for (l, w) in w.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        let right = 16 * (g as i32 % 2) + 4 * l as i32;
        let top = simd.bits(nibbles, 8 - right, 0x700);
        let entry = simd.entries(&GRID, simd.or(simd.bits(chosen, -8 * l as i32, 0xff), top));
        *w = moved(simd, entry, everywhere(simd, simd.bits(nibbles, -1 - right, 4)));
    }
    let (packed, right) = (block.run(12 + g / 4), 16 * (g as i32 / 2 % 2) + 6 * (g as i32 % 2));
    let doubled = simd.or(simd.bits(packed, 1 - right, 0x0e), simd.bits(packed, 6 - right, 0x0e00));
    to.add(g, &Signed(w), two_bytes(simd, *d, odd(simd, doubled), 0), []);
}
