//! The primitives of NEON: four rows in the lanes of a register.
//!
//! Bytes are multiplied as signed ones, so signed weights need nothing, and unsigned ones stay below 128. An offset of
//! the weights is subtracted by way of the sums of the activations.
#![allow(unsafe_code)]
// The number of a token, a row or a run is the index of several arrays.
#![allow(clippy::needless_range_loop)]

use std::arch::aarch64::*;
use std::arch::asm;

use super::dots::{Dot, fitting};
use super::floats;
use crate::simd::blocks::Blocks;
use crate::simd::byte_lanes::ByteLanes;
use crate::simd::token_blocks::TokenBlocks;
use crate::simd::{Simd, Task};

/// Every processor of this architecture has NEON, which is why every block of `unsafe` here is sound that has no other
/// reason. It also has the instructions of `D`.
#[derive(Clone, Copy)]
pub struct Neon<D>(pub D);

/// Rows in a register.
const LANES: usize = 4;

impl<D: Dot> Neon<D> {
    /// If the processor has the instructions.
    pub fn detect() -> Option<Self> {
        D::detect().map(Neon)
    }
}

impl<D: Dot> Simd for Neon<D> {
    const LANES: usize = LANES;
    const REGISTERS: usize = 32;
    const STRIP_TOKENS: usize = 4;
    const STRIP_TOKENS_IN_HALVES: usize = 4;
    const STRIP_STEP: usize = D::STRIP_STEP;
    type Floats = float32x4_t;

    fn run<T: Task<Self>>(self, task: T) {
        task.run(self);
    }

    #[inline(always)]
    fn half<const INTERLEAVED: bool>(self, blocks: Blocks<Self, INTERLEAVED>, i: usize) -> float32x4_t {
        // SAFETY: the blocks have the scale, of two bytes, as `Blocks::half` checks.
        unsafe {
            if INTERLEAVED {
                return widen(blocks.scale_at(i, 0).cast::<uint16x4_t>().read_unaligned());
            }
            let mut bits = [0u16; LANES];
            for r in 0..LANES {
                bits[r] = blocks.scale_at(i, r).cast::<u16>().read_unaligned();
            }
            widen(vld1_u16(bits.as_ptr()))
        }
    }

    #[inline(always)]
    fn raw_scale<const INTERLEAVED: bool>(self, blocks: Blocks<Self, INTERLEAVED>, i: usize) -> uint8x16_t {
        // SAFETY: the blocks have the scale, as `Blocks::raw_scale` checks.
        unsafe {
            let mut wide = [0u32; LANES];
            for r in 0..LANES {
                let at = blocks.scale_at(i, r);
                wide[r] = match blocks.scale_bytes() {
                    1 => u32::from(at.read()),
                    _ => u32::from(at.cast::<u16>().read_unaligned()),
                };
            }
            vreinterpretq_u8_u32(vld1q_u32(wide.as_ptr()))
        }
    }

    #[inline(always)]
    fn run_of_four<const INTERLEAVED: bool>(self, blocks: Blocks<Self, INTERLEAVED>, i: usize) -> uint8x16_t {
        // SAFETY: the blocks have the run, as `Blocks::run` checks.
        unsafe {
            if INTERLEAVED {
                return vld1q_u8(blocks.run_at(i, 0));
            }
            let mut rows = [0u32; LANES];
            for r in 0..LANES {
                rows[r] = blocks.run_at(i, r).cast::<u32>().read_unaligned();
            }
            vreinterpretq_u8_u32(vld1q_u32(rows.as_ptr()))
        }
    }

    #[inline(always)]
    fn four_runs<const INTERLEAVED: bool>(self, blocks: Blocks<Self, INTERLEAVED>, first: usize) -> [uint8x16_t; 4] {
        // SAFETY: the blocks have four runs there, as `Blocks::runs` checks.
        unsafe {
            let mut runs = [vdupq_n_u8(0); 4];
            for i in 0..4 {
                runs[i] =
                    if INTERLEAVED { vld1q_u8(blocks.run_at(first + i, 0)) } else { vld1q_u8(blocks.run_at(first, i)) };
            }
            if INTERLEAVED {
                return runs;
            }
            // From four runs of one row in each to one run of four rows in each.
            let [a, b, c, d] = runs;
            let (a, b) = (vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b));
            let (c, d) = (vreinterpretq_u32_u8(c), vreinterpretq_u32_u8(d));
            let (ac, bd) = (vzip1q_u32(a, c), vzip1q_u32(b, d));
            let (ac_high, bd_high) = (vzip2q_u32(a, c), vzip2q_u32(b, d));
            [
                vreinterpretq_u8_u32(vzip1q_u32(ac, bd)),
                vreinterpretq_u8_u32(vzip2q_u32(ac, bd)),
                vreinterpretq_u8_u32(vzip1q_u32(ac_high, bd_high)),
                vreinterpretq_u8_u32(vzip2q_u32(ac_high, bd_high)),
            ]
        }
    }

    #[inline(always)]
    fn byte(self, bytes: uint8x16_t, at: usize) -> float32x4_t {
        // SAFETY: see `Neon`.
        unsafe { vcvtq_f32_u32(vreinterpretq_u32_u8(self.bits(bytes, -8 * at as i32, 0xff))) }
    }

    #[inline(always)]
    fn signed_byte(self, bytes: uint8x16_t, at: usize) -> float32x4_t {
        // SAFETY: see `Neon`.
        unsafe {
            let top = vshlq_s32(vreinterpretq_s32_u8(bytes), vdupq_n_s32(24 - 8 * at as i32));
            vcvtq_f32_s32(vshrq_n_s32::<24>(top))
        }
    }

    #[inline(always)]
    fn half_of_lanes(self, bytes: uint8x16_t) -> float32x4_t {
        // SAFETY: see `Neon`.
        unsafe { widen(vmovn_u32(vreinterpretq_u32_u8(bytes))) }
    }

    #[inline(always)]
    fn powers(self, exponents: uint8x16_t) -> float32x4_t {
        // SAFETY: see `Neon`.
        unsafe {
            let exponents = vreinterpretq_u32_u8(exponents);
            let normal = vshlq_n_u32::<23>(vsubq_u32(exponents, vdupq_n_u32(1)));
            let subnormal = vshlq_u32(vdupq_n_u32(0x0020_0000), vreinterpretq_s32_u32(exponents));
            let is_normal = vcgtq_u32(exponents, vdupq_n_u32(1));
            vreinterpretq_f32_u32(vbslq_u32(is_normal, normal, subnormal))
        }
    }

    #[inline(always)]
    fn dots<const MAX: u8, const OFFSET: i16, const PARTS: usize, const N: usize>(
        self,
        w: &[uint8x16_t; 8],
        x: TokenBlocks<N>,
    ) -> [[float32x4_t; N]; PARTS] {
        // SAFETY: see `Neon`.
        unsafe {
            let mut dots = [[vdupq_n_f32(0.0); N]; PARTS];
            for part in 0..PARTS {
                let mut sums = [vdupq_n_s32(0); N];
                if OFFSET != 0 {
                    for t in 0..N {
                        sums[t] = vdupq_n_s32(x.begin::<OFFSET, PARTS>(t, part));
                    }
                }
                let sums = self.0.add(sums, w, 8 / PARTS * part, 8 / PARTS, fitting(MAX), x);
                for t in 0..N {
                    dots[part][t] = vcvtq_f32_s32(sums[t]);
                }
            }
            dots
        }
    }

    #[inline(always)]
    fn signed_dots<const PARTS: usize, const N: usize>(
        self,
        w: &[uint8x16_t; 8],
        x: TokenBlocks<N>,
    ) -> [[float32x4_t; N]; PARTS] {
        self.dots::<128, 0, PARTS, N>(w, x)
    }

    #[inline(always)]
    fn store_unsigned<const MAX: u8, const OFFSET: i16>(self, w: &[uint8x16_t; 8], to: &mut [u8]) -> (usize, i32) {
        let mut signed = *w;
        for w in &mut signed {
            *w = self.minus(*w, OFFSET.to_le_bytes()[0]);
        }
        self.store_signed(&signed, to)
    }

    #[inline(always)]
    fn store_signed(self, w: &[uint8x16_t; 8], to: &mut [u8]) -> (usize, i32) {
        for (w, to) in self.0.in_strip(w).iter().zip(to.as_chunks_mut::<16>().0) {
            // SAFETY: see `Neon`; sixteen bytes.
            unsafe { vst1q_u8(to.as_mut_ptr(), *w) };
        }
        (0, 0)
    }

    #[inline(always)]
    unsafe fn strip_dots<const FIT: usize, const PARTS: usize, const N: usize>(
        self,
        bytes: *const u8,
        part: usize,
        _: i32,
        x: TokenBlocks<N>,
    ) -> [[float32x4_t; N]; 2] {
        // SAFETY: see `Neon`; the bytes are there, as the caller guarantees.
        unsafe {
            let sums = self.0.strip_sums::<PARTS, N>(bytes, part, x);
            let mut dots = [[vdupq_n_f32(0.0); N]; 2];
            for v in 0..2 {
                for t in 0..N {
                    dots[v][t] = vcvtq_f32_s32(sums[v][t]);
                }
            }
            dots
        }
    }

    #[inline(always)]
    fn splat(self, value: f32) -> float32x4_t {
        // SAFETY: see `Neon`.
        unsafe { vdupq_n_f32(value) }
    }

    #[inline(always)]
    fn mul(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: see `Neon`.
        unsafe { vmulq_f32(a, b) }
    }

    #[inline(always)]
    fn mul_add(self, a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        // SAFETY: see `Neon`.
        unsafe { vfmaq_f32(c, a, b) }
    }

    #[inline(always)]
    fn mul_sub(self, a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        // SAFETY: see `Neon`.
        unsafe { vfmsq_f32(c, a, b) }
    }

    #[inline(always)]
    unsafe fn floats_at<const KIND: u8>(self, at: *const u8) -> float32x4_t {
        // SAFETY: as the caller guarantees.
        unsafe { floats::four::<KIND>(at, 0) }
    }

    #[inline(always)]
    fn store(self, floats: float32x4_t, out: &mut [f32]) {
        let out = &mut out[..LANES];
        // SAFETY: see `Neon`; four values.
        unsafe { vst1q_f32(out.as_mut_ptr(), floats) };
    }

    #[inline(always)]
    fn prefetch(self, bytes: *const u8, len: usize) {
        for line in (0..len).step_by(64) {
            let at = bytes.wrapping_add(line);
            // SAFETY: a prefetch reads nothing, so any address will do.
            unsafe { asm!("prfm pldl1keep, [{}]", in(reg) at, options(readonly, nostack, preserves_flags)) };
        }
    }
}

/// Stored f16 as f32.
///
/// Every processor has the instruction, but the intrinsic for it requires f16 arithmetic, which not all have.
#[inline(always)]
pub fn widen(bits: uint16x4_t) -> float32x4_t {
    let wide;
    // SAFETY: from register to register.
    unsafe { asm!("fcvtl {0:v}.4s, {1:v}.4h", out(vreg) wide, in(vreg) bits, options(pure, nomem, nostack)) };
    wide
}
