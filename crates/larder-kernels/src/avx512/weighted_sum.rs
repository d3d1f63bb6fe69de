//! Weighted sums of rows of floats.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::floats::{one, sixteen};
use crate::kernel_set::StridedRows;

/// Adds `factors[i] · rows[i]` to each output with its own factors, one row after the other. Up to four outputs are computed at a
/// time, so that a value is loaded and widened once for them, in strips of columns that fit the registers.
///
/// # Safety
/// There are as many rows of `KIND` as factors of each output, and outputs are of one length, which no row is shorter than.
#[target_feature(enable = "avx512f")]
pub unsafe fn rows<const KIND: u8>(rows: &StridedRows, factors: &[&[f32]], out: &mut [&mut [f32]]) {
    for (factors, out) in factors.chunks(4).zip(out.chunks_mut(4)) {
        // SAFETY: as the caller guarantees.
        unsafe {
            match (factors, out) {
                ([a], [x]) => several::<KIND, 1, 8>(rows, [a], [x]),
                ([a, b], [x, y]) => several::<KIND, 2, 4>(rows, [a, b], [x, y]),
                ([a, b, c], [x, y, z]) => several::<KIND, 3, 4>(rows, [a, b, c], [x, y, z]),
                ([a, b, c, d], [x, y, z, u]) => several::<KIND, 4, 4>(rows, [a, b, c, d], [x, y, z, u]),
                _ => unreachable!("chunks of one to four"),
            }
        }
    }
}

/// As [`rows`], for `N` outputs, in strips of `16 · W` columns.
///
/// # Safety
/// As [`rows`].
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn several<const KIND: u8, const N: usize, const W: usize>(
    rows: &StridedRows,
    factors: [&[f32]; N],
    mut out: [&mut [f32]; N],
) {
    let width = out[0].len();
    let (strips, sixteens) = (width / (16 * W) * (16 * W), width / 16 * 16);
    let out_at = out.each_mut().map(|out| out.as_mut_ptr());
    // SAFETY: as the caller guarantees.
    unsafe {
        for column in (0..strips).step_by(16 * W) {
            columns::<KIND, N, W>(rows, factors, column, out_at);
        }
        for column in (strips..sixteens).step_by(16) {
            columns::<KIND, N, 1>(rows, factors, column, out_at);
        }
        for (factors, out) in factors.iter().zip(out) {
            for (column, out) in (sixteens..).zip(&mut out[sixteens..]) {
                for (i, factor) in factors.iter().enumerate() {
                    *out += factor * one::<KIND>(rows.bytes.as_ptr().add(i * rows.row_bytes), column);
                }
            }
        }
    }
}

/// As [`rows`], for `16 · W` columns from `column` on of `N` outputs.
///
/// # Safety
/// As [`rows`]; the outputs have these columns.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn columns<const KIND: u8, const N: usize, const W: usize>(
    rows: &StridedRows,
    factors: [&[f32]; N],
    column: usize,
    out: [*mut f32; N],
) {
    // SAFETY: the outputs have `16 · W` columns from there on.
    let load = |out: *mut f32| std::array::from_fn(|i| unsafe { _mm512_loadu_ps(out.add(column + 16 * i)) });
    let mut sums: [[__m512; W]; N] = out.map(load);
    let factor_at = factors.map(<[f32]>::as_ptr);
    let mut row = rows.bytes.as_ptr();
    for i in 0..factors[0].len() {
        // SAFETY: every row has the columns up to `column + 16 · W`.
        let values: [__m512; W] = std::array::from_fn(|j| unsafe { sixteen::<KIND>(row, column + 16 * j) });
        for (sums, factors) in sums.iter_mut().zip(factor_at) {
            // SAFETY: there are as many factors as rows.
            let factor = unsafe { _mm512_set1_ps(*factors.add(i)) };
            for (sum, values) in sums.iter_mut().zip(values) {
                *sum = _mm512_add_ps(*sum, _mm512_mul_ps(factor, values));
            }
        }
        row = row.wrapping_add(rows.row_bytes);
    }
    for (out, sums) in out.into_iter().zip(sums) {
        for (i, sum) in sums.into_iter().enumerate() {
            // SAFETY: as above.
            unsafe { _mm512_storeu_ps(out.add(column + 16 * i), sum) };
        }
    }
}
