//! Loading the same part of the blocks of four rows, in either row order: one row per lane.
#![allow(unsafe_code)]

use std::arch::aarch64::*;
use std::arch::asm;

use crate::eight_rows::EightBlocks;

/// Four runs of four bytes: four consecutive ones of each of four rows.
pub type Runs = [uint8x16_t; 4];

/// One block of each of four rows, which are the lanes of what is loaded from it.
#[derive(Clone, Copy)]
pub struct FourBlocks<'a, const INTERLEAVED: bool> {
    /// Eight rows.
    pub rows: EightBlocks<'a, INTERLEAVED>,
    /// The first of the four.
    pub first: usize,
}

impl<const INTERLEAVED: bool> FourBlocks<'_, INTERLEAVED> {
    /// The f16 number `i` of every block, as f32.
    ///
    /// # Safety
    /// The blocks have that number.
    #[target_feature(enable = "neon")]
    #[inline]
    pub unsafe fn half(self, i: usize) -> float32x4_t {
        let at = |r: usize| self.rows.scale_at(i, self.first + r).cast::<u16>();
        // SAFETY: inside the blocks, as the caller guarantees.
        unsafe {
            if INTERLEAVED {
                return widen(at(0).cast::<uint16x4_t>().read_unaligned());
            }
            let bits: [u16; 4] = std::array::from_fn(|r| at(r).read_unaligned());
            widen(vld1_u16(bits.as_ptr()))
        }
    }

    /// Four runs of four bytes, from number `first` on.
    ///
    /// # Safety
    /// The blocks have these runs.
    #[target_feature(enable = "neon")]
    #[inline]
    pub unsafe fn runs(self, first: usize) -> Runs {
        // SAFETY: inside the blocks, as the caller guarantees.
        let sixteen = |i, r| unsafe { vld1q_u8(self.rows.four_at(first + i, self.first + r)) };
        match INTERLEAVED {
            true => [sixteen(0, 0), sixteen(1, 0), sixteen(2, 0), sixteen(3, 0)],
            false => transposed([sixteen(0, 0), sixteen(0, 1), sixteen(0, 2), sixteen(0, 3)]),
        }
    }
}

/// From four runs of one row in each to one run of four rows in each.
#[target_feature(enable = "neon")]
#[inline]
fn transposed(rows: [uint8x16_t; 4]) -> Runs {
    let [a, b, c, d] = rows.map(|row| vreinterpretq_u32_u8(row));
    let (ac, bd) = (vzip1q_u32(a, c), vzip1q_u32(b, d));
    let (ac_high, bd_high) = (vzip2q_u32(a, c), vzip2q_u32(b, d));
    [vzip1q_u32(ac, bd), vzip2q_u32(ac, bd), vzip1q_u32(ac_high, bd_high), vzip2q_u32(ac_high, bd_high)]
        .map(|run| vreinterpretq_u8_u32(run))
}

/// Stored f16 as f32.
///
/// Every processor has the instruction, but the intrinsic for it requires f16 arithmetic, which not all have.
#[target_feature(enable = "neon")]
#[inline]
pub fn widen(bits: uint16x4_t) -> float32x4_t {
    let wide;
    // SAFETY: from register to register.
    unsafe { asm!("fcvtl {0:v}.4s, {1:v}.4h", out(vreg) wide, in(vreg) bits, options(pure, nomem, nostack)) };
    wide
}

/// Prefetches bytes into the cache; the hardware prefetcher does not cross the end of a row or a page.
#[inline]
pub fn prefetch(bytes: *const u8, len: usize) {
    for line in (0..len).step_by(64) {
        let at = bytes.wrapping_add(line);
        // SAFETY: a prefetch reads nothing, so any address will do.
        unsafe { asm!("prfm pldl1keep, [{}]", in(reg) at, options(readonly, nostack, preserves_flags)) };
    }
}
