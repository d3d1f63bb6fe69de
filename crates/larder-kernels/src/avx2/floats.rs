//! Products with plain floats.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use half::{bf16, f16};

use crate::dot::LANES;
use crate::set::Sums;
use crate::weights::Panel;

/// The kinds, as parameters of functions.
pub const F32: u8 = 0;
/// As above.
pub const F16: u8 = 1;
/// As above.
pub const BF16: u8 = 2;

/// The dot products of all rows with all tokens, in tiles that leave enough registers for their sums.
///
/// # Safety
/// The panel is whole rows of `KIND`, and every token has as many values as it has columns.
#[target_feature(enable = "avx2,f16c")]
pub unsafe fn panel<const KIND: u8>(panel: &Panel, x: &[&[f32]], out: &mut [Sums]) {
    let (pairs, last) = x.as_chunks::<2>();
    for (t, pair) in pairs.iter().enumerate() {
        for r in (0..panel.rows).step_by(2) {
            // SAFETY: as the caller guarantees; a row that is missing is replaced by the last one.
            let sums = unsafe { tile::<KIND, 2, 2>(panel, r, pair) };
            store(&mut out[2 * t..], sums, r);
        }
    }
    if let [token] = *last {
        for r in (0..panel.rows).step_by(4) {
            // SAFETY: as above.
            let sums = unsafe { tile::<KIND, 4, 1>(panel, r, &[token]) };
            store(&mut out[x.len() - 1..], sums, r);
        }
    }
}

fn store<const R: usize, const N: usize>(out: &mut [Sums], sums: [[f32; R]; N], row: usize) {
    for (out, sums) in out.iter_mut().zip(sums) {
        out[row..row + R].copy_from_slice(&sums);
    }
}

#[target_feature(enable = "avx2,f16c")]
#[inline]
unsafe fn tile<const KIND: u8, const R: usize, const N: usize>(
    panel: &Panel,
    first: usize,
    x: &[&[f32]; N],
) -> [[f32; R]; N] {
    let rows: [*const u8; R] = std::array::from_fn(|r| panel.row((first + r).min(panel.rows - 1)).as_ptr());
    let x = x.map(<[f32]>::as_ptr);
    let mut lanes = [[[_mm256_setzero_ps(); 2]; R]; N];
    let body = panel.cols / LANES * LANES;
    for c in (0..body).step_by(LANES) {
        for half in 0..2 {
            let mut w = [_mm256_setzero_ps(); R];
            for r in 0..R {
                // SAFETY: eight values from there are inside the row.
                w[r] = unsafe { eight::<KIND>(rows[r], c + 8 * half) };
            }
            for t in 0..N {
                // SAFETY: as above, and of the token as well.
                let x = unsafe { _mm256_loadu_ps(x[t].add(c + 8 * half)) };
                for r in 0..R {
                    lanes[t][r][half] = _mm256_add_ps(lanes[t][r][half], _mm256_mul_ps(w[r], x));
                }
            }
        }
    }
    let mut sums = [[0.0; R]; N];
    for t in 0..N {
        for r in 0..R {
            sums[t][r] = reduce(lanes[t][r]);
            for c in body..panel.cols {
                // SAFETY: the values from `body` on are inside as well.
                sums[t][r] += unsafe { one::<KIND>(rows[r], c) * *x[t].add(c) };
            }
        }
    }
    sums
}

/// Eight weights from column `c`.
#[target_feature(enable = "avx2,f16c")]
#[inline]
unsafe fn eight<const KIND: u8>(row: *const u8, c: usize) -> __m256 {
    // SAFETY: they are inside the row, as the caller guarantees.
    unsafe {
        match KIND {
            F32 => _mm256_loadu_ps(row.add(4 * c).cast()),
            F16 => _mm256_cvtph_ps(_mm_loadu_si128(row.add(2 * c).cast())),
            _ => {
                let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(row.add(2 * c).cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high))
            }
        }
    }
}

#[inline]
unsafe fn one<const KIND: u8>(row: *const u8, c: usize) -> f32 {
    // SAFETY: it is inside the row, as the caller guarantees.
    unsafe {
        match KIND {
            F32 => row.add(4 * c).cast::<f32>().read_unaligned(),
            F16 => row.add(2 * c).cast::<f16>().read_unaligned().to_f32(),
            _ => row.add(2 * c).cast::<bf16>().read_unaligned().to_f32(),
        }
    }
}

/// Lane i with lane i + 8, then + 4, + 2, + 1.
#[target_feature(enable = "avx2")]
#[inline]
fn reduce([low, high]: [__m256; 2]) -> f32 {
    let sum = _mm256_add_ps(low, high);
    let sum = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps::<1>(sum));
    let sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    _mm_cvtss_f32(_mm_add_ss(sum, _mm_shuffle_ps::<1>(sum, sum)))
}
