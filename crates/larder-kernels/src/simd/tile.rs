//! The running sums of one token times the rows of a vector's lanes.
#![allow(unsafe_code)]
// The number of a minimum is the index of several arrays.
#![allow(clippy::needless_range_loop)]

use super::Simd;
use super::groups::{Groups, Integers};
use super::token_blocks::TokenBlocks;
use crate::block::{BLOCK, Block};

/// The running sums of all lanes.
#[derive(Clone, Copy)]
pub struct Tile<'a, S: Simd> {
    simd: S,
    x: &'a [Block],
    /// The first block of activations that belongs to the current block of weights, and how many do.
    at: usize,
    each: usize,
    next: NextBlocks,
    sums: S::Floats,
}

impl<'a, S: Simd> Tile<'a, S> {
    #[inline(always)]
    pub fn new(simd: S, x: &'a [Block]) -> Self {
        Tile { simd, x, at: 0, each: 0, next: NextBlocks::NONE, sums: simd.splat(0.0) }
    }

    /// Goes on to `each` blocks of activations from number `at` on, and prefetches `next` while they are added.
    ///
    /// # Safety
    /// The token has these blocks.
    #[inline(always)]
    pub unsafe fn go_to(&mut self, at: usize, each: usize, next: NextBlocks) {
        (self.at, self.each, self.next) = (at, each, next);
    }

    /// Stores the sums.
    #[inline(always)]
    pub fn store(&self, lanes: &mut [f32]) {
        self.simd.store(self.sums, lanes);
    }
}

impl<S: Simd> Groups<S> for Tile<'_, S> {
    #[inline(always)]
    fn add<const SCALES: usize, const MINIMA: usize>(
        &mut self,
        g: usize,
        w: &impl Integers<S>,
        scales: [S::Floats; SCALES],
        minima: [S::Floats; MINIMA],
    ) {
        assert!(g < self.each, "the current block has fewer blocks of {BLOCK} values");
        let simd = self.simd;
        self.next.prefetch(simd, g, self.each);
        // SAFETY: the token has `each` blocks from `at` on, as `go_to` requires.
        let x = unsafe { self.x.get_unchecked(self.at + g) };
        let dots = w.dots::<SCALES, 1>(simd, TokenBlocks([x]));
        let mut term = simd.mul(scales[0], dots[0][0]);
        if SCALES == 2 {
            term = simd.mul_add(scales[1], dots[1][0], term);
        }
        for m in 0..MINIMA {
            let sum = if MINIMA == 1 { x.sum } else { x.halves[m] };
            term = simd.mul_sub(minima[m], simd.splat(sum), term);
        }
        self.sums = simd.mul_add(term, simd.splat(x.d), self.sums);
    }
}

/// Bytes of a cache line.
const LINE: usize = 64;

/// Blocks of weights to prefetch.
#[derive(Clone, Copy)]
pub struct NextBlocks {
    /// Where those of each panel begin.
    pub panels: [*const u8; 2],
    /// Bytes of a panel's blocks; none are prefetched if it is 0.
    pub bytes: usize,
}

impl NextBlocks {
    /// None.
    pub const NONE: NextBlocks = NextBlocks { panels: [std::ptr::null(); 2], bytes: 0 };

    /// Prefetches part `i` of `each`. All lines at once would be more than a processor can wait for: it would stop
    /// until most have come.
    #[inline(always)]
    pub fn prefetch<S: Simd>(&self, simd: S, i: usize, each: usize) {
        let lines = self.bytes.div_ceil(LINE);
        let (from, end) = (lines * i / each, lines * (i + 1) / each);
        for panel in self.panels {
            simd.prefetch(panel.wrapping_add(from * LINE), (end - from) * LINE);
        }
    }
}
