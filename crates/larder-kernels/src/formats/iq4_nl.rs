//! `iq4_nl`: 32 values; an f16 scale, and nibbles that are indices of [`IQ4_NL_LEVELS`].

use larder_core::{IQ4_NL_LEVELS, NumberFormat};

use super::{BlockFormat, half, integer_dot, nibbles, sized};
use crate::block::Block;
use crate::simd::Simd;
use crate::simd::blocks::{Blocks, joined, row_nibbles};
use crate::simd::integers::Signed;
use crate::simd::tile::Tile;

pub struct Iq4Nl;

impl BlockFormat for Iq4Nl {
    const KIND: NumberFormat = NumberFormat::Iq4Nl;

    fn widen(block: &[u8], out: &mut [f32]) {
        let d = half(block, 0);
        for (o, q) in out.iter_mut().zip(quants(sized(block))) {
            *o = d * q as f32;
        }
    }

    fn add(block: &[u8], x: &[Block], sum: f32) -> f32 {
        sum + integer_dot(&quants(sized(block)), &x[0].q) as f32 * (half(block, 0) * x[0].d)
    }

    #[inline(always)]
    fn add_rows<S: Simd, const INTERLEAVED: bool, const N: usize, const G: usize>(
        block: Blocks<S, INTERLEAVED>,
        tile: &mut Tile<S, N, G>,
    ) {
        tile.add(0, &Signed(levels(block.simd, block.runs(0))), block.half(0));
    }
}

/// The integers of a block, −127 to 113.
fn quants(block: &[u8; 18]) -> [i8; 32] {
    nibbles(&block[2..]).map(|q| IQ4_NL_LEVELS[q as usize])
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
