//! `mxfp4`: 32 values; one byte with the exponent of their scale, and nibbles that are floats of four bits (a sign, two
//! bits of exponent, one of mantissa). [`MXFP4_LEVELS`] has twice what they stand for, so that they are integers.

use larder_core::{MXFP4_LEVELS, NumberFormat, mxfp4_scale};

use super::{BlockFormat, integer_dot, nibbles, sized};
use crate::block::Block;
use crate::simd::Simd;
use crate::simd::blocks::{Blocks, row_nibbles};
use crate::simd::integers::Unsigned;
use crate::simd::tile::Tile;

pub struct Mxfp4;

impl BlockFormat for Mxfp4 {
    const KIND: NumberFormat = NumberFormat::Mxfp4;

    fn widen(block: &[u8], out: &mut [f32]) {
        let d = mxfp4_scale(block[0]);
        for (o, q) in out.iter_mut().zip(quants(sized(block))) {
            *o = d * q as f32;
        }
    }

    fn add(block: &[u8], x: &[Block], sum: f32) -> f32 {
        sum + integer_dot(&quants(sized(block)), &x[0].q) as f32 * (mxfp4_scale(block[0]) * x[0].d)
    }

    #[inline(always)]
    fn add_rows<S: Simd, const INTERLEAVED: bool, const N: usize, const G: usize>(
        block: Blocks<S, INTERLEAVED>,
        tile: &mut Tile<S, N, G>,
    ) {
        let simd = block.simd;
        let mut w = row_nibbles(simd, block.runs(0));
        for w in &mut w {
            *w = simd.look_up(&RAISED_LEVELS, *w);
        }
        tile.add(0, &Unsigned::<S, 24, 12>(w), simd.powers(block.raw_scale(0)));
    }
}

/// The integers of a block, −12 to 12.
fn quants(block: &[u8; 17]) -> [i8; 32] {
    nibbles(&block[1..]).map(|q| MXFP4_LEVELS[q as usize])
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
