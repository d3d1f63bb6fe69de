//! Block formats with eight groups per block (`q4_k`, `q5_k`, `q6_k`), each group with an integer scale of its own.
#![allow(unsafe_code)]

use std::arch::aarch64::*;

use larder_core::NumberFormat;

use super::block_format::{BlockFormat, nibbles};
use super::dots::Dot;
use super::load::{FourBlocks, Runs};
use super::scales::{Minima, signed};
use super::tile::{Tile, TokenBlocks};

/// A block format with eight groups per block.
trait GroupedFormat {
    const KIND: NumberFormat;

    /// The part of a block that all its groups need.
    type Head;

    /// # Safety
    /// The block is of this format.
    unsafe fn head<const INTERLEAVED: bool>(block: FourBlocks<INTERLEAVED>) -> Self::Head;

    /// Adds the products of group `G` with one block of each token.
    ///
    /// # Safety
    /// The block is of this format, and the processor has the instructions of `D`.
    unsafe fn group<D: Dot, const INTERLEAVED: bool, const G: usize, const N: usize>(
        block: FourBlocks<INTERLEAVED>,
        head: &Self::Head,
        x: TokenBlocks<N>,
        tile: &mut Tile<N>,
    );
}

impl<K: GroupedFormat> BlockFormat for K {
    const KIND: NumberFormat = K::KIND;

    #[target_feature(enable = "neon")]
    #[inline]
    unsafe fn add<D: Dot, const INTERLEAVED: bool, const N: usize>(
        block: FourBlocks<INTERLEAVED>,
        at: usize,
        tile: &mut Tile<N>,
    ) {
        // SAFETY: as the caller guarantees.
        unsafe {
            let head = K::head(block);
            K::group::<D, INTERLEAVED, 0, N>(block, &head, tile.at(at), tile);
            K::group::<D, INTERLEAVED, 1, N>(block, &head, tile.at(at + 1), tile);
            K::group::<D, INTERLEAVED, 2, N>(block, &head, tile.at(at + 2), tile);
            K::group::<D, INTERLEAVED, 3, N>(block, &head, tile.at(at + 3), tile);
            K::group::<D, INTERLEAVED, 4, N>(block, &head, tile.at(at + 4), tile);
            K::group::<D, INTERLEAVED, 5, N>(block, &head, tile.at(at + 5), tile);
            K::group::<D, INTERLEAVED, 6, N>(block, &head, tile.at(at + 6), tile);
            K::group::<D, INTERLEAVED, 7, N>(block, &head, tile.at(at + 7), tile);
        }
    }
}

pub struct Q4K;

impl GroupedFormat for Q4K {
    const KIND: NumberFormat = NumberFormat::Q4K;
    type Head = Minima;

    #[target_feature(enable = "neon")]
    #[inline]
    unsafe fn head<const INTERLEAVED: bool>(block: FourBlocks<INTERLEAVED>) -> Minima {
        // SAFETY: as the caller guarantees.
        unsafe { Minima::of(block) }
    }

    #[target_feature(enable = "neon")]
    #[inline]
    unsafe fn group<D: Dot, const INTERLEAVED: bool, const G: usize, const N: usize>(
        block: FourBlocks<INTERLEAVED>,
        minima: &Minima,
        x: TokenBlocks<N>,
        tile: &mut Tile<N>,
    ) {
        // SAFETY: the block has these parts, as the caller guarantees. Two groups share their bytes. 8 · 15 · 127 fits
        // 16 bits.
        let dots = unsafe {
            let at = 3 + 8 * (G / 2);
            let w = [block.runs(at), block.runs(at + 4)].map(|w| nibbles(w, G % 2));
            D::dot::<8, 2, N>(w, x, 0, [0; N])
        };
        minima.add(G, dots, x, tile);
    }
}

pub struct Q5K;

impl GroupedFormat for Q5K {
    const KIND: NumberFormat = NumberFormat::Q5K;
    type Head = Minima;

    #[target_feature(enable = "neon")]
    #[inline]
    unsafe fn head<const INTERLEAVED: bool>(block: FourBlocks<INTERLEAVED>) -> Minima {
        // SAFETY: as the caller guarantees.
        unsafe { Minima::of(block) }
    }

    #[target_feature(enable = "neon")]
    #[inline]
    unsafe fn group<D: Dot, const INTERLEAVED: bool, const G: usize, const N: usize>(
        block: FourBlocks<INTERLEAVED>,
        minima: &Minima,
        x: TokenBlocks<N>,
        tile: &mut Tile<N>,
    ) {
        // SAFETY: as above. All groups share the bytes of their fifth bits. 8 · 31 · 127 fits 16 bits.
        let dots = unsafe {
            let at = 11 + 8 * (G / 2);
            let first = with_top(nibbles(block.runs(at), G % 2), block.runs(3), G, 1);
            let second = with_top(nibbles(block.runs(at + 4), G % 2), block.runs(7), G, 1);
            D::dot::<8, 2, N>([first, second], x, 0, [0; N])
        };
        minima.add(G, dots, x, tile);
    }
}

pub struct Q6K;

impl GroupedFormat for Q6K {
    const KIND: NumberFormat = NumberFormat::Q6K;
    /// The packed scales, and the scale of the scales.
    type Head = (Runs, float32x4_t);

    #[target_feature(enable = "neon")]
    #[inline]
    unsafe fn head<const INTERLEAVED: bool>(block: FourBlocks<INTERLEAVED>) -> Self::Head {
        // SAFETY: a block of q6_k has these parts, as the caller guarantees.
        unsafe { (block.runs(48), block.half(0)) }
    }

    #[target_feature(enable = "neon")]
    #[inline]
    unsafe fn group<D: Dot, const INTERLEAVED: bool, const G: usize, const N: usize>(
        block: FourBlocks<INTERLEAVED>,
        (scales, d): &Self::Head,
        x: TokenBlocks<N>,
        tile: &mut Tile<N>,
    ) {
        let (half, run) = (G / 4, G % 4);
        let (low, high) = (16 * half + 8 * (run % 2), 32 + 8 * half);
        let mut dots = [vdupq_n_s32(0); N];
        for part in 0..2 {
            // SAFETY: as above. Two runs share the bytes of their low bits, and four those of their high ones. The
            // stored weights are 32 too large, and 4 · 63 · 127 fits 16 bits.
            let part_dots = unsafe {
                let low = nibbles(block.runs(low + 4 * part), run / 2);
                let w = with_top(low, block.runs(high + 4 * part), 2 * run, 3);
                D::dot::<4, 1, N>([w], x, part, x.0.map(|x| -32 * i32::from(x.halves[part])))
            };
            let scale = signed(scales[G / 2], 2 * (G % 2) + part);
            for (dots, part_dots) in dots.iter_mut().zip(part_dots) {
                *dots = vmlaq_s32(*dots, part_dots, scale);
            }
        }
        tile.add(x, dots, *d);
    }
}

/// Above the low half of every byte, the bits of `mask` from bit `at` of the byte in `tops`.
#[target_feature(enable = "neon")]
#[inline]
fn with_top(mut low: Runs, tops: Runs, at: usize, mask: u8) -> Runs {
    for (low, top) in low.iter_mut().zip(tops) {
        let top = vshlq_u8(top, vdupq_n_s8(4 - at as i8));
        *low = vorrq_u8(*low, vandq_u8(top, vdupq_n_u8(mask << 4)));
    }
    low
}
