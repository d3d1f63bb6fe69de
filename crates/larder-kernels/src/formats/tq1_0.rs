//! `tq1_0`: 256 values, −1, 0 or 1, times an f16 scale, which is last. 48 bytes have five values each, and four bytes
//! have four: the digits, to the base of 3, of a fraction of 256.

use larder_core::NumberFormat;

use super::{BlockFormat, WeightGroup, half};
use crate::simd::Simd;
use crate::simd::blocks::Blocks;
use crate::simd::groups::{Groups, Unsigned};

pub struct Tq1_0;

impl BlockFormat for Tq1_0 {
    const KIND: NumberFormat = NumberFormat::Tq1_0;

    fn group(block: &[u8], g: usize) -> WeightGroup {
        let q = std::array::from_fn(|i| {
            let (byte, n) = place(g, i / 4);
            digit(block[byte + i % 4], n)
        });
        WeightGroup::of(q, half(block, 52))
    }

    #[inline(always)]
    fn rows<S: Simd, const INTERLEAVED: bool>(block: Blocks<S, INTERLEAVED>, to: &mut impl Groups<S>) {
        let d = block.half(0);
        add_each_group!(add_group(block, &d, to));
    }
}

/// Digit `n` of a byte, minus 1.
fn digit(byte: u8, n: usize) -> i8 {
    let rest = byte.wrapping_mul([1, 3, 9, 27, 81][n]);
    ((u16::from(rest) * 3) >> 8) as i8 - 1
}

/// The first byte and the digit of run `k` of group `g`: a digit of each of 32 bytes, five times, of each of 16 bytes,
/// five times, and of each of four bytes, four times.
const fn place(g: usize, k: usize) -> (usize, usize) {
    match 32 * g + 4 * k {
        i @ 0..160 => (i % 32, i / 32),
        i @ 160..240 => (32 + i % 16, (i - 160) / 16),
        i => (48, (i - 240) / 4),
    }
}

#[inline(always)]
fn add_group<S: Simd, const INTERLEAVED: bool>(
    block: Blocks<S, INTERLEAVED>,
    d: &S::Floats,
    g: usize,
    to: &mut impl Groups<S>,
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
    to.add(g, &Unsigned::<S, 2, 1>(w), [*d], []);
}
