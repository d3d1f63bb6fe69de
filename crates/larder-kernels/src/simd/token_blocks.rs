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

    /// As [`begin`](TokenBlocks::begin), with an offset that is known later.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub fn begin_at<const PARTS: usize>(&self, t: usize, part: usize, offset: i32) -> i32 {
        let raised = if PARTS == 1 { self.0[t].raised } else { self.0[t].raised_halves[part] };
        (raised >> 7) * offset
    }

    /// What the dot product of a token with half `part` of `PARTS` = 2, or with the whole block, begins with if the
    /// weights are `OFFSET` too large.
    #[inline(always)]
    pub fn begin<const OFFSET: i16, const PARTS: usize>(&self, t: usize, part: usize) -> i32 {
        let raised = if PARTS == 1 { self.0[t].raised } else { self.0[t].raised_halves[part] };
        if OFFSET == 128 { raised } else { (raised >> 7) * i32::from(OFFSET) }
    }
}
