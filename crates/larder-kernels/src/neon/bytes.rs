//! The primitives of NEON on bytes.
#![allow(unsafe_code)]

use std::arch::aarch64::*;

use super::dots::Dot;
use super::primitives::Neon;
use crate::simd::byte_lanes::ByteLanes;

impl<D: Dot> Neon<D> {
    /// Byte `k` of every lane, in each of its bytes.
    #[inline(always)]
    fn four_times(self, bytes: uint8x16_t, k: usize) -> uint8x16_t {
        // SAFETY: see `Neon`.
        unsafe {
            let lane = vreinterpretq_u8_u32(vld1q_u32([0, 0x0404_0404, 0x0808_0808, 0x0c0c_0c0c].as_ptr()));
            vqtbl1q_u8(bytes, vaddq_u8(lane, vdupq_n_u8(k as u8)))
        }
    }

    /// Bits `4 · k` to `4 · k + 3` of every lane: all bits of a byte are set if its bit is.
    #[inline(always)]
    fn spread(self, bits: uint8x16_t, k: usize) -> uint8x16_t {
        // SAFETY: see `Neon`. The byte with the four bits, four times in every lane; of each copy one bit is tested.
        unsafe {
            let each = vdupq_n_u32(if k.is_multiple_of(2) { 0x0804_0201 } else { 0x8040_2010 });
            vtstq_u8(self.four_times(bits, k / 2), vreinterpretq_u8_u32(each))
        }
    }
}

impl<D: Dot> ByteLanes for Neon<D> {
    type Bytes = uint8x16_t;
    type Signed = uint8x16_t;

    #[inline(always)]
    fn bits(self, bytes: uint8x16_t, left: i32, mask: u32) -> uint8x16_t {
        // SAFETY: see `Neon`.
        unsafe {
            if left == -4 && mask == 0x0f0f_0f0f {
                return vshrq_n_u8::<4>(bytes);
            }
            let shifted = match left {
                0 => bytes,
                _ => vreinterpretq_u8_u32(vshlq_u32(vreinterpretq_u32_u8(bytes), vdupq_n_s32(left))),
            };
            vandq_u8(shifted, vreinterpretq_u8_u32(vdupq_n_u32(mask)))
        }
    }

    #[inline(always)]
    fn or(self, a: uint8x16_t, b: uint8x16_t) -> uint8x16_t {
        // SAFETY: see `Neon`.
        unsafe { vorrq_u8(a, b) }
    }

    #[inline(always)]
    fn minus(self, bytes: uint8x16_t, offset: u8) -> uint8x16_t {
        // SAFETY: see `Neon`.
        unsafe { vsubq_u8(bytes, vdupq_n_u8(offset)) }
    }

    #[inline(always)]
    fn sixteens(self, bits: uint8x16_t, k: usize) -> uint8x16_t {
        // SAFETY: see `Neon`.
        unsafe { vandq_u8(self.spread(bits, k), vdupq_n_u8(16)) }
    }

    #[inline(always)]
    fn look_up(self, table: &[u8; 16], indices: uint8x16_t) -> uint8x16_t {
        // SAFETY: see `Neon`; the table has 16 bytes.
        unsafe { vqtbl1q_u8(vld1q_u8(table.as_ptr()), indices) }
    }

    #[inline(always)]
    fn look_up_signed(self, table: &[i8; 16], indices: uint8x16_t) -> uint8x16_t {
        // SAFETY: as above.
        unsafe { vqtbl1q_u8(vld1q_u8(table.as_ptr().cast()), indices) }
    }

    #[inline(always)]
    fn signed(self, bytes: uint8x16_t) -> uint8x16_t {
        bytes
    }

    #[inline(always)]
    fn xor(self, a: uint8x16_t, b: uint8x16_t) -> uint8x16_t {
        // SAFETY: see `Neon`.
        unsafe { veorq_u8(a, b) }
    }

    #[inline(always)]
    fn pairs(self, bytes: uint8x16_t, k: usize) -> uint8x16_t {
        // SAFETY: see `Neon`. Of four copies of a byte, each is shifted right by another number of bits.
        unsafe {
            let left = vreinterpretq_s8_u32(vdupq_n_u32(0xfafc_fe00));
            vandq_u8(vshlq_u8(self.four_times(bytes, k), left), vdupq_n_u8(3))
        }
    }

    #[inline(always)]
    fn tripled(self, bytes: uint8x16_t) -> uint8x16_t {
        // SAFETY: see `Neon`.
        unsafe { vmulq_u8(bytes, vdupq_n_u8(3)) }
    }

    #[inline(always)]
    fn digits(self, bytes: uint8x16_t) -> uint8x16_t {
        // SAFETY: see `Neon`. Three times a byte is 256 or more from 86 on, and 512 or more from 171 on.
        unsafe {
            let (one, two) = (vcgeq_u8(bytes, vdupq_n_u8(86)), vcgeq_u8(bytes, vdupq_n_u8(171)));
            vsubq_u8(vdupq_n_u8(0), vaddq_u8(one, two))
        }
    }

    #[inline(always)]
    fn entries<const LEN: usize>(self, table: &[u32; LEN], indices: uint8x16_t) -> uint8x16_t {
        const { assert!(LEN.is_power_of_two(), "indices are masked") };
        // SAFETY: see `Neon`; masked indices are inside the table.
        unsafe {
            let mut lanes = [0; 4];
            vst1q_u32(lanes.as_mut_ptr(), vreinterpretq_u32_u8(indices));
            for lane in &mut lanes {
                *lane = *table.get_unchecked(*lane as usize & (LEN - 1));
            }
            vreinterpretq_u8_u32(vld1q_u32(lanes.as_ptr()))
        }
    }

    #[inline(always)]
    fn negated(self, bytes: uint8x16_t, signs: uint8x16_t, k: usize) -> uint8x16_t {
        // SAFETY: see `Neon`. All bits flipped, and one added, is minus the byte.
        unsafe {
            let flipped = self.spread(signs, k);
            vsubq_u8(veorq_u8(bytes, flipped), flipped)
        }
    }
}
