//! `q5_0`: 32 values; an f16 scale, four bytes with the fifth bit of each value, and nibbles. The offset is 16.
// The number of a token, a row or a run is the index of several arrays.
#![allow(clippy::needless_range_loop)]

use larder_core::NumberFormat;

use super::{BlockFormat, half, integer_dot, nibbles, sized};
use crate::block::Block;
use crate::simd::Simd;
use crate::simd::blocks::{Blocks, row_nibbles};
use crate::simd::integers::Unsigned;
use crate::simd::tile::Tile;

pub struct Q5_0;

impl BlockFormat for Q5_0 {
    const KIND: NumberFormat = NumberFormat::Q5_0;

    fn widen(block: &[u8], out: &mut [f32]) {
        let d = half(block, 0);
        for (o, q) in out.iter_mut().zip(quants(sized(block))) {
            *o = d * q as f32;
        }
    }

    fn add(block: &[u8], x: &[Block], sum: f32) -> f32 {
        sum + integer_dot(&quants(sized(block)), &x[0].q) as f32 * (half(block, 0) * x[0].d)
    }

    #[inline(always)]
    fn add_rows<S: Simd, const INTERLEAVED: bool, const N: usize, const G: usize>(
        block: Blocks<S, INTERLEAVED>,
        tile: &mut Tile<S, N, G>,
    ) {
        tile.add(0, &Unsigned::<S, 31, 16>(five_bits(block)), block.half(0));
    }
}

/// The integers of a block, −16 to 15.
fn quants(block: &[u8; 22]) -> [i8; 32] {
    with_fifths(&block[2..]).map(|q| q - 16)
}

/// Of four bytes, bit `i` of which is the fifth bit of value `i`, and 16 bytes of nibbles: the integers, 0 to 31.
pub fn with_fifths(bytes: &[u8]) -> [i8; 32] {
    let fifths = u32::from_le_bytes(*sized(&bytes[..4]));
    let low = nibbles(&bytes[4..]);
    std::array::from_fn(|i| (low[i] | ((fifths >> i & 1) as u8 * 16)) as i8)
}

/// The integers of blocks whose other bytes than scales are as [`with_fifths`] has them.
#[inline(always)]
pub fn five_bits<S: Simd, const INTERLEAVED: bool>(block: Blocks<S, INTERLEAVED>) -> [S::Bytes; 8] {
    let (simd, fifths) = (block.simd, block.run(0));
    let mut w = row_nibbles(simd, block.runs(1));
    for k in 0..8 {
        w[k] = simd.or(w[k], simd.sixteens(fifths, k));
    }
    w
}
