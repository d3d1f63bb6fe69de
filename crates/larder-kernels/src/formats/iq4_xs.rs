//! `iq4_xs`: 256 values in groups of 32; the f16 scale of the scales, two bytes with the high two bits of the eight 6-bit scales,
//! four with their low four bits, and nibbles as in `iq4_nl`. The offset of the scales is 32.

use larder_core::{IQ4_NL_LEVELS, NumberFormat};

use super::{BlockFormat, half, integer_dot, nibbles, sized};
use crate::block::Block;

pub struct Iq4Xs;

impl BlockFormat for Iq4Xs {
    const KIND: NumberFormat = NumberFormat::Iq4Xs;

    fn widen(block: &[u8], out: &mut [f32]) {
        let block: &[u8; 136] = sized(block);
        let d = half(block, 0);
        for (g, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let d = d * scale(block, g) as f32;
            for (o, q) in out.iter_mut().zip(quants(block, g)) {
                *o = d * q as f32;
            }
        }
    }

    fn add(block: &[u8], x: &[Block], mut sum: f32) -> f32 {
        let block: &[u8; 136] = sized(block);
        let d = half(block, 0);
        for (g, x) in x.iter().enumerate() {
            // 32 · 32 · 127 · 127 is below 2^24.
            let dot = scale(block, g) * integer_dot(&quants(block, g), &x.q);
            sum += dot as f32 * (d * x.d);
        }
        sum
    }
}

/// The scale of group `g`, −32 to 31.
fn scale(block: &[u8; 136], g: usize) -> i32 {
    let high = u16::from_le_bytes(*sized(&block[2..4])) >> (2 * g) & 3;
    let low = block[4 + g / 2] >> (4 * (g % 2)) & 15;
    (low as i32 | (high as i32) << 4) - 32
}

/// The integers of group `g`, −127 to 113.
fn quants(block: &[u8; 136], g: usize) -> [i8; 32] {
    nibbles(&block[8 + 16 * g..][..16]).map(|q| IQ4_NL_LEVELS[q as usize])
}
