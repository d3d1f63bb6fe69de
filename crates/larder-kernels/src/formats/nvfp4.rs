//! `nvfp4`: 64 values in groups of sixteen; four bytes that are the groups' scales, floats of three bits of mantissa,
//! and for each group eight bytes of nibbles: the low ones are its first eight values. A nibble is a float of four
//! bits, as in `mxfp4`.

use larder_core::{MXFP4_LEVELS, NumberFormat, nvfp4_scale};

use super::mxfp4::RAISED_LEVELS;
use super::{BlockFormat, WeightGroup};
use crate::simd::Simd;
use crate::simd::blocks::{Blocks, high, low};
use crate::simd::groups::{Groups, Unsigned};

pub struct Nvfp4;

impl BlockFormat for Nvfp4 {
    const KIND: NumberFormat = NumberFormat::Nvfp4;

    fn group(block: &[u8], g: usize) -> WeightGroup {
        let nibble = |i: usize| block[4 + 16 * g + i / 16 * 8 + i % 8] >> (i % 16 / 8 * 4) & 15;
        let q = std::array::from_fn(|i| MXFP4_LEVELS[usize::from(nibble(i))]);
        WeightGroup::in_halves(q, [2 * g, 2 * g + 1].map(|at| nvfp4_scale(block[at])))
    }

    #[inline(always)]
    fn rows<S: Simd, const INTERLEAVED: bool>(block: Blocks<S, INTERLEAVED>, to: &mut impl Groups<S>) {
        let scales = without_nan(block.simd, block.run(0));
        add_each_group!(add_pair, block, &scales, to, 0 1);
    }
}

/// The bytes without the sign, with 0 for 0x7f.
#[inline(always)]
fn without_nan<S: Simd>(simd: S, bytes: S::Bytes) -> S::Bytes {
    // The top bit of a byte becomes set if one is added to 0x7f, and to no other that does not have it.
    let changed = simd.xor(bytes, simd.minus(bytes, 0xff));
    let set = simd.xor(simd.or(changed, bytes), bytes);
    let mut masks = [0; 16];
    masks[1] = 0x7f;
    let mask = simd.look_up(&masks, simd.bits(set, -7, 0x0101_0101));
    simd.bits(simd.xor(bytes, mask), 0, 0x7f7f_7f7f)
}

/// The scale of group `g`. Its bits are those of an f16 that is smaller by 2^8, also where they are subnormal.
#[inline(always)]
fn scale<S: Simd>(simd: S, bytes: S::Bytes, g: usize) -> S::Floats {
    let half = simd.half_of_lanes(simd.bits(bytes, 7 - 8 * g as i32, 0x3f80));
    simd.mul(half, simd.splat(128.0))
}

/// Adds groups `2 · i` and `2 · i + 1`.
#[inline(always)]
fn add_pair<S: Simd, const INTERLEAVED: bool>(
    block: Blocks<S, INTERLEAVED>,
    scales: &S::Bytes,
    i: usize,
    to: &mut impl Groups<S>,
) {
    let (simd, [a, b, c, d]) = (block.simd, block.runs(1 + 4 * i));
    let mut w = [
        low(simd, a),
        low(simd, b),
        high(simd, a),
        high(simd, b),
        low(simd, c),
        low(simd, d),
        high(simd, c),
        high(simd, d),
    ];
    for w in &mut w {
        *w = simd.look_up(&RAISED_LEVELS, *w);
    }
    let scales = [scale(simd, *scales, 2 * i), scale(simd, *scales, 2 * i + 1)];
    to.add(i, &Unsigned::<S, 24, 12>(w), scales, []);
}
