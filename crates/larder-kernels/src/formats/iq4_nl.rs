//! `iq4_nl`: 32 values; an f16 scale, and nibbles that are indices of [`IQ4_NL_LEVELS`].

use larder_core::{IQ4_NL_LEVELS, NumberFormat};

use super::{BlockFormat, half, integer_dot, nibbles, sized};
use crate::block::Block;

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
}

/// The integers of a block, −127 to 113.
fn quants(block: &[u8; 18]) -> [i8; 32] {
    nibbles(&block[2..]).map(|q| IQ4_NL_LEVELS[q as usize])
}
