//! `q6_k`: 256 values in groups of sixteen; 128 bytes with their low nibbles, 64 with the other two bits, sixteen
//! signed bytes of scales, and the f16 scale of the scales. The offset is 32.

use larder_core::NumberFormat;

use super::{BlockFormat, half, half_dots, sized};
use crate::block::Block;
use crate::simd::Simd;
use crate::simd::blocks::{Blocks, high, low};
use crate::simd::integers::HalfScaled;
use crate::simd::tile::Tile;

pub struct Q6K;

impl BlockFormat for Q6K {
    const KIND: NumberFormat = NumberFormat::Q6K;

    fn widen(block: &[u8], out: &mut [f32]) {
        let block: &[u8; 210] = sized(block);
        widen_sixteens(half(block, 208), &scales(block), &quants(block), out);
    }

    fn add(block: &[u8], x: &[Block], sum: f32) -> f32 {
        let block: &[u8; 210] = sized(block);
        add_sixteens(half(block, 208), &scales(block), &quants(block), x, sum)
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

/// Widens sixteen groups of sixteen values, each with an integer scale.
pub fn widen_sixteens(d: f32, scales: &[i8; 16], quants: &[i8; 256], out: &mut [f32]) {
    let groups = out.as_chunks_mut::<16>().0.iter_mut().zip(quants.as_chunks::<16>().0);
    for ((out, quants), scale) in groups.zip(scales) {
        let d = d * *scale as f32;
        for (o, q) in out.iter_mut().zip(quants) {
            *o = d * *q as f32;
        }
    }
}

/// Adds the product of sixteen groups of sixteen values, each with an integer scale.
pub fn add_sixteens(d: f32, scales: &[i8; 16], quants: &[i8; 256], x: &[Block], mut sum: f32) -> f32 {
    for ((q, scales), x) in quants.as_chunks::<32>().0.iter().zip(scales.as_chunks::<2>().0).zip(x) {
        sum += half_dots(q, &x.q, scales.map(i32::from)) as f32 * (d * x.d);
    }
    sum
}

fn scales(block: &[u8; 210]) -> [i8; 16] {
    std::array::from_fn(|g| block[192 + g] as i8)
}

/// The integers of a block, −32 to 31.
///
/// Each half of 128 values: four runs of 32; runs 0 and 1 in the low nibbles of 64 bytes, 2 and 3 in the high ones; two
/// more bits of each in 32 bytes, a run per bit pair.
fn quants(block: &[u8; 210]) -> [i8; 256] {
    let (low, high) = (&block[..128], &block[128..192]);
    let mut quants = [0; 256];
    for (at, out) in quants.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (half, run) = (at / 4, at % 4);
        let low = &low[half * 64 + run % 2 * 32..][..32];
        let high = &high[half * 32..][..32];
        let (nibble, pair) = (4 * (run / 2) as u32, 2 * run as u32);
        for ((o, l), h) in out.iter_mut().zip(low).zip(high) {
            *o = ((l >> nibble & 15) | (h >> pair & 3) << 4) as i8 - 32;
        }
    }
    quants
}

/// The packed scales, and the scale of the scales.
struct Head<S: Simd> {
    scales: [S::Bytes; 4],
    d: S::Floats,
}

impl<S: Simd> Head<S> {
    #[inline(always)]
    fn of<const INTERLEAVED: bool>(block: Blocks<S, INTERLEAVED>) -> Self {
        Head { scales: block.runs(48), d: block.half(0) }
    }
}

#[inline(always)]
fn add_group<S: Simd, const INTERLEAVED: bool, const N: usize, const G: usize>(
    block: Blocks<S, INTERLEAVED>,
    head: &Head<S>,
    g: usize,
    tile: &mut Tile<S, N, G>,
) {
    let (simd, half, run) = (block.simd, g / 4, g % 4);
    // Two runs share the bytes of their low bits, and four those of their high ones.
    let (mut w, tops) = (block.eight_runs(16 * half + 8 * (run % 2)), block.eight_runs(32 + 8 * half));
    for k in 0..8 {
        let low = if run < 2 { low(simd, w[k]) } else { high(simd, w[k]) };
        w[k] = simd.or(low, simd.bits(tops[k], 4 - 2 * run as i32, 0x3030_3030));
    }
    let scales = simd.half_scales(head.scales[g / 2], 2 * (g % 2));
    tile.add(g, &HalfScaled::<S, 63, 32>(w, scales), head.d);
}
