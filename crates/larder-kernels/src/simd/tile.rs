//! The running sums of some tokens times the rows of a vector's lanes.
#![allow(unsafe_code)]
// The number of a token, a row or a run is the index of several arrays.
#![allow(clippy::needless_range_loop)]

use super::Simd;
use super::groups::{Groups, Integers};
use super::token_blocks::TokenBlocks;
use crate::block::{BLOCK, Block};

/// Up to `G` groups of `N` tokens, and for each token the running sums of all lanes.
///
/// A block's integers are decoded once for all groups. The sums of one group are in registers.
#[derive(Clone, Copy)]
pub struct Tile<'a, S: Simd, const N: usize, const G: usize> {
    simd: S,
    x: &'a [[&'a [Block]; N]; G],
    /// Number of groups, from 1 to `G`.
    groups: usize,
    /// The first block of activations that belongs to the current block of weights, and how many do.
    at: usize,
    each: usize,
    next: NextBlocks,
    sums: [[S::Floats; N]; G],
}

impl<'a, S: Simd, const N: usize, const G: usize> Tile<'a, S, N, G> {
    #[inline(always)]
    pub fn new(simd: S, x: &'a [[&'a [Block]; N]; G], groups: usize) -> Self {
        assert!(0 < groups && groups <= G, "a tile has one to {G} groups");
        Tile { simd, x, groups, at: 0, each: 0, next: NextBlocks::NONE, sums: [[simd.splat(0.0); N]; G] }
    }

    /// Goes on to `each` blocks of activations from number `at` on, and prefetches `next` while they are added.
    ///
    /// # Safety
    /// All tokens of the groups have these blocks.
    #[inline(always)]
    pub unsafe fn go_to(&mut self, at: usize, each: usize, next: NextBlocks) {
        (self.at, self.each, self.next) = (at, each, next);
    }

    /// Stores the sums of token `t` of the tile.
    #[inline(always)]
    pub fn store(&self, t: usize, lanes: &mut [f32]) {
        self.simd.store(self.sums[t / N][t % N], lanes);
    }

    /// Prefetches the part of the next blocks that belongs to block `i` of the activations. All lines at once would be
    /// more than a processor can wait for: it would stop until most have come.
    #[inline(always)]
    fn prefetch(&self, i: usize) {
        let lines = self.next.bytes.div_ceil(LINE);
        let (from, end) = (lines * i / self.each, lines * (i + 1) / self.each);
        for panel in self.next.panels {
            self.simd.prefetch(panel.wrapping_add(from * LINE), (end - from) * LINE);
        }
    }

    #[inline(always)]
    fn groups(&self) -> usize {
        if G == 1 { 1 } else { self.groups }
    }

    /// Block `i` of the current block of each token of a group.
    #[inline(always)]
    fn tokens(&self, group: usize, i: usize) -> TokenBlocks<'a, N> {
        assert!(i < self.each, "the current block has fewer blocks of {BLOCK} values");
        let x = &self.x[group];
        let mut blocks = [&Block::ZERO; N];
        for t in 0..N {
            // SAFETY: the tokens have `each` blocks from `at` on, as `go_to` requires.
            blocks[t] = unsafe { x[t].get_unchecked(self.at + i) };
        }
        TokenBlocks(blocks)
    }
}

impl<S: Simd, const N: usize, const G: usize> Groups<S> for Tile<'_, S, N, G> {
    #[inline(always)]
    fn add<const SCALES: usize, const MINIMA: usize>(
        &mut self,
        g: usize,
        w: &impl Integers<S>,
        scales: [S::Floats; SCALES],
        minima: [S::Floats; MINIMA],
    ) {
        let simd = self.simd;
        self.prefetch(g);
        for group in 0..self.groups() {
            let x = self.tokens(group, g);
            let dots = w.dots::<SCALES, N>(simd, x);
            for t in 0..N {
                let mut term = simd.mul(scales[0], dots[0][t]);
                if SCALES == 2 {
                    term = simd.mul_add(scales[1], dots[1][t], term);
                }
                for m in 0..MINIMA {
                    let sum = if MINIMA == 1 { x.0[t].sum } else { x.0[t].halves[m] };
                    term = simd.mul_sub(minima[m], simd.splat(sum), term);
                }
                self.sums[group][t] = simd.mul_add(term, simd.splat(x.0[t].d), self.sums[group][t]);
            }
        }
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
}
