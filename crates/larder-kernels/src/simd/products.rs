//! Tiles of rows and tokens.
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

/// Groups of four tokens for which a block is decoded once; more tokens are computed in strips.
const GROUPS: usize = 2;

/// Products of one or two panels with some tokens: `out [panels, tokens]`.
///
/// # Panics
/// If lengths do not fit.
pub fn products<S: Simd>(simd: S, panels: &[Panel], x: &[&[Block]], out: &mut [Sums]) {
    check(panels, x.iter().map(|x| x.len() * BLOCK), out);
    with_format(panels[0].kind, Products { simd, panels, x, out });
}

struct Products<'a, S> {
    simd: S,
    panels: &'a [Panel<'a>],
    x: &'a [&'a [Block]],
    out: &'a mut [Sums],
}

impl<S: Simd> FormatTask for Products<'_, S> {
    fn run<F: BlockFormat>(self) {
        by_panels::<S, F>(self.simd, self.panels, self.x, self.out);
    }
}

/// Two panels are computed in step as the lanes of one vector, or for one token to read weights in two places.
fn by_panels<S: Simd, F: BlockFormat>(simd: S, panels: &[Panel], x: &[&[Block]], out: &mut [Sums]) {
    let in_step = S::LANES > ROW_GROUP || S::LANES == ROW_GROUP && x.len() == 1;
    match *panels {
        [p, q] if in_step && p.interleaved == q.interleaved => by_order::<S, F>(simd, [p, q], x, out),
        // Where there is no second panel, the first stands in for it.
        _ => panels.iter().zip(out.chunks_mut(x.len())).for_each(|(panel, out)| {
            by_order::<S, F>(simd, [*panel, Panel { next: &[], ..*panel }], x, out);
        }),
    }
}

fn by_order<S: Simd, F: BlockFormat>(simd: S, panels: [Panel; 2], x: &[&[Block]], out: &mut [Sums]) {
    match (panels[0].interleaved, const { S::LANES < ROW_GROUP }) {
        (true, true) => by_tokens::<S, F, true, 2>(simd, panels, x, out),
        (true, false) => by_tokens::<S, F, true, 1>(simd, panels, x, out),
        (false, true) => by_tokens::<S, F, false, 2>(simd, panels, x, out),
        (false, false) => by_tokens::<S, F, false, 1>(simd, panels, x, out),
    }
}

/// Takes the tokens in tiles. Only the first reads panels that are not in the cache yet. `VECTORS` hold the rows.
///
/// Each `if const` that is false, and each size of tile that is left out for rows in plain order, which are few, is one
/// function less to compile for every format.
fn by_tokens<S: Simd, F: BlockFormat, const INTERLEAVED: bool, const VECTORS: usize>(
    simd: S,
    mut panels: [Panel; 2],
    x: &[&[Block]],
    out: &mut [Sums],
) {
    let mut first = 0;
    while first < x.len() {
        let (left, rest) = (x.len() - first, Rest { panels: &panels, x, first });
        first += if const { S::LANES == ROW_GROUP } && x.len() == 1 {
            tile::<S, F, INTERLEAVED, 2, 1, 1>(simd, rest, out)
        } else if const { S::LANES != ROW_GROUP } && left == 1 {
            tile::<S, F, INTERLEAVED, VECTORS, 1, 1>(simd, rest, out)
        } else if INTERLEAVED && left <= 2 {
            tile::<S, F, INTERLEAVED, VECTORS, 2, 1>(simd, rest, out)
        } else if const { INTERLEAVED && S::LANES <= ROW_GROUP } && left == 3 {
            tile::<S, F, INTERLEAVED, VECTORS, 3, 1>(simd, rest, out)
        } else {
            // Several, also where one would do: the compiler would mix those of a large block, which do not fit the
            // registers.
            tile::<S, F, INTERLEAVED, VECTORS, 4, GROUPS>(simd, rest, out)
        };
        panels.iter_mut().for_each(|panel| panel.next = &[]);
    }
}

/// Panels, and the tokens from number `first` on.
struct Rest<'a> {
    panels: &'a [Panel<'a>; 2],
    x: &'a [&'a [Block]],
    first: usize,
}

/// Computes up to `G` groups of `N` tokens, and returns how many tokens that were. A group may be filled up with the
/// last token, but no second one is begun for half of its tokens or fewer.
fn tile<S: Simd, F: BlockFormat, const INTERLEAVED: bool, const VECTORS: usize, const N: usize, const G: usize>(
    simd: S,
    Rest { panels, x, first }: Rest,
    out: &mut [Sums],
) -> usize {
    let left = &x[first..];
    let groups = ((left.len() + (N - 1) / 2) / N).clamp(1, G);
    let mut tokens = [[&[][..]; N]; G];
    for (t, token) in tokens[..groups].as_flattened_mut().iter_mut().enumerate() {
        *token = left[t.min(left.len() - 1)];
    }
    let count = left.len().min(groups * N);
    let out = Out { sums: out, first, count, tokens: x.len() };
    simd.run(Rows::<F, INTERLEAVED, VECTORS, N, G> { panels, x: &tokens, groups, out, format: PhantomData });
    count
}

/// Where the results of a tile go.
struct Out<'a> {
    /// `[panels, tokens]`
    sums: &'a mut [Sums],
    /// The first token of the tile, and how many are wanted.
    first: usize,
    count: usize,
    tokens: usize,
}

/// All blocks of the rows of two panels times a tile of tokens.
struct Rows<'a, F, const INTERLEAVED: bool, const VECTORS: usize, const N: usize, const G: usize> {
    panels: &'a [Panel<'a>; 2],
    x: &'a [[&'a [Block]; N]; G],
    groups: usize,
    out: Out<'a>,
    format: PhantomData<F>,
}

impl<S: Simd, F: BlockFormat, const INTERLEAVED: bool, const VECTORS: usize, const N: usize, const G: usize> Task<S>
    for Rows<'_, F, INTERLEAVED, VECTORS, N, G>
{
    #[inline(always)]
    fn run(self, simd: S) {
        let rows = [EightRows::of(&self.panels[0]), EightRows::of(&self.panels[1])];
        let mut tiles = [Tile::new(simd, self.x, self.groups); VECTORS];
        for i in 0..self.panels[0].blocks {
            // Not a loop, so that the number of the vector is known when each is compiled.
            add::<S, F, INTERLEAVED, VECTORS, N, G>(simd, &rows, i, 0, next::<F>(self.panels, i), &mut tiles);
            if VECTORS > 1 {
                add::<S, F, INTERLEAVED, VECTORS, N, G>(simd, &rows, i, 1, NextBlocks::NONE, &mut tiles);
            }
        }
        self.out.store(&tiles);
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
fn add<S: Simd, F: BlockFormat, const INTERLEAVED: bool, const VECTORS: usize, const N: usize, const G: usize>(
    simd: S,
    rows: &[EightRows<INTERLEAVED>; 2],
    i: usize,
    vector: usize,
    next: NextBlocks,
    tiles: &mut [Tile<S, N, G>; VECTORS],
) {
    let each = F::KIND.block_len() / BLOCK;
    // SAFETY: the rows have block `i`, and all tokens have the activations that belong to it, as `check` has made sure
    // of.
    unsafe {
        tiles[vector].go_to(i * each, each, next);
        F::rows(Blocks::new(simd, rows, vector * S::LANES, F::KIND, i), &mut tiles[vector]);
    }
}

impl Out<'_> {
    #[inline(always)]
    fn store<S: Simd, const VECTORS: usize, const N: usize, const G: usize>(self, tiles: &[Tile<S, N, G>; VECTORS]) {
        let panels = self.sums.len() / self.tokens;
        for t in 0..self.count {
            let mut rows = [0.0; 2 * ROW_GROUP];
            for vector in 0..VECTORS {
                tiles[vector].store(t, &mut rows[vector * S::LANES..]);
            }
            for panel in 0..panels {
                let sums = &mut self.sums[panel * self.tokens + self.first + t];
                sums.copy_from_slice(&rows[panel * ROW_GROUP..][..ROW_GROUP]);
            }
        }
    }
}
