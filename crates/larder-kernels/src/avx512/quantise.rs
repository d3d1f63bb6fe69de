//! Quantisation of activations.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use crate::block::{BLOCK, Block};

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub fn block(x: &[f32; BLOCK]) -> Block {
    // SAFETY: sixteen values from the first or the seventeenth.
    let x = unsafe { [_mm512_loadu_ps(x.as_ptr()), _mm512_loadu_ps(x.as_ptr().add(16))] };
    let (d, inverse) = Block::factors(largest(x));
    if inverse == 0.0 {
        return Block::new([0; BLOCK], d);
    }
    let inverse = _mm512_set1_ps(inverse);
    // Rounds to nearest, ties to even: the processor's default mode.
    let [first, second] = x.map(|x| _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(x, inverse))));
    let mut block = Block::with_sums([0; BLOCK], d, [half_sum(first), half_sum(second)]);
    // SAFETY: 32 bytes.
    unsafe { _mm256_storeu_si256(block.q.as_mut_ptr().cast(), _mm256_set_m128i(second, first)) };
    block
}

/// The bits of the largest magnitude. The bits of non-negative floats are in the order of their values, with NaN above
/// all.
#[target_feature(enable = "avx512f")]
#[inline]
fn largest(x: [__m512; 2]) -> u32 {
    let [a, b] = x.map(|x| _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(i32::MAX)));
    _mm512_reduce_max_epi32(_mm512_max_epi32(a, b)).cast_unsigned()
}

/// The sum of sixteen signed bytes.
#[target_feature(enable = "avx512f,avx512vl,avx512vnni")]
#[inline]
fn half_sum(q: __m128i) -> i32 {
    let sums = _mm_dpbusd_epi32(_mm_setzero_si128(), _mm_set1_epi8(1), q);
    let sums = _mm_add_epi32(sums, _mm_shuffle_epi32::<0b01_00_11_10>(sums));
    _mm_cvtsi128_si32(_mm_add_epi32(sums, _mm_shuffle_epi32::<0b10_11_00_01>(sums)))
}
