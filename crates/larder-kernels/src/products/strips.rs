//! Products of many tokens: a strip of rows at a time, unpacked once for all of them.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::ops::Range;

use larder_core::ROW_GROUP;

use super::Product;
use crate::block::{BLOCK, Block};
use crate::disjoint::Disjoint;
use crate::kernel_set::StripKernels;
use crate::strip::{STRIP_BLOCKS, STRIP_PANELS, STRIP_ROWS, Strip, StripSums};
use crate::weights::{Panel, Panels};

/// The most tokens for which a strip is unpacked once: their sums stay in the cache.
const TOKENS: usize = 256;

/// Values of a line of the cache.
const LINE: usize = 16;

/// Buffers of a thread.
struct Scratch {
    strip: Box<Strip>,
    sums: Box<[StripSums]>,
}

/// Bytes of the buffers of one thread for products of many tokens.
pub const PRODUCT_SCRATCH_BYTES: usize = size_of::<Strip>() + TOKENS * size_of::<StripSums>();

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch {
        strip: Strip::new(),
        sums: vec![StripSums([0.0; STRIP_ROWS]); TOKENS].into(),
    });
}

/// The results of the strip that begins with panel number `first`, for some tokens. If there is a `next` strip, it is
/// prefetched meanwhile.
pub fn in_strips(
    kernels: &StripKernels,
    product: &Product,
    first: usize,
    tokens: Range<usize>,
    next: bool,
    out: &Disjoint<f32>,
) {
    let stored = product.weights.panels();
    let panels = panels_from(&stored, first);
    let blocks = panels[0].blocks;
    let step = STRIP_BLOCKS * BLOCK / product.weights.kind.block_len();
    let each = product.weights.kind.block_len() / BLOCK;
    SCRATCH.with_borrow_mut(|Scratch { strip, sums }| {
        for tokens in parts(tokens, TOKENS) {
            let mut x: [&[Block]; TOKENS] = [&[]; TOKENS];
            for (x, t) in x.iter_mut().zip(tokens.clone()) {
                *x = product.x.blocks(product.pick.map_or(t, |pick| pick[t] as usize));
            }
            let (x, sums) = (&x[..tokens.len()], &mut sums[..tokens.len()]);
            sums.fill(StripSums([0.0; STRIP_ROWS]));
            for part in parts(0..blocks, step) {
                let ahead = part.end..blocks.min(part.end + step);
                let ahead = if !ahead.is_empty() {
                    panels.map(|panel| stored_blocks(&panel, ahead.clone()))
                } else if next {
                    panels_from(&stored, first + STRIP_PANELS).map(|panel| stored_blocks(&panel, 0..blocks.min(step)))
                } else {
                    [&[][..]; STRIP_PANELS]
                };
                // Each part of the blocks has time for as large a part of the results.
                let of_part = |block: usize| tokens.start + tokens.len() * block / blocks;
                product.expect_strip(first * ROW_GROUP, of_part(part.start)..of_part(part.end), out);
                let first = part.start * each;
                (kernels.unpack)(&panels, part, ahead, strip);
                (kernels.multiply)(strip, x, first, sums);
            }
            product.store_strip(first * ROW_GROUP, tokens.start, sums, out);
        }
    });
}

impl Product<'_> {
    /// Requests the places of the results of a strip for some tokens, so that storing them does not wait for memory.
    fn expect_strip(&self, row: usize, tokens: Range<usize>, out: &Disjoint<f32>) {
        for t in tokens {
            // SAFETY: every tile belongs to one task, and nothing is written here.
            let out = unsafe { out.slice(t * self.weights.rows + row, STRIP_ROWS) };
            out.as_chunks::<LINE>().0.iter().for_each(prefetch_to_write);
        }
    }

    /// Stores the sums of a strip, times the scale of the matrix, for the tokens from number `first` on.
    fn store_strip(&self, row: usize, first: usize, sums: &[StripSums], out: &Disjoint<f32>) {
        for (t, StripSums(sums)) in sums.iter().enumerate() {
            // SAFETY: every tile belongs to one task, and only its results are written here.
            let out = unsafe { out.slice((first + t) * self.weights.rows + row, STRIP_ROWS) };
            out.copy_from_slice(sums);
            if self.weights.scale != 1.0 {
                out.iter_mut().for_each(|value| *value *= self.weights.scale);
            }
        }
    }
}

fn panels_from<'a>(stored: &Panels<'a>, first: usize) -> [Panel<'a>; STRIP_PANELS] {
    std::array::from_fn(|i| stored.get(first + i))
}

/// Requests a line of the cache for writing.
#[cfg(target_arch = "x86_64")]
fn prefetch_to_write(line: &[f32; LINE]) {
    // SAFETY: a prefetch changes nothing, and processors that do not know it ignore it.
    unsafe { std::arch::asm!("prefetchw [{}]", in(reg) line, options(nostack, preserves_flags, readonly)) };
}

#[cfg(target_arch = "aarch64")]
fn prefetch_to_write(line: &[f32; LINE]) {
    // SAFETY: a prefetch changes nothing.
    unsafe { std::arch::asm!("prfm pstl2keep, [{}]", in(reg) line, options(nostack, preserves_flags, readonly)) };
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn prefetch_to_write(_: &[f32; LINE]) {}

/// The bytes of some blocks of each row, where they lie side by side.
fn stored_blocks<'a>(panel: &Panel<'a>, blocks: Range<usize>) -> &'a [u8] {
    let each = ROW_GROUP * panel.kind.block_bytes();
    if panel.interleaved { &panel.bytes[blocks.start * each..blocks.end * each] } else { &[] }
}

/// A range in parts of at most `most`.
fn parts(all: Range<usize>, most: usize) -> impl Iterator<Item = Range<usize>> {
    all.clone().step_by(most).map(move |start| start..all.end.min(start + most))
}
