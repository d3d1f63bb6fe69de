//! Products of one token after the other, each directly with the stored blocks of the rows of two panels.
#![allow(unsafe_code)]

use std::marker::PhantomData;

use larder_core::ROW_GROUP;

use super::blocks::{Blocks, EightRows, check};
use super::tile::{NextBlocks, Tile};
use super::{Simd, Task};
use crate::block::{BLOCK, Block};
use crate::formats::{BlockFormat, FormatTask, with_format};
use crate::kernel_set::Sums;
use crate::weights::Panel;

/// Products of one or two panels with some tokens: `out [panels, tokens]`. Only the first token reads panels that are
/// not in the cache yet.
///
/// # Panics
/// If lengths do not fit.
pub fn products<S: Simd>(simd: S, panels: &[Panel], x: &[&[Block]], out: &mut [Sums]) {
    check(panels, x.iter().map(|x| x.len() * BLOCK), out);
    for t in 0..x.len() {
        with_format(panels[0].kind, OfToken { simd, panels, x, t, out: &mut *out });
    }
}

/// Panels times token number `t`.
struct OfToken<'a, S> {
    simd: S,
    panels: &'a [Panel<'a>],
    x: &'a [&'a [Block]],
    t: usize,
    out: &'a mut [Sums],
}

impl<S: Simd> FormatTask for OfToken<'_, S> {
    /// Two panels are computed in step, as the lanes of one vector or to read weights in two places.
    fn run<F: BlockFormat>(mut self) {
        let in_step = S::LANES >= ROW_GROUP;
        match *self.panels {
            [p, q] if in_step && p.interleaved == q.interleaved => self.by_order::<F>([p, q], &[0, 1]),
            // Where there is no second panel, the first stands in for it.
            _ => {
                for (i, panel) in self.panels.iter().enumerate() {
                    self.by_order::<F>([*panel, Panel { next: &[], ..*panel }], &[i]);
                }
            }
        }
    }
}

impl<S: Simd> OfToken<'_, S> {
    /// Computes two panels. The results of the first ones are those of the panels `to`.
    fn by_order<F: BlockFormat>(&mut self, mut panels: [Panel; 2], to: &[usize]) {
        if self.t > 0 {
            panels.iter_mut().for_each(|panel| panel.next = &[]);
        }
        let (x, mut rows) = (self.x[self.t], [Sums::default(); 2]);
        match (panels[0].interleaved, const { S::LANES == 2 * ROW_GROUP }) {
            (true, true) => self.simd.run(Rows::<F, true, 1>::new(&panels, x, &mut rows)),
            (true, false) => self.simd.run(Rows::<F, true, 2>::new(&panels, x, &mut rows)),
            (false, true) => self.simd.run(Rows::<F, false, 1>::new(&panels, x, &mut rows)),
            (false, false) => self.simd.run(Rows::<F, false, 2>::new(&panels, x, &mut rows)),
        }
        for (panel, rows) in to.iter().zip(rows) {
            self.out[panel * self.x.len() + self.t] = rows;
        }
    }
}

/// All blocks of the rows of two panels, which `VECTORS` hold, times a token.
struct Rows<'a, F, const INTERLEAVED: bool, const VECTORS: usize> {
    panels: &'a [Panel<'a>; 2],
    x: &'a [Block],
    sums: &'a mut [Sums; 2],
    format: PhantomData<F>,
}

impl<'a, F, const INTERLEAVED: bool, const VECTORS: usize> Rows<'a, F, INTERLEAVED, VECTORS> {
    fn new(panels: &'a [Panel<'a>; 2], x: &'a [Block], sums: &'a mut [Sums; 2]) -> Self {
        Rows { panels, x, sums, format: PhantomData }
    }
}

impl<S: Simd, F: BlockFormat, const INTERLEAVED: bool, const VECTORS: usize> Task<S>
    for Rows<'_, F, INTERLEAVED, VECTORS>
{
    #[inline(always)]
    fn run(self, simd: S) {
        let rows = [EightRows::of(&self.panels[0]), EightRows::of(&self.panels[1])];
        let mut tiles = [Tile::new(simd, self.x); VECTORS];
        for i in 0..self.panels[0].blocks {
            // Not a loop, so that the number of the vector is known when each is compiled.
            add::<S, F, INTERLEAVED>(simd, &rows, i, 0, next::<F>(self.panels, i), &mut tiles[0]);
            if VECTORS > 1 {
                add::<S, F, INTERLEAVED>(simd, &rows, i, 1, NextBlocks::NONE, &mut tiles[1]);
            }
        }
        for (vector, tile) in tiles.iter().enumerate() {
            tile.store(&mut self.sums.as_flattened_mut()[vector * S::LANES..]);
        }
    }
}

/// Block `i` of the rows of the panels that will be read next. Where there is none it is that of the current panel,
/// which costs less than a branch in every block.
#[inline(always)]
fn next<F: BlockFormat>(panels: &[Panel; 2], i: usize) -> NextBlocks {
    let bytes = ROW_GROUP * F::KIND.block_bytes();
    let mut starts = [panels[0].bytes.as_ptr(), panels[1].bytes.as_ptr()];
    for panel in 0..2 {
        if !panels[panel].next.is_empty() {
            starts[panel] = panels[panel].next.as_ptr();
        }
        starts[panel] = starts[panel].wrapping_add(i * bytes);
    }
    NextBlocks { panels: starts, bytes }
}

/// Adds block `i` of the rows of a vector, and prefetches `next` meanwhile.
#[inline(always)]
fn add<S: Simd, F: BlockFormat, const INTERLEAVED: bool>(
    simd: S,
    rows: &[EightRows<INTERLEAVED>; 2],
    i: usize,
    vector: usize,
    next: NextBlocks,
    tile: &mut Tile<S>,
) {
    let each = F::KIND.block_len() / BLOCK;
    // SAFETY: the rows have block `i`, and the token the activations that belong to it, as `check` has made sure of.
    unsafe {
        tile.go_to(i * each, each, next);
        F::rows(Blocks::new(simd, rows, vector * S::LANES, F::KIND, i), tile);
    }
}
