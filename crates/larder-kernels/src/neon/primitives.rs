//! The primitives of NEON: four rows in the lanes of a register.
//!
//! Bytes are multiplied as signed ones, so signed weights need nothing, and unsigned ones stay below 128. An offset of
//! the weights is subtracted by way of the sums of the activations.
#![allow(unsafe_code)]
// The number of a token, a row or a run is the index of several arrays.
#![allow(clippy::needless_range_loop)]

use std::arch::aarch64::*;
use std::arch::asm;

use super::dots::Dot;
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
    /// The dot products of `len` runs from number `first` on, whose magnitudes are at most `max`, added to `start`.
    #[inline(always)]
    fn add_dots<const N: usize>(
        self,
        start: [int32x4_t; N],
        w: &[uint8x16_t; 8],
        (first, len): (usize, usize),
        max: u8,
        x: TokenBlocks<N>,
    ) -> [int32x4_t; N] {
        let fit = i16::MAX as usize / (127 * max as usize);
        self.0.add(start, w, first, len, fit, x)
    }

    /// What the dot products with both halves begin with if the weights are `offset` too large.
    #[inline(always)]
    fn start<const N: usize>(self, offset: i16, x: TokenBlocks<N>) -> [int32x4_t; N] {
        // SAFETY: see `Neon`.
        unsafe {
            let mut start = [vdupq_n_s32(0); N];
            for t in 0..N {
                start[t] = vdupq_n_s32(-(i32::from(offset) * (x.0[t].sum8 >> 3)));
            }
            start
        }
    }

    /// The dot products with one half of a block, if the weights are `OFFSET` too large.
    #[inline(always)]
    fn dots_of_half<const MAX: u8, const OFFSET: i16, const N: usize>(
        self,
        half: usize,
        w: &[uint8x16_t; 8],
        x: TokenBlocks<N>,
    ) -> [int32x4_t; N] {
        // SAFETY: see `Neon`.
        unsafe {
            let mut start = [vdupq_n_s32(0); N];
            for t in 0..N {
                start[t] = vdupq_n_s32(-(i32::from(OFFSET) * i32::from(x.0[t].halves[half])));
            }
            self.add_dots(start, w, (4 * half, 4), MAX, x)
        }
    }

    #[inline(always)]
    fn floats<const N: usize>(self, integers: [int32x4_t; N]) -> [float32x4_t; N] {
        // SAFETY: see `Neon`.
        unsafe {
            let mut floats = [vdupq_n_f32(0.0); N];
            for t in 0..N {
                floats[t] = vcvtq_f32_s32(integers[t]);
            }
            floats
        }
    }

    #[inline(always)]
    fn times<const N: usize>(self, mut integers: [int32x4_t; N], scale: int32x4_t) -> [int32x4_t; N] {
        for integers in &mut integers {
            // SAFETY: see `Neon`.
            *integers = unsafe { vmulq_s32(*integers, scale) };
        }
        integers
    }
}

impl<D: Dot> Simd for Neon<D> {
    const LANES: usize = LANES;
    const TOKENS: usize = 4;
    type Floats = float32x4_t;
    type Scale = int32x4_t;
    type HalfScales = [int32x4_t; 2];

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
    fn scale(self, bytes: uint8x16_t, at: usize) -> int32x4_t {
        // SAFETY: see `Neon`.
        unsafe {
            let top = vshlq_s32(vreinterpretq_s32_u8(bytes), vdupq_n_s32(24 - 8 * at as i32));
            vshrq_n_s32::<24>(top)
        }
    }

    #[inline(always)]
    fn half_scales(self, bytes: uint8x16_t, at: usize) -> [int32x4_t; 2] {
        [self.scale(bytes, at), self.scale(bytes, at + 1)]
    }

    #[inline(always)]
    fn byte(self, bytes: uint8x16_t, at: usize) -> float32x4_t {
        // SAFETY: see `Neon`.
        unsafe { vcvtq_f32_u32(vreinterpretq_u32_u8(self.bits(bytes, -8 * at as i32, 0xff))) }
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
    fn dots<const MAX: u8, const OFFSET: i16, const N: usize>(
        self,
        w: &[uint8x16_t; 8],
        x: TokenBlocks<N>,
    ) -> [float32x4_t; N] {
        self.floats(self.add_dots(self.start(OFFSET, x), w, (0, 8), MAX, x))
    }

    #[inline(always)]
    fn signed_dots<const N: usize>(self, w: &[uint8x16_t; 8], x: TokenBlocks<N>) -> [float32x4_t; N] {
        self.dots::<128, 0, N>(w, x)
    }

    #[inline(always)]
    fn scaled_dots<const MAX: u8, const N: usize>(
        self,
        w: &[uint8x16_t; 8],
        scale: int32x4_t,
        x: TokenBlocks<N>,
    ) -> [float32x4_t; N] {
        let dots = self.add_dots(self.start(0, x), w, (0, 8), MAX, x);
        self.floats(self.times(dots, scale))
    }

    #[inline(always)]
    fn signed_scaled_dots<const N: usize>(
        self,
        w: &[uint8x16_t; 8],
        scale: int32x4_t,
        x: TokenBlocks<N>,
    ) -> [float32x4_t; N] {
        self.scaled_dots::<128, N>(w, scale, x)
    }

    #[inline(always)]
    fn half_scaled_dots<const MAX: u8, const OFFSET: i16, const N: usize>(
        self,
        w: &[uint8x16_t; 8],
        scales: [int32x4_t; 2],
        x: TokenBlocks<N>,
    ) -> [float32x4_t; N] {
        // SAFETY: see `Neon`.
        unsafe {
            let mut sums = [vdupq_n_s32(0); N];
            for half in 0..2 {
                let dots = self.dots_of_half::<MAX, OFFSET, N>(half, w, x);
                for t in 0..N {
                    sums[t] = vmlaq_s32(sums[t], dots[t], scales[half]);
                }
            }
            self.floats(sums)
        }
    }

    #[inline(always)]
    fn signed_half_scaled_dots<const N: usize>(
        self,
        w: &[uint8x16_t; 8],
        scales: [int32x4_t; 2],
        x: TokenBlocks<N>,
    ) -> [float32x4_t; N] {
        self.half_scaled_dots::<128, 0, N>(w, scales, x)
    }

    #[inline(always)]
    fn half_dots<const MAX: u8, const OFFSET: i16, const N: usize>(
        self,
        w: &[uint8x16_t; 8],
        x: TokenBlocks<N>,
    ) -> [[float32x4_t; N]; 2] {
        let first = self.dots_of_half::<MAX, OFFSET, N>(0, w, x);
        let second = self.dots_of_half::<MAX, OFFSET, N>(1, w, x);
        [self.floats(first), self.floats(second)]
    }

    #[inline(always)]
    fn scaled_halves<const N: usize>(self, scales: [int32x4_t; 2], x: TokenBlocks<N>) -> [float32x4_t; N] {
        // SAFETY: see `Neon`.
        unsafe {
            let mut sums = [vdupq_n_s32(0); N];
            for t in 0..N {
                let [first, second] = x.0[t].halves;
                sums[t] = vmlaq_n_s32(vmulq_n_s32(scales[0], first.into()), scales[1], second.into());
            }
            self.floats(sums)
        }
    }

    #[inline(always)]
    fn splat(self, value: f32) -> float32x4_t {
        // SAFETY: see `Neon`.
        unsafe { vdupq_n_f32(value) }
    }

    #[inline(always)]
    fn add(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: see `Neon`.
        unsafe { vaddq_f32(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: see `Neon`.
        unsafe { vsubq_f32(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: see `Neon`.
        unsafe { vmulq_f32(a, b) }
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
