//! `q2_0`: 64 values; an f16 scale, and 16 bytes of four values each, two bits from the lowest on. The offset is 1.

use larder_core::NumberFormat;

use super::{BlockFormat, WeightGroup, half};
use crate::simd::Simd;
use crate::simd::blocks::Blocks;
use crate::simd::groups::{Groups, Unsigned};

pub struct Q2_0;

impl BlockFormat for Q2_0 {
    const KIND: NumberFormat = NumberFormat::Q2_0;

    fn group(block: &[u8], g: usize) -> WeightGroup {
        WeightGroup::of(
            std::array::from_fn(|i| (block[2 + 8 * g + i / 4] >> (2 * (i % 4)) & 3) as i8 - 1),
            half(block, 0),
        )
    }

    #[inline(always)]
    fn rows<S: Simd, const INTERLEAVED: bool>(block: Blocks<S, INTERLEAVED>, to: &mut impl Groups<S>) {
        let d = block.half(0);
        add_each_group!(add_group, block, &d, to, 0 1);
    }
}

#[inline(always)]
fn add_group<S: Simd, const INTERLEAVED: bool>(
    block: Blocks<S, INTERLEAVED>,
    d: &S::Floats,
    g: usize,
    to: &mut impl Groups<S>,
) {
    let (simd, a, b) = (block.simd, block.run(2 * g), block.run(2 * g + 1));
    let mut w = [a; 8];
    for (k, w) in w.iter_mut().enumerate() {
        *w = simd.pairs(if k < 4 { a } else { b }, k % 4);
    }
    to.add(g, &Unsigned::<S, 3, 1>(w), [*d], []);
}
