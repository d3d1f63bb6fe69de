//! Loops of AVX-512.
#![allow(unsafe_code)]

use std::arch::is_x86_feature_detected;
use std::arch::x86_64::*;
use std::hint::black_box;

use super::peak_loop::{CHAINS, PeakLoop};

/// Multiply-adds of sixteen floats.
pub fn floats() -> Option<PeakLoop> {
    // SAFETY: the loop is only handed out where the processor has the instructions.
    let run = |rounds| unsafe { add_floats(rounds) };
    let of = PeakLoop { instructions: "AVX-512", operations: 2 * 16 * CHAINS, run };
    is_x86_feature_detected!("avx512f").then_some(of)
}

/// Additions of the products of 64 bytes.
pub fn bytes() -> Option<PeakLoop> {
    // SAFETY: as above.
    let run = |rounds| unsafe { add_bytes(rounds) };
    let of = PeakLoop { instructions: "AVX-512 VNNI", operations: 2 * 64 * CHAINS, run };
    (is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vnni")).then_some(of)
}

#[target_feature(enable = "avx512f")]
fn add_floats(rounds: u64) {
    let (factor, term) = (_mm512_set1_ps(black_box(0.75)), _mm512_set1_ps(black_box(0.25)));
    let mut sums = [term; CHAINS];
    for (i, sum) in sums.iter_mut().enumerate() {
        *sum = _mm512_set1_ps(i as f32);
    }
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm512_fmadd_ps(*sum, factor, term);
        }
    }
    black_box(sums);
}

#[target_feature(enable = "avx512f,avx512vnni")]
fn add_bytes(rounds: u64) {
    let (a, b) = (_mm512_set1_epi8(black_box(3)), _mm512_set1_epi8(black_box(-5)));
    let mut sums = [a; CHAINS];
    for (i, sum) in sums.iter_mut().enumerate() {
        *sum = _mm512_set1_epi32(i as i32);
    }
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm512_dpbusd_epi32(*sum, a, b);
        }
    }
    black_box(sums);
}
