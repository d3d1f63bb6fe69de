//! Products with weights in float formats.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::primitives::prefetch;
use crate::dot::LANES;
use crate::kernel_set::Sums;
use crate::weights::Panel;

/// f32, as a const parameter of functions.
pub const F32: u8 = 0;
/// f16, likewise.
pub const F16: u8 = 1;
/// bf16, likewise.
pub const BF16: u8 = 2;

/// The dot products of all rows with some tokens, in tiles that leave enough registers for their sums.
///
/// # Safety
/// The panel is whole rows of `KIND`, and every token has as many values as a row.
#[target_feature(enable = "avx2,f16c")]
pub unsafe fn panel<const KIND: u8>(mut panel: Panel, x: &[&[f32]], out: &mut [Sums]) {
    for (x, out) in x.chunks(4).zip(out.chunks_mut(4)) {
        // SAFETY: as the caller guarantees.
        unsafe {
            match *x {
                [a] => tiles::<KIND, 4, 1, 2>(&panel, [a], out),
                [a, b] => tiles::<KIND, 4, 2, 1>(&panel, [a, b], out),
                [a, b, c] => tiles::<KIND, 2, 3, 1>(&panel, [a, b, c], out),
                [a, b, c, d] => tiles::<KIND, 2, 4, 1>(&panel, [a, b, c, d], out),
                _ => unreachable!("chunks of one to four"),
            }
        }
        panel.next = &[];
    }
}

/// `R` rows at a time. Of the sixteen lanes, `H` times eight are summed in one pass.
#[target_feature(enable = "avx2,f16c")]
#[inline]
unsafe fn tiles<const KIND: u8, const R: usize, const N: usize, const H: usize>(
    panel: &Panel,
    x: [&[f32]; N],
    out: &mut [Sums],
) {
    // Rows of f32 are long enough for the hardware prefetcher; prefetching by hand only slows them down.
    let prefetches = KIND != F32 && !panel.next.is_empty();
    for first in (0..panel.rows).step_by(R) {
        // The last row stands in for missing ones.
        let rows: [*const u8; R] = std::array::from_fn(|r| panel.row((first + r).min(panel.rows - 1)).as_ptr());
        let mut lanes = [[[_mm256_setzero_ps(); R]; N]; 2];
        for half in (0..2).step_by(H) {
            let next = prefetches.then(|| panel.next.as_ptr().wrapping_add(first * panel.row_bytes));
            // SAFETY: as the caller guarantees.
            unsafe { pass::<KIND, R, N, H>(rows, x, 8 * half, next, &mut lanes[half..half + H]) };
        }
        for t in 0..N {
            for r in 0..R {
                let body = panel.cols() / LANES * LANES;
                let tail = (body..).zip(&x[t][body..]);
                let start = reduce(lanes[0][t][r], lanes[1][t][r]);
                // SAFETY: the row has as many values as the token.
                let sum = tail.fold(start, |sum, (c, x)| unsafe { sum + one::<KIND>(rows[r], c) * x });
                out[t][first + r] = sum;
            }
        }
    }
}

/// Sums lanes `from` to `from + 8 · H` over all whole groups of sixteen columns.
#[target_feature(enable = "avx2,f16c")]
#[inline]
unsafe fn pass<const KIND: u8, const R: usize, const N: usize, const H: usize>(
    rows: [*const u8; R],
    x: [&[f32]; N],
    from: usize,
    next: Option<*const u8>,
    lanes: &mut [[[__m256; R]; N]],
) {
    let mut sums = [[[_mm256_setzero_ps(); R]; N]; H];
    for c in (from..x[0].len() / LANES * LANES).step_by(LANES) {
        if let Some(next) = next {
            let step = R * if KIND == F32 { 4 } else { 2 };
            prefetch(next.wrapping_add(c * step), LANES * step);
        }
        for (half, sums) in sums.iter_mut().enumerate() {
            let c = c + 8 * half;
            let mut w = [_mm256_setzero_ps(); R];
            for (w, row) in w.iter_mut().zip(rows) {
                // SAFETY: eight values from there are inside the row.
                *w = unsafe { eight::<KIND>(row, c) };
            }
            for (sums, x) in sums.iter_mut().zip(&x) {
                // SAFETY: as above, and of the token.
                let x = unsafe { _mm256_loadu_ps(x.as_ptr().add(c)) };
                for (sum, w) in sums.iter_mut().zip(w) {
                    *sum = _mm256_add_ps(*sum, _mm256_mul_ps(w, x));
                }
            }
        }
    }
    lanes.copy_from_slice(&sums);
}

/// Eight weights from column `c`.
#[target_feature(enable = "avx2,f16c")]
#[inline]
pub unsafe fn eight<const KIND: u8>(row: *const u8, c: usize) -> __m256 {
    // SAFETY: the values are inside the row, as the caller guarantees.
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

#[target_feature(enable = "avx2,f16c")]
#[inline]
pub unsafe fn one<const KIND: u8>(row: *const u8, c: usize) -> f32 {
    // SAFETY: the value is inside the row, as the caller guarantees.
    unsafe {
        match KIND {
            F32 => row.add(4 * c).cast::<f32>().read_unaligned(),
            F16 => {
                let bits = row.add(2 * c).cast::<u16>().read_unaligned();
                _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits.into())))
            }
            _ => f32::from_bits(u32::from(row.add(2 * c).cast::<u16>().read_unaligned()) << 16),
        }
    }
}

/// Adds lane i + 8 to lane i, then + 4, + 2, + 1.
#[target_feature(enable = "avx2")]
#[inline]
fn reduce(low: __m256, high: __m256) -> f32 {
    let sum = _mm256_add_ps(low, high);
    let sum = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps::<1>(sum));
    let sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    _mm_cvtss_f32(_mm_add_ss(sum, _mm_shuffle_ps::<1>(sum, sum)))
}

/// The values of a block in `q8_0`: the scale times each integer.
#[target_feature(enable = "avx2,f16c")]
#[inline]
pub fn widen_q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let half = u16::from_le_bytes([block[0], block[1]]);
    let scale = _mm256_set1_ps(_mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half.into()))));
    for (quants, out) in block[2..].as_chunks::<8>().0.iter().zip(out.as_chunks_mut::<8>().0) {
        // SAFETY: eight bytes are read, and eight floats written.
        unsafe {
            let quants = _mm256_cvtepi8_epi32(_mm_loadl_epi64(quants.as_ptr().cast()));
            _mm256_storeu_ps(out.as_mut_ptr(), _mm256_mul_ps(scale, _mm256_cvtepi32_ps(quants)));
        }
    }
}
