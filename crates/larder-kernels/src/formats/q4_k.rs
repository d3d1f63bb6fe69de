//! `q4_k`: 256 values in groups of 32; the f16 scale of the scales and that of the minima, twelve bytes with 6-bit scales and
//! minima, and nibbles.

use larder_core::NumberFormat;

use super::{BlockFormat, half, integer_dot, sized};
use crate::block::Block;

pub struct Q4K;

impl BlockFormat for Q4K {
    const KIND: NumberFormat = NumberFormat::Q4K;

    fn widen(block: &[u8], out: &mut [f32]) {
        widen_with_minima(block, &quants(sized(block)), out);
    }

    fn add(block: &[u8], x: &[Block], sum: f32) -> f32 {
        add_with_minima(block, &quants(sized(block)), x, sum)
    }
}

/// The integers of a block, 0 to 15.
fn quants(block: &[u8; 144]) -> [i8; 256] {
    grouped_nibbles(&block[16..])
}

/// 256 nibbles in groups of 32. Two groups share 32 bytes: the even one has the low nibbles.
pub fn grouped_nibbles(bytes: &[u8]) -> [i8; 256] {
    let mut quants = [0; 256];
    for (g, out) in quants.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        for (o, q) in out.iter_mut().zip(&bytes[g / 2 * 32..][..32]) {
            *o = (q >> (4 * (g % 2)) & 15) as i8;
        }
    }
    quants
}

/// Widens a block whose first 16 bytes are as in `q4_k`.
pub fn widen_with_minima(block: &[u8], quants: &[i8; 256], out: &mut [f32]) {
    let (d, dmin) = (half(block, 0), half(block, 2));
    for (g, (out, quants)) in out.as_chunks_mut::<32>().0.iter_mut().zip(quants.as_chunks::<32>().0).enumerate() {
        let (scale, min) = scale_min(&block[4..16], g);
        let (d, m) = (d * scale as f32, dmin * min as f32);
        for (o, q) in out.iter_mut().zip(quants) {
            *o = d * *q as f32 - m;
        }
    }
}

/// Adds the product of a block whose first 16 bytes are as in `q4_k`.
pub fn add_with_minima(block: &[u8], quants: &[i8; 256], x: &[Block], mut sum: f32) -> f32 {
    let (d, dmin) = (half(block, 0), half(block, 2));
    for (g, (q, x)) in quants.as_chunks::<32>().0.iter().zip(x).enumerate() {
        let (scale, min) = scale_min(&block[4..16], g);
        let dot = scale as i32 * integer_dot(q, &x.q);
        sum += dot as f32 * (d * x.d) - (dmin * min as f32) * x.d_sum;
    }
    sum
}

/// The 6-bit scale and minimum of group `g`, packed over 12 bytes: the first four groups in the low six bits of bytes
/// 0..4 and 4..8, the last four in the nibbles of bytes 8..12 with their top bits in the high bits of the others.
pub fn scale_min(packed: &[u8], g: usize) -> (u8, u8) {
    match g {
        0..4 => (packed[g] & 63, packed[g + 4] & 63),
        _ => ((packed[g + 4] & 15) | (packed[g - 4] >> 6 << 4), (packed[g + 4] >> 4) | (packed[g] >> 6 << 4)),
    }
}
