//! Strips: rows whose weights are unpacked to bytes once, for many tokens.
//!
//! All formats are one in a strip: bytes, one scale for each block of 32 or one for each half, and possibly minima. So
//! tokens have one inner loop for each instruction set, and what a format costs to unpack is paid once for all of them.
#![allow(unsafe_code)]
// The number of a token or of a vector is the index of several arrays.
#![allow(clippy::needless_range_loop)]

use std::marker::PhantomData;
use std::ops::Range;

use larder_core::ROW_GROUP;

use super::blocks::{Blocks, EightRows, check_rows};
use super::groups::{Groups, Integers};
use super::tile::NextBlocks;
use super::token_blocks::TokenBlocks;
use super::{Simd, Task};
use crate::block::{BLOCK, Block};
use crate::formats::{BlockFormat, FormatTask, with_format};
use crate::strip::{STRIP_BLOCKS, STRIP_PANELS, STRIP_ROWS, Strip, StripForm, StripSums};
use crate::weights::Panel;

/// Unpacks blocks of a format, `blocks` of each row, of the rows of four whole panels in the same order. Meanwhile
/// prefetches as many blocks of the panels that `next` begins with, which are of the same shape.
///
/// # Panics
/// If lengths do not fit.
pub fn unpack<S: Simd>(
    simd: S,
    panels: &[Panel; STRIP_PANELS],
    blocks: Range<usize>,
    next: [&[u8]; STRIP_PANELS],
    strip: &mut Strip,
) {
    check_rows(panels);
    let each = panels[0].kind.block_len() / BLOCK;
    assert!(panels.iter().all(|panel| panel.rows == ROW_GROUP), "a strip has whole panels");
    assert!(panels.iter().all(|panel| panel.interleaved == panels[0].interleaved), "row orders differ in a strip");
    assert!(blocks.end <= panels[0].blocks && blocks.len() * each <= STRIP_BLOCKS, "a strip is shorter");
    strip.blocks = blocks.len() * each;
    with_format(panels[0].kind, Unpacking { simd, panels, blocks, next, strip });
}

struct Unpacking<'a, S> {
    simd: S,
    panels: &'a [Panel<'a>; STRIP_PANELS],
    blocks: Range<usize>,
    next: [&'a [u8]; STRIP_PANELS],
    strip: &'a mut Strip,
}

impl<S: Simd> FormatTask for Unpacking<'_, S> {
    fn run<F: BlockFormat>(self) {
        let Unpacking { simd, panels, blocks, next, strip } = self;
        let pairs = panels.as_chunks::<2>().0.iter().zip(next.as_chunks::<2>().0);
        for (number, (panels, next)) in pairs.enumerate() {
            let (blocks, first) = (blocks.clone(), number * 2 * ROW_GROUP);
            if panels[0].interleaved {
                simd.run(OfPair::<F, true> { panels, blocks, next, first, strip, format: PhantomData });
            } else {
                simd.run(OfPair::<F, false> { panels, blocks, next, first, strip, format: PhantomData });
            }
        }
    }
}

/// The blocks of two panels, whose rows are those of the strip from number `first` on.
struct OfPair<'a, F, const INTERLEAVED: bool> {
    panels: &'a [Panel<'a>; 2],
    blocks: Range<usize>,
    next: &'a [&'a [u8]; 2],
    first: usize,
    strip: &'a mut Strip,
    format: PhantomData<F>,
}

impl<S: Simd, F: BlockFormat, const INTERLEAVED: bool> Task<S> for OfPair<'_, F, INTERLEAVED> {
    #[inline(always)]
    fn run(self, simd: S) {
        let each = F::KIND.block_len() / BLOCK;
        let rows = [EightRows::<INTERLEAVED>::of(&self.panels[0]), EightRows::of(&self.panels[1])];
        let (from, count) = (self.blocks.start, self.blocks.len());
        let ahead = NextBlocks { panels: [self.next[0].as_ptr(), self.next[1].as_ptr()], bytes: self.next[0].len() };
        for i in self.blocks {
            ahead.prefetch(simd, i - from, count);
            for lane in (0..2 * ROW_GROUP).step_by(S::LANES) {
                let mut to =
                    Unpacked { simd, strip: &mut *self.strip, row: self.first + lane, block: (i - from) * each };
                // SAFETY: the rows have block `i`, as `unpack` has made sure of.
                F::rows(unsafe { Blocks::new(simd, &rows, lane, F::KIND, i) }, &mut to);
            }
        }
    }
}

/// Where the groups of a vector's rows go.
struct Unpacked<'a, S> {
    simd: S,
    strip: &'a mut Strip,
    /// The first row.
    row: usize,
    /// The first block.
    block: usize,
}

impl<S: Simd> Groups<S> for Unpacked<'_, S> {
    #[inline(always)]
    fn add<const SCALES: usize, const MINIMA: usize>(
        &mut self,
        g: usize,
        w: &impl Integers<S>,
        scales: [S::Floats; SCALES],
        minima: [S::Floats; MINIMA],
    ) {
        let (simd, block) = (self.simd, self.block + g);
        let (fit, offset) = w.store(simd, &mut self.strip.bytes[(block * STRIP_ROWS + self.row) * BLOCK..]);
        self.strip.form = StripForm { scales: SCALES, minima: MINIMA, fit, offset };
        for i in 0..SCALES {
            simd.store(scales[i], &mut self.strip.scales[(SCALES * block + i) * STRIP_ROWS + self.row..]);
        }
        for i in 0..MINIMA {
            simd.store(minima[i], &mut self.strip.minima[(MINIMA * block + i) * STRIP_ROWS + self.row..]);
        }
    }
}

/// Adds the products of a strip with some tokens to their sums. The strip's first block belongs to block `first` of the
/// activations.
///
/// # Panics
/// If lengths do not fit.
pub fn multiply<S: Simd>(simd: S, strip: &Strip, x: &[&[Block]], first: usize, sums: &mut [StripSums]) {
    assert!(x.len() == sums.len(), "there is a sum for each token");
    assert!(x.iter().all(|x| first + strip.blocks <= x.len()), "activations are shorter than the strip");
    let parts = x.len().div_ceil(most::<S>(strip.form.scales));
    let begin = |part: usize| (x.len() * part / parts).next_multiple_of(S::STRIP_STEP).min(x.len());
    let mut rest = sums;
    for part in 0..parts {
        let tokens = begin(part)..begin(part + 1);
        let (sums, behind) = rest.split_at_mut(tokens.len());
        rest = behind;
        let task = SomeTokens { strip, x: &x[tokens], first, sums };
        simd.strip_task(strip.form.fit, task);
    }
}

/// Tokens that are computed at a time, if a block has this number of scales.
const fn most<S: Simd>(scales: usize) -> usize {
    if scales == 1 { S::STRIP_TOKENS } else { S::STRIP_TOKENS_IN_HALVES }
}

/// A strip times as many tokens as are computed at a time.
pub struct SomeTokens<'a> {
    strip: &'a Strip,
    x: &'a [&'a [Block]],
    first: usize,
    sums: &'a mut [StripSums],
}

impl SomeTokens<'_> {
    /// Computes them, `FIT` as in [`StripForm`].
    pub fn by_form<S: Simd, const FIT: usize>(self, simd: S) {
        match (self.strip.form.scales, self.strip.form.minima) {
            (1, 0) => self.by_tokens::<S, FIT, 1, 0>(simd),
            (1, _) => self.by_tokens::<S, FIT, 1, 1>(simd),
            (_, 0) => self.by_tokens::<S, FIT, 2, 0>(simd),
            _ => self.by_tokens::<S, FIT, 2, 2>(simd),
        }
    }

    /// Each `if const` that is false is one function less to compile.
    fn by_tokens<S: Simd, const FIT: usize, const SCALES: usize, const MINIMA: usize>(self, simd: S) {
        let tokens = self.x.len();
        if const { most::<S>(SCALES) >= 6 } && tokens == 6 {
            simd.run(Multiplying::<FIT, SCALES, MINIMA, 6>(self));
        } else if const { most::<S>(SCALES) >= 5 } && tokens == 5 {
            simd.run(Multiplying::<FIT, SCALES, MINIMA, 5>(self));
        } else if const { most::<S>(SCALES) >= 4 } && tokens == 4 {
            simd.run(Multiplying::<FIT, SCALES, MINIMA, 4>(self));
        } else if tokens == 3 {
            simd.run(Multiplying::<FIT, SCALES, MINIMA, 3>(self));
        } else if tokens == 2 {
            simd.run(Multiplying::<FIT, SCALES, MINIMA, 2>(self));
        } else {
            simd.run(Multiplying::<FIT, SCALES, MINIMA, 1>(self));
        }
    }
}

struct Multiplying<'a, const FIT: usize, const SCALES: usize, const MINIMA: usize, const N: usize>(SomeTokens<'a>);

impl<S: Simd, const FIT: usize, const SCALES: usize, const MINIMA: usize, const N: usize> Task<S>
    for Multiplying<'_, FIT, SCALES, MINIMA, N>
{
    #[inline(always)]
    fn run(self, simd: S) {
        let SomeTokens { strip, x, first, sums } = self.0;
        for row in (0..STRIP_ROWS).step_by(2 * S::LANES) {
            let mut totals = [[simd.splat(0.0); N]; 2];
            for t in 0..N {
                for v in 0..2 {
                    // SAFETY: the sums have the rows of two vectors from `row` on.
                    totals[v][t] = unsafe { floats(simd, sums[t].0.as_ptr().add(row + v * S::LANES)) };
                }
            }
            for block in 0..strip.blocks {
                // SAFETY: the strip has the block, and so have the activations, as `multiply` has made sure of.
                unsafe {
                    let mut own = [&Block::ZERO; N];
                    for t in 0..N {
                        own[t] = x.get_unchecked(t).get_unchecked(first + block);
                    }
                    let (own, bytes) = (TokenBlocks(own), strip.bytes.as_ptr().add((block * STRIP_ROWS + row) * BLOCK));
                    let scales = strip.scales.as_ptr().add(SCALES * block * STRIP_ROWS + row);
                    let minima = strip.minima.as_ptr().add(MINIMA * block * STRIP_ROWS + row);
                    let dots = simd.strip_dots::<FIT, SCALES, N>(bytes, 0, strip.form.offset, own);
                    let mut terms = [[simd.splat(0.0); N]; 2];
                    for v in 0..2 {
                        let scale = floats(simd, scales.add(v * S::LANES));
                        for t in 0..N {
                            terms[v][t] = simd.mul(scale, dots[v][t]);
                        }
                    }
                    if SCALES == 2 {
                        let dots = simd.strip_dots::<FIT, SCALES, N>(bytes, 1, strip.form.offset, own);
                        for v in 0..2 {
                            let scale = floats(simd, scales.add(STRIP_ROWS + v * S::LANES));
                            for t in 0..N {
                                terms[v][t] = simd.mul_add(scale, dots[v][t], terms[v][t]);
                            }
                        }
                    }
                    for m in 0..MINIMA {
                        for v in 0..2 {
                            let minimum = floats(simd, minima.add(m * STRIP_ROWS + v * S::LANES));
                            for t in 0..N {
                                let sum = if MINIMA == 1 { own.0[t].sum } else { own.0[t].halves[m] };
                                terms[v][t] = simd.mul_sub(minimum, simd.splat(sum), terms[v][t]);
                            }
                        }
                    }
                    for t in 0..N {
                        let d = simd.splat(own.0[t].d);
                        for v in 0..2 {
                            totals[v][t] = simd.mul_add(terms[v][t], d, totals[v][t]);
                        }
                    }
                }
            }
            for t in 0..N {
                for v in 0..2 {
                    simd.store(totals[v][t], &mut sums[t].0[row + v * S::LANES..]);
                }
            }
        }
    }
}

/// A value for each lane.
///
/// # Safety
/// They are readable at `at`.
#[inline(always)]
unsafe fn floats<S: Simd>(simd: S, at: *const f32) -> S::Floats {
    // SAFETY: as the caller guarantees.
    unsafe { simd.floats_at::<{ super::F32 }>(at.cast()) }
}
