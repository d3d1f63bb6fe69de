//! Block formats with eight groups per block (`q4_k`, `q5_k`, `q6_k`), each group with an integer scale of its own.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use larder_core::NumberFormat;

use super::block_format::{BlockFormat, nibbles};
use super::scales::{HalfScales, Minima};
use super::tile::{Tile, TokenBlocks, sum, widened};
use crate::eight_rows::EightBlocks;

/// A block format with eight groups per block.
trait GroupedFormat {
    const KIND: NumberFormat;

    /// The part of a block that all its groups need.
    type Head;

    /// # Safety
    /// The block is of this format.
    unsafe fn head<const INTERLEAVED: bool>(block: EightBlocks<INTERLEAVED>) -> Self::Head;

    /// Adds the products of group `G` with one block of each token.
    ///
    /// # Safety
    /// The block is of this format.
    unsafe fn group<const INTERLEAVED: bool, const G: usize, const N: usize>(
        block: EightBlocks<INTERLEAVED>,
        head: &Self::Head,
        x: TokenBlocks<N>,
        tile: &mut Tile<N>,
    );
}

impl<K: GroupedFormat> BlockFormat for K {
    const KIND: NumberFormat = K::KIND;

    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    unsafe fn add<const INTERLEAVED: bool, const N: usize>(
        block: EightBlocks<INTERLEAVED>,
        at: usize,
        tile: &mut Tile<N>,
    ) {
        // SAFETY: as the caller guarantees.
        unsafe {
            let head = K::head(block);
            K::group::<INTERLEAVED, 0, N>(block, &head, tile.at(at), tile);
            K::group::<INTERLEAVED, 1, N>(block, &head, tile.at(at + 1), tile);
            K::group::<INTERLEAVED, 2, N>(block, &head, tile.at(at + 2), tile);
            K::group::<INTERLEAVED, 3, N>(block, &head, tile.at(at + 3), tile);
            K::group::<INTERLEAVED, 4, N>(block, &head, tile.at(at + 4), tile);
            K::group::<INTERLEAVED, 5, N>(block, &head, tile.at(at + 5), tile);
            K::group::<INTERLEAVED, 6, N>(block, &head, tile.at(at + 6), tile);
            K::group::<INTERLEAVED, 7, N>(block, &head, tile.at(at + 7), tile);
        }
    }
}

pub struct Q4K;

impl GroupedFormat for Q4K {
    const KIND: NumberFormat = NumberFormat::Q4K;
    type Head = Minima;

    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    unsafe fn head<const INTERLEAVED: bool>(block: EightBlocks<INTERLEAVED>) -> Minima {
        // SAFETY: as the caller guarantees.
        unsafe { Minima::of(block) }
    }

    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    unsafe fn group<const INTERLEAVED: bool, const G: usize, const N: usize>(
        block: EightBlocks<INTERLEAVED>,
        minima: &Minima,
        x: TokenBlocks<N>,
        tile: &mut Tile<N>,
    ) {
        // SAFETY: the block has these parts, as the caller guarantees. Two groups share their bytes.
        let w = nibbles(unsafe { block.eights(3 + 8 * (G / 2)) }, G % 2);
        let (scale, min) = minima.group(G);
        // 8 · 2 · 15 · 127 fits 16 bits.
        tile.add_above(x, widened(x.pairs(w, 0), scale), minima.d, min);
    }
}

pub struct Q5K;

impl GroupedFormat for Q5K {
    const KIND: NumberFormat = NumberFormat::Q5K;
    type Head = Minima;

    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    unsafe fn head<const INTERLEAVED: bool>(block: EightBlocks<INTERLEAVED>) -> Minima {
        // SAFETY: as the caller guarantees.
        unsafe { Minima::of(block) }
    }

    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    unsafe fn group<const INTERLEAVED: bool, const G: usize, const N: usize>(
        block: EightBlocks<INTERLEAVED>,
        minima: &Minima,
        x: TokenBlocks<N>,
        tile: &mut Tile<N>,
    ) {
        // SAFETY: as above. All groups share the bytes of their fifth bits.
        let (w, fifths) = unsafe { (block.eights(11 + 8 * (G / 2)), block.eights(3)) };
        let [a, b, c, d, e, f, g, h] = with_top(nibbles(w, G % 2), fifths, G, 1);
        let (scale, min) = minima.group(G);
        // 4 · 2 · 31 · 127 fits 16 bits, and twice as much does not.
        let first = widened(x.pairs([a, b, c, d], 0), scale);
        let second = widened(x.pairs([e, f, g, h], 4), scale);
        tile.add_above(x, sum(first, second), minima.d, min);
    }
}

pub struct Q6K;

impl GroupedFormat for Q6K {
    const KIND: NumberFormat = NumberFormat::Q6K;
    /// The packed scales, and the scale of the scales.
    type Head = ([__m256i; 4], __m256);

    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    unsafe fn head<const INTERLEAVED: bool>(block: EightBlocks<INTERLEAVED>) -> Self::Head {
        // SAFETY: a block of q6_k has these parts, as the caller guarantees.
        unsafe { (block.fours(48), block.half(0)) }
    }

    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    unsafe fn group<const INTERLEAVED: bool, const G: usize, const N: usize>(
        block: EightBlocks<INTERLEAVED>,
        (scales, d): &Self::Head,
        x: TokenBlocks<N>,
        tile: &mut Tile<N>,
    ) {
        let (half, run) = (G / 4, G % 4);
        // SAFETY: as above. Two runs share the bytes of their low bits, and four those of their high ones.
        let (w, tops) = unsafe { (block.eights(16 * half + 8 * (run % 2)), block.eights(32 + 8 * half)) };
        let w = with_top(nibbles(w, run / 2), tops, 2 * run, 3);
        tile.add(x, q6_k_dots(w, HalfScales::of(scales[G / 2], G % 2), x), *d);
    }
}

/// The integer part of a group of `q6_k`.
#[target_feature(enable = "avx2")]
#[inline]
fn q6_k_dots<const N: usize>(
    [a, b, c, d, e, f, g, h]: [__m256i; 8],
    scales: HalfScales,
    x: TokenBlocks<N>,
) -> [__m256i; N] {
    // 2 · 2 · 63 · 127 fits 16 bits, and twice as much does not.
    let first = sum(widened(x.pairs([a, b], 0), scales.first), widened(x.pairs([c, d], 2), scales.first));
    let second = sum(widened(x.pairs([e, f], 4), scales.second), widened(x.pairs([g, h], 6), scales.second));
    let mut dots = sum(first, second);
    for (dots, x) in dots.iter_mut().zip(x.0) {
        // The stored weights are 32 too large.
        let [a, b] = x.halves;
        let sums = _mm256_set1_epi32(a as u16 as i32 | (b as i32) << 16);
        *dots = _mm256_sub_epi32(*dots, _mm256_slli_epi32::<5>(_mm256_madd_epi16(scales.both, sums)));
    }
    dots
}

/// Above the low half of every byte, the bits of `mask` from bit `at` of the byte in `tops`.
#[target_feature(enable = "avx2")]
#[inline]
pub fn with_top(mut low: [__m256i; 8], tops: [__m256i; 8], at: usize, mask: i8) -> [__m256i; 8] {
    for (low, top) in low.iter_mut().zip(tops) {
        let top = _mm256_and_si256(_mm256_srlv_epi32(top, _mm256_set1_epi32(at as i32)), _mm256_set1_epi8(mask));
        *low = _mm256_or_si256(*low, _mm256_slli_epi16::<4>(top));
    }
    low
}
