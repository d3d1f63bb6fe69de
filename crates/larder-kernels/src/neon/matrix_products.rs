//! Sums of products of bytes with matrix products (i8mm), which take two rows and two tokens at a time.
#![allow(unsafe_code)]
// The number of a token or a vector is the index of several arrays.
#![allow(clippy::needless_range_loop)]

use std::arch::aarch64::*;
use std::arch::{asm, is_aarch64_feature_detected};

use super::dots::{Dot, Sdot};
use crate::simd::token_blocks::TokenBlocks;

/// With products of eight bytes of two rows and of two tokens, and with dot products: both are always present from
/// ARMv8.6 on.
///
/// Of a strip, a register has two runs of a row and then the same two of the next one, and the sums of two tokens are
/// tiles of two rows. For a block of eight rows and four tokens there are 32 products, 8 instructions that bring eight
/// activations of two tokens side by side, and 8, or 16 with two scales, that make rows of tiles: 48, or 56, in the
/// place of 64 dot products. Compiled, the loop over blocks has 109 instructions in the place of 125, and with two
/// scales 142 in the place of 151, and all its values stay in registers.
///
/// The last of an odd number of tokens is multiplied as a pair of itself, alone with 48 instructions in the place of
/// 39. So tokens are divided at even numbers, and decoding has dot products.
#[derive(Clone, Copy)]
pub struct Smmla(Sdot);

impl Dot for Smmla {
    const STRIP_STEP: usize = 2;

    fn detect() -> Option<Self> {
        is_aarch64_feature_detected!("i8mm").then_some(Smmla(Sdot::detect()?))
    }

    #[inline(always)]
    fn add<const N: usize>(
        self,
        sums: [int32x4_t; N],
        w: &[uint8x16_t; 8],
        first: usize,
        len: usize,
        fit: usize,
        x: TokenBlocks<N>,
    ) -> [int32x4_t; N] {
        self.0.add(sums, w, first, len, fit, x)
    }

    /// Of two runs, those of rows 0 and 1, and then those of rows 2 and 3.
    #[inline(always)]
    fn in_strip(self, w: &[uint8x16_t; 8]) -> [uint8x16_t; 8] {
        let mut pairs = *w;
        for k in (0..8).step_by(2) {
            // SAFETY: every processor has NEON.
            unsafe {
                let (a, b) = (vreinterpretq_u32_u8(w[k]), vreinterpretq_u32_u8(w[k + 1]));
                pairs[k] = vreinterpretq_u8_u32(vzip1q_u32(a, b));
                pairs[k + 1] = vreinterpretq_u8_u32(vzip2q_u32(a, b));
            }
        }
        pairs
    }

    #[inline(always)]
    unsafe fn strip_sums<const PARTS: usize, const N: usize>(
        self,
        bytes: *const u8,
        part: usize,
        x: TokenBlocks<N>,
    ) -> [[int32x4_t; N]; 2] {
        // SAFETY: this processor has the instruction, as `self` shows; the bytes are there, as the caller guarantees.
        unsafe {
            // Of each vector, and of each even token and the next one: the sums of rows 0 and 1, and of rows 2 and 3.
            let mut tiles = [[[vdupq_n_s32(0); 2]; N]; 2];
            for k in (8 / PARTS * part..8 / PARTS * (part + 1)).step_by(4) {
                let pairs = pairs(x, k);
                for half in 0..2 {
                    for v in 0..2 {
                        for rows in 0..2 {
                            let w = vld1q_u8(bytes.add(16 * (8 * v + k + 2 * half + rows)));
                            for t in (0..N).step_by(2) {
                                tiles[v][t][rows] = smmla(tiles[v][t][rows], w, pairs[t][half]);
                            }
                        }
                    }
                }
            }
            let mut sums = [[vdupq_n_s32(0); N]; 2];
            for v in 0..2 {
                for t in 0..N {
                    let [first, last] = tiles[v][t & !1];
                    sums[v][t] = if t % 2 == 0 { vuzp1q_s32(first, last) } else { vuzp2q_s32(first, last) };
                }
            }
            sums
        }
    }
}

/// Of each even token and the next one: their activations from number `4 · k` on, eight of each, and the eight after
/// those. A last token without another is its own.
#[inline(always)]
fn pairs<const N: usize>(x: TokenBlocks<N>, k: usize) -> [[int8x16_t; 2]; N] {
    // SAFETY: every processor has NEON. Sixteen activations are read.
    unsafe {
        let mut pairs = [[vdupq_n_s8(0); 2]; N];
        for t in (0..N).step_by(2) {
            let own = vreinterpretq_s64_s8(vld1q_s8(x.0[t].q[4 * k..][..16].as_ptr()));
            let next = vreinterpretq_s64_s8(vld1q_s8(x.0[(t + 1).min(N - 1)].q[4 * k..][..16].as_ptr()));
            pairs[t] = [vreinterpretq_s8_s64(vzip1q_s64(own, next)), vreinterpretq_s8_s64(vzip2q_s64(own, next))];
        }
        pairs
    }
}

/// Adds the products of eight bytes of two rows with eight activations of two tokens: to the sums of the first row with
/// both tokens, and then to those of the second one.
///
/// # Safety
/// The processor has the instruction.
#[inline(always)]
unsafe fn smmla(mut sums: int32x4_t, w: uint8x16_t, x: int8x16_t) -> int32x4_t {
    // SAFETY: as the caller guarantees.
    unsafe {
        asm!(
            ".arch_extension i8mm",
            "smmla {sums:v}.4s, {w:v}.16b, {x:v}.16b",
            sums = inout(vreg) sums, w = in(vreg) w, x = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sums
}
