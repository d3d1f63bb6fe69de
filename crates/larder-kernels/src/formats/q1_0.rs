//! `q1_0`: 128 values; an f16 scale, and a bit for each value: whether it is the scale, or minus the scale.

use larder_core::NumberFormat;

use super::grid::negated_runs;
use super::{BlockFormat, WeightGroup, half};
use crate::simd::Simd;
use crate::simd::blocks::Blocks;
use crate::simd::groups::{Groups, Signed};

pub struct Q1_0;

impl BlockFormat for Q1_0 {
    const KIND: NumberFormat = NumberFormat::Q1_0;

    fn group(block: &[u8], g: usize) -> WeightGroup {
        WeightGroup::of(
            std::array::from_fn(|i| (block[2 + 4 * g + i / 8] >> (i % 8) & 1) as i8 * 2 - 1),
            half(block, 0),
        )
    }

    #[inline(always)]
    fn rows<S: Simd, const INTERLEAVED: bool>(block: Blocks<S, INTERLEAVED>, to: &mut impl Groups<S>) {
        let d = block.half(0);
        add_each_group!(add_group, block, &d, to, 0 1 2 3);
    }
}

#[inline(always)]
fn add_group<S: Simd, const INTERLEAVED: bool>(
    block: Blocks<S, INTERLEAVED>,
    d: &S::Floats,
    g: usize,
    to: &mut impl Groups<S>,
) {
    let (simd, bits) = (block.simd, block.run(g));
    // A set bit negates −1.
    let minus_one = simd.signed(simd.minus(simd.bits(bits, 0, 0), 1));
    to.add(g, &Signed(negated_runs(simd, [minus_one; 8], bits)), [*d], []);
}
