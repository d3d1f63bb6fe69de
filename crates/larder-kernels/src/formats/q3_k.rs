//! `q3_k`: 256 values in groups of sixteen; 32 bytes with the third bits, 64 with the other two, sixteen 6-bit scales
//! in twelve bytes, and the f16 scale of the scales. The offset of the values is 4, that of the scales 32.
// The number of a token, a row or a run is the index of several arrays.
#![allow(clippy::needless_range_loop)]

use larder_core::NumberFormat;

use super::q6_k::{add_sixteens, widen_sixteens};
use super::{BlockFormat, bit_pairs, half, sized};
use crate::block::Block;
use crate::simd::Simd;
use crate::simd::blocks::{Blocks, high, low};
use crate::simd::integers::HalfScaled;
use crate::simd::tile::Tile;

pub struct Q3K;

impl BlockFormat for Q3K {
    const KIND: NumberFormat = NumberFormat::Q3K;

    fn widen(block: &[u8], out: &mut [f32]) {
        let block: &[u8; 110] = sized(block);
        widen_sixteens(half(block, 108), &scales(&block[96..108]), &quants(block), out);
    }

    fn add(block: &[u8], x: &[Block], sum: f32) -> f32 {
        let block: &[u8; 110] = sized(block);
        add_sixteens(half(block, 108), &scales(&block[96..108]), &quants(block), x, sum)
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

/// The integers of a block, −4 to 3: bit `g` of the first 32 bytes is the third bit of group `g` of 32 values.
fn quants(block: &[u8; 110]) -> [i8; 256] {
    let mut quants = bit_pairs(&block[32..96]);
    for (g, quants) in quants.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        for (q, third) in quants.iter_mut().zip(&block[..32]) {
            *q += (third >> g & 1) as i8 * 4 - 4;
        }
    }
    quants
}

/// The scales of the sixteen groups, −32 to 31. The low nibbles of eight bytes are the low bits of the first eight
/// scales, the high nibbles those of the last eight; four more bytes hold the high bits, of scale `g` from bit `2 · (g
/// / 4)` of byte `g % 4`.
fn scales(packed: &[u8]) -> [i8; 16] {
    std::array::from_fn(|g| {
        let (low, high) = (packed[g % 8] >> (4 * (g / 8)) & 15, packed[8 + g % 4] >> (2 * (g / 4)) & 3);
        (low | high << 4) as i8 - 32
    })
}

/// The scales, and their scale.
struct Head<S: Simd> {
    /// A byte for each of four groups of sixteen.
    scales: [S::Bytes; 4],
    d: S::Floats,
}

impl<S: Simd> Head<S> {
    #[inline(always)]
    fn of<const INTERLEAVED: bool>(block: Blocks<S, INTERLEAVED>) -> Self {
        let (simd, [_, a, b, c]) = (block.simd, block.runs(23));
        let mut scales = [low(simd, a), low(simd, b), high(simd, a), high(simd, b)];
        for i in 0..4 {
            let top = simd.bits(c, 4 - 2 * i as i32, 0x3030_3030);
            scales[i] = simd.minus(simd.or(scales[i], top), 32);
        }
        Head { scales, d: block.half(0) }
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
    let (mut w, thirds) = (block.eight_runs(8 + 8 * (g / 4)), block.eight_runs(0));
    for k in 0..8 {
        let low = simd.bits(w[k], -2 * (g as i32 % 4), 0x0303_0303);
        w[k] = simd.or(low, simd.bits(thirds[k], 2 - g as i32, 0x0404_0404));
    }
    let scales = simd.half_scales(head.scales[g / 2], 2 * (g % 2));
    tile.add(g, &HalfScaled::<S, 7, 4>(w, scales), head.d);
}
