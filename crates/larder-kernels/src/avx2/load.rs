//! Loading the same part of the blocks of eight rows, in either row order: one row per lane.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use larder_core::ROW_GROUP;

use crate::eight_rows::EightBlocks;

impl<const INTERLEAVED: bool> EightBlocks<'_, INTERLEAVED> {
    /// The f16 number `i` of every block, as f32.
    ///
    /// # Safety
    /// The blocks have that number.
    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    pub unsafe fn half(self, i: usize) -> __m256 {
        // SAFETY: inside the blocks, as the caller guarantees.
        let bits = unsafe {
            if INTERLEAVED {
                _mm_loadu_si128(self.scale_at(i, 0).cast())
            } else {
                let one = |r: usize| self.scale_at(i, r).cast::<i16>().read_unaligned();
                _mm_setr_epi16(one(0), one(1), one(2), one(3), one(4), one(5), one(6), one(7))
            }
        };
        _mm256_cvtph_ps(bits)
    }

    /// Four runs of four bytes, from number `first` on.
    ///
    /// # Safety
    /// The blocks have these runs.
    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    pub unsafe fn fours(self, first: usize) -> [__m256i; 4] {
        // SAFETY: inside the blocks, as the caller guarantees.
        unsafe {
            match INTERLEAVED {
                true => together(self.four_at(first, 0)),
                false => apart(std::array::from_fn(|r| self.four_at(first, r))),
            }
        }
    }

    /// Eight runs of four bytes, as [`fours`](EightBlocks::fours).
    ///
    /// # Safety
    /// The blocks have these runs.
    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    pub unsafe fn eights(self, first: usize) -> [__m256i; 8] {
        // SAFETY: as the caller guarantees.
        let ([a, b, c, d], [e, f, g, h]) = unsafe { (self.fours(first), self.fours(first + 4)) };
        [a, b, c, d, e, f, g, h]
    }
}

#[target_feature(enable = "avx2")]
#[inline]
unsafe fn together(at: *const u8) -> [__m256i; 4] {
    // SAFETY: 128 bytes are there, as the caller guarantees.
    let four = |i: usize| unsafe { _mm256_loadu_si256(at.add(4 * ROW_GROUP * i).cast()) };
    [four(0), four(1), four(2), four(3)]
}

#[target_feature(enable = "avx2")]
#[inline]
unsafe fn apart(rows: [*const u8; ROW_GROUP]) -> [__m256i; 4] {
    // SAFETY: every row has sixteen bytes there, as the caller guarantees.
    let row = |r: usize| unsafe { _mm_loadu_si128(rows[r].cast()) };
    let (a, b) = (_mm256_set_m128i(row(4), row(0)), _mm256_set_m128i(row(5), row(1)));
    let (c, d) = (_mm256_set_m128i(row(6), row(2)), _mm256_set_m128i(row(7), row(3)));
    let (ab, cd) = (_mm256_unpacklo_epi32(a, b), _mm256_unpacklo_epi32(c, d));
    let (ab_high, cd_high) = (_mm256_unpackhi_epi32(a, b), _mm256_unpackhi_epi32(c, d));
    [
        _mm256_unpacklo_epi64(ab, cd),
        _mm256_unpackhi_epi64(ab, cd),
        _mm256_unpacklo_epi64(ab_high, cd_high),
        _mm256_unpackhi_epi64(ab_high, cd_high),
    ]
}

/// Prefetches bytes into the cache; the hardware prefetcher does not cross the end of a row or a page.
#[inline]
pub fn prefetch(bytes: *const u8, len: usize) {
    for line in (0..len).step_by(64) {
        // SAFETY: a prefetch reads nothing, so any address will do.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(bytes.wrapping_add(line).cast()) };
    }
}
