//! Entries of code books as bytes, signs, and odd scales, which the formats from `iq1_s` to `iq3_s` share.

use larder_core::IQ2_LEVELS;

use crate::simd::Simd;
use crate::simd::blocks::{high, low};

/// The levels of the values of `iq2_xxs`, `iq2_xs` and `iq2_s`, as a table for a look-up.
const IQ2_TABLE: [i8; 16] = {
    let [low, middle, high] = IQ2_LEVELS;
    [low, middle, high, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
};

/// A code book of four values for each entry: their levels, a byte each.
pub const fn quads<const N: usize>(packed: &[u16; N], levels: [i8; 8]) -> [u32; N] {
    let mut entries = [0; N];
    let mut i = 0;
    while i < N {
        let entry = packed[i] as usize;
        entries[i] = u32::from_le_bytes([
            levels[entry & 7] as u8,
            levels[entry >> 3 & 7] as u8,
            levels[entry >> 6 & 7] as u8,
            levels[entry >> 9 & 7] as u8,
        ]);
        i += 1;
    }
    entries
}

/// A code book of eight values for each entry: the numbers of their levels as nibbles, the first four values in the low
/// nibbles of four bytes, the last four in the high ones.
pub const fn octets<const N: usize>(packed: &[u16; N]) -> [u32; N] {
    let mut entries = [0; N];
    let mut i = 0;
    while i < N {
        let mut at = 0;
        while at < 8 {
            let number = packed[i] as u32 >> (2 * at) & 3;
            entries[i] |= number << (8 * (at % 4) + 4 * (at / 4));
            at += 1;
        }
        i += 1;
    }
    entries
}

/// The numbers of the levels of an entry of [`octets`].
pub fn numbers(entry: u32) -> [u8; 8] {
    std::array::from_fn(|i| (entry >> (8 * (i % 4) + 4 * (i / 4)) & 15) as u8)
}

/// The values of four entries of [`octets`] with the levels of `iq2_xxs`.
pub fn iq2_levels(entries: [u32; 4]) -> [i8; 32] {
    std::array::from_fn(|i| IQ2_LEVELS[numbers(entries[i / 8])[i % 8] as usize])
}

/// Values, of which those are negated whose bit is set.
pub fn with_signs(values: [i8; 32], signs: u32) -> [i8; 32] {
    std::array::from_fn(|i| if signs >> i & 1 == 1 { -values[i] } else { values[i] })
}

/// The signs of 32 values: 7 bits for each 8 values, whose number of minus signs is even.
pub fn even_signs(sevens: [u32; 4]) -> u32 {
    let byte = |bits: u32| (bits & 127) as u8 | (((bits & 127).count_ones() & 1) as u8) << 7;
    u32::from_le_bytes(sevens.map(byte))
}

/// As [`even_signs`], of the low seven bits of every byte; the eighth is zero.
#[inline(always)]
pub fn even_signs_of<S: Simd>(simd: S, sevens: S::Bytes) -> S::Bytes {
    // The top bit that four bits have if the number of ones is odd.
    const ODD: [u8; 16] = [0, 128, 128, 0, 128, 0, 0, 128, 128, 0, 0, 128, 0, 128, 128, 0];
    let folded = simd.xor(sevens, simd.bits(sevens, -4, 0x0707_0707));
    simd.or(sevens, simd.look_up(&ODD, simd.bits(folded, 0, 0x0f0f_0f0f)))
}

/// The four fields of seven bits from the lowest bit of every lane, one in each byte.
#[inline(always)]
pub fn sevens<S: Simd>(simd: S, lanes: S::Bytes) -> S::Bytes {
    let first = simd.or(simd.bits(lanes, 0, 0x7f), simd.bits(lanes, 1, 0x7f00));
    let last = simd.or(simd.bits(lanes, 2, 0x007f_0000), simd.bits(lanes, 3, 0x7f00_0000));
    simd.or(first, last)
}

/// Scales `2 · s + 1` of bytes that are `2 · s`.
#[inline(always)]
pub fn odd<S: Simd>(simd: S, doubled: S::Bytes) -> S::Bytes {
    // One more is 255 less, modulo 256.
    simd.minus(doubled, 255)
}

/// Signed bytes of which those are negated whose bit of `signs` is set.
#[inline(always)]
pub fn negated_runs<S: Simd>(simd: S, runs: [S::Signed; 8], signs: S::Bytes) -> [S::Signed; 8] {
    let [a, b, c, d, e, f, g, h] = runs;
    [
        simd.negated(a, signs, 0),
        simd.negated(b, signs, 1),
        simd.negated(c, signs, 2),
        simd.negated(d, signs, 3),
        simd.negated(e, signs, 4),
        simd.negated(f, signs, 5),
        simd.negated(g, signs, 6),
        simd.negated(h, signs, 7),
    ]
}

/// The values of an entry of [`octets`] with the levels of `iq2_xxs`, four in each run.
#[inline(always)]
pub fn iq2_values<S: Simd>(simd: S, entry: S::Bytes) -> [S::Signed; 2] {
    [simd.look_up_signed(&IQ2_TABLE, low(simd, entry)), simd.look_up_signed(&IQ2_TABLE, high(simd, entry))]
}
