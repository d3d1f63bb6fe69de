//! Blocks of `q8_0`, widened to f32.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

/// The values of a block: the scale times each integer.
#[target_feature(enable = "avx2,f16c")]
#[inline]
pub fn q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let half = u16::from_le_bytes([block[0], block[1]]);
    let scale = _mm256_set1_ps(_mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half.into()))));
    for (quants, out) in block[2..].as_chunks::<8>().0.iter().zip(out.as_chunks_mut::<8>().0) {
        // SAFETY: eight bytes are read, and eight floats written.
        unsafe {
            let quants = _mm256_cvtepi8_epi32(_mm_loadl_epi64(quants.as_ptr().cast()));
            _mm256_storeu_ps(out.as_mut_ptr(), _mm256_mul_ps(scale, _mm256_cvtepi32_ps(quants)));
        }
    }
}
