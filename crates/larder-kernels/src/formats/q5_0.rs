//! `q5_0`: 32 values; an f16 scale, four bytes with the fifth bit of each value, and nibbles. The offset is 16.
// The number of a run is the index of several arrays.
#![allow(clippy::needless_range_loop)]

use larder_core::NumberFormat;

use super::{BlockFormat, WeightGroup, half, nibbles, sized};
use crate::simd::Simd;
use crate::simd::blocks::{Blocks, row_nibbles};
use crate::simd::groups::{Groups, Unsigned};

pub struct Q5_0;

impl BlockFormat for Q5_0 {
    const KIND: NumberFormat = NumberFormat::Q5_0;

    fn group(block: &[u8], _: usize) -> WeightGroup {
        WeightGroup::of(with_fifths(&block[2..]).map(|q| q - 16), half(block, 0))
    }

    #[inline(always)]
    fn rows<S: Simd, const INTERLEAVED: bool>(block: Blocks<S, INTERLEAVED>, to: &mut impl Groups<S>) {
        to.add(0, &Unsigned::<S, 31, 16>(five_bits(block)), [block.half(0)], []);
    }
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
