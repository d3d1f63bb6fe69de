//! Weighted sums of rows of floats.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::floats::{eight, one};
use crate::kernel_set::StridedRows;

/// Adds `factors[i] · rows[i]` to `out`, one row after the other, in strips of columns that fit the registers.
///
/// # Safety
/// There are as many rows of `KIND` as factors, each with at least as many values as `out`.
#[target_feature(enable = "avx2,f16c")]
pub unsafe fn rows<const KIND: u8>(rows: StridedRows, factors: &[f32], out: &mut [f32]) {
    let (strips, rest) = out.as_chunks_mut::<64>();
    let mut column = 0;
    for strip in strips {
        // SAFETY: as the caller guarantees.
        unsafe { columns::<KIND, 8>(&rows, factors, column, strip) };
        column += 64;
    }
    let (eights, rest) = rest.as_chunks_mut::<8>();
    for eight_columns in eights {
        // SAFETY: as the caller guarantees.
        unsafe { columns::<KIND, 1>(&rows, factors, column, eight_columns) };
        column += 8;
    }
    for (c, out) in (column..).zip(rest) {
        for (i, factor) in factors.iter().enumerate() {
            // SAFETY: as the caller guarantees.
            *out += factor * unsafe { one::<KIND>(rows.bytes.as_ptr().add(i * rows.row_bytes), c) };
        }
    }
}

/// As [`rows`], for `8 · N` columns from `column` on.
#[target_feature(enable = "avx2,f16c")]
#[inline]
unsafe fn columns<const KIND: u8, const N: usize>(rows: &StridedRows, factors: &[f32], column: usize, out: &mut [f32]) {
    let mut sums = [_mm256_setzero_ps(); N];
    for (i, sum) in sums.iter_mut().enumerate() {
        // SAFETY: the output has `8 · N` columns.
        *sum = unsafe { _mm256_loadu_ps(out.as_ptr().add(8 * i)) };
    }
    let mut row = rows.bytes.as_ptr();
    for factor in factors {
        let factor = _mm256_set1_ps(*factor);
        for (i, sum) in sums.iter_mut().enumerate() {
            // SAFETY: every row has the columns up to `column + 8 · N`.
            let values = unsafe { eight::<KIND>(row, column + 8 * i) };
            *sum = _mm256_add_ps(*sum, _mm256_mul_ps(factor, values));
        }
        row = row.wrapping_add(rows.row_bytes);
    }
    for (i, sum) in sums.iter().enumerate() {
        // SAFETY: as above.
        unsafe { _mm256_storeu_ps(out.as_mut_ptr().add(8 * i), *sum) };
    }
}
