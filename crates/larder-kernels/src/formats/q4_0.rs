//! `q4_0`: 32 values; an f16 scale, and nibbles with an offset of 8.

use larder_core::NumberFormat;

use super::{BlockFormat, WeightGroup, half, nibbles};
use crate::simd::Simd;
use crate::simd::blocks::{Blocks, row_nibbles};
use crate::simd::groups::{Groups, Unsigned};

pub struct Q4_0;

impl BlockFormat for Q4_0 {
    const KIND: NumberFormat = NumberFormat::Q4_0;

    fn group(block: &[u8], _: usize) -> WeightGroup {
        WeightGroup::of(nibbles(&block[2..]).map(|q| q as i8 - 8), half(block, 0))
    }

    #[inline(always)]
    fn rows<S: Simd, const INTERLEAVED: bool>(block: Blocks<S, INTERLEAVED>, to: &mut impl Groups<S>) {
        let w = row_nibbles(block.simd, block.runs(0));
        to.add(0, &Unsigned::<S, 15, 8>(w), [block.half(0)], []);
    }
}
