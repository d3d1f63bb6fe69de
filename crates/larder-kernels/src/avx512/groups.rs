//! The kinds of weights with blocks of eight groups, which have scales of their own in integers.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use larder_core::Kind;

use super::blocks::{Weight, dots};
use crate::avx2::{Blocks, Halves, Minima, Tile, nibbles, sum, with_top};
use crate::rows::Eight;

/// A kind of weights whose blocks have eight groups.
trait Grouped {
    const KIND: Kind;

    /// What all groups of a block need.
    type Head;

    /// # Safety
    /// The block is of this kind.
    unsafe fn head<const MIXED: bool>(block: Eight<MIXED>) -> Self::Head;

    /// Adds what group `G` gives with a block of each token.
    ///
    /// # Safety
    /// The block is of this kind.
    unsafe fn group<const MIXED: bool, const G: usize, const N: usize>(
        block: Eight<MIXED>,
        head: &Self::Head,
        x: Blocks<N>,
        tile: &mut Tile<N>,
    );
}

impl<K: Grouped> Weight for K {
    const KIND: Kind = K::KIND;

    #[target_feature(enable = "avx512vl,avx512vnni")]
    #[inline]
    unsafe fn add<const MIXED: bool, const N: usize>(block: Eight<MIXED>, at: usize, tile: &mut Tile<N>) {
        // SAFETY: as the caller guarantees.
        unsafe {
            let head = K::head(block);
            K::group::<MIXED, 0, N>(block, &head, tile.at(at), tile);
            K::group::<MIXED, 1, N>(block, &head, tile.at(at + 1), tile);
            K::group::<MIXED, 2, N>(block, &head, tile.at(at + 2), tile);
            K::group::<MIXED, 3, N>(block, &head, tile.at(at + 3), tile);
            K::group::<MIXED, 4, N>(block, &head, tile.at(at + 4), tile);
            K::group::<MIXED, 5, N>(block, &head, tile.at(at + 5), tile);
            K::group::<MIXED, 6, N>(block, &head, tile.at(at + 6), tile);
            K::group::<MIXED, 7, N>(block, &head, tile.at(at + 7), tile);
        }
    }
}

pub struct Q4K;

impl Grouped for Q4K {
    const KIND: Kind = Kind::Q4K;
    type Head = Minima;

    #[target_feature(enable = "avx512vl,avx512vnni")]
    #[inline]
    unsafe fn head<const MIXED: bool>(block: Eight<MIXED>) -> Minima {
        // SAFETY: as the caller guarantees.
        unsafe { Minima::of(block) }
    }

    #[target_feature(enable = "avx512vl,avx512vnni")]
    #[inline]
    unsafe fn group<const MIXED: bool, const G: usize, const N: usize>(
        block: Eight<MIXED>,
        minima: &Minima,
        x: Blocks<N>,
        tile: &mut Tile<N>,
    ) {
        // SAFETY: the block has these parts, as the caller guarantees. Two groups share their bytes.
        let w = nibbles(unsafe { block.eights(3 + 8 * (G / 2)) }, G % 2);
        add_above::<G, N>(minima, w, x, tile);
    }
}

pub struct Q5K;

impl Grouped for Q5K {
    const KIND: Kind = Kind::Q5K;
    type Head = Minima;

    #[target_feature(enable = "avx512vl,avx512vnni")]
    #[inline]
    unsafe fn head<const MIXED: bool>(block: Eight<MIXED>) -> Minima {
        // SAFETY: as the caller guarantees.
        unsafe { Minima::of(block) }
    }

    #[target_feature(enable = "avx512vl,avx512vnni")]
    #[inline]
    unsafe fn group<const MIXED: bool, const G: usize, const N: usize>(
        block: Eight<MIXED>,
        minima: &Minima,
        x: Blocks<N>,
        tile: &mut Tile<N>,
    ) {
        // SAFETY: as above. All groups share the bytes of their fifth bits.
        let (w, fifths) = unsafe { (block.eights(11 + 8 * (G / 2)), block.eights(3)) };
        add_above::<G, N>(minima, with_top(nibbles(w, G % 2), fifths, G, 1), x, tile);
    }
}

/// Adds what the weights of a group give, which are above a minimum.
#[target_feature(enable = "avx512vl,avx512vnni")]
#[inline]
fn add_above<const G: usize, const N: usize>(minima: &Minima, w: [__m256i; 8], x: Blocks<N>, tile: &mut Tile<N>) {
    let (scale, min) = minima.group(G);
    let scale = upper(scale);
    let dots = dots([0; N], w, x, 0).map(|dots| _mm256_mullo_epi32(dots, scale));
    tile.add_above(x, dots, minima.d, min);
}

pub struct Q6K;

impl Grouped for Q6K {
    const KIND: Kind = Kind::Q6K;
    /// The packed scales, and the scale of scales.
    type Head = ([__m256i; 4], __m256);

    #[target_feature(enable = "avx512vl,avx512vnni")]
    #[inline]
    unsafe fn head<const MIXED: bool>(block: Eight<MIXED>) -> Self::Head {
        // SAFETY: a block of q6_k has them, as the caller guarantees.
        unsafe { (block.fours(48), block.half(0)) }
    }

    #[target_feature(enable = "avx512vl,avx512vnni")]
    #[inline]
    unsafe fn group<const MIXED: bool, const G: usize, const N: usize>(
        block: Eight<MIXED>,
        (scales, d): &Self::Head,
        x: Blocks<N>,
        tile: &mut Tile<N>,
    ) {
        let (half, run) = (G / 4, G % 4);
        // SAFETY: as above. Two runs share the bytes of their low bits, and four those of their high ones.
        let (w, tops) = unsafe { (block.eights(16 * half + 8 * (run % 2)), block.eights(32 + 8 * half)) };
        let [a, b, c, e, f, g, h, i] = with_top(nibbles(w, run / 2), tops, 2 * run, 3);
        let scales = Halves::of(scales[G / 2], G % 2);
        let (first, second) = (upper(scales.first), upper(scales.second));
        // The weights are 32 too large.
        let start = |half: usize| x.0.map(|x| -32 * i32::from(x.halves[half]));
        let first = dots(start(0), [a, b, c, e], x, 0).map(|dots| _mm256_mullo_epi32(dots, first));
        let second = dots(start(1), [f, g, h, i], x, 4).map(|dots| _mm256_mullo_epi32(dots, second));
        tile.add(x, sum(first, second), *d);
    }
}

/// The upper half of every lane, with its sign.
#[target_feature(enable = "avx512vl,avx512vnni")]
#[inline]
fn upper(halves: __m256i) -> __m256i {
    _mm256_srai_epi32::<16>(halves)
}
