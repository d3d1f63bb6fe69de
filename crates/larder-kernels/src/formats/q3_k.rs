//! `q3_k`: 256 values in groups of sixteen; 32 bytes with the third bits, 64 with the other two, sixteen 6-bit scales in twelve
//! bytes, and the f16 scale of the scales. The offset of the values is 4, that of the scales 32.

use larder_core::NumberFormat;

use super::q6_k::{add_sixteens, widen_sixteens};
use super::{BlockFormat, bit_pairs, half, sized};
use crate::block::Block;

pub struct Q3K;

impl BlockFormat for Q3K {
    const KIND: NumberFormat = NumberFormat::Q3K;

    fn widen(block: &[u8], out: &mut [f32]) {
        let block: &[u8; 110] = sized(block);
        widen_sixteens(half(block, 108), &scales(&block[96..108]), &quants(block), out);
    }

    fn add(block: &[u8], x: &[Block], sum: f32) -> f32 {
        let block: &[u8; 110] = sized(block);
        add_sixteens(half(block, 108), &scales(&block[96..108]), &quants(block), x, sum)
    }
}

/// The integers of a block, −4 to 3: bit `g` of the first 32 bytes is the third bit of group `g` of 32 values.
fn quants(block: &[u8; 110]) -> [i8; 256] {
    let mut quants = bit_pairs(&block[32..96]);
    for (g, quants) in quants.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        for (q, third) in quants.iter_mut().zip(&block[..32]) {
            *q += (third >> g & 1) as i8 * 4 - 4;
        }
    }
    quants
}

/// The scales of the sixteen groups, −32 to 31. The low nibbles of eight bytes are the low bits of the first eight scales, the
/// high nibbles those of the last eight; four more bytes hold the high bits, of scale `g` from bit `2 · (g / 4)` of byte `g % 4`.
fn scales(packed: &[u8]) -> [i8; 16] {
    std::array::from_fn(|g| {
        let (low, high) = (packed[g % 8] >> (4 * (g / 8)) & 15, packed[8 + g % 4] >> (2 * (g / 4)) & 3);
        (low | high << 4) as i8 - 32
    })
}
