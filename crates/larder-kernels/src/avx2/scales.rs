//! Scales and minima that are stored as integers.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use crate::eight_rows::EightBlocks;

/// The scales and minima of `q4_k` and `q5_k`.
pub struct Minima {
    /// The scale of the scales.
    pub d: __m256,
    dmin: __m256,
    /// A byte for each of the first and the last four groups.
    scales: [__m256i; 2],
    minima: [__m256i; 2],
}

impl Minima {
    /// Unpacks the scales and minima of a block; see [`scale_min`](crate::formats::q4_k::scale_min) for the packing.
    ///
    /// # Safety
    /// The block is `q4_k` or `q5_k`.
    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    pub unsafe fn of<const INTERLEAVED: bool>(block: EightBlocks<INTERLEAVED>) -> Self {
        // SAFETY: blocks of these formats begin with two f16 and twelve bytes of scales.
        let ([a, b, c, _], d, dmin) = unsafe { (block.fours(0), block.half(0), block.half(1)) };
        let six = |v| _mm256_and_si256(v, _mm256_set1_epi8(63));
        let four = |v| _mm256_and_si256(v, _mm256_set1_epi8(15));
        let top = |v| _mm256_and_si256(_mm256_srli_epi16::<2>(v), _mm256_set1_epi8(48));
        let scales = [six(a), _mm256_or_si256(four(c), top(a))];
        let minima = [six(b), _mm256_or_si256(four(_mm256_srli_epi16::<4>(c)), top(b))];
        Minima { d, dmin, scales, minima }
    }

    /// A group's scale, in both 16-bit halves of each lane, and its minimum.
    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    pub fn group(&self, g: usize) -> (__m256i, __m256) {
        let at = (g % 4) as i32;
        let scale = arrange(self.scales[g / 4], [at, NONE, at, NONE]);
        let min = arrange(self.minima[g / 4], [at, NONE, NONE, NONE]);
        (scale, _mm256_mul_ps(self.dmin, _mm256_cvtepi32_ps(min)))
    }
}

/// The scales of the two halves of a group of `q6_k`.
#[derive(Clone, Copy)]
pub struct HalfScales {
    /// The first, in both 16-bit halves of each lane.
    pub first: __m256i,
    /// The second, in both.
    pub second: __m256i,
    /// The first and the second.
    pub both: __m256i,
}

impl HalfScales {
    /// From the first or the second two bytes of each lane.
    #[target_feature(enable = "avx2")]
    #[inline]
    pub fn of(scales: __m256i, two: usize) -> Self {
        let at = 2 * two as i32;
        // A byte goes to the upper half of 16 bits; the shift right extends its sign.
        let wide = |a, b| _mm256_srai_epi16::<8>(arrange(scales, [NONE, a, NONE, b]));
        HalfScales { first: wide(at, at), second: wide(at + 1, at + 1), both: wide(at, at + 1) }
    }
}

/// The index that yields a zero byte.
const NONE: i32 = 0x80;

/// The bytes at these indices of every lane.
#[target_feature(enable = "avx2")]
#[inline]
fn arrange(bytes: __m256i, [a, b, c, d]: [i32; 4]) -> __m256i {
    let lane = _mm256_setr_epi32(0, 0x0404_0404, 0x0808_0808, 0x0c0c_0c0c, 0, 0x0404_0404, 0x0808_0808, 0x0c0c_0c0c);
    let places = _mm256_set1_epi32(a | b << 8 | c << 16 | d << 24);
    _mm256_shuffle_epi8(bytes, _mm256_add_epi8(places, lane))
}
