//! `q2_k`: 256 values in groups of sixteen; for each group a byte with a 4-bit scale and, above it, a 4-bit minimum; 64
//! bytes of values; the f16 scale of the scales and that of the minima.

use larder_core::NumberFormat;

use super::{BlockFormat, bit_pairs, half, half_dots, sized};
use crate::block::Block;
use crate::simd::Simd;
use crate::simd::blocks::{Blocks, high, low};
use crate::simd::integers::HalfScaled;
use crate::simd::tile::Tile;

pub struct Q2K;

impl BlockFormat for Q2K {
    const KIND: NumberFormat = NumberFormat::Q2K;

    fn widen(block: &[u8], out: &mut [f32]) {
        let block: &[u8; 84] = sized(block);
        let (d, dmin) = (half(block, 80), half(block, 82));
        let quants = quants(block);
        let groups = out.as_chunks_mut::<16>().0.iter_mut().zip(quants.as_chunks::<16>().0);
        for ((out, quants), packed) in groups.zip(&block[..16]) {
            let (d, min) = (d * (packed & 15) as f32, dmin * (packed >> 4) as f32);
            for (o, q) in out.iter_mut().zip(quants) {
                *o = d * *q as f32 - min;
            }
        }
    }

    fn add(block: &[u8], x: &[Block], mut sum: f32) -> f32 {
        let block: &[u8; 84] = sized(block);
        let (d, dmin) = (half(block, 80), half(block, 82));
        let packed = block[..16].as_chunks::<2>().0;
        for ((q, packed), x) in quants(block).as_chunks::<32>().0.iter().zip(packed).zip(x) {
            let dot = half_dots(q, &x.q, packed.map(|p| (p & 15) as i32));
            let [first, second] = packed.map(|p| (p >> 4) as i32);
            let below = first * x.halves[0] as i32 + second * x.halves[1] as i32;
            sum += dot as f32 * (d * x.d) - below as f32 * (dmin * x.d);
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

/// The integers of a block, 0 to 3.
fn quants(block: &[u8; 84]) -> [i8; 256] {
    bit_pairs(&block[16..80])
}

/// The scales and minima of the groups, and what they are multiplied by.
struct Head<S: Simd> {
    packed: [S::Bytes; 4],
    d: S::Floats,
    dmin: S::Floats,
}

impl<S: Simd> Head<S> {
    #[inline(always)]
    fn of<const INTERLEAVED: bool>(block: Blocks<S, INTERLEAVED>) -> Self {
        Head { packed: block.runs(0), d: block.half(0), dmin: block.half(1) }
    }
}

#[inline(always)]
fn add_group<S: Simd, const INTERLEAVED: bool, const N: usize, const G: usize>(
    block: Blocks<S, INTERLEAVED>,
    head: &Head<S>,
    g: usize,
    tile: &mut Tile<S, N, G>,
) {
    let (simd, packed, at) = (block.simd, head.packed[g / 2], 2 * (g % 2));
    let mut w = block.eight_runs(4 + 8 * (g / 4));
    for w in &mut w {
        *w = simd.bits(*w, -2 * (g as i32 % 4), 0x0303_0303);
    }
    let w = HalfScaled::<S, 3, 0>(w, simd.half_scales(low(simd, packed), at));
    tile.add_above_halves(g, &w, head.d, simd.half_scales(high(simd, packed), at), head.dmin);
}
