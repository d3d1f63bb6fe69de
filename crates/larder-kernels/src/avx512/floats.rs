//! Products with weights in float formats: the sixteen lanes of the definition are those of a register.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use crate::dot::LANES;
use crate::kernel_set::Sums;
use crate::simd::{F16, F32};
use crate::weights::Panel;

/// The dot products of all rows with some tokens, in tiles that leave enough registers for their sums.
///
/// # Safety
/// The panel is whole rows of `KIND`, and every token has as many values as a row.
#[target_feature(enable = "avx512f")]
pub unsafe fn panel<const KIND: u8>(mut panel: Panel, x: &[&[f32]], out: &mut [Sums]) {
    for (x, out) in x.chunks(4).zip(out.chunks_mut(4)) {
        // SAFETY: as the caller guarantees.
        unsafe {
            match *x {
                [a] => tiles::<KIND, 8, 1>(&panel, [a], out),
                [a, b] => tiles::<KIND, 4, 2>(&panel, [a, b], out),
                [a, b, c] => tiles::<KIND, 4, 3>(&panel, [a, b, c], out),
                [a, b, c, d] => tiles::<KIND, 4, 4>(&panel, [a, b, c, d], out),
                _ => unreachable!("chunks of one to four"),
            }
        }
        panel.next = &[];
    }
}

/// `R` rows at a time.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn tiles<const KIND: u8, const R: usize, const N: usize>(panel: &Panel, x: [&[f32]; N], out: &mut [Sums]) {
    // Rows of f32 are long enough for the hardware prefetcher.
    let prefetches = KIND != F32 && !panel.next.is_empty();
    let body = panel.cols() / LANES * LANES;
    for first in (0..panel.rows).step_by(R) {
        // The last row stands in for missing ones.
        let rows: [*const u8; R] = std::array::from_fn(|r| panel.row((first + r).min(panel.rows - 1)).as_ptr());
        let mut sums = [[_mm512_setzero_ps(); R]; N];
        for c in (0..body).step_by(LANES) {
            if prefetches {
                // The next panel lies behind this one; a step prefetches as many bytes of it as it reads.
                let next = panel.next.as_ptr().wrapping_add(first * panel.row_bytes + 2 * R * c);
                for line in (0..2 * R * LANES).step_by(64) {
                    _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(line).cast());
                }
            }
            // SAFETY: sixteen values from there are inside the rows, and of the tokens.
            unsafe {
                let w: [__m512; R] = rows.map(|row| sixteen::<KIND>(row, c));
                for (sums, x) in sums.iter_mut().zip(x) {
                    let x = _mm512_loadu_ps(x.as_ptr().add(c));
                    for (sum, w) in sums.iter_mut().zip(w) {
                        *sum = _mm512_fmadd_ps(w, x, *sum);
                    }
                }
            }
        }
        let sums = reduce(&sums);
        for (t, sums) in sums.iter().enumerate() {
            for (r, sum) in sums.iter().enumerate().take(panel.rows - first) {
                let tail = (body..).zip(&x[t][body..]);
                // SAFETY: the row has as many values as the token.
                out[t][first + r] = tail.fold(*sum, |sum, (c, x)| unsafe { one::<KIND>(rows[r], c).mul_add(*x, sum) });
            }
        }
    }
}

/// Sixteen weights from column `c`.
///
/// # Safety
/// They are inside the row.
#[target_feature(enable = "avx512f")]
#[inline]
pub unsafe fn sixteen<const KIND: u8>(row: *const u8, c: usize) -> __m512 {
    // SAFETY: as the caller guarantees.
    unsafe {
        match KIND {
            F32 => _mm512_loadu_ps(row.add(4 * c).cast()),
            F16 => _mm512_cvtph_ps(_mm256_loadu_si256(row.add(2 * c).cast())),
            _ => {
                let high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(row.add(2 * c).cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(high))
            }
        }
    }
}

/// The weight in column `c`.
///
/// # Safety
/// It is inside the row.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn one<const KIND: u8>(row: *const u8, c: usize) -> f32 {
    // SAFETY: as the caller guarantees.
    unsafe {
        match KIND {
            F32 => row.add(4 * c).cast::<f32>().read_unaligned(),
            F16 => {
                let bits = row.add(2 * c).cast::<u16>().read_unaligned();
                _mm512_cvtss_f32(_mm512_cvtph_ps(_mm256_set1_epi16(bits.cast_signed())))
            }
            _ => f32::from_bits(u32::from(row.add(2 * c).cast::<u16>().read_unaligned()) << 16),
        }
    }
}

/// For up to sixteen pairs of token and row: adds lane i + 8 to lane i, then + 4, + 2, + 1. After each step two
/// registers of half as many sums each are joined to one.
#[target_feature(enable = "avx512f")]
#[inline]
fn reduce<const R: usize, const N: usize>(lanes: &[[__m512; R]; N]) -> [[f32; R]; N] {
    const { assert!(R * N <= 16) };
    // The steps exchange them, and in this order they end where they belong.
    const ORDER: [usize; 16] = [0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15];
    let of = |i: usize| {
        let pair = ORDER[i];
        if pair < R * N { lanes[pair / R][pair % R] } else { _mm512_setzero_ps() }
    };
    let eights: [__m512; 8] = std::array::from_fn(|i| {
        let (a, b) = (of(i), of(i + 8));
        _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xEE>(a, b))
    });
    let fours: [__m512; 4] = std::array::from_fn(|i| {
        let (a, b) = (eights[i], eights[i + 4]);
        _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xDD>(a, b))
    });
    let twos: [__m512; 2] = std::array::from_fn(|i| {
        let (a, b) = (fours[i], fours[i + 2]);
        _mm512_add_ps(_mm512_shuffle_ps::<0x44>(a, b), _mm512_shuffle_ps::<0xEE>(a, b))
    });
    let [a, b] = twos;
    let ones = _mm512_add_ps(_mm512_shuffle_ps::<0x88>(a, b), _mm512_shuffle_ps::<0xDD>(a, b));
    let mut sums = [0.0; 16];
    // SAFETY: sixteen floats are written.
    unsafe { _mm512_storeu_ps(sums.as_mut_ptr(), ones) };
    std::array::from_fn(|t| std::array::from_fn(|r| sums[t * R + r]))
}

/// The values of a block in `q8_0`: the scale times each integer.
#[target_feature(enable = "avx512f")]
#[inline]
pub fn widen_q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    // SAFETY: the block begins with two bytes, which are the scale.
    let scale = _mm512_set1_ps(unsafe { one::<F16>(block.as_ptr(), 0) });
    for (quants, out) in block[2..].as_chunks::<16>().0.iter().zip(out.as_chunks_mut::<16>().0) {
        // SAFETY: sixteen bytes are read, and sixteen floats written.
        unsafe {
            let quants = _mm512_cvtepi8_epi32(_mm_loadu_si128(quants.as_ptr().cast()));
            _mm512_storeu_ps(out.as_mut_ptr(), _mm512_mul_ps(scale, _mm512_cvtepi32_ps(quants)));
        }
    }
}
