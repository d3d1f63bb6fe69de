//! Products with quantised weights: eight rows in the lanes of a register, up to four tokens for each block loaded.
//!
//! Every 32-bit lane belongs to a row. A load brings four consecutive weights of each, which meet the same four
//! activations in all lanes. One instruction multiplies unsigned with signed bytes and adds pairs, so weights that are
//! signed have an offset, which is taken off through the activations' sums, or lend their sign to the activations.
//! Sums of pairs stay in 16 bits for as long as they cannot overflow; the next step, to 32 bits, multiplies by the
//! scale where there is one in integers.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use larder_core::Kind;

use super::load::{Eight, Rows};
use super::scales::{Halves, Minima};
use super::tile::{Blocks, Tile, sum, widened};
use crate::inputs::{BLOCK, Block};
use crate::set::Sums;
use crate::weights::Panel;

/// Products of the panel with some tokens.
///
/// # Safety
/// The panel is whole rows, and every token has as many blocks as it has columns.
#[target_feature(enable = "avx2,f16c")]
pub unsafe fn tile<const N: usize>(panel: &Panel, x: [&[Block]; N], out: &mut [Sums]) {
    // SAFETY: as the caller guarantees.
    let sums = unsafe {
        match panel.interleaved {
            true => by_kind::<true, N>(panel, x),
            false => by_kind::<false, N>(panel, x),
        }
    };
    for (out, sums) in out.iter_mut().zip(sums) {
        // SAFETY: eight values.
        unsafe { _mm256_storeu_ps(out.as_mut_ptr(), sums) };
    }
}

#[target_feature(enable = "avx2,f16c")]
#[inline]
unsafe fn by_kind<const MIXED: bool, const N: usize>(panel: &Panel, x: [&[Block]; N]) -> [__m256; N] {
    // SAFETY: as the caller guarantees.
    unsafe {
        match panel.kind {
            Kind::Q8_0 => rows::<Q8_0, MIXED, N>(panel, x),
            Kind::Q4_0 => rows::<Q4_0, MIXED, N>(panel, x),
            Kind::Q4K => rows::<Q4K, MIXED, N>(panel, x),
            Kind::Q5K => rows::<Q5K, MIXED, N>(panel, x),
            Kind::Q6K => rows::<Q6K, MIXED, N>(panel, x),
            Kind::F32 | Kind::F16 | Kind::Bf16 => unreachable!("floats have kernels of their own"),
        }
    }
}

#[target_feature(enable = "avx2,f16c")]
#[inline(never)]
unsafe fn rows<K: Weight, const MIXED: bool, const N: usize>(panel: &Panel, x: [&[Block]; N]) -> [__m256; N] {
    let rows = Rows::<MIXED>::of(panel);
    let mut tile = Tile::new(x);
    for i in 0..panel.cols / K::KIND.block_len() {
        // SAFETY: the rows have that many blocks, and the tokens that many times 32 values.
        unsafe { K::add(rows.block(K::KIND, i), i * K::KIND.block_len() / BLOCK, &mut tile) };
    }
    tile.sums
}

/// A kind of weights.
trait Weight {
    const KIND: Kind;

    /// Adds what a block of weights gives with each token's blocks from number `at`.
    ///
    /// # Safety
    /// The block is of this kind, and the tokens have these blocks.
    unsafe fn add<const MIXED: bool, const N: usize>(block: Eight<MIXED>, at: usize, tile: &mut Tile<N>);
}

struct Q8_0;

impl Weight for Q8_0 {
    const KIND: Kind = Kind::Q8_0;

    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    unsafe fn add<const MIXED: bool, const N: usize>(block: Eight<MIXED>, at: usize, tile: &mut Tile<N>) {
        // SAFETY: a block of q8_0 has these parts, and the tokens have a block there, as the caller guarantees.
        let (w, d, x) = unsafe { (block.eights(0), block.half(0), tile.at(at)) };
        let mut dots = [_mm256_setzero_si256(); N];
        for (k, w) in w.iter().enumerate() {
            let size = _mm256_abs_epi8(*w);
            for (t, dots) in dots.iter_mut().enumerate() {
                let pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(x.four(t, k), *w));
                *dots = x.in_turn(_mm256_add_epi32(*dots, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
            }
        }
        tile.add(x, dots, d);
    }
}

struct Q4_0;

impl Weight for Q4_0 {
    const KIND: Kind = Kind::Q4_0;

    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    unsafe fn add<const MIXED: bool, const N: usize>(block: Eight<MIXED>, at: usize, tile: &mut Tile<N>) {
        // SAFETY: as above.
        let (w, d, x) = unsafe { (block.fours(0), block.half(0), tile.at(at)) };
        let (low, high) = (low(w), high(w));
        let mut pairs = [_mm256_setzero_si256(); N];
        for k in 0..4 {
            // 8 · 2 · 15 · 127 fits 16 bits.
            x.add_pairs(&mut pairs, low[k], k);
            x.add_pairs(&mut pairs, high[k], k + 4);
        }
        let mut dots = widened(pairs, _mm256_set1_epi16(1));
        for (dots, x) in dots.iter_mut().zip(x.0) {
            *dots = _mm256_sub_epi32(*dots, _mm256_set1_epi32(x.sum8));
        }
        tile.add(x, dots, d);
    }
}

struct Q4K;

impl Weight for Q4K {
    const KIND: Kind = Kind::Q4K;

    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    unsafe fn add<const MIXED: bool, const N: usize>(block: Eight<MIXED>, at: usize, tile: &mut Tile<N>) {
        // SAFETY: as above.
        let minima = unsafe { Minima::of(block) };
        // Two groups share their bytes, which one token unpacks together; several need the registers for their sums.
        let step = if N == 1 { 2 } else { 1 };
        for first in (0..8).step_by(step) {
            // SAFETY: as above.
            let w = unsafe { block.eights(3 + 8 * (first / 2)) };
            for g in first..first + step {
                let w = if g % 2 == 0 { low(w) } else { high(w) };
                let (scale, min) = minima.group(g);
                // SAFETY: as above.
                let x = unsafe { tile.at(at + g) };
                // As in q4_0.
                tile.add_above(x, widened(x.pairs(w, 0), scale), minima.d, min);
            }
        }
    }
}

struct Q5K;

impl Weight for Q5K {
    const KIND: Kind = Kind::Q5K;

    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    unsafe fn add<const MIXED: bool, const N: usize>(block: Eight<MIXED>, at: usize, tile: &mut Tile<N>) {
        // SAFETY: as above.
        let (minima, fifths) = unsafe { (Minima::of(block), block.eights(3)) };
        for g in 0..8 {
            // SAFETY: as above.
            let (w, x) = unsafe { (block.eights(11 + 8 * (g / 2)), tile.at(at + g)) };
            let w = with_top(if g % 2 == 0 { low(w) } else { high(w) }, &fifths, g, 1);
            let (scale, min) = minima.group(g);
            // 4 · 2 · 31 · 127 fits 16 bits, and twice as much does not.
            let ([a, b, c, d], [e, f, g, h]) = halves(w);
            let dots = sum(widened(x.pairs([a, b, c, d], 0), scale), widened(x.pairs([e, f, g, h], 4), scale));
            tile.add_above(x, dots, minima.d, min);
        }
    }
}

struct Q6K;

impl Weight for Q6K {
    const KIND: Kind = Kind::Q6K;

    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    unsafe fn add<const MIXED: bool, const N: usize>(block: Eight<MIXED>, at: usize, tile: &mut Tile<N>) {
        // SAFETY: as above.
        let (scales, d) = unsafe { (block.fours(48), block.half(0)) };
        for part in 0..8 {
            let (half, run) = (part / 4, part % 4);
            // SAFETY: as above. Two runs share the bytes of their low bits, and four those of their high ones.
            let (w, tops) = unsafe { (block.eights(16 * half + 8 * (run % 2)), block.eights(32 + 8 * half)) };
            let w = with_top(if run < 2 { low(w) } else { high(w) }, &tops, 2 * run, 3);
            // SAFETY: as above.
            let x = unsafe { tile.at(at + part) };
            tile.add(x, q6_k_dots(w, Halves::of(scales[part / 2], run % 2), x), d);
        }
    }
}

/// The integer part of a block of `q6_k`.
#[target_feature(enable = "avx2")]
#[inline]
fn q6_k_dots<const N: usize>([a, b, c, d, e, f, g, h]: [__m256i; 8], scales: Halves, x: Blocks<N>) -> [__m256i; N] {
    // 2 · 2 · 63 · 127 fits 16 bits, and twice as much does not.
    let first = sum(widened(x.pairs([a, b], 0), scales.first), widened(x.pairs([c, d], 2), scales.first));
    let second = sum(widened(x.pairs([e, f], 4), scales.second), widened(x.pairs([g, h], 6), scales.second));
    let mut dots = sum(first, second);
    for (dots, x) in dots.iter_mut().zip(x.0) {
        let [a, b] = x.halves;
        let sums = _mm256_set1_epi32(a as u16 as i32 | (b as i32) << 16);
        *dots = _mm256_sub_epi32(*dots, _mm256_slli_epi32::<5>(_mm256_madd_epi16(scales.both, sums)));
    }
    dots
}

#[target_feature(enable = "avx2")]
#[inline]
fn halves([a, b, c, d, e, f, g, h]: [__m256i; 8]) -> ([__m256i; 4], [__m256i; 4]) {
    ([a, b, c, d], [e, f, g, h])
}

/// The low half of every byte.
#[target_feature(enable = "avx2")]
#[inline]
fn low<const K: usize>(mut w: [__m256i; K]) -> [__m256i; K] {
    for w in &mut w {
        *w = _mm256_and_si256(*w, _mm256_set1_epi8(15));
    }
    w
}

/// The high half of every byte.
#[target_feature(enable = "avx2")]
#[inline]
fn high<const K: usize>(mut w: [__m256i; K]) -> [__m256i; K] {
    for w in &mut w {
        *w = _mm256_srli_epi16::<4>(*w);
    }
    low(w)
}

/// Above the low half of every byte, the bits of `mask` from bit `at` of the byte in `tops`.
#[target_feature(enable = "avx2")]
#[inline]
fn with_top(mut low: [__m256i; 8], tops: &[__m256i; 8], at: usize, mask: i8) -> [__m256i; 8] {
    for (low, top) in low.iter_mut().zip(tops) {
        let top = _mm256_and_si256(_mm256_srlv_epi32(*top, _mm256_set1_epi32(at as i32)), _mm256_set1_epi8(mask));
        *low = _mm256_or_si256(*low, _mm256_slli_epi16::<4>(top));
    }
    low
}
