//! `tq1_0`: 256 values, −1, 0 or 1, times an f16 scale, which is last. 48 bytes have five values each, and four bytes
//! have four: the digits, to the base of 3, of a fraction of 256.

use larder_core::NumberFormat;

use super::tq2_0::add_equal;
use super::{BlockFormat, half, sized};
use crate::block::Block;
use crate::simd::Simd;
use crate::simd::blocks::Blocks;
use crate::simd::integers::Unsigned;
use crate::simd::tile::Tile;

pub struct Tq1_0;

impl BlockFormat for Tq1_0 {
    const KIND: NumberFormat = NumberFormat::Tq1_0;

    fn widen(block: &[u8], out: &mut [f32]) {
        let block: &[u8; 54] = sized(block);
        let d = half(block, 52);
        for (o, q) in out.iter_mut().zip(quants(block)) {
            *o = d * f32::from(q);
        }
    }

    fn add(block: &[u8], x: &[Block], sum: f32) -> f32 {
        let block: &[u8; 54] = sized(block);
        add_equal(half(block, 52), quants(block).as_chunks().0, x, sum)
    }

    #[inline(always)]
    fn add_rows<S: Simd, const INTERLEAVED: bool, const N: usize, const G: usize>(
        block: Blocks<S, INTERLEAVED>,
        tile: &mut Tile<S, N, G>,
    ) {
        let d = block.half(0);
        add_each_group!(add_group(block, &d, tile));
    }
}

/// The integers of a block, −1 to 1: a digit of each of 32 bytes, five times, of each of 16 bytes, five times, and of
/// each of four bytes, four times.
fn quants(block: &[u8; 54]) -> [i8; 256] {
    std::array::from_fn(|i| match i {
        0..160 => digit(block[i % 32], i / 32),
        160..240 => digit(block[32 + i % 16], (i - 160) / 16),
        _ => digit(block[48 + i % 4], (i - 240) / 4),
    })
}

/// Digit `n` of a byte, minus 1.
fn digit(byte: u8, n: usize) -> i8 {
    let rest = byte.wrapping_mul([1, 3, 9, 27, 81][n]);
    ((u16::from(rest) * 3) >> 8) as i8 - 1
}

/// The first byte and the digit of run `k` of group `g`.
const fn place(g: usize, k: usize) -> (usize, usize) {
    match 32 * g + 4 * k {
        i @ 0..160 => (i % 32, i / 32),
        i @ 160..240 => (32 + i % 16, (i - 160) / 16),
        i => (48, (i - 240) / 4),
    }
}

#[inline(always)]
fn add_group<S: Simd, const INTERLEAVED: bool, const N: usize, const G: usize>(
    block: Blocks<S, INTERLEAVED>,
    d: &S::Floats,
    g: usize,
    tile: &mut Tile<S, N, G>,
) {
    let simd = block.simd;
    let mut w = [block.run(0); 8];
    for (k, w) in w.iter_mut().enumerate() {
        let (byte, n) = place(g, k);
        *w = block.run(byte / 4);
        for _ in 0..n {
            *w = simd.tripled(*w);
        }
        *w = simd.digits(*w);
    }
    tile.add(g, &Unsigned::<S, 2, 1>(w), *d);
}
