//! `iq4_nl`: 32 values; an f16 scale, and nibbles that are indices of [`IQ4_NL_LEVELS`].

use larder_core::{IQ4_NL_LEVELS, NumberFormat};

use super::{BlockFormat, WeightGroup, half, nibbles};
use crate::simd::Simd;
use crate::simd::blocks::{Blocks, joined, row_nibbles};
use crate::simd::groups::{Groups, Signed};

pub struct Iq4Nl;

impl BlockFormat for Iq4Nl {
    const KIND: NumberFormat = NumberFormat::Iq4Nl;

    fn group(block: &[u8], _: usize) -> WeightGroup {
        WeightGroup::of(nibbles(&block[2..]).map(|q| IQ4_NL_LEVELS[q as usize]), half(block, 0))
    }

    #[inline(always)]
    fn rows<S: Simd, const INTERLEAVED: bool>(block: Blocks<S, INTERLEAVED>, to: &mut impl Groups<S>) {
        to.add(0, &Signed(levels(block.simd, block.runs(0))), [block.half(0)], []);
    }
}

/// The integers of 16 bytes of each row.
#[inline(always)]
pub fn levels<S: Simd>(simd: S, runs: [S::Bytes; 4]) -> [S::Signed; 8] {
    let [a, b, c, d, e, f, g, h] = row_nibbles(simd, runs);
    joined(four_levels(simd, [a, b, c, d]), four_levels(simd, [e, f, g, h]))
}

#[inline(always)]
fn four_levels<S: Simd>(simd: S, [a, b, c, d]: [S::Bytes; 4]) -> [S::Signed; 4] {
    [
        simd.look_up_signed(&IQ4_NL_LEVELS, a),
        simd.look_up_signed(&IQ4_NL_LEVELS, b),
        simd.look_up_signed(&IQ4_NL_LEVELS, c),
        simd.look_up_signed(&IQ4_NL_LEVELS, d),
    ]
}
