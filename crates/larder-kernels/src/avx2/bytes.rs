//! The primitives of AVX2 on bytes.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::primitives::{Avx2, NONE};
use crate::simd::byte_lanes::ByteLanes;

impl<const VNNI: bool> Avx2<VNNI> {
    /// Bits `4 · k` to `4 · k + 3` of every lane: all bits of a byte are set if its bit is.
    #[inline(always)]
    fn spread(self, bits: __m256i, k: usize) -> __m256i {
        // SAFETY: see `Avx2`.
        unsafe {
            let byte = (k / 2) as i32;
            let four = self.arrange(bits, [byte; 4]);
            // Each byte keeps one of the four bits.
            let each = _mm256_set1_epi32(if k.is_multiple_of(2) { 0x0804_0201 } else { 0x8040_2010_u32.cast_signed() });
            _mm256_cmpeq_epi8(_mm256_and_si256(four, each), each)
        }
    }
}

impl<const VNNI: bool> ByteLanes for Avx2<VNNI> {
    type Bytes = __m256i;
    type Signed = __m256i;

    #[inline(always)]
    fn bits(self, bytes: __m256i, left: i32, mask: u32) -> __m256i {
        // SAFETY: see `Avx2`.
        unsafe {
            let shifted = match left {
                0 => bytes,
                1.. => _mm256_sllv_epi32(bytes, _mm256_set1_epi32(left)),
                _ => _mm256_srlv_epi32(bytes, _mm256_set1_epi32(-left)),
            };
            _mm256_and_si256(shifted, _mm256_set1_epi32(mask.cast_signed()))
        }
    }

    #[inline(always)]
    fn or(self, a: __m256i, b: __m256i) -> __m256i {
        // SAFETY: see `Avx2`.
        unsafe { _mm256_or_si256(a, b) }
    }

    #[inline(always)]
    fn minus(self, bytes: __m256i, offset: u8) -> __m256i {
        // SAFETY: see `Avx2`.
        unsafe { _mm256_sub_epi8(bytes, _mm256_set1_epi8(offset.cast_signed())) }
    }

    #[inline(always)]
    fn sixteens(self, bits: __m256i, k: usize) -> __m256i {
        // SAFETY: see `Avx2`.
        unsafe { _mm256_and_si256(self.spread(bits, k), _mm256_set1_epi8(16)) }
    }

    #[inline(always)]
    fn look_up(self, table: &[u8; 16], indices: __m256i) -> __m256i {
        // SAFETY: see `Avx2`; the table has 16 bytes.
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            _mm256_shuffle_epi8(table, indices)
        }
    }

    #[inline(always)]
    fn look_up_signed(self, table: &[i8; 16], indices: __m256i) -> __m256i {
        // SAFETY: see `Avx2`; the table has 16 bytes.
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            _mm256_shuffle_epi8(table, indices)
        }
    }

    #[inline(always)]
    fn signed(self, bytes: __m256i) -> __m256i {
        bytes
    }

    #[inline(always)]
    fn xor(self, a: __m256i, b: __m256i) -> __m256i {
        // SAFETY: see `Avx2`.
        unsafe { _mm256_xor_si256(a, b) }
    }

    #[inline(always)]
    fn pairs(self, bytes: __m256i, k: usize) -> __m256i {
        // SAFETY: see `Avx2`. The byte is the upper one of both 16-bit halves of a lane, of which the lower keeps the
        // four low bits and the upper the four high ones. A product moves two bits to each byte, and what remains is
        // masked.
        unsafe {
            let twice = self.arrange(bytes, [NONE, k as i32, NONE, k as i32]);
            let four = _mm256_and_si256(twice, _mm256_set1_epi32(0xf000_0f00_u32.cast_signed()));
            let moved = _mm256_mulhi_epu16(four, _mm256_set1_epi32((1024 + 16) << 16 | (16384 + 256)));
            _mm256_and_si256(moved, _mm256_set1_epi8(3))
        }
    }

    #[inline(always)]
    fn tripled(self, bytes: __m256i) -> __m256i {
        // SAFETY: see `Avx2`.
        unsafe { _mm256_add_epi8(_mm256_add_epi8(bytes, bytes), bytes) }
    }

    #[inline(always)]
    fn digits(self, bytes: __m256i) -> __m256i {
        // SAFETY: see `Avx2`. Three times a byte is 256 or more from 86 on, and 512 or more from 171 on.
        unsafe {
            let one = _mm256_cmpeq_epi8(_mm256_max_epu8(bytes, _mm256_set1_epi8(86)), bytes);
            let two = _mm256_cmpeq_epi8(_mm256_max_epu8(bytes, _mm256_set1_epi8(171_u8.cast_signed())), bytes);
            _mm256_abs_epi8(_mm256_add_epi8(one, two))
        }
    }

    #[inline(always)]
    fn entries<const LEN: usize>(self, table: &[u32; LEN], indices: __m256i) -> __m256i {
        const { assert!(LEN.is_power_of_two(), "indices are masked") };
        // SAFETY: see `Avx2`; masked indices are inside the table.
        unsafe { _mm256_i32gather_epi32::<4>(table.as_ptr().cast(), self.bits(indices, 0, LEN as u32 - 1)) }
    }

    #[inline(always)]
    fn negated(self, bytes: __m256i, signs: __m256i, k: usize) -> __m256i {
        // SAFETY: see `Avx2`. All bits set is −1, and negates.
        unsafe { _mm256_sign_epi8(bytes, _mm256_or_si256(self.spread(signs, k), _mm256_set1_epi8(1))) }
    }
}
