//! `q4_1`: 32 values; an f16 scale, an f16 minimum, and nibbles.

use larder_core::NumberFormat;

use super::{BlockFormat, WeightGroup, half, nibbles};
use crate::simd::Simd;
use crate::simd::blocks::{Blocks, row_nibbles};
use crate::simd::groups::{Groups, Unsigned};

pub struct Q4_1;

impl BlockFormat for Q4_1 {
    const KIND: NumberFormat = NumberFormat::Q4_1;

    fn group(block: &[u8], _: usize) -> WeightGroup {
        WeightGroup::of(nibbles(&block[4..]).map(|q| q as i8), half(block, 0)).above(-half(block, 2))
    }

    #[inline(always)]
    fn rows<S: Simd, const INTERLEAVED: bool>(block: Blocks<S, INTERLEAVED>, to: &mut impl Groups<S>) {
        let w = row_nibbles(block.simd, block.runs(0));
        to.add(0, &Unsigned::<S, 15, 0>(w), [block.half(0)], [negative(block.simd, block.half(1))]);
    }
}

/// Minima that are added and not subtracted.
#[inline(always)]
pub fn negative<S: Simd>(simd: S, minima: S::Floats) -> S::Floats {
    simd.mul(minima, simd.splat(-1.0))
}
