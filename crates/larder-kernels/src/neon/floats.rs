//! Products with weights in float formats.
#![allow(unsafe_code)]

use std::arch::aarch64::*;

use super::primitives::widen;
use crate::dot::LANES;
use crate::kernel_set::Sums;
use crate::simd::{F16, F32};
use crate::weights::Panel;

/// Registers that hold the [`LANES`] sums of a row and a token.
const QUADS: usize = LANES / 4;

/// The dot products of all rows with some tokens, in tiles that leave enough registers for their sums.
///
/// # Safety
/// The panel is whole rows of `KIND`, and every token has as many values as a row.
#[target_feature(enable = "neon")]
pub unsafe fn panel<const KIND: u8>(panel: &Panel, x: &[&[f32]], out: &mut [Sums]) {
    for (x, out) in x.chunks(4).zip(out.chunks_mut(4)) {
        // SAFETY: as the caller guarantees.
        unsafe {
            match *x {
                [a] => tiles::<KIND, 4, 1, 4>(panel, [a], out),
                [a, b] => tiles::<KIND, 2, 2, 4>(panel, [a, b], out),
                [a, b, c] => tiles::<KIND, 2, 3, 2>(panel, [a, b, c], out),
                [a, b, c, d] => tiles::<KIND, 2, 4, 2>(panel, [a, b, c, d], out),
                _ => unreachable!("chunks of one to four"),
            }
        }
    }
}

/// `R` rows at a time. `Q` of the four registers of sums are filled in one pass.
#[target_feature(enable = "neon")]
#[inline]
unsafe fn tiles<const KIND: u8, const R: usize, const N: usize, const Q: usize>(
    panel: &Panel,
    x: [&[f32]; N],
    out: &mut [Sums],
) {
    for first in (0..panel.rows).step_by(R) {
        // The last row stands in for missing ones.
        let rows: [*const u8; R] = std::array::from_fn(|r| panel.row((first + r).min(panel.rows - 1)).as_ptr());
        let mut lanes = [[[vdupq_n_f32(0.0); R]; N]; QUADS];
        for (pass, lanes) in lanes.as_chunks_mut::<Q>().0.iter_mut().enumerate() {
            // SAFETY: as the caller guarantees.
            unsafe { sum::<KIND, R, N, Q>(rows, x, 4 * Q * pass, lanes) };
        }
        for t in 0..N {
            for r in 0..R {
                let body = panel.cols() / LANES * LANES;
                let tail = (body..).zip(&x[t][body..]);
                let start = reduce(lanes.map(|lanes| lanes[t][r]));
                // SAFETY: the row has as many values as the token.
                out[t][first + r] = tail.fold(start, |sum, (c, x)| unsafe { one::<KIND>(rows[r], c).mul_add(*x, sum) });
            }
        }
    }
}

/// Sums `4 · Q` lanes, the first of which is `from`, over all whole groups of sixteen columns.
#[target_feature(enable = "neon")]
#[inline]
unsafe fn sum<const KIND: u8, const R: usize, const N: usize, const Q: usize>(
    rows: [*const u8; R],
    x: [&[f32]; N],
    from: usize,
    lanes: &mut [[[float32x4_t; R]; N]; Q],
) {
    let mut sums = *lanes;
    for c in (from..x[0].len() / LANES * LANES).step_by(LANES) {
        for (c, sums) in (c..).step_by(4).zip(&mut sums) {
            // SAFETY: four values from there are inside the row, and of the token.
            let w = rows.map(|row| unsafe { four::<KIND>(row, c) });
            for (sums, x) in sums.iter_mut().zip(x) {
                // SAFETY: as above.
                let x = unsafe { vld1q_f32(x.as_ptr().add(c)) };
                for (sum, w) in sums.iter_mut().zip(w) {
                    *sum = vfmaq_f32(*sum, w, x);
                }
            }
        }
    }
    *lanes = sums;
}

/// Four weights from column `c`.
#[target_feature(enable = "neon")]
#[inline]
pub unsafe fn four<const KIND: u8>(row: *const u8, c: usize) -> float32x4_t {
    // SAFETY: the values are inside the row, as the caller guarantees.
    unsafe {
        match KIND {
            F32 => row.add(4 * c).cast::<float32x4_t>().read_unaligned(),
            F16 => widen(row.add(2 * c).cast::<uint16x4_t>().read_unaligned()),
            _ => {
                let high = row.add(2 * c).cast::<uint16x4_t>().read_unaligned();
                vreinterpretq_f32_u32(vshll_n_u16::<16>(high))
            }
        }
    }
}

#[target_feature(enable = "neon")]
#[inline]
unsafe fn one<const KIND: u8>(row: *const u8, c: usize) -> f32 {
    // SAFETY: the value is inside the row, as the caller guarantees.
    unsafe {
        match KIND {
            F32 => row.add(4 * c).cast::<f32>().read_unaligned(),
            F16 => vgetq_lane_f32::<0>(widen(vdup_n_u16(row.add(2 * c).cast::<u16>().read_unaligned()))),
            _ => f32::from_bits(u32::from(row.add(2 * c).cast::<u16>().read_unaligned()) << 16),
        }
    }
}

/// Adds lane i + 8 to lane i, then + 4, + 2, + 1.
#[target_feature(enable = "neon")]
#[inline]
fn reduce([a, b, c, d]: [float32x4_t; QUADS]) -> f32 {
    let sum = vaddq_f32(vaddq_f32(a, c), vaddq_f32(b, d));
    let sum = vadd_f32(vget_low_f32(sum), vget_high_f32(sum));
    vget_lane_f32::<0>(sum) + vget_lane_f32::<1>(sum)
}
