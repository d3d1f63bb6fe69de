//! Many matrix products in one fork-join.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ops::Range;

use larder_core::ROW_GROUP;

use crate::disjoint::Disjoint;
use crate::dispatch;
use crate::dot::dot;
use crate::inputs::Inputs;
use crate::kernel_set::{KernelSet, MAX_PANELS, MAX_TOKENS, Sums};
use crate::thread_pool::ThreadPool;
use crate::weights::{Panel, Panels, WeightMatrix, widen_row};

/// The least work for one task, in bytes of weights times tokens: claiming a task takes 0.1 µs, and reading this much
/// from memory 1 µs.
const MIN_TASK_WORK: usize = 16 * 1024;

/// Tasks per thread, so that other threads can take over the share of a thread that is delayed.
const TASKS_PER_THREAD: usize = 8;

/// One product: `out[t, r] = Σ_c weights[r, c] · x[t, c]`.
pub struct Product<'a> {
    /// `[rows, cols]`
    pub weights: WeightMatrix<'a>,
    /// `[any, cols]`. Should be quantised if the weights are. If not, the rows of the weights are widened one by one: a
    /// slow path, kept as the reference for the fast one.
    pub x: &'a Inputs,
    /// The tokens of `x` that take part, in this order; `None` for all of them.
    pub pick: Option<&'a [u32]>,
    /// `[tokens that take part, rows]`
    pub out: &'a mut [f32],
}

/// Computes all products in one fork-join. Allocates nothing, except one widened row per task where weights are quantised
/// and activations are not.
///
/// A result depends on its row and its token only: not on the other tokens, the row order, the number of threads, or the
/// instruction set.
///
/// # Panics
/// If a length does not fit the shapes. They are checked here, once, and nowhere below.
pub fn products(pool: &ThreadPool, products: &mut [Product]) {
    products.iter().for_each(Product::check);
    let work: usize = products.iter().map(Product::work).sum();
    let share = MIN_TASK_WORK.max(work / (pool.threads() * TASKS_PER_THREAD));
    let tasks = products.iter().map(|p| p.tasks(share)).sum();
    let (set, all) = (dispatch::best(), SharedProducts::new(products));
    pool.run(tasks, &|task| {
        let (product, task, out) = all.find(task, share);
        let panels = product.panels_per_task(share);
        let first = task * panels;
        product.compute(set, first..product.weights.panels().count().min(first + panels), &out);
    });
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

    /// Work in bytes of weights times tokens.
    fn work(&self) -> usize {
        self.weights.bytes.len() * self.tokens()
    }

    fn panels_per_task(&self, share: usize) -> usize {
        let panel_work = ROW_GROUP * self.weights.panels().row_bytes * self.tokens();
        (share / panel_work.max(1)).max(1).next_multiple_of(MAX_PANELS)
    }

    fn tasks(&self, share: usize) -> usize {
        match self.tokens() {
            0 => 0,
            _ => self.weights.panels().count().div_ceil(self.panels_per_task(share)),
        }
    }

    /// The results of some panels for all tokens.
    fn compute(&self, set: &KernelSet, panels: Range<usize>, out: &Disjoint<f32>) {
        let tokens = self.tokens();
        if !self.weights.kind.is_float() && !self.x.is_quantised() {
            return self.compute_widened(panels, out);
        }
        let stored = self.weights.panels();
        // Reads weights in several places at a time.
        let step = panels.len().div_ceil(MAX_PANELS);
        for near in (0..tokens).step_by(MAX_TOKENS) {
            let tokens = near..tokens.min(near + MAX_TOKENS);
            for first in panels.start..panels.start + step {
                let these: [_; MAX_PANELS] = std::array::from_fn(|i| (first + i * step).min(panels.end - 1));
                let these = &these[..(first..panels.end).step_by(step).len()];
                // The fewer, the fewer sums are cleared.
                match tokens.len() {
                    1 => self.tile::<1>(set, &stored, these, tokens.clone(), out),
                    2..=4 => self.tile::<4>(set, &stored, these, tokens.clone(), out),
                    5..=16 => self.tile::<16>(set, &stored, these, tokens.clone(), out),
                    _ => self.tile::<MAX_TOKENS>(set, &stored, these, tokens.clone(), out),
                }
            }
        }
    }

    /// The reference path: weights widened to f32, activations as they are.
    fn compute_widened(&self, panels: Range<usize>, out: &Disjoint<f32>) {
        let rows = self.weights.rows;
        let mut wide = vec![0.0; self.weights.cols];
        for row in panels.start * ROW_GROUP..rows.min(panels.end * ROW_GROUP) {
            widen_row(self.weights, row, &mut wide);
            for t in 0..self.tokens() {
                let x = self.x.values(self.pick.map_or(t, |pick| pick[t] as usize));
                // SAFETY: every panel belongs to one task, and only rows of its panels are written here.
                let out = unsafe { out.slice(t * rows + row, 1) };
                out[0] = dot(&wide, x);
            }
        }
    }

    /// The results of some panels for some tokens, at most [`MAX_PANELS`] and `T`.
    #[inline]
    fn tile<const T: usize>(
        &self,
        set: &KernelSet,
        stored: &Panels,
        panels: &[usize],
        tokens: Range<usize>,
        out: &Disjoint<f32>,
    ) {
        let stored: [_; MAX_PANELS] = std::array::from_fn(|i| {
            let panel = stored.get(panels[i.min(panels.len() - 1)]);
            // For later tokens the next panel is in the cache already.
            if tokens.start == 0 { panel } else { Panel { next: &[], ..panel } }
        });
        let (stored, count) = (&stored[..panels.len()], tokens.len());
        let token = |t: usize| self.pick.map_or(t, |pick| pick[t] as usize);
        let mut sums = [[Sums::default(); T]; MAX_PANELS];
        let sums = &mut sums.as_flattened_mut()[..panels.len() * count];
        if self.weights.kind.is_float() {
            let mut x = [&[][..]; T];
            x.iter_mut().zip(tokens.clone()).for_each(|(x, t)| *x = self.x.values(token(t)));
            (set.floats)(stored, &x[..count], sums);
        } else {
            let mut x = [&[][..]; T];
            x.iter_mut().zip(tokens.clone()).for_each(|(x, t)| *x = self.x.blocks(token(t)));
            (set.blocks)(stored, &x[..count], sums);
        }
        for ((index, panel), sums) in panels.iter().zip(stored).zip(sums.chunks(count)) {
            for (t, sums) in tokens.clone().zip(sums) {
                let at = t * self.weights.rows + index * ROW_GROUP;
                // SAFETY: every panel belongs to one task, and only its rows are written here.
                unsafe { out.slice(at, panel.rows) }.copy_from_slice(&sums[..panel.rows]);
            }
        }
    }
}

/// The products as all threads see them: everything can be read, and outputs are written through [`Disjoint`].
struct SharedProducts<'a, 'b> {
    first: *mut Product<'a>,
    len: usize,
    products: PhantomData<&'b mut [Product<'a>]>,
}

// SAFETY: all shared parts are Sync, except the outputs, which are f32 and written in disjoint ranges.
unsafe impl Sync for SharedProducts<'_, '_> {}

impl<'a, 'b> SharedProducts<'a, 'b> {
    fn new(products: &'b mut [Product<'a>]) -> Self {
        SharedProducts { first: products.as_mut_ptr(), len: products.len(), products: PhantomData }
    }

    /// Of task number `task` among the tasks of all products: its product, its number within that product, and the output.
    fn find(&self, mut task: usize, share: usize) -> (&Product<'a>, usize, Disjoint<'_, f32>) {
        for i in 0..self.len {
            // SAFETY: inside the slice, which is borrowed while this value lives; there is no unique reference to it.
            let product = unsafe { &*self.first.add(i) };
            let tasks = product.tasks(share);
            if task < tasks {
                // SAFETY: as above. No reference to the values of the output is created here.
                let out = unsafe { Disjoint::from_raw(&raw mut *(*self.first.add(i)).out) };
                return (product, task, out);
            }
            task -= tasks;
        }
        unreachable!("the task number is below the sum of all tasks")
    }
}

#[cfg(test)]
mod tests;
