//! `q3_k`: 256 values in groups of sixteen; 32 bytes with the third bits, 64 with the other two, sixteen 6-bit scales
//! in twelve bytes, and the f16 scale of the scales. The offset of the values is 4, that of the scales 32.
// The number of a run is the index of several arrays.
#![allow(clippy::needless_range_loop)]

use larder_core::NumberFormat;

use super::{BlockFormat, WeightGroup, bit_pairs, half, pairs_of_rows, two_signed};
use crate::simd::Simd;
use crate::simd::blocks::{Blocks, high, low};
use crate::simd::groups::{Groups, Unsigned};

pub struct Q3K;

impl BlockFormat for Q3K {
    const KIND: NumberFormat = NumberFormat::Q3K;

    /// Bit `g` of the first 32 bytes is the third bit of group `g` of 32 values.
    fn group(block: &[u8], g: usize) -> WeightGroup {
        let (pairs, d) = (bit_pairs(&block[32..96], g), half(block, 108));
        let q = std::array::from_fn(|i| pairs[i] + (block[i] >> g & 1) as i8 * 4 - 4);
        WeightGroup::in_halves(q, [2 * g, 2 * g + 1].map(|at| d * scale(&block[96..108], at) as f32))
    }

    #[inline(always)]
    fn rows<S: Simd, const INTERLEAVED: bool>(block: Blocks<S, INTERLEAVED>, to: &mut impl Groups<S>) {
        let head = Head::of(block);
        add_each_group!(add_group(block, &head, to));
    }
}

/// The scale of group `g` of sixteen, −32 to 31. The low nibbles of eight bytes are the low bits of the first eight
/// scales, the high nibbles those of the last eight; four more bytes hold the high bits, of scale `g` from bit `2 · (g
/// / 4)` of byte `g % 4`.
fn scale(packed: &[u8], g: usize) -> i8 {
    let (low, high) = (packed[g % 8] >> (4 * (g / 8)) & 15, packed[8 + g % 4] >> (2 * (g / 4)) & 3);
    (low | high << 4) as i8 - 32
}

/// The scales, and their scale.
struct Head<S: Simd> {
    /// A byte for each of four groups of sixteen.
    scales: [S::Bytes; 4],
    d: S::Floats,
}

impl<S: Simd> Head<S> {
    #[inline(always)]
    fn of<const INTERLEAVED: bool>(block: Blocks<S, INTERLEAVED>) -> Self {
        let (simd, [_, a, b, c]) = (block.simd, block.runs(23));
        let mut scales = [low(simd, a), low(simd, b), high(simd, a), high(simd, b)];
        for i in 0..4 {
            let top = simd.bits(c, 4 - 2 * i as i32, 0x3030_3030);
            scales[i] = simd.minus(simd.or(scales[i], top), 32);
        }
        Head { scales, d: block.half(0) }
    }
}

#[inline(always)]
fn add_group<S: Simd, const INTERLEAVED: bool>(
    block: Blocks<S, INTERLEAVED>,
    head: &Head<S>,
    g: usize,
    to: &mut impl Groups<S>,
) {
    let simd = block.simd;
    let (mut w, thirds) = (pairs_of_rows(block, 8, g), block.eight_runs(0));
    for k in 0..8 {
        w[k] = simd.or(w[k], simd.bits(thirds[k], 2 - g as i32, 0x0404_0404));
    }
    to.add(g, &Unsigned::<S, 7, 4>(w), two_signed(simd, head.d, head.scales[g / 2], 2 * (g % 2)), []);
}
