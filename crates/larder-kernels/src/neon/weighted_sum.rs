//! Weighted sums of rows of floats.
#![allow(unsafe_code)]

use std::arch::aarch64::*;

use super::floats::{four, one};
use crate::kernel_set::StridedRows;

/// Columns that are summed at once; their sums leave enough registers for the values that are added.
const STRIP: usize = 64;

/// Adds `factors[i] · rows[i]` to `out`, one row after the other, in strips of columns that fit the registers.
///
/// # Safety
/// There are as many rows of `KIND` as factors, each with at least as many values as `out`.
#[target_feature(enable = "neon")]
pub unsafe fn rows<const KIND: u8>(rows: &StridedRows, factors: &[f32], out: &mut [f32]) {
    let (strips, rest) = out.as_chunks_mut::<STRIP>();
    let (fours, tail) = rest.as_chunks_mut::<4>();
    let (body, whole) = (STRIP * strips.len(), STRIP * strips.len() + 4 * fours.len());
    // SAFETY: as the caller guarantees.
    unsafe {
        for (column, strip) in (0..).step_by(STRIP).zip(strips) {
            columns::<KIND, { STRIP / 4 }>(rows, factors, column, strip);
        }
        for (column, four_columns) in (body..).step_by(4).zip(fours) {
            columns::<KIND, 1>(rows, factors, column, four_columns);
        }
        for (column, out) in (whole..).zip(tail) {
            for (i, factor) in factors.iter().enumerate() {
                *out += factor * one::<KIND>(rows.bytes.as_ptr().add(i * rows.row_bytes), column);
            }
        }
    }
}

/// As [`rows`], for `4 · N` columns from `column` on.
#[target_feature(enable = "neon")]
#[inline]
unsafe fn columns<const KIND: u8, const N: usize>(rows: &StridedRows, factors: &[f32], column: usize, out: &mut [f32]) {
    // SAFETY: the output has `4 · N` columns.
    let mut sums: [_; N] = std::array::from_fn(|i| unsafe { vld1q_f32(out.as_ptr().add(4 * i)) });
    for (i, factor) in factors.iter().enumerate() {
        let row = rows.bytes.as_ptr().wrapping_add(i * rows.row_bytes);
        for (column, sum) in (column..).step_by(4).zip(&mut sums) {
            // SAFETY: every row has the columns up to `column + 4`.
            let values = unsafe { four::<KIND>(row, column) };
            *sum = vaddq_f32(*sum, vmulq_n_f32(values, *factor));
        }
    }
    for (i, sum) in sums.into_iter().enumerate() {
        // SAFETY: as above.
        unsafe { vst1q_f32(out.as_mut_ptr().add(4 * i), sum) };
    }
}
