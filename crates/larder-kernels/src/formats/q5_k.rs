//! `q5_k`: 256 values in groups of 32; scales and minima as in `q4_k`, 32 bytes with the fifth bits, and nibbles.

use larder_core::NumberFormat;

use super::q4_k::{add_with_minima, grouped_nibbles, widen_with_minima};
use super::{BlockFormat, sized};
use crate::block::Block;

pub struct Q5K;

impl BlockFormat for Q5K {
    const KIND: NumberFormat = NumberFormat::Q5K;

    fn widen(block: &[u8], out: &mut [f32]) {
        widen_with_minima(block, &quants(sized(block)), out);
    }

    fn add(block: &[u8], x: &[Block], sum: f32) -> f32 {
        add_with_minima(block, &quants(sized(block)), x, sum)
    }
}

/// The integers of a block, 0 to 31: bit `g` of 32 bytes is the fifth bit of group `g`.
fn quants(block: &[u8; 176]) -> [i8; 256] {
    let mut quants = grouped_nibbles(&block[48..]);
    for (g, quants) in quants.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        for (q, fifth) in quants.iter_mut().zip(&block[16..48]) {
            *q |= ((fifth >> g & 1) << 4) as i8;
        }
    }
    quants
}
