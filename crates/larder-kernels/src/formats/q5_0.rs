//! `q5_0`: 32 values; an f16 scale, four bytes with the fifth bit of each value, and nibbles. The offset is 16.

use larder_core::NumberFormat;

use super::{BlockFormat, half, integer_dot, nibbles, sized};
use crate::block::Block;

pub struct Q5_0;

impl BlockFormat for Q5_0 {
    const KIND: NumberFormat = NumberFormat::Q5_0;

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

/// The integers of a block, −16 to 15.
fn quants(block: &[u8; 22]) -> [i8; 32] {
    with_fifths(&block[2..]).map(|q| q - 16)
}

/// Of four bytes, bit `i` of which is the fifth bit of value `i`, and 16 bytes of nibbles: the integers, 0 to 31.
pub fn with_fifths(bytes: &[u8]) -> [i8; 32] {
    let fifths = u32::from_le_bytes(*sized(&bytes[..4]));
    let low = nibbles(&bytes[4..]);
    std::array::from_fn(|i| (low[i] | (fifths >> i & 1) as u8 * 16) as i8)
}
