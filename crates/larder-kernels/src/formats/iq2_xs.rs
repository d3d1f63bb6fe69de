//! `iq2_xs`: 256 values in groups of sixteen; an f16 scale, 32 times two bytes with nine bits that choose eight values
//! from a code book of 512 entries and, above them, seven signs, and eight bytes with 4-bit scales.

use larder_core::{NumberFormat, code_books};

use super::grid::{even_signs, even_signs_of, iq2_levels, iq2_values, negated_runs, octets, odd, with_signs};
use super::{BlockFormat, half, half_dots, sized};
use crate::block::Block;
use crate::simd::Simd;
use crate::simd::blocks::Blocks;
use crate::simd::integers::SignedHalfScaled;
use crate::simd::tile::Tile;

/// The code book.
static GRID: [u32; 512] = octets(&code_books::IQ2_XS);

pub struct Iq2Xs;

impl BlockFormat for Iq2Xs {
    const KIND: NumberFormat = NumberFormat::Iq2Xs;

    fn widen(block: &[u8], out: &mut [f32]) {
        let block: &[u8; 74] = sized(block);
        widen_halves(half(block, 0), &block[66..74], |g| quants(block, g), out);
    }

    fn add(block: &[u8], x: &[Block], sum: f32) -> f32 {
        let block: &[u8; 74] = sized(block);
        add_halves(half(block, 0), &block[66..74], |g| quants(block, g), x, sum)
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

/// Widens eight groups of 32 values, which have a byte with the scales of both halves, the low nibble the first.
pub fn widen_halves(d: f32, scales: &[u8], quants: impl Fn(usize) -> [i8; 32], out: &mut [f32]) {
    for (g, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let scales = odd_scales(scales[g]).map(|scale| d * 0.125 * scale as f32);
        for (i, (o, q)) in out.iter_mut().zip(quants(g)).enumerate() {
            *o = scales[i / 16] * q as f32;
        }
    }
}

/// Adds the product of eight groups of 32 values, whose scales are as in [`widen_halves`].
pub fn add_halves(d: f32, scales: &[u8], quants: impl Fn(usize) -> [i8; 32], x: &[Block], mut sum: f32) -> f32 {
    for (g, x) in x.iter().enumerate() {
        // 31 · 32 · 43 · 127 is below 2^24.
        sum += half_dots(&quants(g), &x.q, odd_scales(scales[g])) as f32 * (d * 0.125 * x.d);
    }
    sum
}

/// The scales of both halves of a group, odd numbers from 1 to 31.
fn odd_scales(packed: u8) -> [i32; 2] {
    [packed & 15, packed >> 4].map(|scale| 2 * i32::from(scale) + 1)
}

/// The integers of group `g`, −43 to 43.
fn quants(block: &[u8; 74], g: usize) -> [i8; 32] {
    let packed: [u32; 4] = std::array::from_fn(|l| u16::from_le_bytes(*sized(&block[2 + 8 * g + 2 * l..][..2])).into());
    with_signs(iq2_levels(packed.map(|p| GRID[p as usize & 511])), even_signs(packed.map(|p| p >> 9)))
}

/// The scales of both halves of group `g`, whose byte is in the run `packed`, as the first two bytes of a lane.
#[inline(always)]
pub fn half_scales<S: Simd>(simd: S, packed: S::Bytes, g: usize) -> S::HalfScales {
    let right = 8 * (g as i32 % 4);
    let doubled = simd.or(simd.bits(packed, 1 - right, 0x1e), simd.bits(packed, 5 - right, 0x1e00));
    simd.half_scales(odd(simd, doubled), 0)
}

#[inline(always)]
fn add_group<S: Simd, const INTERLEAVED: bool, const N: usize, const G: usize>(
    block: Blocks<S, INTERLEAVED>,
    d: &S::Floats,
    g: usize,
    tile: &mut Tile<S, N, G>,
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
    let scales = half_scales(simd, block.run(16 + g / 4), g);
    tile.add(g, &SignedHalfScaled(negated_runs(simd, w, signs), scales), *d);
}
