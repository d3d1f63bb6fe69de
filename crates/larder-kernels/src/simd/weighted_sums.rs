//! Weighted sums of rows of floats.
#![allow(unsafe_code)]
// The number of a register or of an output is the index of several arrays.
#![allow(clippy::needless_range_loop)]

use larder_core::NumberFormat;

use super::{BF16, F16, F32, Simd, Task};
use crate::kernel_set::StridedRows;
use crate::portable;

/// Adds `factors[n][i] · rows[i]` to `out[n]`, one row after the other. Up to six outputs are computed at a time, so
/// that a value is loaded and widened once for them, in strips of columns whose sums fit the registers.
///
/// # Panics
/// If lengths do not fit.
pub fn weighted_sums<S: Simd>(simd: S, rows: StridedRows, factors: &[&[f32]], out: &mut [&mut [f32]]) {
    rows.check(factors, out);
    match rows.kind {
        NumberFormat::F32 => simd.run(WeightedSums::<F32> { rows, factors, out }),
        NumberFormat::F16 => simd.run(WeightedSums::<F16> { rows, factors, out }),
        _ => simd.run(WeightedSums::<BF16> { rows, factors, out }),
    }
}

/// Weighted sums of rows of `KIND`, whose lengths were checked.
struct WeightedSums<'a, 'b, const KIND: u8> {
    rows: StridedRows<'a>,
    factors: &'a [&'a [f32]],
    out: &'a mut [&'b mut [f32]],
}

impl<S: Simd, const KIND: u8> Task<S> for WeightedSums<'_, '_, KIND> {
    #[inline(always)]
    fn run(self, simd: S) {
        // Each size that is left out is one function less to compile.
        let most = if S::REGISTERS == 32 { 6 } else { 4 };
        let (mut factors, mut out) = (self.factors, self.out);
        while !out.is_empty() {
            let count = out.len().min(most);
            let (now, behind) = factors.split_at(count);
            let (to, left) = out.split_at_mut(count);
            if const { S::REGISTERS == 32 } && count == 6 {
                several::<S, KIND, 6, 4>(simd, self.rows, now, to);
            } else if const { S::REGISTERS == 32 } && count == 5 {
                several::<S, KIND, 5, 4>(simd, self.rows, now, to);
            } else if const { S::REGISTERS == 32 } && count == 4 {
                several::<S, KIND, 4, 4>(simd, self.rows, now, to);
            } else if const { S::REGISTERS != 32 } && count == 4 {
                several::<S, KIND, 4, 2>(simd, self.rows, now, to);
            } else if count == 3 {
                several::<S, KIND, 3, 2>(simd, self.rows, now, to);
            } else if count == 2 {
                several::<S, KIND, 2, 4>(simd, self.rows, now, to);
            } else {
                several::<S, KIND, 1, 8>(simd, self.rows, now, to);
            }
            (factors, out) = (behind, left);
        }
    }
}

/// The sums of `N` outputs, in strips of `W` registers, then of one; the columns behind them one by one.
#[inline(always)]
fn several<S: Simd, const KIND: u8, const N: usize, const W: usize>(
    simd: S,
    rows: StridedRows,
    factors: &[&[f32]],
    out: &mut [&mut [f32]],
) {
    let factors: &[&[f32]; N] = factors.as_array().expect("as many factors as outputs");
    let width = out[0].len();
    let (strips, whole) = (width / (W * S::LANES) * (W * S::LANES), width / S::LANES * S::LANES);
    for column in (0..strips).step_by(W * S::LANES) {
        columns::<S, KIND, N, W>(simd, rows, factors, column, out);
    }
    for column in (strips..whole).step_by(S::LANES) {
        columns::<S, KIND, N, 1>(simd, rows, factors, column, out);
    }
    if whole < width {
        let rest = StridedRows { bytes: &rows.bytes[whole * rows.kind.block_bytes()..], ..rows };
        for (factors, out) in factors.iter().zip(out) {
            portable::weighted_sums(rest, &[factors], &mut [&mut out[whole..]]);
        }
    }
}

/// The sums of `N` outputs in `W` registers of columns from `column` on, which all outputs have.
#[inline(always)]
fn columns<S: Simd, const KIND: u8, const N: usize, const W: usize>(
    simd: S,
    rows: StridedRows,
    factors: &[&[f32]; N],
    column: usize,
    out: &mut [&mut [f32]],
) {
    let mut sums = [[simd.splat(0.0); W]; N];
    for n in 0..N {
        for j in 0..W {
            let at = &out[n][column + j * S::LANES..][..S::LANES];
            // SAFETY: as many values as there are lanes.
            sums[n][j] = unsafe { simd.floats_at::<F32>(at.as_ptr().cast()) };
        }
    }
    let mut row = rows.bytes.as_ptr().wrapping_add(column * rows.kind.block_bytes());
    for i in 0..factors[0].len() {
        let mut values = [simd.splat(0.0); W];
        for j in 0..W {
            // SAFETY: there is a row for each factor, and all rows have the columns that the outputs have.
            values[j] = unsafe { simd.floats_at::<KIND>(row.add(j * S::LANES * rows.kind.block_bytes())) };
        }
        for n in 0..N {
            // SAFETY: all outputs have the same number of factors.
            let factor = simd.splat(unsafe { *factors[n].get_unchecked(i) });
            for j in 0..W {
                sums[n][j] = simd.mul_add(factor, values[j], sums[n][j]);
            }
        }
        row = row.wrapping_add(rows.row_bytes);
    }
    for n in 0..N {
        for j in 0..W {
            simd.store(sums[n][j], &mut out[n][column + j * S::LANES..]);
        }
    }
}
