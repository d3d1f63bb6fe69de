//! Quantisation of activations.
#![allow(unsafe_code)]

use std::arch::aarch64::*;

use crate::block::{BLOCK, Block};

#[target_feature(enable = "neon")]
pub fn block(x: &[f32; BLOCK]) -> Block {
    // SAFETY: four values from one of the first 29.
    let x: [_; 8] = std::array::from_fn(|i| unsafe { vld1q_f32(x.as_ptr().add(4 * i)) });
    let (d, inverse) = Block::factors(largest(x));
    if inverse == 0.0 {
        return Block::new([0; BLOCK], d);
    }
    // Rounds to nearest, ties to even.
    let whole = x.map(|x| vcvtnq_s32_f32(vmulq_n_f32(x, inverse)));
    let narrow = |a, b| vcombine_s16(vmovn_s32(a), vmovn_s32(b));
    let sixteen = |i: usize| {
        let (first, second) = (narrow(whole[i], whole[i + 1]), narrow(whole[i + 2], whole[i + 3]));
        vcombine_s8(vmovn_s16(first), vmovn_s16(second))
    };
    let q = [sixteen(0), sixteen(4)];
    let mut block = Block::with_sums([0; BLOCK], d, q.map(|q| vaddlvq_s8(q).into()));
    for (out, q) in block.q.chunks_exact_mut(16).zip(q) {
        // SAFETY: sixteen bytes.
        unsafe { vst1q_s8(out.as_mut_ptr(), q) };
    }
    block
}

/// The bits of the largest magnitude. The bits of non-negative floats are in the order of their values, with NaN above
/// all.
#[target_feature(enable = "neon")]
#[inline]
fn largest(x: [float32x4_t; 8]) -> u32 {
    let bits = x.map(|x| vreinterpretq_u32_f32(vabsq_f32(x)));
    vmaxvq_u32(bits.into_iter().fold(vdupq_n_u32(0), |a, b| vmaxq_u32(a, b)))
}
