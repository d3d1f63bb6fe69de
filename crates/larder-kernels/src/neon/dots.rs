//! Sums of products of bytes, with the instructions in which processors differ.
#![allow(unsafe_code)]
// The number of a token, a row or a run is the index of several arrays.
#![allow(clippy::needless_range_loop)]

use std::arch::aarch64::*;
use std::arch::{asm, is_aarch64_feature_detected};

use crate::simd::token_blocks::TokenBlocks;

/// A way to sum products of bytes. A value of the type shows that this processor has the instructions.
pub trait Dot: Copy {
    /// Tokens that an instruction multiplies with the bytes of a strip.
    const STRIP_STEP: usize = 1;

    /// If the processor has the instructions.
    fn detect() -> Option<Self>;

    /// Adds to the sums of each token the products of `len` (4 or 8) runs of weights from number `first` on with the
    /// activations that belong to them. Sums of `fit` products of a weight and an activation fit 16 bits.
    fn add<const N: usize>(
        self,
        sums: [int32x4_t; N],
        w: &[uint8x16_t; 8],
        first: usize,
        len: usize,
        fit: usize,
        x: TokenBlocks<N>,
    ) -> [int32x4_t; N];

    /// Eight runs of four rows in the order in which [`strip_sums`](Dot::strip_sums) takes their bytes.
    #[inline(always)]
    fn in_strip(self, w: &[uint8x16_t; 8]) -> [uint8x16_t; 8] {
        *w
    }

    /// The sums of the products of part `part` of `PARTS` of a block of eight rows, whose bytes in that order are at
    /// `bytes`, with a block of each token.
    ///
    /// # Safety
    /// They are there.
    #[inline(always)]
    unsafe fn strip_sums<const PARTS: usize, const N: usize>(
        self,
        bytes: *const u8,
        part: usize,
        x: TokenBlocks<N>,
    ) -> [[int32x4_t; N]; 2] {
        let (first, len) = (8 / PARTS * part, 8 / PARTS);
        // SAFETY: every processor has NEON; the bytes are there, as the caller guarantees.
        unsafe {
            let mut sums = [[vdupq_n_s32(0); N]; 2];
            for v in 0..2 {
                let mut w = [vdupq_n_u8(0); 8];
                for k in first..first + len {
                    w[k] = vld1q_u8(bytes.add(16 * (8 * v + k)));
                }
                sums[v] = self.add(sums[v], &w, first, len, fitting(128), x);
            }
            sums
        }
    }
}

/// How many products of an activation and a weight of at most this magnitude have a sum that fits 16 bits.
pub const fn fitting(max: u8) -> usize {
    i16::MAX as usize / (127 * max as usize)
}

/// With dot products of four bytes: optional in ARMv8.2, always present from ARMv8.4 on.
#[derive(Clone, Copy)]
pub struct Sdot(());

impl Dot for Sdot {
    fn detect() -> Option<Self> {
        is_aarch64_feature_detected!("dotprod").then_some(Sdot(()))
    }

    #[inline(always)]
    fn add<const N: usize>(
        self,
        mut sums: [int32x4_t; N],
        w: &[uint8x16_t; 8],
        first: usize,
        len: usize,
        _: usize,
        x: TokenBlocks<N>,
    ) -> [int32x4_t; N] {
        // SAFETY: every processor has NEON, and this one has the instruction, as `self` shows. Sixteen activations are
        // read.
        unsafe {
            for k in (first..first + len).step_by(4) {
                let mut q = [vdupq_n_s8(0); N];
                for t in 0..N {
                    q[t] = vld1q_s8(x.0[t].q[4 * k..][..16].as_ptr());
                }
                for t in 0..N {
                    sums[t] = sdot::<0>(sums[t], w[k], q[t]);
                }
                for t in 0..N {
                    sums[t] = sdot::<1>(sums[t], w[k + 1], q[t]);
                }
                for t in 0..N {
                    sums[t] = sdot::<2>(sums[t], w[k + 2], q[t]);
                }
                for t in 0..N {
                    sums[t] = sdot::<3>(sums[t], w[k + 3], q[t]);
                }
            }
            sums
        }
    }
}

/// Adds the products of four bytes of each row with the activations `4 · I` to `4 · I + 3`.
///
/// # Safety
/// The processor has the instruction.
#[inline(always)]
unsafe fn sdot<const I: usize>(mut sum: int32x4_t, w: uint8x16_t, x: int8x16_t) -> int32x4_t {
    // SAFETY: as the caller guarantees.
    unsafe {
        asm!(
            ".arch_extension dotprod",
            "sdot {sum:v}.4s, {w:v}.16b, {x:v}.4b[{i}]",
            sum = inout(vreg) sum, w = in(vreg) w, x = in(vreg) x, i = const I,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

/// With widening multiplications to 16 bits, which every processor has.
#[derive(Clone, Copy)]
pub struct Smull;

impl Dot for Smull {
    fn detect() -> Option<Self> {
        Some(Smull)
    }

    #[inline(always)]
    fn add<const N: usize>(
        self,
        mut sums: [int32x4_t; N],
        w: &[uint8x16_t; 8],
        first: usize,
        len: usize,
        fit: usize,
        x: TokenBlocks<N>,
    ) -> [int32x4_t; N] {
        // SAFETY: every processor has NEON.
        unsafe {
            for t in 0..N {
                let mut pairs = [vdupq_n_s32(0); 2];
                for k in (first..first + len).step_by(fit) {
                    let mut products = [vdupq_n_s16(0); 2];
                    for run in k..(k + fit).min(first + len) {
                        let x = vreinterpretq_s8_s32(vdupq_n_s32(x.four(t, run)));
                        let w = vreinterpretq_s8_u8(w[run]);
                        products[0] = vmlal_s8(products[0], vget_low_s8(w), vget_low_s8(x));
                        products[1] = vmlal_high_s8(products[1], w, x);
                    }
                    pairs[0] = vpadalq_s16(pairs[0], products[0]);
                    pairs[1] = vpadalq_s16(pairs[1], products[1]);
                }
                sums[t] = vaddq_s32(sums[t], vpaddq_s32(pairs[0], pairs[1]));
            }
            sums
        }
    }
}
