//! `tq2_0`: 256 values; 64 bytes of values, two bits each, and an f16 scale. The offset is 1.

use larder_core::NumberFormat;

use super::{BlockFormat, WeightGroup, bit_pairs, half, pairs_of_rows};
use crate::simd::Simd;
use crate::simd::blocks::Blocks;
use crate::simd::groups::{Groups, Unsigned};

pub struct Tq2_0;

impl BlockFormat for Tq2_0 {
    const KIND: NumberFormat = NumberFormat::Tq2_0;

    fn group(block: &[u8], g: usize) -> WeightGroup {
        WeightGroup::of(bit_pairs(&block[..64], g).map(|q| q - 1), half(block, 64))
    }

    #[inline(always)]
    fn rows<S: Simd, const INTERLEAVED: bool>(block: Blocks<S, INTERLEAVED>, to: &mut impl Groups<S>) {
        let d = block.half(0);
        add_each_group!(add_group(block, &d, to));
    }
}

#[inline(always)]
fn add_group<S: Simd, const INTERLEAVED: bool>(
    block: Blocks<S, INTERLEAVED>,
    d: &S::Floats,
    g: usize,
    to: &mut impl Groups<S>,
) {
    to.add(g, &Unsigned::<S, 3, 1>(pairs_of_rows(block, 0, g)), [*d], []);
}
