//! `mxfp4`: 32 values; one byte with the exponent of their scale, and nibbles that are floats of four bits (a sign, two bits of
//! exponent, one of mantissa). [`LEVELS`] has twice what they stand for, so that they are integers.

use larder_core::NumberFormat;

use super::{BlockFormat, integer_dot, nibbles, sized};
use crate::block::Block;

/// Twice what the sixteen nibbles stand for.
pub const LEVELS: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

pub struct Mxfp4;

impl BlockFormat for Mxfp4 {
    const KIND: NumberFormat = NumberFormat::Mxfp4;

    fn widen(block: &[u8], out: &mut [f32]) {
        let d = scale(block[0]);
        for (o, q) in out.iter_mut().zip(quants(sized(block))) {
            *o = d * q as f32;
        }
    }

    fn add(block: &[u8], x: &[Block], sum: f32) -> f32 {
        sum + integer_dot(&quants(sized(block)), &x[0].q) as f32 * (scale(block[0]) * x[0].d)
    }
}

/// Half of 2^(exponent − 127), as f32 bits; the two smallest are subnormal. The standard's NaN, 255, is 2^127, as it is to ggml.
#[inline]
pub const fn scale_bits(exponent: u8) -> u32 {
    match exponent {
        0 | 1 => 0x0020_0000 << exponent,
        _ => (exponent as u32 - 1) << 23,
    }
}

/// The scale that belongs to [`LEVELS`].
#[inline]
fn scale(exponent: u8) -> f32 {
    f32::from_bits(scale_bits(exponent))
}

/// The integers of a block, −12 to 12.
fn quants(block: &[u8; 17]) -> [i8; 32] {
    nibbles(&block[1..]).map(|q| LEVELS[q as usize])
}
