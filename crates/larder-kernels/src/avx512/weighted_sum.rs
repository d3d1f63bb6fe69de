//! Weighted sums of rows of floats.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::floats::{one, sixteen};
use crate::kernel_set::StridedRows;

/// Columns that are summed at once; their sums leave enough registers for the values that are added.
const STRIP: usize = 128;

/// Adds `factors[i] · rows[i]` to `out`, one row after the other, in strips of columns that fit the registers.
///
/// # Safety
/// There are as many rows of `KIND` as factors, each with at least as many values as `out`.
#[target_feature(enable = "avx512f")]
pub unsafe fn rows<const KIND: u8>(rows: StridedRows, factors: &[f32], out: &mut [f32]) {
    let (strips, rest) = out.as_chunks_mut::<STRIP>();
    let (sixteens, tail) = rest.as_chunks_mut::<16>();
    let (body, whole) = (STRIP * strips.len(), STRIP * strips.len() + 16 * sixteens.len());
    // SAFETY: as the caller guarantees.
    unsafe {
        for (column, strip) in (0..).step_by(STRIP).zip(strips) {
            columns::<KIND, { STRIP / 16 }>(&rows, factors, column, strip);
        }
        for (column, sixteen) in (body..).step_by(16).zip(sixteens) {
            columns::<KIND, 1>(&rows, factors, column, sixteen);
        }
        for (column, out) in (whole..).zip(tail) {
            for (i, factor) in factors.iter().enumerate() {
                *out += factor * one::<KIND>(rows.bytes.as_ptr().add(i * rows.row_bytes), column);
            }
        }
    }
}

/// As [`rows`], for `16 · N` columns from `column` on.
///
/// # Safety
/// As [`rows`]; the output has these columns.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn columns<const KIND: u8, const N: usize>(rows: &StridedRows, factors: &[f32], column: usize, out: &mut [f32]) {
    // SAFETY: the output has `16 · N` columns.
    let mut sums: [_; N] = std::array::from_fn(|i| unsafe { _mm512_loadu_ps(out.as_ptr().add(16 * i)) });
    for (i, factor) in factors.iter().enumerate() {
        let (row, factor) = (rows.bytes.as_ptr().wrapping_add(i * rows.row_bytes), _mm512_set1_ps(*factor));
        for (column, sum) in (column..).step_by(16).zip(&mut sums) {
            // SAFETY: every row has the columns up to `column + 16`.
            let values = unsafe { sixteen::<KIND>(row, column) };
            *sum = _mm512_add_ps(*sum, _mm512_mul_ps(factor, values));
        }
    }
    for (i, sum) in sums.into_iter().enumerate() {
        // SAFETY: as above.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr().add(16 * i), sum) };
    }
}
