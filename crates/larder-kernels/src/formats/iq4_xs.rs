//! `iq4_xs`: 256 values in groups of 32; the f16 scale of the scales, two bytes with the high two bits of the eight
//! 6-bit scales, four with their low four bits, and nibbles as in `iq4_nl`. The offset of the scales is 32.

use larder_core::{IQ4_NL_LEVELS, NumberFormat};

use super::iq4_nl::levels;
use super::{BlockFormat, half, integer_dot, nibbles, sized};
use crate::block::Block;
use crate::simd::Simd;
use crate::simd::blocks::{Blocks, high, low};
use crate::simd::integers::SignedScaled;
use crate::simd::tile::Tile;

pub struct Iq4Xs;

impl BlockFormat for Iq4Xs {
    const KIND: NumberFormat = NumberFormat::Iq4Xs;

    fn widen(block: &[u8], out: &mut [f32]) {
        let block: &[u8; 136] = sized(block);
        let d = half(block, 0);
        for (g, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let d = d * scale(block, g) as f32;
            for (o, q) in out.iter_mut().zip(quants(block, g)) {
                *o = d * q as f32;
            }
        }
    }

    fn add(block: &[u8], x: &[Block], mut sum: f32) -> f32 {
        let block: &[u8; 136] = sized(block);
        let d = half(block, 0);
        for (g, x) in x.iter().enumerate() {
            // 32 · 32 · 127 · 127 is below 2^24.
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
        let head = Head::of(block);
        add_each_group!(add_group(block, &head, tile));
    }
}

/// The scale of group `g`, −32 to 31.
fn scale(block: &[u8; 136], g: usize) -> i32 {
    let high = u16::from_le_bytes(*sized(&block[2..4])) >> (2 * g) & 3;
    let low = block[4 + g / 2] >> (4 * (g % 2)) & 15;
    (low as i32 | (high as i32) << 4) - 32
}

/// The integers of group `g`, −127 to 113.
fn quants(block: &[u8; 136], g: usize) -> [i8; 32] {
    nibbles(&block[8 + 16 * g..][..16]).map(|q| IQ4_NL_LEVELS[q as usize])
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
fn add_group<S: Simd, const INTERLEAVED: bool, const N: usize, const G: usize>(
    block: Blocks<S, INTERLEAVED>,
    head: &Head<S>,
    g: usize,
    tile: &mut Tile<S, N, G>,
) {
    let simd = block.simd;
    let w = levels(simd, block.runs(1 + 4 * g));
    tile.add(g, &SignedScaled(w, simd.scale(head.scales[g % 2], g / 2)), head.d);
}
