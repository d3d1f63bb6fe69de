//! Up to four tokens times eight rows.
#![allow(unsafe_code)]

use std::arch::asm;
use std::arch::x86_64::*;

use crate::block::Block;

/// `N` tokens, and for each the running sums of eight rows.
#[derive(Clone, Copy)]
pub struct Tile<'a, const N: usize> {
    x: [&'a [Block]; N],
    pub sums: [__m256; N],
}

impl<'a, const N: usize> Tile<'a, N> {
    #[target_feature(enable = "avx2")]
    #[inline]
    pub fn new(x: [&'a [Block]; N]) -> Self {
        Tile { x, sums: [_mm256_setzero_ps(); N] }
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
    #[target_feature(enable = "avx2")]
    #[inline]
    pub fn add(&mut self, x: TokenBlocks<N>, dots: [__m256i; N], d: __m256) {
        for ((sum, dots), x) in self.sums.iter_mut().zip(dots).zip(x.0) {
            *sum = _mm256_add_ps(*sum, scaled(dots, d, x));
        }
    }

    /// Adds `dots · (d · e) − min · (e · s)`, where `s` is the sum of the activations.
    #[target_feature(enable = "avx2")]
    #[inline]
    pub fn add_above(&mut self, x: TokenBlocks<N>, dots: [__m256i; N], d: __m256, min: __m256) {
        for ((sum, dots), x) in self.sums.iter_mut().zip(dots).zip(x.0) {
            let offset = _mm256_mul_ps(min, _mm256_set1_ps(x.d_sum));
            *sum = _mm256_add_ps(*sum, _mm256_sub_ps(scaled(dots, d, x), offset));
        }
    }
}

#[target_feature(enable = "avx2")]
#[inline]
fn scaled(dots: __m256i, d: __m256, x: &Block) -> __m256 {
    _mm256_mul_ps(_mm256_cvtepi32_ps(dots), _mm256_mul_ps(d, _mm256_set1_ps(x.d)))
}

/// One block of activations of each token.
#[derive(Clone, Copy)]
pub struct TokenBlocks<'a, const N: usize>(pub [&'a Block; N]);

impl<const N: usize> TokenBlocks<'_, N> {
    /// Adds the products of four unsigned weights of each row with activations `4 · k` and the next three: in each
    /// lane two sums of 16 bits.
    #[target_feature(enable = "avx2")]
    #[inline]
    pub fn add_pairs(&self, sums: &mut [__m256i; N], w: __m256i, k: usize) {
        for (t, sum) in sums.iter_mut().enumerate() {
            *sum = self.in_turn(_mm256_add_epi16(*sum, _mm256_maddubs_epi16(w, self.four(t, k))));
        }
    }

    /// Keeps the compiler from reordering the steps of several sums so that one sum comes after the other: in turns, the
    /// processor always has an instruction that does not wait for a result.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn in_turn(&self, mut sum: __m256i) -> __m256i {
        if N > 1 && !cfg!(miri) {
            // SAFETY: the assembly has no instructions.
            unsafe { asm!("/* {} */", inout(ymm_reg) sum, options(nomem, nostack, preserves_flags)) };
        }
        sum
    }

    /// The sums of the products of `K` times four weights, the first with activations `4 · first` and the next three.
    #[target_feature(enable = "avx2")]
    #[inline]
    pub fn pairs<const K: usize>(&self, w: [__m256i; K], first: usize) -> [__m256i; N] {
        let mut sums = [_mm256_setzero_si256(); N];
        for (k, w) in (first..).zip(w) {
            self.add_pairs(&mut sums, w, k);
        }
        sums
    }

    /// Activations `4 · k` and the next three of a token, in all lanes.
    #[target_feature(enable = "avx2")]
    #[inline]
    pub fn four(&self, t: usize, k: usize) -> __m256i {
        let q = &self.0[t].q[4 * k..4 * k + 4];
        // SAFETY: four bytes.
        _mm256_set1_epi32(unsafe { q.as_ptr().cast::<i32>().read_unaligned() })
    }
}

/// Multiplies each 16-bit pair by its factors and adds the two products.
#[target_feature(enable = "avx2")]
#[inline]
pub fn widened<const N: usize>(mut pairs: [__m256i; N], factors: __m256i) -> [__m256i; N] {
    for pair in &mut pairs {
        *pair = _mm256_madd_epi16(*pair, factors);
    }
    pairs
}

#[target_feature(enable = "avx2")]
#[inline]
pub fn sum<const N: usize>(mut a: [__m256i; N], b: [__m256i; N]) -> [__m256i; N] {
    for (a, b) in a.iter_mut().zip(b) {
        *a = _mm256_add_epi32(*a, b);
    }
    a
}
