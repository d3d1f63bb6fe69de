//! Scales and minima that are stored as integers.
#![allow(unsafe_code)]

use std::arch::aarch64::*;

use super::load::FourBlocks;
use super::tile::{Tile, TokenBlocks};

/// The scales and minima of `q4_k` and `q5_k`.
pub struct Minima {
    /// The scale of the scales.
    d: float32x4_t,
    dmin: float32x4_t,
    /// A byte for each of the first and the last four groups.
    scales: [uint8x16_t; 2],
    minima: [uint8x16_t; 2],
}

impl Minima {
    /// Unpacks the scales and minima of a block; see [`scale_min`](crate::formats::q4_k::scale_min) for the packing.
    ///
    /// # Safety
    /// The block is `q4_k` or `q5_k`.
    #[target_feature(enable = "neon")]
    #[inline]
    pub unsafe fn of<const INTERLEAVED: bool>(block: FourBlocks<INTERLEAVED>) -> Self {
        // SAFETY: blocks of these formats begin with two f16 and twelve bytes of scales.
        let ([a, b, c, _], d, dmin) = unsafe { (block.runs(0), block.half(0), block.half(1)) };
        let six = |v| vandq_u8(v, vdupq_n_u8(63));
        let top = |v| vandq_u8(vshrq_n_u8::<2>(v), vdupq_n_u8(48));
        let scales = [six(a), vorrq_u8(vandq_u8(c, vdupq_n_u8(15)), top(a))];
        let minima = [six(b), vorrq_u8(vshrq_n_u8::<4>(c), top(b))];
        Minima { d, dmin, scales, minima }
    }

    /// Scales the integer dot products of group `g` and adds them to the tile.
    #[target_feature(enable = "neon")]
    #[inline]
    pub fn add<const N: usize>(&self, g: usize, dots: [int32x4_t; N], x: TokenBlocks<N>, tile: &mut Tile<N>) {
        let scale = signed(self.scales[g / 4], g % 4);
        let min = vmulq_f32(self.dmin, vcvtq_f32_s32(signed(self.minima[g / 4], g % 4)));
        tile.add_above(x, dots.map(|dots| vmulq_s32(dots, scale)), self.d, min);
    }
}

/// The signed byte at index `at` of every lane.
#[target_feature(enable = "neon")]
#[inline]
pub fn signed(bytes: uint8x16_t, at: usize) -> int32x4_t {
    let top = vshlq_s32(vreinterpretq_s32_u8(bytes), vdupq_n_s32(24 - 8 * at as i32));
    vshrq_n_s32::<24>(top)
}
