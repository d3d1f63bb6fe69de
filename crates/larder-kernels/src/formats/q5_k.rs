//! `q5_k`: 256 values in groups of 32; scales and minima as in `q4_k`, 32 bytes with the fifth bits, and nibbles.

use larder_core::NumberFormat;

use super::q4_k::{Minima, add_with_minima, group_nibbles, grouped_nibbles, widen_with_minima};
use super::{BlockFormat, sized};
use crate::block::Block;
use crate::simd::Simd;
use crate::simd::blocks::Blocks;
use crate::simd::integers::Scaled;
use crate::simd::tile::Tile;

pub struct Q5K;

impl BlockFormat for Q5K {
    const KIND: NumberFormat = NumberFormat::Q5K;

    fn widen(block: &[u8], out: &mut [f32]) {
        widen_with_minima(block, &quants(sized(block)), out);
    }

    fn add(block: &[u8], x: &[Block], sum: f32) -> f32 {
        add_with_minima(block, &quants(sized(block)), x, sum)
    }

    #[inline(always)]
    fn add_rows<S: Simd, const INTERLEAVED: bool, const N: usize, const G: usize>(
        block: Blocks<S, INTERLEAVED>,
        tile: &mut Tile<S, N, G>,
    ) {
        let head = Minima::of(block);
        add_each_group!(add_group(block, &head, tile));
    }
}

/// The integers of a block, 0 to 31: bit `g` of 32 bytes is the fifth bit of group `g`.
fn quants(block: &[u8; 176]) -> [i8; 256] {
    let mut quants = grouped_nibbles(&block[48..]);
    for (g, quants) in quants.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        for (q, fifth) in quants.iter_mut().zip(&block[16..48]) {
            *q |= ((fifth >> g & 1) << 4) as i8;
        }
    }
    quants
}

#[inline(always)]
fn add_group<S: Simd, const INTERLEAVED: bool, const N: usize, const G: usize>(
    block: Blocks<S, INTERLEAVED>,
    head: &Minima<S>,
    g: usize,
    tile: &mut Tile<S, N, G>,
) {
    let (simd, (scale, min)) = (block.simd, head.group(block.simd, g));
    let (mut w, fifths) = (group_nibbles(block, 11 + 8 * (g / 2), g), block.eight_runs(3));
    for k in 0..8 {
        w[k] = simd.or(w[k], simd.bits(fifths[k], 4 - g as i32, 0x1010_1010));
    }
    tile.add_above(g, &Scaled::<S, 31>(w, scale), head.d, min);
}
