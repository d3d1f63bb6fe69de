//! The operations of a step on the CPU. Each is computed at once, by tasks of a fork-join where it is more than one
//! task's work, and its result lies in the workspace.

mod attention;
mod cca;
mod gather;
mod hyper_connections;
mod matmul;
mod pages;
mod recurrent;
mod sampling;
#[cfg(test)]
mod tests;
mod topk;
mod workspace;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use larder_kernels::{InputBuffer, ThreadPool, tanh};
use parking_lot::{Mutex, MutexGuard};

use crate::compute::{ComputeClocks, RowValues};
use crate::device::Place;
use crate::error::{ModelError, Result};
use crate::fake::{FakeAttention, FakeProducts};
use crate::ops::{Activation, Few, GateFunction, GateOrder, NormGate, Ops, Rows, layer_norm_row, rms_row};
use crate::weights::PlacedMatrix;
pub use gather::gather_bytes;
pub use pages::CpuPages;
use sampling::Sampling;
use workspace::Workspace;
pub use workspace::{HostBuffer, HostRows};

/// The least number of values of a task that adds or multiplies each of them.
const TASK_VALUES: usize = 16 * 1024;
/// The least number of values of a task that computes an activation of each of them.
const TASK_ACTIVATIONS: usize = 4 * 1024;

/// The CPU as a backend of a model's operations.
pub struct CpuOps {
    pool: Arc<ThreadPool>,
    /// Whether activations are not rounded in matmuls with quantised weights.
    exact: bool,
    clocks: Arc<ComputeClocks>,
    pages: Arc<CpuPages>,
    /// Parts that make it the fake of a device, in tests.
    fake: Option<Fake>,
    state: Mutex<State>,
}

/// Parts that make the CPU the fake of a device.
struct Fake {
    products: Arc<FakeProducts>,
    attention: Arc<FakeAttention>,
    /// Every n-th draw is of another token; 0 for none.
    wrong_draws: u64,
    /// The first error since the host waited.
    failed: Mutex<Option<ModelError>>,
}

/// What operations change.
#[derive(Default)]
struct State {
    /// Values that do not change, by id.
    kept: Vec<Vec<f32>>,
    rows: Workspace,
    /// The quantised inputs of matmuls.
    inputs: InputBuffer,
    /// The last choice of rows.
    choice: Vec<Vec<u32>>,
    sampling: Sampling,
}

impl State {
    fn values(&self, rows: Rows) -> &[f32] {
        self.rows.values(rows)
    }

    fn kept(&self, id: usize) -> &[f32] {
        &self.kept[id]
    }
}

impl CpuOps {
    /// On these threads, with KV caches and states in these pages.
    pub(crate) fn new(pool: Arc<ThreadPool>, exact: bool, clocks: Arc<ComputeClocks>, pages: Arc<CpuPages>) -> Self {
        CpuOps { pool, exact, clocks, pages, fake: None, state: Mutex::default() }
    }

    /// The fake of a device with these weights and pages.
    pub fn fake(products: Arc<FakeProducts>, attention: Arc<FakeAttention>) -> Self {
        let pages = attention.pages().clone();
        let fake = Fake { products, attention, wrong_draws: 0, failed: Mutex::default() };
        CpuOps { fake: Some(fake), ..CpuOps::new(ThreadPool::single_threaded().into(), false, Arc::default(), pages) }
    }

    /// Every n-th draw of the fake is of another token.
    pub fn drawing_wrong(mut self, every: u64) -> Self {
        self.fake.iter_mut().for_each(|fake| fake.wrong_draws = every);
        self
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Values of rows that were written so far.
    pub(crate) fn row_values(&self) -> RowValues {
        RowValues { written: self.lock().rows.written(), shared: self.clocks.row_values_shared.load(Relaxed) }
    }

    /// As [`ComputeClocks::shared`].
    fn shared<T>(&self, values: usize, work: impl FnOnce(&ThreadPool) -> T) -> T {
        self.clocks.shared(&self.pool, values, || work(&self.pool))
    }

    /// Shares the values of rows in chunks.
    fn run_chunks(&self, out: &mut HostBuffer, chunk: usize, task: &(dyn Fn(usize, &mut [f32]) + Sync)) {
        self.shared(out.len(), |pool| pool.run_chunks(out.values(), chunk, task));
    }

    /// Shares the values of as many chunks of two buffers.
    fn run_pairs(
        &self,
        (a, a_chunk): (&mut HostBuffer, usize),
        (b, b_chunk): (&mut HostBuffer, usize),
        task: &(impl Fn(usize, &mut [f32], &mut [f32]) + Sync),
    ) {
        self.shared(a.len() + b.len(), |pool| pool.run_pairs((a.values(), a_chunk), (b.values(), b_chunk), task));
    }

    /// New rows of `width` values, made of others: `make` gets the state, the number of a row, and places for it and
    /// some rows behind it.
    fn make_rows(
        &self,
        [rows, width]: [usize; 2],
        task_values: usize,
        make: impl Fn(&State, usize, &mut [f32]) + Sync,
    ) -> Rows {
        let mut state = self.lock();
        let mut out = state.rows.take(rows, width);
        let (some, all) = (task_values.div_ceil(width), &*state);
        self.run_chunks(&mut out, some * width, &|task, out| make(all, task * some, out));
        state.rows.push(out)
    }

    /// `x` changed by `others`, in tasks of `task_values` values: in place, unless it is read elsewhere. `change` gets
    /// the state, the number of a value, and it with some values after it.
    fn change(
        &self,
        x: Rows,
        others: &[Rows],
        task_values: usize,
        change: impl Fn(&State, usize, &mut [f32]) + Sync,
    ) -> Rows {
        let mut state = self.lock();
        let is_read = others.iter().any(|other| other.id == x.id);
        let own = if is_read { None } else { state.rows.take_out(x) };
        let (is_own, mut out) = match own {
            Some(own) => (true, own),
            None => (false, state.rows.take(x.rows, x.width)),
        };
        let all = &*state;
        self.run_chunks(&mut out, task_values, &|task, out| {
            let at = task * task_values;
            if !is_own {
                out.copy_from_slice(part(all.values(x), at, out.len()));
            }
            change(all, at, out);
        });
        if is_own {
            state.rows.put_back(x, out);
            x
        } else {
            state.rows.push(out)
        }
    }
}

/// The part of values that a task gets.
fn part(values: &[f32], at: usize, len: usize) -> &[f32] {
    &values[at..][..len]
}

/// Values of whole rows of `x`, at least `values`.
fn rows_of(x: Rows, values: usize) -> usize {
    values.div_ceil(x.width) * x.width
}

/// `y = x + factor · y`; zero plus the product where the factor is not 1.
fn add_to(x: &[f32], y: &mut [f32], factor: f32) {
    if factor == 1.0 {
        y.iter_mut().zip(x).for_each(|(y, x)| *y += x)
    } else {
        y.iter_mut().zip(x).for_each(|(y, x)| *y = x + (*y * factor + 0.0))
    }
}

impl Ops for CpuOps {
    fn keep(&self, values: &[f32]) -> Result<usize> {
        let mut state = self.lock();
        state.kept.push(values.to_vec());
        Ok(state.kept.len() - 1)
    }

    fn buffer(&self, rows: usize, width: usize) -> HostBuffer {
        self.lock().rows.take(rows, width)
    }

    fn upload(&self, buffer: HostBuffer) -> Result<Rows> {
        Ok(self.lock().rows.push(buffer))
    }

    fn draws(&self) -> bool {
        self.fake.is_some()
    }

    fn place(&self) -> Place {
        if self.fake.is_some() { Place::Device } else { Place::Host }
    }

    fn retain(&self, live: &[Rows]) {
        self.lock().rows.retain(live);
    }

    fn begin_layer(&self) {}

    fn slice(&self, x: Rows, first: usize, rows: usize) -> Result<Rows> {
        Ok(if (first, rows) == (0, x.rows) { x } else { self.lock().rows.slice(x, first..first + rows) })
    }

    fn attend_new(&self, heads: &crate::ops::Heads, tasks: &[&attention::Task]) -> Result<Rows> {
        self.attend_new_heads(heads, tasks)
    }

    fn matmul(&self, x: Rows, weights: &[&PlacedMatrix]) -> Result<Few<Rows>> {
        self.matmul(x, weights)
    }

    fn matmul_heads(&self, x: Rows, heads: &[PlacedMatrix]) -> Result<Rows> {
        self.matmul_heads(x, heads)
    }

    fn combine(&self, act: Activation, gate: Rows, up: Rows) -> Result<Rows> {
        Ok(self.change(gate, &[up], TASK_ACTIVATIONS, |state, at, out| {
            act.combine(out, part(state.values(up), at, out.len()));
        }))
    }

    fn activate(&self, act: Activation, x: Rows) -> Result<Rows> {
        Ok(self.change(x, &[], TASK_ACTIVATIONS, |_, _, out| act.apply(out)))
    }

    fn softcap(&self, x: Rows, cap: f32) -> Result<Rows> {
        Ok(self.change(x, &[], TASK_ACTIVATIONS, |_, _, out| {
            out.iter_mut().for_each(|value| *value = tanh(*value / cap) * cap);
        }))
    }

    fn gate(&self, x: Rows, gates: Rows, function: GateFunction, heads: usize) -> Result<Rows> {
        let (of_value, width) = (gates.width / heads, x.width / heads);
        Ok(self.change(x, &[gates], rows_of(x, TASK_ACTIVATIONS), |state, at, out| {
            let gates = state.values(gates)[at / width * of_value..].chunks_exact(of_value);
            for (out, gates) in out.chunks_exact_mut(width).zip(gates) {
                match *gates {
                    [gate] => {
                        let gate = function.of(gate);
                        out.iter_mut().for_each(|value| *value *= gate);
                    }
                    _ => out.iter_mut().zip(gates).for_each(|(value, gate)| *value *= function.of(*gate)),
                }
            }
        }))
    }

    fn norm_gate(&self, x: Rows, gates: Rows, norm: &NormGate) -> Result<Rows> {
        let NormGate { weight, width, eps, function, order } = *norm;
        Ok(self.change(x, &[gates], rows_of(x, TASK_ACTIVATIONS), |state, at, out| {
            let gates = part(state.values(gates), at, out.len());
            let gate = |out: &mut [f32]| {
                out.iter_mut().zip(gates).for_each(|(value, gate)| *value *= function.of(*gate));
            };
            let normalise = |out: &mut [f32]| {
                let weights = state.kept(weight).chunks_exact(width).cycle();
                out.chunks_exact_mut(width).zip(weights).for_each(|(part, weight)| rms_row(part, weight, eps));
            };
            match order {
                GateOrder::NormFirst => {
                    normalise(out);
                    gate(out);
                }
                GateOrder::GateFirst => {
                    gate(out);
                    normalise(out);
                }
            }
        }))
    }

    fn scale(&self, x: Rows, factor: f32) -> Result<Rows> {
        Ok(self.change(x, &[], TASK_VALUES, |_, _, out| {
            out.iter_mut().for_each(|value| *value = *value * factor + 0.0);
        }))
    }

    fn scale_columns(&self, x: Rows, factors: usize) -> Result<Rows> {
        Ok(self.make_rows([x.rows, x.width], TASK_VALUES, |state, first, out| {
            let (x, factors) = (part(state.values(x), first * x.width, out.len()), state.kept(factors).iter().cycle());
            out.iter_mut().zip(x).zip(factors).for_each(|((out, x), factor)| *out = x * factor);
        }))
    }

    fn add(&self, x: Rows, y: Rows, factor: f32) -> Result<Rows> {
        Ok(self.change(y, &[x], TASK_VALUES, |state, at, out| add_to(&state.values(x)[at..], out, factor)))
    }

    fn add_norm(&self, x: Rows, y: Rows, factor: f32, weight: usize, eps: f64) -> Result<[Rows; 2]> {
        let mut state = self.lock();
        let own = if x.id == y.id { None } else { state.rows.take_out(y) };
        let Some(mut sum) = own else {
            drop(state);
            let sum = self.add(x, y, factor)?;
            return Ok([sum, self.rms_norm(sum, weight, eps)?]);
        };
        let (width, mut out) = (x.width, state.rows.take(x.rows, x.width));
        let (all, some) = (&*state, rows_of(x, TASK_VALUES));
        self.run_pairs((&mut sum, some), (&mut out, some), &|task, sum, out| {
            add_to(&all.values(x)[task * some..], sum, factor);
            out.copy_from_slice(sum);
            out.chunks_exact_mut(width).for_each(|row| rms_row(row, all.kept(weight), eps));
        });
        state.rows.put_back(y, sum);
        Ok([y, state.rows.push(out)])
    }

    fn add_row(&self, x: Rows, row: usize) -> Result<Rows> {
        Ok(self.change(x, &[], rows_of(x, TASK_VALUES), |state, _, out| {
            out.iter_mut().zip(state.kept(row).iter().cycle()).for_each(|(value, y)| *value += y);
        }))
    }

    fn rms_norm(&self, x: Rows, weight: usize, eps: f64) -> Result<Rows> {
        Ok(self.make_rows([x.rows, x.width], TASK_VALUES, |state, first, out| {
            out.copy_from_slice(part(state.values(x), first * x.width, out.len()));
            out.chunks_exact_mut(x.width).for_each(|row| rms_row(row, state.kept(weight), eps));
        }))
    }

    fn layer_norm(&self, x: Rows, [weight, bias]: [usize; 2], eps: f64) -> Result<Rows> {
        Ok(self.make_rows([x.rows, x.width], TASK_VALUES, |state, first, out| {
            out.copy_from_slice(part(state.values(x), first * x.width, out.len()));
            let rows = out.chunks_exact_mut(x.width);
            rows.for_each(|row| layer_norm_row(row, state.kept(weight), state.kept(bias), eps));
        }))
    }

    fn find_best(&self, x: Rows, best: usize) -> Result<Rows> {
        Ok(self.best_of_rows(x, best))
    }

    fn take_out(&self, x: Rows, places: &[u32]) -> Result<Rows> {
        Ok(self.taken_out(x, places))
    }

    fn download(&self, wanted: &[Rows]) -> Result<Few<HostRows>> {
        let mut state = self.lock();
        state.sampling.waits += 1;
        if let Some(error) = self.fake.as_ref().and_then(|fake| fake.failed.lock().take()) {
            return Err(error);
        }
        Ok(wanted.iter().map(|rows| state.rows.shared(*rows)).collect())
    }
}
