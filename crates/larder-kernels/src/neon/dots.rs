//! Sums of products of bytes, with the instructions in which processors differ.
#![allow(unsafe_code)]

use std::arch::aarch64::*;
use std::arch::asm;

use super::load::Runs;
use super::tile::TokenBlocks;

/// A way to sum products of bytes.
pub trait Dot {
    /// For each token the sums of four rows: `start` plus the products of the weights with the activations from number
    /// `16 · first` on. The sum of `FIT` products of a weight and an activation fits 16 bits.
    ///
    /// # Safety
    /// The processor has the instructions.
    unsafe fn dot<const FIT: usize, const S: usize, const N: usize>(
        w: [Runs; S],
        x: TokenBlocks<N>,
        first: usize,
        start: [i32; N],
    ) -> [int32x4_t; N];
}

/// With dot products of four bytes: optional in ARMv8.2, always present from ARMv8.4 on.
pub struct Sdot;

impl Dot for Sdot {
    #[target_feature(enable = "neon")]
    #[inline]
    unsafe fn dot<const FIT: usize, const S: usize, const N: usize>(
        w: [Runs; S],
        x: TokenBlocks<N>,
        first: usize,
        start: [i32; N],
    ) -> [int32x4_t; N] {
        let mut sums = start.map(|start| vdupq_n_s32(start));
        for (s, [a, b, c, d]) in (first..).zip(w) {
            let x = x.sixteen(s);
            // SAFETY: the processor has the instruction, as the caller guarantees.
            unsafe {
                sdot::<0, N>(&mut sums, a, x);
                sdot::<1, N>(&mut sums, b, x);
                sdot::<2, N>(&mut sums, c, x);
                sdot::<3, N>(&mut sums, d, x);
            }
        }
        sums
    }
}

/// Adds the products of four bytes of each row with the activations `4 · I` to `4 · I + 3`.
///
/// # Safety
/// The processor has the instruction.
#[target_feature(enable = "neon")]
#[inline]
unsafe fn sdot<const I: usize, const N: usize>(sums: &mut [int32x4_t; N], w: uint8x16_t, x: [int8x16_t; N]) {
    for (sum, x) in sums.iter_mut().zip(x) {
        // SAFETY: as the caller guarantees.
        unsafe {
            asm!(
                ".arch_extension dotprod",
                "sdot {sum:v}.4s, {w:v}.16b, {x:v}.4b[{i}]",
                sum = inout(vreg) *sum, w = in(vreg) w, x = in(vreg) x, i = const I,
                options(pure, nomem, nostack, preserves_flags),
            );
        }
    }
}

/// With widening multiplications to 16 bits, which every processor has.
pub struct Smull;

impl Dot for Smull {
    // A call would pass the weights through memory.
    #[inline(always)]
    unsafe fn dot<const FIT: usize, const S: usize, const N: usize>(
        w: [Runs; S],
        x: TokenBlocks<N>,
        first: usize,
        start: [i32; N],
    ) -> [int32x4_t; N] {
        // SAFETY: every processor has NEON.
        unsafe {
            let mut sums = [[vdupq_n_s32(0); 2]; N];
            for (k, w) in (4 * first..).step_by(FIT).zip(w.as_flattened().chunks_exact(FIT)) {
                for (t, [low, high]) in sums.iter_mut().enumerate() {
                    let mut products = [vdupq_n_s16(0); 2];
                    for (k, w) in (k..).zip(w) {
                        let (w, x) = (vreinterpretq_s8_u8(*w), x.four(t, k));
                        products[0] = vmlal_s8(products[0], vget_low_s8(w), vget_low_s8(x));
                        products[1] = vmlal_high_s8(products[1], w, x);
                    }
                    *low = vpadalq_s16(*low, products[0]);
                    *high = vpadalq_s16(*high, products[1]);
                }
            }
            let mut out = start.map(|start| vdupq_n_s32(start));
            for (out, [low, high]) in out.iter_mut().zip(sums) {
                *out = vaddq_s32(*out, vpaddq_s32(low, high));
            }
            out
        }
    }
}
