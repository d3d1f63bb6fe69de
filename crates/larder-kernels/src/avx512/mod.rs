//! Products with quantised weights for processors with AVX-512 and its dot products of bytes (VNNI); the rest is as with
//! AVX2.
//!
//! Registers are 256 bits wide, and a row is in every lane, as there: a panel has eight rows, and for wider registers
//! activations would have to be shuffled, where now a load brings them to all lanes.
//!
//! The kernels were checked by emulation (`docs/adding-an-instruction-set.md`), and never timed.
#![allow(unsafe_code)]

mod blocks;
mod groups;

use std::arch::is_x86_feature_detected;

use crate::avx2;
use crate::inputs::{BLOCK, Block};
use crate::rows::check;
use crate::set::{Set, Sums};
use crate::weights::Panel;

/// The kernels, if this processor can run them.
pub fn set() -> Option<Set> {
    let able = is_x86_feature_detected!("avx512vl") && is_x86_feature_detected!("avx512vnni");
    avx2::set().filter(|_| able).map(|set| Set { name: "avx512", blocks, ..set })
}

fn blocks(panels: &[Panel], x: &[&[Block]], out: &mut [Sums]) {
    check(panels, x.iter().map(|x| x.len() * BLOCK), out);
    // SAFETY: `set` gives this function away on processors that have the features, and the lengths are as they should.
    unsafe {
        if let ([p, q], [a]) = (panels, x)
            && p.interleaved == q.interleaved
        {
            return blocks::tile([p, q], [a], out);
        }
        for (panel, out) in panels.iter().zip(out.chunks_mut(x.len())) {
            let mut panel = *panel;
            for (x, out) in x.chunks(4).zip(out.chunks_mut(4)) {
                match *x {
                    [a] => blocks::tile([&panel], [a], out),
                    [a, b] => blocks::tile([&panel], [a, b], out),
                    [a, b, c] => blocks::tile([&panel], [a, b, c], out),
                    [a, b, c, d] => blocks::tile([&panel], [a, b, c, d], out),
                    _ => unreachable!("chunks of one to four"),
                }
                panel.next = &[];
            }
        }
    }
}
