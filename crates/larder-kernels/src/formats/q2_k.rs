//! `q2_k`: 256 values in groups of sixteen; for each group a byte with a 4-bit scale and, above it, a 4-bit minimum; 64 bytes
//! of values; the f16 scale of the scales and that of the minima.

use larder_core::NumberFormat;

use super::{BlockFormat, bit_pairs, half, half_dots, sized};
use crate::block::Block;

pub struct Q2K;

impl BlockFormat for Q2K {
    const KIND: NumberFormat = NumberFormat::Q2K;

    fn widen(block: &[u8], out: &mut [f32]) {
        let block: &[u8; 84] = sized(block);
        let (d, dmin) = (half(block, 80), half(block, 82));
        let quants = quants(block);
        let groups = out.as_chunks_mut::<16>().0.iter_mut().zip(quants.as_chunks::<16>().0);
        for ((out, quants), packed) in groups.zip(&block[..16]) {
            let (d, min) = (d * (packed & 15) as f32, dmin * (packed >> 4) as f32);
            for (o, q) in out.iter_mut().zip(quants) {
                *o = d * *q as f32 - min;
            }
        }
    }

    fn add(block: &[u8], x: &[Block], mut sum: f32) -> f32 {
        let block: &[u8; 84] = sized(block);
        let (d, dmin) = (half(block, 80), half(block, 82));
        let packed = block[..16].as_chunks::<2>().0;
        for ((q, packed), x) in quants(block).as_chunks::<32>().0.iter().zip(packed).zip(x) {
            let dot = half_dots(q, &x.q, packed.map(|p| (p & 15) as i32));
            let [first, second] = packed.map(|p| (p >> 4) as i32);
            let below = first * x.halves[0] as i32 + second * x.halves[1] as i32;
            sum += dot as f32 * (d * x.d) - below as f32 * (dmin * x.d);
        }
        sum
    }
}

/// The integers of a block, 0 to 3.
fn quants(block: &[u8; 84]) -> [i8; 256] {
    bit_pairs(&block[16..80])
}
