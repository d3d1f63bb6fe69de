//! `mxfp4`: 32 values; one byte with the exponent of their scale, and nibbles that are floats of four bits (a sign, two
//! bits of exponent, one of mantissa). [`MXFP4_LEVELS`] has twice what they stand for, so that they are integers.

use larder_core::{MXFP4_LEVELS, NumberFormat, mxfp4_scale};

use super::{BlockFormat, WeightGroup, nibbles};
use crate::simd::Simd;
use crate::simd::blocks::{Blocks, row_nibbles};
use crate::simd::groups::{Groups, Unsigned};

pub struct Mxfp4;

impl BlockFormat for Mxfp4 {
    const KIND: NumberFormat = NumberFormat::Mxfp4;

    fn group(block: &[u8], _: usize) -> WeightGroup {
        WeightGroup::of(nibbles(&block[1..]).map(|q| MXFP4_LEVELS[q as usize]), mxfp4_scale(block[0]))
    }

    #[inline(always)]
    fn rows<S: Simd, const INTERLEAVED: bool>(block: Blocks<S, INTERLEAVED>, to: &mut impl Groups<S>) {
        let simd = block.simd;
        let mut w = row_nibbles(simd, block.runs(0));
        for w in &mut w {
            *w = simd.look_up(&RAISED_LEVELS, *w);
        }
        to.add(0, &Unsigned::<S, 24, 12>(w), [simd.powers(block.raw_scale(0))], []);
    }
}

/// [`MXFP4_LEVELS`], each 12 larger, so that none is negative.
pub const RAISED_LEVELS: [u8; 16] = {
    let (mut raised, mut i) = ([0; 16], 0);
    while i < 16 {
        raised[i] = (MXFP4_LEVELS[i] + 12).cast_unsigned();
        i += 1;
    }
    raised
};
