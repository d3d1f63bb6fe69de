//! Quantisation of activations.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use crate::block::{BLOCK, Block};

#[target_feature(enable = "avx2")]
pub fn block(x: &[f32; BLOCK]) -> Block {
    // SAFETY: eight values from one of the first 25.
    let eight = |i: usize| unsafe { _mm256_loadu_ps(x.as_ptr().add(i)) };
    let x = [eight(0), eight(8), eight(16), eight(24)];
    let (d, inverse) = Block::factors(largest(x));
    if inverse == 0.0 {
        return Block::new([0; BLOCK], d);
    }
    let inverse = _mm256_set1_ps(inverse);
    // Rounds to nearest, ties to even: the processor's default mode.
    let whole = |i: usize| _mm256_cvtps_epi32(_mm256_mul_ps(x[i], inverse));
    let (first, second) = (_mm256_packs_epi32(whole(0), whole(1)), _mm256_packs_epi32(whole(2), whole(3)));
    let packed = _mm256_packs_epi16(first, second);
    let q = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    let mut block = Block::with_sums([0; BLOCK], d, half_sums(q));
    // SAFETY: 32 bytes.
    unsafe { _mm256_storeu_si256(block.q.as_mut_ptr().cast(), q) };
    block
}

/// The bits of the largest magnitude. The bits of non-negative floats are in the order of their values, with NaN above
/// all.
#[target_feature(enable = "avx2")]
#[inline]
fn largest([a, b, c, d]: [__m256; 4]) -> u32 {
    let bits = |x| _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(i32::MAX));
    let max = _mm256_max_epi32(_mm256_max_epi32(bits(a), bits(b)), _mm256_max_epi32(bits(c), bits(d)));
    let max = _mm_max_epi32(_mm256_castsi256_si128(max), _mm256_extracti128_si256::<1>(max));
    let max = _mm_max_epi32(max, _mm_shuffle_epi32::<0b01_00_11_10>(max));
    _mm_cvtsi128_si32(_mm_max_epi32(max, _mm_shuffle_epi32::<0b10_11_00_01>(max))) as u32
}

#[target_feature(enable = "avx2")]
#[inline]
fn half_sums(q: __m256i) -> [i32; 2] {
    let pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), q);
    let fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    let sums = _mm256_hadd_epi32(fours, fours);
    let sums = _mm256_hadd_epi32(sums, sums);
    [_mm256_extract_epi32::<0>(sums), _mm256_extract_epi32::<4>(sums)]
}
