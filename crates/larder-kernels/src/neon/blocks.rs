//! Products with quantised weights: four rows in the lanes of a register, up to four tokens for each block loaded.
//!
//! Every 32-bit lane belongs to a row. A load brings four consecutive weights of each row, which are multiplied with the
//! same four activations in all lanes. An offset of the weights is subtracted by way of the sums of the activations.
#![allow(unsafe_code)]

use std::arch::aarch64::*;

use larder_core::{NumberFormat, ROW_GROUP};

use super::block_format::{BlockFormat, nibbles};
use super::dots::Dot;
use super::groups::{Q4K, Q5K, Q6K};
use super::load::{FourBlocks, prefetch};
use super::tile::Tile;
use crate::block::{BLOCK, Block};
use crate::eight_rows::EightRows;
use crate::kernel_set::Sums;
use crate::weights::Panel;

/// Whether there are kernels for a format.
pub fn knows(kind: NumberFormat) -> bool {
    use NumberFormat::{Q4_0, Q4K, Q5K, Q6K, Q8_0};
    matches!(kind, Q8_0 | Q4_0 | Q4K | Q5K | Q6K)
}

/// Products of a panel with `N` tokens.
///
/// # Safety
/// The panel is whole rows, every token has as many blocks as a row, and the processor has the instructions of `D`.
#[target_feature(enable = "neon")]
pub unsafe fn tile<D: Dot, const N: usize>(panel: &Panel, x: [&[Block]; N], out: &mut [Sums]) {
    // SAFETY: as the caller guarantees.
    let [first, second] = unsafe {
        match panel.interleaved {
            true => by_kind::<D, true, N>(panel, x),
            false => by_kind::<D, false, N>(panel, x),
        }
    };
    for ((out, first), second) in out.iter_mut().zip(first).zip(second) {
        // SAFETY: eight values.
        unsafe {
            vst1q_f32(out.as_mut_ptr(), first);
            vst1q_f32(out[4..].as_mut_ptr(), second);
        }
    }
}

#[target_feature(enable = "neon")]
#[inline]
unsafe fn by_kind<D: Dot, const INTERLEAVED: bool, const N: usize>(
    panel: &Panel,
    x: [&[Block]; N],
) -> [[float32x4_t; N]; 2] {
    // SAFETY: as the caller guarantees.
    unsafe {
        match panel.kind {
            NumberFormat::Q8_0 => rows::<Q8_0, D, INTERLEAVED, N>(panel, x),
            NumberFormat::Q4_0 => rows::<Q4_0, D, INTERLEAVED, N>(panel, x),
            NumberFormat::Q4K => rows::<Q4K, D, INTERLEAVED, N>(panel, x),
            NumberFormat::Q5K => rows::<Q5K, D, INTERLEAVED, N>(panel, x),
            NumberFormat::Q6K => rows::<Q6K, D, INTERLEAVED, N>(panel, x),
            _ => unreachable!("the caller has asked whether there are kernels"),
        }
    }
}

/// The sums of the first and the last four rows.
#[target_feature(enable = "neon")]
#[inline(never)]
unsafe fn rows<K: BlockFormat, D: Dot, const INTERLEAVED: bool, const N: usize>(
    panel: &Panel,
    x: [&[Block]; N],
) -> [[float32x4_t; N]; 2] {
    let rows = EightRows::<INTERLEAVED>::of(panel);
    let step = ROW_GROUP * K::KIND.block_bytes();
    let (mut first, mut second) = (Tile::new(x), Tile::new(x));
    for i in 0..panel.blocks {
        if !panel.next.is_empty() {
            prefetch(panel.next.as_ptr().wrapping_add(i * step), step);
        }
        let (rows, at) = (rows.block(K::KIND, i), i * K::KIND.block_len() / BLOCK);
        // SAFETY: the rows have block `i`, and the tokens have the activations that belong to it.
        unsafe {
            K::add::<D, INTERLEAVED, N>(FourBlocks { rows, first: 0 }, at, &mut first);
            K::add::<D, INTERLEAVED, N>(FourBlocks { rows, first: 4 }, at, &mut second);
        }
    }
    [first.sums, second.sums]
}

struct Q8_0;

impl BlockFormat for Q8_0 {
    const KIND: NumberFormat = NumberFormat::Q8_0;

    #[inline(always)]
    unsafe fn add<D: Dot, const INTERLEAVED: bool, const N: usize>(
        block: FourBlocks<INTERLEAVED>,
        at: usize,
        tile: &mut Tile<N>,
    ) {
        // SAFETY: a block of q8_0 has these parts; the rest is as the caller guarantees. 2 · 128 · 127 fits 16 bits.
        unsafe {
            let x = tile.at(at);
            let dots = D::dot::<2, 2, N>([block.runs(0), block.runs(4)], x, 0, [0; N]);
            tile.add(x, dots, block.half(0));
        }
    }
}

struct Q4_0;

impl BlockFormat for Q4_0 {
    const KIND: NumberFormat = NumberFormat::Q4_0;

    #[inline(always)]
    unsafe fn add<D: Dot, const INTERLEAVED: bool, const N: usize>(
        block: FourBlocks<INTERLEAVED>,
        at: usize,
        tile: &mut Tile<N>,
    ) {
        // SAFETY: as above. The stored weights are 8 too large, and 8 · 15 · 127 fits 16 bits.
        unsafe {
            let (w, x) = (block.runs(0), tile.at(at));
            let dots = D::dot::<8, 2, N>([nibbles(w, 0), nibbles(w, 1)], x, 0, x.0.map(|x| -x.sum8));
            tile.add(x, dots, block.half(0));
        }
    }
}
