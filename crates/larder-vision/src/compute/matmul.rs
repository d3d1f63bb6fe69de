//! Products of matrices. Each result is one chain of fused multiply-adds over its whole length in order, so it
//! depends on its row and its column only, and has the same bits with every instruction set.

use std::ops::Range;

use larder_kernels::{Arithmetic, ThreadPool, widest};

use super::panels::{ColumnPanels, PANEL};

/// Rows of a tile: with sixteen columns, its sums fill the registers of AVX2.
pub const TILE: usize = 6;
/// Values of a sum that are taken at a time, so that a panel of them stays in the first cache.
const STRETCH: usize = 256;
/// The most rows of a task: with a stretch of each, they stay in the second cache.
const TASK_ROWS: usize = 16 * TILE;
/// Tasks per thread, so that other threads can take over the share of a thread that is delayed.
const TASKS_PER_THREAD: usize = 4;

/// A linear layer.
pub struct TowerLinear {
    /// The matrix.
    pub weights: ColumnPanels,
    /// A summand for each column; empty for nothing.
    pub bias: Vec<f32>,
}

impl TowerLinear {
    /// Bytes of memory.
    pub fn bytes(&self) -> usize {
        self.weights.bytes() + size_of_val(self.bias.as_slice())
    }

    /// Applies it to the rows of `x`. The rows of a task are given to `then` with the number of the first one.
    pub fn apply(&self, pool: &ThreadPool, x: &[f32], then: &(dyn Fn(usize, &mut [f32]) + Sync)) -> Vec<f32> {
        let (depth, columns) = (self.weights.depth(), self.weights.columns());
        let rows = x.len() / depth;
        let mut out = vec![0.0; rows * columns];
        let some = task_rows(rows, pool.threads());
        pool.run_chunks(&mut out, some * columns, &|number, out| {
            let x = &x[number * some * depth..][..out.len() / columns * depth];
            matmul(x, depth, &self.weights, &self.bias, out);
            then(number * some, out);
        });
        out
    }
}

/// Rows of a task: whole tiles, as few as give each thread some tasks.
fn task_rows(rows: usize, threads: usize) -> usize {
    rows.div_ceil(threads * TASKS_PER_THREAD).next_multiple_of(TILE).min(TASK_ROWS)
}

/// `out[r, c] = bias[c] + Σ x[r, i] · weights[i, c]` on this thread.
///
/// `out` has as many columns as the weights, and `x` as many rows as `out`.
pub fn matmul(x: &[f32], depth: usize, weights: &ColumnPanels, bias: &[f32], out: &mut [f32]) {
    widest(Matmul { x, depth, weights, bias, out });
}

struct Matmul<'a> {
    x: &'a [f32],
    depth: usize,
    weights: &'a ColumnPanels,
    bias: &'a [f32],
    out: &'a mut [f32],
}

impl Arithmetic for Matmul<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Matmul { x, depth, weights, bias, out } = self;
        let columns = weights.columns();
        let tiles = (out.len() / columns).div_ceil(TILE);
        let mut rows = vec![[0.0f32; TILE]; tiles * STRETCH.min(depth)];
        let mut wide = vec![[0.0f32; PANEL]; STRETCH.min(depth)];
        fill_with_bias(out, columns, bias);
        for first in (0..depth).step_by(STRETCH) {
            let stretch = first..depth.min(first + STRETCH);
            interleave(x, depth, stretch.clone(), &mut rows);
            for panel in 0..weights.count() {
                let wide = weights.widened(panel, first, stretch.len(), &mut wide);
                for (tile, rows) in rows.chunks_exact(stretch.len()).take(tiles).enumerate() {
                    let at = tile * TILE * columns + panel * PANEL;
                    add_tile(rows, wide, &mut out[at..], columns, columns - panel * PANEL);
                }
            }
        }
    }
}

#[inline(always)]
fn fill_with_bias(out: &mut [f32], columns: usize, bias: &[f32]) {
    if bias.is_empty() {
        out.fill(0.0);
    } else {
        out.chunks_exact_mut(columns).for_each(|row| row.copy_from_slice(bias));
    }
}

/// For each tile of rows: the values of a stretch, those of the rows side by side. Missing rows are zeros.
#[inline(always)]
fn interleave(x: &[f32], depth: usize, stretch: Range<usize>, rows: &mut [[f32; TILE]]) {
    for (tile, rows) in x.chunks(TILE * depth).zip(rows.chunks_exact_mut(stretch.len())) {
        for (r, row) in tile.chunks_exact(depth).enumerate() {
            rows.iter_mut().zip(&row[stretch.clone()]).for_each(|(values, value)| values[r] = *value);
        }
    }
}

/// Adds a stretch of products to a tile of results, of which the matrix has `columns` and the tile at most `left`.
#[inline(always)]
fn add_tile(rows: &[[f32; TILE]], wide: &[[f32; PANEL]], out: &mut [f32], columns: usize, left: usize) {
    let (width, height) = (left.min(PANEL), out.len().saturating_sub(left.min(PANEL)) / columns + 1);
    let mut sums = [[0.0f32; PANEL]; TILE];
    if width == PANEL && height >= TILE {
        for (r, sums) in sums.iter_mut().enumerate() {
            *sums = *out[r * columns..].first_chunk().expect("a whole panel");
        }
        let sums = multiply(rows, wide, sums);
        for (r, sums) in sums.iter().enumerate() {
            *out[r * columns..].first_chunk_mut().expect("a whole panel") = *sums;
        }
        return;
    }
    for (r, sums) in sums.iter_mut().enumerate().take(height) {
        sums[..width].copy_from_slice(&out[r * columns..][..width]);
    }
    let sums = multiply(rows, wide, sums);
    for (r, sums) in sums.iter().enumerate().take(height) {
        out[r * columns..][..width].copy_from_slice(&sums[..width]);
    }
}

#[inline(always)]
fn multiply(rows: &[[f32; TILE]], wide: &[[f32; PANEL]], mut sums: [[f32; PANEL]; TILE]) -> [[f32; PANEL]; TILE] {
    for (values, wide) in rows.iter().zip(wide) {
        for r in 0..TILE {
            for c in 0..PANEL {
                sums[r][c] = values[r].mul_add(wide[c], sums[r][c]);
            }
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(count: usize, seed: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * 7919 + seed * 104_729) % 1009) as f32 / 1009.0 - 0.5).collect()
    }

    #[test]
    fn each_result_is_one_chain_of_multiply_adds() {
        for (rows, depth, columns) in [(1, 1, 1), (5, 300, 17), (6, 256, 16), (13, 700, 40), (97, 33, 31)] {
            let (x, w, bias) = (values(rows * depth, 1), values(columns * depth, 2), values(columns, 3));
            let linear = TowerLinear { weights: ColumnPanels::from_f32(&w, depth), bias: bias.clone() };
            for threads in [1, 3] {
                let pool = ThreadPool::new(threads, false).unwrap();
                let out = linear.apply(&pool, &x, &|_, _| ());
                for (i, got) in out.iter().enumerate() {
                    let (r, c) = (i / columns, i % columns);
                    let chain = |sum: f32, i: usize| x[r * depth + i].mul_add(w[c * depth + i], sum);
                    assert_eq!(*got, (0..depth).fold(bias[c], chain), "{rows} x {depth} x {columns} at {r}, {c}");
                }
            }
        }
    }

    #[test]
    fn stored_halves_give_the_bits_of_their_values() {
        let (depth, columns) = (260, 21);
        let (x, w) = (values(7 * depth, 1), values(columns * depth, 2));
        let pool = ThreadPool::single_threaded();
        let bias = Vec::new();
        let halves: Vec<half::f16> = w.iter().map(|v| half::f16::from_f32(*v)).collect();
        let wide: Vec<f32> = halves.iter().map(|v| v.to_f32()).collect();
        let bits: Vec<u16> = halves.iter().map(|v| v.to_bits()).collect();
        let of = |weights| TowerLinear { weights, bias: bias.clone() }.apply(&pool, &x, &|_, _| ());
        assert_eq!(of(ColumnPanels::from_f16(&bits, depth)), of(ColumnPanels::from_f32(&wide, depth)));
        let bfloats: Vec<half::bf16> = w.iter().map(|v| half::bf16::from_f32(*v)).collect();
        let wide: Vec<f32> = bfloats.iter().map(|v| v.to_f32()).collect();
        let bits: Vec<u16> = bfloats.iter().map(|v| v.to_bits()).collect();
        assert_eq!(of(ColumnPanels::from_bf16(&bits, depth)), of(ColumnPanels::from_f32(&wide, depth)));
    }

    /// Rates of the best of many calls on one thread, so that other work of the machine counts little.
    #[test]
    #[ignore = "measures the machine"]
    fn a_task_reaches_half_of_the_peak() {
        let peak = larder_kernels::Peak::all()[0].rate(&ThreadPool::single_threaded());
        let Some(peak) = peak else { return };
        for (depth, columns) in [(1152, 4304), (4304, 1152), (1152, 3456), (72, 4096), (4096, 72)] {
            let (x, w) = (values(TASK_ROWS * depth, 1), values(columns * depth, 2));
            let bits: Vec<u16> = w.iter().map(|v| (v.to_bits() >> 16) as u16).collect();
            for (weights, name) in
                [(ColumnPanels::from_f32(&w, depth), "f32"), (ColumnPanels::from_bf16(&bits, depth), "bf16")]
            {
                let mut out = vec![0.0; TASK_ROWS * columns];
                let mut seconds = f64::INFINITY;
                for _ in 0..60 {
                    let start = std::time::Instant::now();
                    matmul(&x, depth, &weights, &[], &mut out);
                    seconds = seconds.min(start.elapsed().as_secs_f64());
                }
                let rate = 2.0 * (TASK_ROWS * depth * columns) as f64 / seconds;
                let share = rate / peak;
                println!("{depth} x {columns} {name}: {:.1} of {:.1} GFLOP/s", rate / 1e9, peak / 1e9);
                assert!(share > 0.5, "{depth} x {columns} {name} has {share:.2} of the peak");
            }
        }
    }
}
