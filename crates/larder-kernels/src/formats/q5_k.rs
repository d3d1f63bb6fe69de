//! `q5_k`: 256 values in groups of 32; scales and minima as in `q4_k`, 32 bytes with the fifth bits, and nibbles.

use larder_core::NumberFormat;

use super::q4_k::{Minima, group_nibbles, grouped_nibbles, with_minimum};
use super::{BlockFormat, WeightGroup};
use crate::simd::Simd;
use crate::simd::blocks::Blocks;
use crate::simd::groups::{Groups, Unsigned};

pub struct Q5K;

impl BlockFormat for Q5K {
    const KIND: NumberFormat = NumberFormat::Q5K;

    /// Bit `g` of 32 bytes is the fifth bit of group `g`.
    fn group(block: &[u8], g: usize) -> WeightGroup {
        let nibbles = grouped_nibbles(&block[48..], g);
        with_minimum(block, std::array::from_fn(|i| nibbles[i] | ((block[16 + i] >> g & 1) << 4) as i8), g)
    }

    #[inline(always)]
    fn rows<S: Simd, const INTERLEAVED: bool>(block: Blocks<S, INTERLEAVED>, to: &mut impl Groups<S>) {
        let head = Minima::of(block);
        add_each_group!(add_group(block, &head, to));
    }
}

#[inline(always)]
fn add_group<S: Simd, const INTERLEAVED: bool>(
    block: Blocks<S, INTERLEAVED>,
    head: &Minima<S>,
    g: usize,
    to: &mut impl Groups<S>,
) {
    let (simd, (scale, min)) = (block.simd, head.group(block.simd, g));
    let (mut w, fifths) = (group_nibbles(block, 11 + 8 * (g / 2), g), block.eight_runs(3));
    for k in 0..8 {
        w[k] = simd.or(w[k], simd.bits(fifths[k], 4 - g as i32, 0x1010_1010));
    }
    to.add(g, &Unsigned::<S, 31, 0>(w), [scale], [min]);
}
