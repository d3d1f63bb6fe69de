//! `q6_k`: 256 values in groups of sixteen; 128 bytes with their low nibbles, 64 with the other two bits, sixteen
//! signed bytes of scales, and the f16 scale of the scales. The offset is 32.

use larder_core::NumberFormat;

use super::{BlockFormat, WeightGroup, half, two_signed};
use crate::simd::Simd;
use crate::simd::blocks::{Blocks, high, low};
use crate::simd::groups::{Groups, Unsigned};

pub struct Q6K;

impl BlockFormat for Q6K {
    const KIND: NumberFormat = NumberFormat::Q6K;

    /// Each half of 128 values: four runs of 32; runs 0 and 1 in the low nibbles of 64 bytes, 2 and 3 in the high ones;
    /// two more bits of each in 32 bytes, a run per bit pair.
    fn group(block: &[u8], g: usize) -> WeightGroup {
        let (half_of, run, d) = (g / 4, g % 4, half(block, 208));
        let (low, high) = (&block[half_of * 64 + run % 2 * 32..][..32], &block[128 + half_of * 32..][..32]);
        let q =
            std::array::from_fn(|i| ((low[i] >> (4 * (run / 2)) & 15) | (high[i] >> (2 * run) & 3) << 4) as i8 - 32);
        WeightGroup::in_halves(q, [2 * g, 2 * g + 1].map(|at| d * (block[192 + at] as i8) as f32))
    }

    #[inline(always)]
    fn rows<S: Simd, const INTERLEAVED: bool>(block: Blocks<S, INTERLEAVED>, to: &mut impl Groups<S>) {
        let head = (block.runs(48), block.half(0));
        add_each_group!(add_group(block, &head, to));
    }
}

/// The head of a block: the packed scales, and the scale of the scales.
#[inline(always)]
fn add_group<S: Simd, const INTERLEAVED: bool>(
    block: Blocks<S, INTERLEAVED>,
    (scales, d): &([S::Bytes; 4], S::Floats),
    g: usize,
    to: &mut impl Groups<S>,
) {
    let (simd, half, run) = (block.simd, g / 4, g % 4);
    // Two runs share the bytes of their low bits, and four those of their high ones.
    let (mut w, tops) = (block.eight_runs(16 * half + 8 * (run % 2)), block.eight_runs(32 + 8 * half));
    for k in 0..8 {
        let low = if run < 2 { low(simd, w[k]) } else { high(simd, w[k]) };
        w[k] = simd.or(low, simd.bits(tops[k], 4 - 2 * run as i32, 0x3030_3030));
    }
    to.add(g, &Unsigned::<S, 63, 32>(w), two_signed(simd, *d, scales[g / 2], 2 * (g % 2)), []);
}
