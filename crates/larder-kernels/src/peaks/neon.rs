//! Loops of NEON.
#![allow(unsafe_code)]

use std::arch::aarch64::*;
use std::arch::{asm, is_aarch64_feature_detected};
use std::hint::black_box;

use super::peak_loop::{CHAINS, PeakLoop};

/// Multiply-adds of four floats.
pub fn floats() -> Option<PeakLoop> {
    Some(PeakLoop { instructions: "NEON", operations: 2 * 4 * CHAINS, run: add_floats })
}

/// Additions of the products of matrices of two times eight bytes.
pub fn matrices() -> Option<PeakLoop> {
    // SAFETY: the loop is only handed out where the processor has the instruction.
    let run = |rounds| unsafe { add_matrices(rounds) };
    let of = PeakLoop { instructions: "NEON matrix products", operations: 2 * 32 * CHAINS, run };
    is_aarch64_feature_detected!("i8mm").then_some(of)
}

/// Additions of the products of sixteen bytes.
pub fn bytes() -> Option<PeakLoop> {
    // SAFETY: as above.
    let run = |rounds| unsafe { add_bytes(rounds) };
    let of = PeakLoop { instructions: "NEON dot products", operations: 2 * 16 * CHAINS, run };
    is_aarch64_feature_detected!("dotprod").then_some(of)
}

fn add_floats(rounds: u64) {
    // SAFETY: every processor of this architecture has NEON.
    unsafe {
        let (factor, term) = (vdupq_n_f32(black_box(0.75)), vdupq_n_f32(black_box(0.25)));
        let mut sums = [term; CHAINS];
        for (i, sum) in sums.iter_mut().enumerate() {
            *sum = vdupq_n_f32(i as f32);
        }
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = vfmaq_f32(term, *sum, factor);
            }
        }
        black_box(sums);
    }
}

/// Adds the products of two registers to others, for a number of rounds.
macro_rules! add_products {
    ($rounds:ident, $extension:literal, $instruction:literal) => {{
        let (a, b) = (vdupq_n_s8(black_box(3)), vdupq_n_s8(black_box(-5)));
        let mut sums = [vdupq_n_s32(0); CHAINS];
        for _ in 0..$rounds {
            for sum in &mut sums {
                asm!(
                    concat!(".arch_extension ", $extension),
                    concat!($instruction, " {sum:v}.4s, {a:v}.16b, {b:v}.16b"),
                    sum = inout(vreg) *sum, a = in(vreg) a, b = in(vreg) b,
                    options(nomem, nostack, preserves_flags),
                );
            }
        }
        black_box(sums);
    }};
}

/// # Safety
/// The processor has the instruction.
unsafe fn add_matrices(rounds: u64) {
    // SAFETY: as the caller guarantees.
    unsafe { add_products!(rounds, "i8mm", "smmla") }
}

/// # Safety
/// The processor has the instruction.
unsafe fn add_bytes(rounds: u64) {
    // SAFETY: as the caller guarantees.
    unsafe { add_products!(rounds, "dotprod", "sdot") }
}
