//! Products with quantised weights: eight rows in the lanes of a register, up to four tokens for each block loaded.
//!
//! One instruction multiplies four unsigned weights of every row with signed activations and adds them up in 32 bits, so
//! weights that are signed have an offset, which is taken off through the activations' sums.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use larder_core::{GROUP, Kind};

use super::groups::{Q4K, Q5K, Q6K};
use crate::avx2::{Blocks, Tile, fetch, nibbles};
use crate::inputs::{BLOCK, Block};
use crate::rows::{Eight, Rows};
use crate::set::Sums;
use crate::weights::Panel;

/// Products of `P` panels with `N` tokens: `out [panels, tokens]`.
///
/// # Safety
/// The panels are whole rows of the same kind, order and length, and every token has as many blocks as they have.
#[target_feature(enable = "avx512vl,avx512vnni")]
pub unsafe fn tile<const P: usize, const N: usize>(panels: [&Panel; P], x: [&[Block]; N], out: &mut [Sums]) {
    // SAFETY: as the caller guarantees.
    let sums = unsafe {
        match panels[0].kind {
            Kind::Q8_0 => in_order::<Q8_0, P, N>(panels, x),
            Kind::Q4_0 => in_order::<Q4_0, P, N>(panels, x),
            Kind::Q4K => in_order::<Q4K, P, N>(panels, x),
            Kind::Q5K => in_order::<Q5K, P, N>(panels, x),
            Kind::Q6K => in_order::<Q6K, P, N>(panels, x),
            Kind::F32 | Kind::F16 | Kind::Bf16 => unreachable!("floats have kernels of their own"),
        }
    };
    for (out, sums) in out.iter_mut().zip(sums.as_flattened()) {
        // SAFETY: eight values.
        unsafe { _mm256_storeu_ps(out.as_mut_ptr(), *sums) };
    }
}

#[target_feature(enable = "avx512vl,avx512vnni")]
#[inline]
unsafe fn in_order<K: Weight, const P: usize, const N: usize>(
    panels: [&Panel; P],
    x: [&[Block]; N],
) -> [[__m256; N]; P] {
    // SAFETY: as the caller guarantees.
    unsafe {
        match panels[0].interleaved {
            true => rows::<K, true, P, N>(panels, x),
            false => rows::<K, false, P, N>(panels, x),
        }
    }
}

#[target_feature(enable = "avx512vl,avx512vnni")]
#[inline(never)]
unsafe fn rows<K: Weight, const MIXED: bool, const P: usize, const N: usize>(
    panels: [&Panel; P],
    x: [&[Block]; N],
) -> [[__m256; N]; P] {
    let rows = panels.map(Rows::<MIXED>::of);
    let fetches = !panels[0].next.is_empty();
    let step = GROUP * K::KIND.block_bytes();
    let mut tiles = [Tile::new(x); P];
    for i in 0..panels[0].blocks {
        for p in 0..P {
            if fetches {
                fetch(panels[p].next.as_ptr().wrapping_add(i * step), step);
            }
            // SAFETY: the rows have that many blocks, and the tokens that many times 32 values.
            unsafe { K::add(rows[p].block(K::KIND, i), i * K::KIND.block_len() / BLOCK, &mut tiles[p]) };
        }
    }
    tiles.map(|tile| tile.sums)
}

/// A kind of weights.
pub trait Weight {
    const KIND: Kind;

    /// Adds what a block of every row gives with each token's blocks from number `at`.
    ///
    /// # Safety
    /// The blocks are of this kind, and the tokens have these blocks.
    unsafe fn add<const MIXED: bool, const N: usize>(block: Eight<MIXED>, at: usize, tile: &mut Tile<N>);
}

struct Q8_0;

impl Weight for Q8_0 {
    const KIND: Kind = Kind::Q8_0;

    #[target_feature(enable = "avx512vl,avx512vnni")]
    #[inline]
    unsafe fn add<const MIXED: bool, const N: usize>(block: Eight<MIXED>, at: usize, tile: &mut Tile<N>) {
        // SAFETY: a block of q8_0 has these parts, and the tokens have a block there, as the caller guarantees.
        let (w, d, x) = unsafe { (block.eights(0), block.half(0), tile.at(at)) };
        // With the other sign bit a byte without sign is 128 too large.
        let w = w.map(|w| _mm256_xor_si256(w, _mm256_set1_epi8(-128)));
        tile.add(x, dots(x.0.map(|x| -16 * x.sum8), w, x, 0), d);
    }
}

struct Q4_0;

impl Weight for Q4_0 {
    const KIND: Kind = Kind::Q4_0;

    #[target_feature(enable = "avx512vl,avx512vnni")]
    #[inline]
    unsafe fn add<const MIXED: bool, const N: usize>(block: Eight<MIXED>, at: usize, tile: &mut Tile<N>) {
        // SAFETY: as above.
        let (w, d, x) = unsafe { (block.fours(0), block.half(0), tile.at(at)) };
        let ([a, b, c, e], [f, g, h, i]) = (nibbles(w, 0), nibbles(w, 1));
        // The weights are 8 too large.
        tile.add(x, dots(x.0.map(|x| -x.sum8), [a, b, c, e, f, g, h, i], x, 0), d);
    }
}

/// For each token what its sums start from, and the products of `K` times four weights of each row, the first with
/// activations `4 · first` and the next three.
#[target_feature(enable = "avx512vl,avx512vnni")]
#[inline]
pub fn dots<const K: usize, const N: usize>(
    start: [i32; N],
    w: [__m256i; K],
    x: Blocks<N>,
    first: usize,
) -> [__m256i; N] {
    let mut sums = start.map(|start| _mm256_set1_epi32(start));
    for (k, w) in (first..).zip(w) {
        for (t, sum) in sums.iter_mut().enumerate() {
            *sum = _mm256_dpbusd_epi32(*sum, w, x.four(t, k));
        }
    }
    sums
}
