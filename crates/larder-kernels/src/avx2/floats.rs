//! Products with weights in float formats.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::primitives::prefetch;
use crate::dot::LANES;
use crate::kernel_set::Sums;
use crate::simd::{F16, F32};
use crate::weights::Panel;

/// The dot products of all rows with some tokens, in tiles that leave enough registers for their sums.
///
/// # Safety
/// The panel is whole rows of `KIND`, and every token has as many values as a row.
#[target_feature(enable = "avx2,fma,f16c")]
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
#[target_feature(enable = "avx2,fma,f16c")]
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
        let body = panel.cols() / LANES * LANES;
        let sums = reduce(&lanes);
        for (t, (sums, out)) in sums.iter().zip(&mut *out).enumerate() {
            for (r, sum) in sums.iter().enumerate() {
                let tail = (body..).zip(&x[t][body..]);
                // SAFETY: the row has as many values as the token.
                out[first + r] = tail.fold(*sum, |sum, (c, x)| unsafe { one::<KIND>(rows[r], c) }.mul_add(*x, sum));
            }
        }
    }
}

/// Sums lanes `from` to `from + 8 · H` over all whole groups of sixteen columns.
#[target_feature(enable = "avx2,fma,f16c")]
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
                    *sum = _mm256_fmadd_ps(w, x, *sum);
                }
            }
        }
    }
    lanes.copy_from_slice(&sums);
}

/// Eight weights from column `c`.
#[target_feature(enable = "avx2,fma,f16c")]
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

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn one<const KIND: u8>(row: *const u8, c: usize) -> f32 {
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

/// For up to eight pairs of token and row: adds lane i + 8 to lane i, then + 4, + 2, + 1. After each step two registers
/// of half as many sums each are joined to one.
#[target_feature(enable = "avx2")]
#[inline]
fn reduce<const R: usize, const N: usize>(lanes: &[[[__m256; R]; N]; 2]) -> [[f32; R]; N] {
    const { assert!(R * N <= 8) };
    let of = |i: usize| {
        if i < R * N { _mm256_add_ps(lanes[0][i / R][i % R], lanes[1][i / R][i % R]) } else { _mm256_setzero_ps() }
    };
    // The sums of pairs i and i + 4.
    let fours: [__m256; 4] = std::array::from_fn(|i| {
        let (a, b) = (of(i), of(i + 4));
        _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b))
    });
    let twos = [[fours[0], fours[1]], [fours[2], fours[3]]]
        .map(|[a, b]| _mm256_add_ps(_mm256_shuffle_ps::<0x44>(a, b), _mm256_shuffle_ps::<0xEE>(a, b)));
    let [a, b] = twos;
    let ones = _mm256_add_ps(_mm256_shuffle_ps::<0x88>(a, b), _mm256_shuffle_ps::<0xDD>(a, b));
    let mut sums = [0.0; 8];
    // SAFETY: eight floats are written.
    unsafe { _mm256_storeu_ps(sums.as_mut_ptr(), ones) };
    std::array::from_fn(|t| std::array::from_fn(|r| sums[t * R + r]))
}

/// The values of a block in `q8_0`: the scale times each integer.
#[target_feature(enable = "avx2,fma,f16c")]
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
