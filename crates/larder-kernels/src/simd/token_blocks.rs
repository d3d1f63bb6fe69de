//! A block of activations of several tokens, which a block of weights is multiplied with.
#![allow(unsafe_code)]

use crate::block::Block;

/// One block of activations of each token.
#[derive(Clone, Copy)]
pub struct TokenBlocks<'a, const N: usize>(pub [&'a Block; N]);

impl<const N: usize> TokenBlocks<'_, N> {
    /// Activations `4 · k` and the next three of a token, as the bytes of an integer.
    #[inline(always)]
    pub fn four(&self, t: usize, k: usize) -> i32 {
        let q = &self.0[t].q[4 * k..4 * k + 4];
        // SAFETY: four bytes.
        unsafe { q.as_ptr().cast::<i32>().read_unaligned() }
    }

    /// The sums of both halves of a token's block, as the 16-bit halves of an integer.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub fn halves(&self, t: usize) -> i32 {
        // SAFETY: four bytes.
        unsafe { self.0[t].halves.as_ptr().cast::<i32>().read_unaligned() }
    }
}
