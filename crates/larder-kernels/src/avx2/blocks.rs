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
    let rows = Rows::<MIXED>::of(panel);
    let blocks = panel.cols / panel.kind.block_len();
    let mut tile = Tile { x: x.map(<[Block]>::as_ptr), sums: [_mm256_setzero_ps(); N] };
    /// All blocks of the rows, each with as many of the tokens as it has values.
    macro_rules! each {
        ($add:ident, $kind:expr) => {
            for i in 0..blocks {
                // SAFETY: the rows have that many blocks, and the tokens that many times 32 values.
                unsafe { $add(rows.block($kind, i), i * $kind.block_len() / BLOCK, &mut tile) }
            }
        };
    }
    match panel.kind {
        Kind::Q8_0 => each!(q8_0, Kind::Q8_0),
        Kind::Q4_0 => each!(q4_0, Kind::Q4_0),
        Kind::Q4K => each!(q4_k, Kind::Q4K),
        Kind::Q5K => each!(q5_k, Kind::Q5K),
        Kind::Q6K => each!(q6_k, Kind::Q6K),
        Kind::F32 | Kind::F16 | Kind::Bf16 => unreachable!("floats have kernels of their own"),
    }
    tile.sums
}

/// Some tokens, and for each the sums of eight rows.
struct Tile<const N: usize> {
    x: [*const Block; N],
    sums: [__m256; N],
}

impl<const N: usize> Tile<N> {
    /// Adds what a block of weights gives with each token's block number `at`.
    ///
    /// # Safety
    /// The tokens have that block.
    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    unsafe fn add(&mut self, at: usize, term: impl Fn(&Block) -> __m256) {
        for t in 0..N {
            // SAFETY: the block is there, as the caller guarantees.
            let x = unsafe { &*self.x[t].add(at) };
            self.sums[t] = _mm256_add_ps(self.sums[t], term(x));
        }
    }
}

#[target_feature(enable = "avx2,f16c")]
#[inline]
unsafe fn q8_0<const MIXED: bool, const N: usize>(block: Eight<MIXED>, at: usize, tile: &mut Tile<N>) {
    // SAFETY: a block of q8_0 has these parts, and the tokens have a block there, as the caller guarantees.
    unsafe {
        let (w, d) = (block.eights(0), block.half(0));
        tile.add(at, |x| {
            let mut dots = _mm256_setzero_si256();
            for (k, w) in w.iter().enumerate() {
                let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(*w), _mm256_sign_epi8(four(x, k), *w));
                dots = _mm256_add_epi32(dots, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
            }
            scaled(dots, d, x)
        });
    }
}

#[target_feature(enable = "avx2,f16c")]
#[inline]
unsafe fn q4_0<const MIXED: bool, const N: usize>(block: Eight<MIXED>, at: usize, tile: &mut Tile<N>) {
    // SAFETY: as above.
    unsafe {
        let (w, d) = (block.fours(0), block.half(0));
        let (low, high) = (low(w), high(w));
        tile.add(at, |x| {
            // 8 · 2 · 15 · 127 fits 16 bits.
            let pairs = _mm256_add_epi16(pairs(&low, x, 0), pairs(&high, x, 4));
            let dots = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
            scaled(_mm256_sub_epi32(dots, _mm256_set1_epi32(x.sum8)), d, x)
        });
    }
}

#[target_feature(enable = "avx2,f16c")]
#[inline]
unsafe fn q4_k<const MIXED: bool, const N: usize>(block: Eight<MIXED>, at: usize, tile: &mut Tile<N>) {
    // SAFETY: as above.
    unsafe {
        let minima = Minima::of(block);
        for two in 0..4 {
            let w = block.eights(3 + 8 * two);
            q4_k_group(low(w), &minima, 2 * two, at, tile);
            q4_k_group(high(w), &minima, 2 * two + 1, at, tile);
        }
    }
}

#[target_feature(enable = "avx2,f16c")]
#[inline]
unsafe fn q4_k_group<const N: usize>(w: [__m256i; 8], minima: &Minima, g: usize, at: usize, tile: &mut Tile<N>) {
    let (scale, min) = minima.group(g);
    // SAFETY: as above.
    unsafe {
        tile.add(at + g, |x| {
            // As in q4_0.
            let pairs = _mm256_add_epi16(pairs(&w[..4], x, 0), pairs(&w[4..], x, 4));
            let dots = _mm256_madd_epi16(pairs, scale);
            _mm256_sub_ps(scaled(dots, minima.d, x), _mm256_mul_ps(min, _mm256_set1_ps(x.d_sum)))
        });
    }
}

#[target_feature(enable = "avx2,f16c")]
#[inline]
unsafe fn q5_k<const MIXED: bool, const N: usize>(block: Eight<MIXED>, at: usize, tile: &mut Tile<N>) {
    // SAFETY: as above.
    unsafe {
        let minima = Minima::of(block);
        let fifths = block.eights(3);
        for two in 0..4 {
            let w = block.eights(11 + 8 * two);
            q5_k_group(low(w), &fifths, &minima, 2 * two, at, tile);
            q5_k_group(high(w), &fifths, &minima, 2 * two + 1, at, tile);
        }
    }
}

#[target_feature(enable = "avx2,f16c")]
#[inline]
unsafe fn q5_k_group<const N: usize>(
    w: [__m256i; 8],
    fifths: &[__m256i; 8],
    minima: &Minima,
    g: usize,
    at: usize,
    tile: &mut Tile<N>,
) {
    let (scale, min) = minima.group(g);
    let w = with_top(w, fifths, g, 1);
    // SAFETY: as above.
    unsafe {
        tile.add(at + g, |x| {
            // 4 · 2 · 31 · 127 fits 16 bits, and twice as much does not.
            let first = _mm256_madd_epi16(pairs(&w[..4], x, 0), scale);
            let second = _mm256_madd_epi16(pairs(&w[4..], x, 4), scale);
            let dots = _mm256_add_epi32(first, second);
            _mm256_sub_ps(scaled(dots, minima.d, x), _mm256_mul_ps(min, _mm256_set1_ps(x.d_sum)))
        });
    }
}

#[target_feature(enable = "avx2,f16c")]
#[inline]
unsafe fn q6_k<const MIXED: bool, const N: usize>(block: Eight<MIXED>, at: usize, tile: &mut Tile<N>) {
    // SAFETY: as above.
    unsafe {
        let (scales, d) = (block.fours(48), block.half(0));
        for half in 0..2 {
            let w = [block.eights(16 * half), block.eights(16 * half + 8)];
            let tops = block.eights(32 + 8 * half);
            for run in 0..4 {
                let nibbles = if run < 2 { low(w[run]) } else { high(w[run - 2]) };
                let w = with_top(nibbles, &tops, 2 * run, 3);
                let scales = Halves::of(scales[2 * half + run / 2], run % 2);
                tile.add(at + 4 * half + run, |x| scaled(q6_k_dots(&w, &scales, x), d, x));
            }
        }
    }
}

/// The integer part of a block of `q6_k`.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn q6_k_dots(w: &[__m256i; 8], scales: &Halves, x: &Block) -> __m256i {
    // 2 · 2 · 63 · 127 fits 16 bits, and twice as much does not.
    let two = |k: usize, scale| _mm256_madd_epi16(pairs(&w[k..k + 2], x, k), scale);
    let first = _mm256_add_epi32(two(0, scales.first), two(2, scales.first));
    let second = _mm256_add_epi32(two(4, scales.second), two(6, scales.second));
    let [a, b] = x.halves;
    let offset = _mm256_madd_epi16(scales.both, each_lane(a as u16 as i32 | (b as i32) << 16));
    _mm256_sub_epi32(_mm256_add_epi32(first, second), _mm256_slli_epi32::<5>(offset))
}

/// Σ over the weights of products with the activations from number `4 · first`, in sums of two pairs.
#[target_feature(enable = "avx2")]
#[inline]
fn pairs(w: &[__m256i], x: &Block, first: usize) -> __m256i {
    let mut sum = _mm256_setzero_si256();
    for (k, w) in w.iter().enumerate() {
        sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(*w, four(x, first + k)));
    }
    sum
}

/// Activations `4 · k` and the next three, in all lanes.
#[target_feature(enable = "avx2")]
#[inline]
fn four(x: &Block, k: usize) -> __m256i {
    let fours: &[[i8; 4]; 8] = x.q.as_chunks().0.as_array().expect("32 activations");
    // SAFETY: four bytes.
    each_lane(unsafe { fours[k].as_ptr().cast::<i32>().read_unaligned() })
}

#[target_feature(enable = "avx2")]
#[inline]
fn each_lane(bits: i32) -> __m256i {
    _mm256_set1_epi32(bits)
}

/// `dots · (d · e)`, where `e` is the activations' scale.
#[target_feature(enable = "avx2")]
#[inline]
fn scaled(dots: __m256i, d: __m256, x: &Block) -> __m256 {
    _mm256_mul_ps(_mm256_cvtepi32_ps(dots), _mm256_mul_ps(d, _mm256_set1_ps(x.d)))
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
        let top = _mm256_and_si256(_mm256_srlv_epi32(*top, each_lane(at as i32)), _mm256_set1_epi8(mask));
        *low = _mm256_or_si256(*low, _mm256_slli_epi16::<4>(top));
    }
    low
}
