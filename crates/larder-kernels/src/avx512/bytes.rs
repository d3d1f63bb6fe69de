//! The primitives of AVX-512 on bytes.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::primitives::Avx512;
use crate::simd::byte_lanes::ByteLanes;

impl Avx512 {
    /// The bits `4 · k` to `4 · k + 3` of every lane, one for each of its bytes.
    #[inline(always)]
    fn spread(self, bits: __m512i, k: usize) -> __mmask64 {
        // SAFETY: see `Avx512`.
        unsafe {
            // The byte with the four bits, four times in every lane; of each copy one bit is tested.
            let each = _mm512_set1_epi32(if k.is_multiple_of(2) { 0x0804_0201 } else { 0x8040_2010_u32.cast_signed() });
            _mm512_test_epi8_mask(self.four_times(bits, k / 2), each)
        }
    }

    /// Byte `k` of every lane, in each of its bytes.
    #[inline(always)]
    fn four_times(self, bytes: __m512i, k: usize) -> __m512i {
        // SAFETY: see `Avx512`.
        unsafe {
            let lane = _mm512_set4_epi32(0x0c0c_0c0c, 0x0808_0808, 0x0404_0404, 0);
            _mm512_shuffle_epi8(bytes, _mm512_add_epi8(lane, _mm512_set1_epi8(k as i8)))
        }
    }

    /// A table in each quarter of a register.
    #[inline(always)]
    fn table(self, table: *const u8) -> __m512i {
        // SAFETY: see `Avx512`; the table has 16 bytes.
        unsafe { _mm512_broadcast_i32x4(_mm_loadu_si128(table.cast())) }
    }
}

impl ByteLanes for Avx512 {
    type Bytes = __m512i;
    /// Raised by 128.
    type Signed = __m512i;

    #[inline(always)]
    fn bits(self, bytes: __m512i, left: i32, mask: u32) -> __m512i {
        // SAFETY: see `Avx512`.
        unsafe {
            let shifted = match left {
                0 => bytes,
                1.. => _mm512_sllv_epi32(bytes, _mm512_set1_epi32(left)),
                _ => _mm512_srlv_epi32(bytes, _mm512_set1_epi32(-left)),
            };
            _mm512_and_si512(shifted, _mm512_set1_epi32(mask.cast_signed()))
        }
    }

    #[inline(always)]
    fn or(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: see `Avx512`.
        unsafe { _mm512_or_si512(a, b) }
    }

    #[inline(always)]
    fn minus(self, bytes: __m512i, offset: u8) -> __m512i {
        // SAFETY: see `Avx512`.
        unsafe { _mm512_sub_epi8(bytes, _mm512_set1_epi8(offset.cast_signed())) }
    }

    #[inline(always)]
    fn sixteens(self, bits: __m512i, k: usize) -> __m512i {
        // SAFETY: see `Avx512`.
        unsafe { _mm512_maskz_mov_epi8(self.spread(bits, k), _mm512_set1_epi8(16)) }
    }

    #[inline(always)]
    fn look_up(self, table: &[u8; 16], indices: __m512i) -> __m512i {
        // SAFETY: see `Avx512`.
        unsafe { _mm512_shuffle_epi8(self.table(table.as_ptr()), indices) }
    }

    #[inline(always)]
    fn look_up_signed(self, table: &[i8; 16], indices: __m512i) -> __m512i {
        // SAFETY: see `Avx512`. The table is raised, which is done once, and not its entries.
        unsafe { _mm512_shuffle_epi8(self.signed(self.table(table.as_ptr().cast())), indices) }
    }

    #[inline(always)]
    fn signed(self, bytes: __m512i) -> __m512i {
        // SAFETY: see `Avx512`.
        unsafe { _mm512_xor_si512(bytes, _mm512_set1_epi8(i8::MIN)) }
    }

    #[inline(always)]
    fn xor(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: see `Avx512`.
        unsafe { _mm512_xor_si512(a, b) }
    }

    #[inline(always)]
    fn pairs(self, bytes: __m512i, k: usize) -> __m512i {
        // SAFETY: see `Avx512`. Of four copies of a byte, the upper byte of each 16-bit half of a lane keeps four bits,
        // the low ones in the lower half. A product moves two bits to each byte, and what remains is masked.
        unsafe {
            let four = _mm512_and_si512(self.four_times(bytes, k), _mm512_set1_epi32(0xf000_0f00_u32.cast_signed()));
            let moved = _mm512_mulhi_epu16(four, _mm512_set1_epi32((1024 + 16) << 16 | (16384 + 256)));
            _mm512_and_si512(moved, _mm512_set1_epi8(3))
        }
    }

    #[inline(always)]
    fn tripled(self, bytes: __m512i) -> __m512i {
        // SAFETY: see `Avx512`.
        unsafe { _mm512_add_epi8(_mm512_add_epi8(bytes, bytes), bytes) }
    }

    #[inline(always)]
    fn digits(self, bytes: __m512i) -> __m512i {
        // SAFETY: see `Avx512`. Three times a byte is 256 or more from 86 on, and 512 or more from 171 on.
        unsafe {
            let one = _mm512_cmpge_epu8_mask(bytes, _mm512_set1_epi8(86));
            let two = _mm512_cmpge_epu8_mask(bytes, _mm512_set1_epi8(171_u8.cast_signed()));
            _mm512_mask_mov_epi8(_mm512_maskz_mov_epi8(one, _mm512_set1_epi8(1)), two, _mm512_set1_epi8(2))
        }
    }

    #[inline(always)]
    fn entries<const LEN: usize>(self, table: &[u32; LEN], indices: __m512i) -> __m512i {
        const { assert!(LEN.is_power_of_two(), "indices are masked") };
        // SAFETY: see `Avx512`; masked indices are inside the table.
        unsafe { _mm512_i32gather_epi32::<4>(self.bits(indices, 0, LEN as u32 - 1), table.as_ptr().cast()) }
    }

    #[inline(always)]
    fn negated(self, bytes: __m512i, signs: __m512i, k: usize) -> __m512i {
        // SAFETY: see `Avx512`. Modulo 256, minus a byte that is raised by 128 is minus the byte, raised by 128.
        unsafe { _mm512_mask_sub_epi8(bytes, self.spread(signs, k), _mm512_setzero_si512(), bytes) }
    }
}
