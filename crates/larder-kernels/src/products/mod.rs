//! Many matrix products in one fork-join.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ops::Range;

use larder_core::ROW_GROUP;

use crate::block::Block;
use crate::disjoint::Disjoint;
use crate::dispatch;
use crate::inputs::Inputs;
use crate::kernel_set::{KernelSet, MAX_PANELS, MAX_TOKENS, StripKernels, Sums};
use crate::strip::STRIP_PANELS;
use crate::thread_pool::ThreadPool;
use crate::weights::{Panel, WeightMatrix, widen_row};

/// The least work for one task, in bytes of weights times tokens: claiming a task takes 0.1 µs, and reading this much
/// from memory 1 µs.
const MIN_TASK_WORK: usize = 16 * 1024;

/// Products of one fork-join: gate and up of all experts of a common layer.
const MAX_PRODUCTS: usize = 512;

mod strips;

pub use strips::PRODUCT_SCRATCH_BYTES;
use strips::in_strips;

/// Tasks per thread, so that other threads can take over the share of a thread that is delayed.
const TASKS_PER_THREAD: usize = 8;

/// One product: `out[t, r] = (Σ_c weights[r, c] · x[t, c]) · scale`, where the scale is that of the whole matrix.
pub struct Product<'a> {
    /// `[rows, cols]`
    pub weights: WeightMatrix<'a>,
    /// `[any, cols]`. Should be quantised if the weights are. If not, the rows of the weights are widened one by one: a
    /// slow path, kept as the reference for the fast one.
    pub x: Inputs<'a>,
    /// The tokens of `x` that take part, in this order; `None` for all of them.
    pub pick: Option<&'a [u32]>,
    /// `[tokens that take part, rows]`
    pub out: &'a mut [f32],
}

/// Computes all products in one fork-join. Allocates nothing, except one widened row per task where weights are
/// quantised and activations are not.
///
/// A result depends on its row and its token only: not on the other tokens, the row order, the number of threads, or
/// the instruction set.
///
/// # Panics
/// If a length does not fit the shapes. They are checked here, once, and nowhere below.
pub fn products(pool: &ThreadPool, products: &mut [Product]) {
    products.iter().for_each(Product::check);
    products.chunks_mut(MAX_PRODUCTS).for_each(|some| fork_join(pool, some));
}

fn fork_join(pool: &ThreadPool, products: &mut [Product]) {
    let work: usize = products.iter().map(Product::work).sum();
    let share = MIN_TASK_WORK.max(work / (pool.threads() * TASKS_PER_THREAD));
    let (set, all) = (dispatch::chosen(), SharedProducts::new(products, share));
    pool.run(all.tasks(), &|task| {
        let (product, task, out) = all.find(task);
        product.compute(set, product.division(share).tile(task), &out);
    });
}

/// The results that one task computes.
#[derive(Clone)]
struct Tile {
    panels: Range<usize>,
    tokens: Range<usize>,
}

/// How the results of a product are divided among tasks.
struct Division {
    panels: usize,
    tokens: usize,
    panels_per_task: usize,
    tokens_per_task: usize,
}

impl Division {
    fn tasks(&self) -> usize {
        self.panels.div_ceil(self.panels_per_task) * self.tokens.div_ceil(self.tokens_per_task)
    }

    fn tile(&self, task: usize) -> Tile {
        let parts = self.tokens.div_ceil(self.tokens_per_task);
        let (panel, token) = (task / parts * self.panels_per_task, task % parts * self.tokens_per_task);
        Tile {
            panels: panel..self.panels.min(panel + self.panels_per_task),
            tokens: token..self.tokens.min(token + self.tokens_per_task),
        }
    }
}

impl Product<'_> {
    fn check(&self) {
        self.weights.check();
        let WeightMatrix { rows, cols, .. } = self.weights;
        assert!(self.x.tokens() == 0 || self.x.cols() == cols, "activations are not rows of {cols}");
        let known = |pick: &[u32]| pick.iter().all(|t| (*t as usize) < self.x.tokens());
        assert!(self.pick.is_none_or(known), "a picked token is out of range");
        assert_eq!(self.out.len(), self.tokens() * rows, "output does not fit the shape");
    }

    fn tokens(&self) -> usize {
        self.pick.map_or(self.x.tokens(), <[u32]>::len)
    }

    /// The kernels with which weights are unpacked once for all tokens, if these are enough.
    fn strips(&self, set: &KernelSet) -> Option<StripKernels> {
        let quantised = self.x.is_quantised() && !self.weights.kind.is_float();
        set.strips.filter(|strips| quantised && self.tokens() >= strips.least)
    }

    /// Computes the first panels, as many as there are in whole strips, and returns the rest.
    fn compute_strips(&self, kernels: &StripKernels, tile: Tile, out: &Disjoint<f32>) -> Tile {
        let Tile { panels, tokens } = tile;
        let whole = panels.end.min(self.weights.rows / ROW_GROUP);
        let strips = whole.saturating_sub(panels.start) / STRIP_PANELS;
        for strip in 0..strips {
            let first = panels.start + strip * STRIP_PANELS;
            in_strips(kernels, self, first, tokens.clone(), strip + 1 < strips, out);
        }
        Tile { panels: panels.start + strips * STRIP_PANELS..panels.end, tokens }
    }

    /// Work in bytes of weights times tokens.
    fn work(&self) -> usize {
        self.weights.bytes.len() * self.tokens()
    }

    /// Tasks of about this work. Tokens are divided where panels alone are too few, as those of a router.
    fn division(&self, share: usize) -> Division {
        let (panels, tokens) = (self.weights.panels().count(), self.tokens());
        let panel_work = (ROW_GROUP * self.weights.panels().row_bytes * tokens).max(1);
        let unit = if self.strips(dispatch::chosen()).is_some() { STRIP_PANELS } else { MAX_PANELS };
        let panels_per_task = (share / panel_work).max(1).next_multiple_of(unit);
        let parts = (panels.min(panels_per_task) * panel_work / share).max(1);
        Division { panels, tokens, panels_per_task, tokens_per_task: tokens.div_ceil(parts).max(MAX_TOKENS) }
    }

    /// The results of a tile.
    fn compute(&self, set: &KernelSet, tile: Tile, out: &Disjoint<f32>) {
        if !self.weights.kind.is_float() && !self.x.is_quantised() {
            return self.compute_widened(set, tile, out);
        }
        let tile = match self.strips(set) {
            Some(strips) => self.compute_strips(&strips, tile, out),
            None => tile,
        };
        if tile.panels.is_empty() {
            return;
        }
        for near in tile.tokens.clone().step_by(MAX_TOKENS) {
            let tokens = near..tile.tokens.end.min(near + MAX_TOKENS);
            // The fewer, the fewer sums are cleared.
            match tokens.len() {
                1 => self.tokens_of::<1>(set, &tile, tokens, out),
                2..=4 => self.tokens_of::<4>(set, &tile, tokens, out),
                5..=16 => self.tokens_of::<16>(set, &tile, tokens, out),
                _ => self.tokens_of::<MAX_TOKENS>(set, &tile, tokens, out),
            }
        }
    }

    /// The reference path: weights widened to f32, activations as they are.
    fn compute_widened(&self, set: &KernelSet, Tile { panels, tokens }: Tile, out: &Disjoint<f32>) {
        let WeightMatrix { rows, cols, .. } = self.weights;
        let mut wide = vec![0.0; cols];
        let mut sums = [Sums::default(); 1];
        for row in panels.start * ROW_GROUP..rows.min(panels.end * ROW_GROUP) {
            widen_row(self.weights, row, &mut wide);
            let panel = Panel::of_floats(&wide);
            for t in tokens.clone() {
                let x = self.x.values(self.pick.map_or(t, |pick| pick[t] as usize));
                (set.floats)(&[panel], &[x], &mut sums);
                // SAFETY: every tile belongs to one task, and only its results are written here.
                let out = unsafe { out.slice(t * rows + row, 1) };
                out[0] = sums[0][0];
            }
        }
    }

    /// The results of a tile for some of its tokens, at most `T`.
    fn tokens_of<const T: usize>(&self, set: &KernelSet, tile: &Tile, tokens: Range<usize>, out: &Disjoint<f32>) {
        let (first, count) = (tokens.start, tokens.len());
        let token = |t: usize| self.pick.map_or(first + t, |pick| pick[first + t] as usize);
        if self.weights.kind.is_float() {
            let x: [&[f32]; T] = std::array::from_fn(|t| if t < count { self.x.values(token(t)) } else { &[] });
            self.in_two_places::<_, T>(set.floats, tile, first, &x[..count], out);
        } else {
            let x: [&[Block]; T] = std::array::from_fn(|t| if t < count { self.x.blocks(token(t)) } else { &[] });
            self.in_two_places::<_, T>(set.blocks, tile, first, &x[..count], out);
        }
    }

    /// The results of a tile, whose weights are read in several places at a time, for the tokens `x` from number
    /// `first` on.
    fn in_two_places<X, const T: usize>(
        &self,
        kernel: fn(&[Panel], &[&[X]], &mut [Sums]),
        tile: &Tile,
        first: usize,
        x: &[&[X]],
        out: &Disjoint<f32>,
    ) {
        let Tile { panels, tokens } = tile;
        let (stored, step) = (self.weights.panels(), panels.len().div_ceil(MAX_PANELS));
        let panel = |index: usize| {
            let panel = stored.get(index);
            // For later tokens the next panel is in the cache already.
            if first == tokens.start { panel } else { Panel { next: &[], ..panel } }
        };
        let mut sums = [[Sums::default(); T]; MAX_PANELS];
        let sums = sums.as_flattened_mut();
        for index in panels.start..panels.start + step {
            let both = [index, index + step];
            let count = if both[1] < panels.end { MAX_PANELS } else { 1 };
            let (both, sums) = (&both[..count], &mut sums[..count * x.len()]);
            match *both {
                [a, b] => kernel(&[panel(a), panel(b)], x, sums),
                _ => kernel(&[panel(index)], x, sums),
            }
            for (index, sums) in both.iter().zip(sums.chunks(x.len())) {
                self.store(*index, first, sums, out);
            }
        }
    }

    /// Stores the sums of a panel, times the scale of the matrix, for the tokens from number `first` on.
    fn store(&self, panel: usize, first: usize, sums: &[Sums], out: &Disjoint<f32>) {
        let row = panel * ROW_GROUP;
        let rows = ROW_GROUP.min(self.weights.rows - row);
        for (t, sums) in sums.iter().enumerate() {
            // SAFETY: every tile belongs to one task, and only its results are written here.
            let out = unsafe { out.slice((first + t) * self.weights.rows + row, rows) };
            match <&mut Sums>::try_from(&mut *out) {
                // A copy of known length is one instruction.
                Ok(out) => *out = *sums,
                Err(_) => out.copy_from_slice(&sums[..rows]),
            }
            if self.weights.scale != 1.0 {
                out.iter_mut().for_each(|value| *value *= self.weights.scale);
            }
        }
    }
}

/// The products as all threads see them: everything can be read, and outputs are written through [`Disjoint`].
struct SharedProducts<'a, 'b> {
    first: *mut Product<'a>,
    len: usize,
    /// For each product, the number of tasks up to its last.
    ends: [u32; MAX_PRODUCTS],
    products: PhantomData<&'b mut [Product<'a>]>,
}

// SAFETY: all shared parts are Sync, except the outputs, which are f32 and written in disjoint ranges.
unsafe impl Sync for SharedProducts<'_, '_> {}

impl<'a, 'b> SharedProducts<'a, 'b> {
    fn new(products: &'b mut [Product<'a>], share: usize) -> Self {
        let (mut ends, mut end) = ([0; MAX_PRODUCTS], 0);
        for (product, at) in products.iter().zip(&mut ends) {
            end += product.division(share).tasks() as u32;
            *at = end;
        }
        SharedProducts { first: products.as_mut_ptr(), len: products.len(), ends, products: PhantomData }
    }

    fn tasks(&self) -> usize {
        self.len.checked_sub(1).map_or(0, |last| self.ends[last] as usize)
    }

    /// Of task number `task` among the tasks of all products: its product, its number within that product, and the
    /// output.
    fn find(&self, task: usize) -> (&Product<'a>, usize, Disjoint<'_, f32>) {
        let i = self.ends[..self.len].partition_point(|end| *end as usize <= task);
        assert!(i < self.len, "the task number is below the sum of all tasks");
        let before = i.checked_sub(1).map_or(0, |i| self.ends[i] as usize);
        // SAFETY: inside the slice, which is borrowed while this value lives; there is no unique reference to it, and
        // none to the values of the output is created here.
        let (product, out) = unsafe { (&*self.first.add(i), Disjoint::from_raw(&raw mut *(*self.first.add(i)).out)) };
        (product, task - before, out)
    }
}

#[cfg(test)]
mod tests;
