//! Weighted sums of rows of floats.
#![allow(unsafe_code)]

use std::arch::aarch64::*;

use super::floats::{four, one};
use crate::kernel_set::StridedRows;

/// Adds `factors[i] · rows[i]` to each output with its own factors, one row after the other. Up to four outputs are computed at a
/// time, so that a value is loaded and widened once for them, in strips of columns that fit the registers.
///
/// # Safety
/// There are as many rows of `KIND` as factors of each output, and outputs are of one length, which no row is shorter than.
#[target_feature(enable = "neon")]
pub unsafe fn rows<const KIND: u8>(rows: &StridedRows, factors: &[&[f32]], out: &mut [&mut [f32]]) {
    for (factors, out) in factors.chunks(4).zip(out.chunks_mut(4)) {
        // SAFETY: as the caller guarantees.
        unsafe {
            match (factors, out) {
                ([a], [x]) => several::<KIND, 1, 16>(rows, [a], [x]),
                ([a, b], [x, y]) => several::<KIND, 2, 8>(rows, [a, b], [x, y]),
                ([a, b, c], [x, y, z]) => several::<KIND, 3, 4>(rows, [a, b, c], [x, y, z]),
                ([a, b, c, d], [x, y, z, u]) => several::<KIND, 4, 4>(rows, [a, b, c, d], [x, y, z, u]),
                _ => unreachable!("chunks of one to four"),
            }
        }
    }
}

/// As [`rows`], for `N` outputs, in strips of `4 · W` columns.
///
/// # Safety
/// As [`rows`].
#[target_feature(enable = "neon")]
#[inline]
unsafe fn several<const KIND: u8, const N: usize, const W: usize>(
    rows: &StridedRows,
    factors: [&[f32]; N],
    mut out: [&mut [f32]; N],
) {
    let width = out[0].len();
    let (strips, fours) = (width / (4 * W) * (4 * W), width / 4 * 4);
    let out_at = out.each_mut().map(|out| out.as_mut_ptr());
    // SAFETY: as the caller guarantees.
    unsafe {
        for column in (0..strips).step_by(4 * W) {
            columns::<KIND, N, W>(rows, factors, column, out_at);
        }
        for column in (strips..fours).step_by(4) {
            columns::<KIND, N, 1>(rows, factors, column, out_at);
        }
        for (factors, out) in factors.iter().zip(out) {
            for (column, out) in (fours..).zip(&mut out[fours..]) {
                for (i, factor) in factors.iter().enumerate() {
                    *out += factor * one::<KIND>(rows.bytes.as_ptr().add(i * rows.row_bytes), column);
                }
            }
        }
    }
}

/// As [`rows`], for `4 · W` columns from `column` on of `N` outputs.
///
/// # Safety
/// As [`rows`]; the outputs have these columns.
#[target_feature(enable = "neon")]
#[inline]
unsafe fn columns<const KIND: u8, const N: usize, const W: usize>(
    rows: &StridedRows,
    factors: [&[f32]; N],
    column: usize,
    out: [*mut f32; N],
) {
    // SAFETY: the outputs have `4 · W` columns from there on.
    let load = |out: *mut f32| std::array::from_fn(|i| unsafe { vld1q_f32(out.add(column + 4 * i)) });
    let mut sums: [[float32x4_t; W]; N] = out.map(load);
    let factor_at = factors.map(<[f32]>::as_ptr);
    let mut row = rows.bytes.as_ptr();
    for i in 0..factors[0].len() {
        // SAFETY: every row has the columns up to `column + 4 · W`.
        let values: [float32x4_t; W] = std::array::from_fn(|j| unsafe { four::<KIND>(row, column + 4 * j) });
        for (sums, factors) in sums.iter_mut().zip(factor_at) {
            // SAFETY: there are as many factors as rows.
            let factor = unsafe { *factors.add(i) };
            for (sum, values) in sums.iter_mut().zip(values) {
                *sum = vaddq_f32(*sum, vmulq_n_f32(values, factor));
            }
        }
        row = row.wrapping_add(rows.row_bytes);
    }
    for (out, sums) in out.into_iter().zip(sums) {
        for (i, sum) in sums.into_iter().enumerate() {
            // SAFETY: as above.
            unsafe { vst1q_f32(out.add(column + 4 * i), sum) };
        }
    }
}
