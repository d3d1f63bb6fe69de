//! `q5_1`: 32 values; an f16 scale, an f16 minimum, four bytes with the fifth bit of each value, and nibbles.

use larder_core::NumberFormat;

use super::q4_1::negative;
use super::q5_0::{five_bits, with_fifths};
use super::{BlockFormat, WeightGroup, half};
use crate::simd::Simd;
use crate::simd::blocks::Blocks;
use crate::simd::groups::{Groups, Unsigned};

pub struct Q5_1;

impl BlockFormat for Q5_1 {
    const KIND: NumberFormat = NumberFormat::Q5_1;

    fn group(block: &[u8], _: usize) -> WeightGroup {
        WeightGroup::of(with_fifths(&block[4..]), half(block, 0)).above(-half(block, 2))
    }

    #[inline(always)]
    fn rows<S: Simd, const INTERLEAVED: bool>(block: Blocks<S, INTERLEAVED>, to: &mut impl Groups<S>) {
        let w = Unsigned::<S, 31, 0>(five_bits(block));
        to.add(0, &w, [block.half(0)], [negative(block.simd, block.half(1))]);
    }
}
