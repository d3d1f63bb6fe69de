//! Up to four tokens times four rows.
#![allow(unsafe_code)]

use std::arch::aarch64::*;

use crate::block::Block;

/// `N` tokens, and for each the running sums of four rows.
#[derive(Clone, Copy)]
pub struct Tile<'a, const N: usize> {
    x: [&'a [Block]; N],
    pub sums: [float32x4_t; N],
}

impl<'a, const N: usize> Tile<'a, N> {
    #[target_feature(enable = "neon")]
    #[inline]
    pub fn new(x: [&'a [Block]; N]) -> Self {
        Tile { x, sums: [vdupq_n_f32(0.0); N] }
    }

    /// Block number `at` of each token.
    ///
    /// # Safety
    /// The tokens have that block.
    #[inline]
    pub unsafe fn at(&self, at: usize) -> TokenBlocks<'a, N> {
        // SAFETY: the block is there, as the caller guarantees.
        TokenBlocks(self.x.map(|x| unsafe { x.get_unchecked(at) }))
    }

    /// Adds `dots · (d · e)`, where `e` is the scale of the activations.
    #[target_feature(enable = "neon")]
    #[inline]
    pub fn add(&mut self, x: TokenBlocks<N>, dots: [int32x4_t; N], d: float32x4_t) {
        for ((sum, dots), x) in self.sums.iter_mut().zip(dots).zip(x.0) {
            *sum = vaddq_f32(*sum, scaled(dots, d, x));
        }
    }

    /// Adds `dots · (d · e) − min · (e · s)`, where `s` is the sum of the activations.
    #[target_feature(enable = "neon")]
    #[inline]
    pub fn add_above(&mut self, x: TokenBlocks<N>, dots: [int32x4_t; N], d: float32x4_t, min: float32x4_t) {
        for ((sum, dots), x) in self.sums.iter_mut().zip(dots).zip(x.0) {
            let offset = vmulq_n_f32(min, x.d_sum);
            *sum = vaddq_f32(*sum, vsubq_f32(scaled(dots, d, x), offset));
        }
    }
}

#[target_feature(enable = "neon")]
#[inline]
fn scaled(dots: int32x4_t, d: float32x4_t, x: &Block) -> float32x4_t {
    vmulq_f32(vcvtq_f32_s32(dots), vmulq_n_f32(d, x.d))
}

/// One block of activations of each token.
#[derive(Clone, Copy)]
pub struct TokenBlocks<'a, const N: usize>(pub [&'a Block; N]);

impl<const N: usize> TokenBlocks<'_, N> {
    /// Activations `16 · s` and the fifteen that follow.
    #[target_feature(enable = "neon")]
    #[inline]
    pub fn sixteen(&self, s: usize) -> [int8x16_t; N] {
        self.0.map(|block| {
            let q = &block.q[16 * s..16 * s + 16];
            // SAFETY: sixteen bytes.
            unsafe { vld1q_s8(q.as_ptr()) }
        })
    }

    /// Activations `4 · k` and the next three of a token, for all rows.
    #[target_feature(enable = "neon")]
    #[inline]
    pub fn four(&self, t: usize, k: usize) -> int8x16_t {
        let q = self.0[t].q[4 * k..].first_chunk().expect("a block has eight fours");
        vreinterpretq_s8_s32(vdupq_n_s32(i32::from_ne_bytes(q.map(i8::cast_unsigned))))
    }
}
