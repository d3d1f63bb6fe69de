//! Products with quantised weights: eight rows in the lanes of a register, up to four tokens for each block loaded.
//!
//! Every 32-bit lane belongs to a row. A load brings four consecutive weights of each row, which are multiplied with the
//! same four activations in all lanes. One instruction multiplies unsigned with signed bytes and adds pairs, so signed
//! weights either have an offset, which is subtracted by way of the sums of the activations, or pass their sign to the
//! activations. Sums of pairs stay in 16 bits as long as they cannot overflow; the step to 32 bits multiplies by the scale
//! where that is an integer.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use larder_core::{NumberFormat, ROW_GROUP};

use super::block_format::{BlockFormat, nibbles};
use super::groups::{Q4K, Q5K, Q6K};
use super::load::prefetch;
use super::tile::{Tile, widened};
use crate::block::{BLOCK, Block};
use crate::eight_rows::{EightBlocks, EightRows};
use crate::kernel_set::Sums;
use crate::weights::Panel;

/// Whether there are kernels for a format.
pub fn knows(kind: NumberFormat) -> bool {
    use NumberFormat::{Q4_0, Q4K, Q5K, Q6K, Q8_0};
    matches!(kind, Q8_0 | Q4_0 | Q4K | Q5K | Q6K)
}

/// Products of `P` panels with `N` tokens: `out [panels, tokens]`.
///
/// # Safety
/// The panels are whole rows of the same format, order and length, and every token has as many blocks as a row.
#[target_feature(enable = "avx2,f16c")]
pub unsafe fn tile<const P: usize, const N: usize>(panels: [&Panel; P], x: [&[Block]; N], out: &mut [Sums]) {
    // SAFETY: as the caller guarantees.
    let sums = unsafe {
        match panels[0].interleaved {
            true => by_kind::<true, P, N>(panels, x),
            false => by_kind::<false, P, N>(panels, x),
        }
    };
    for (out, sums) in out.iter_mut().zip(sums.as_flattened()) {
        // SAFETY: eight values.
        unsafe { _mm256_storeu_ps(out.as_mut_ptr(), *sums) };
    }
}

#[target_feature(enable = "avx2,f16c")]
#[inline]
unsafe fn by_kind<const INTERLEAVED: bool, const P: usize, const N: usize>(
    panels: [&Panel; P],
    x: [&[Block]; N],
) -> [[__m256; N]; P] {
    // SAFETY: as the caller guarantees.
    unsafe {
        match panels[0].kind {
            NumberFormat::Q8_0 => rows::<Q8_0, INTERLEAVED, P, N>(panels, x),
            NumberFormat::Q4_0 => rows::<Q4_0, INTERLEAVED, P, N>(panels, x),
            NumberFormat::Q4K => rows::<Q4K, INTERLEAVED, P, N>(panels, x),
            NumberFormat::Q5K => rows::<Q5K, INTERLEAVED, P, N>(panels, x),
            NumberFormat::Q6K => rows::<Q6K, INTERLEAVED, P, N>(panels, x),
            _ => unreachable!("the caller has asked whether there are kernels"),
        }
    }
}

#[target_feature(enable = "avx2,f16c")]
#[inline(never)]
unsafe fn rows<K: BlockFormat, const INTERLEAVED: bool, const P: usize, const N: usize>(
    panels: [&Panel; P],
    x: [&[Block]; N],
) -> [[__m256; N]; P] {
    let rows = panels.map(EightRows::<INTERLEAVED>::of);
    let prefetches = !panels[0].next.is_empty();
    let step = ROW_GROUP * K::KIND.block_bytes();
    let mut tiles = [Tile::new(x); P];
    for i in 0..panels[0].blocks {
        for p in 0..P {
            if prefetches {
                prefetch(panels[p].next.as_ptr().wrapping_add(i * step), step);
            }
            // SAFETY: the rows have block `i`, and the tokens have the activations that belong to it.
            unsafe { K::add(rows[p].block(K::KIND, i), i * K::KIND.block_len() / BLOCK, &mut tiles[p]) };
        }
    }
    tiles.map(|tile| tile.sums)
}

struct Q8_0;

impl BlockFormat for Q8_0 {
    const KIND: NumberFormat = NumberFormat::Q8_0;

    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    unsafe fn add<const INTERLEAVED: bool, const N: usize>(
        block: EightBlocks<INTERLEAVED>,
        at: usize,
        tile: &mut Tile<N>,
    ) {
        // SAFETY: a block of q8_0 has these parts, and the tokens have a block there, as the caller guarantees.
        let (d, x) = unsafe { (block.half(0), tile.at(at)) };
        let mut dots = [_mm256_setzero_si256(); N];
        for first in [0, 4] {
            // SAFETY: as above.
            for (k, w) in (first..).zip(unsafe { block.fours(first) }) {
                let size = _mm256_abs_epi8(w);
                for (t, dots) in dots.iter_mut().enumerate() {
                    let pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(x.four(t, k), w));
                    *dots = _mm256_add_epi32(*dots, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
                }
            }
        }
        tile.add(x, dots, d);
    }
}

struct Q4_0;

impl BlockFormat for Q4_0 {
    const KIND: NumberFormat = NumberFormat::Q4_0;

    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    unsafe fn add<const INTERLEAVED: bool, const N: usize>(
        block: EightBlocks<INTERLEAVED>,
        at: usize,
        tile: &mut Tile<N>,
    ) {
        // SAFETY: as above.
        let (w, d, x) = unsafe { (block.fours(0), block.half(0), tile.at(at)) };
        let ([a, b, c, e], [f, g, h, i]) = (nibbles(w, 0), nibbles(w, 1));
        let mut pairs = [_mm256_setzero_si256(); N];
        for (k, (low, high)) in [(a, f), (b, g), (c, h), (e, i)].into_iter().enumerate() {
            // 8 · 2 · 15 · 127 fits 16 bits.
            x.add_pairs(&mut pairs, low, k);
            x.add_pairs(&mut pairs, high, k + 4);
        }
        let mut dots = widened(pairs, _mm256_set1_epi16(1));
        for (dots, x) in dots.iter_mut().zip(x.0) {
            *dots = _mm256_sub_epi32(*dots, _mm256_set1_epi32(x.sum8));
        }
        tile.add(x, dots, d);
    }
}
