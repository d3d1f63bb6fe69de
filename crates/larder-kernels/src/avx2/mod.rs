//! Kernels for processors with AVX2 and F16C.
#![allow(unsafe_code)]

mod blocks;
mod floats;
mod load;
mod quantise;
mod scales;
mod tile;

use std::arch::is_x86_feature_detected;

use larder_core::Kind;

use crate::inputs::{BLOCK, Block};
use crate::set::{Set, Sums};
use crate::weights::Panel;

/// The kernels, if this processor can run them.
pub fn set() -> Option<Set> {
    let able = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c");
    able.then_some(Set { name: "avx2", blocks, floats, quantise })
}

fn blocks(panel: &Panel, x: &[&[Block]], out: &mut [Sums]) {
    check(panel, x.iter().map(|x| x.len() * BLOCK), out.len());
    // SAFETY: `set` gives this function away on processors that have the features, and the lengths are as they should.
    unsafe {
        match *x {
            [a] => blocks::tile(panel, [a], out),
            [a, b] => blocks::tile(panel, [a, b], out),
            [a, b, c] => blocks::tile(panel, [a, b, c], out),
            [a, b, c, d] => blocks::tile(panel, [a, b, c, d], out),
            _ => unreachable!("a kernel takes one to four tokens"),
        }
    }
}

fn floats(panel: &Panel, x: &[&[f32]], out: &mut [Sums]) {
    check(panel, x.iter().map(|x| x.len()), out.len());
    // SAFETY: as above.
    unsafe {
        match panel.kind {
            Kind::F32 => floats::panel::<{ floats::F32 }>(panel, x, out),
            Kind::F16 => floats::panel::<{ floats::F16 }>(panel, x, out),
            Kind::Bf16 => floats::panel::<{ floats::BF16 }>(panel, x, out),
            Kind::Q8_0 | Kind::Q4_0 | Kind::Q4K | Kind::Q5K | Kind::Q6K => {
                unreachable!("blocks have kernels of their own")
            }
        }
    }
}

fn quantise(x: &[f32], out: &mut [Block]) {
    for (x, out) in x.as_chunks::<BLOCK>().0.iter().zip(out) {
        // SAFETY: as above.
        *out = unsafe { quantise::block(x) };
    }
}

/// What the kernels rely on, once for each tile.
fn check(panel: &Panel, x: impl ExactSizeIterator<Item = usize>, out: usize) {
    assert!(panel.rows > 0 && panel.bytes.len() == panel.rows * panel.row_bytes, "a panel is whole rows");
    assert!(panel.kind.row_bytes(panel.cols) == Some(panel.row_bytes), "a row is whole blocks");
    assert!(x.len() == out && { x }.all(|len| len == panel.cols), "activations do not fit the rows");
}
