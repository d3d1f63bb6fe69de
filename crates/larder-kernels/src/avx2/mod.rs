//! Kernels for processors with AVX2 and F16C.
#![allow(unsafe_code)]

mod blocks;
mod floats;
mod groups;
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

fn blocks(panels: &[Panel], x: &[&[Block]], out: &mut [Sums]) {
    check(panels, x.iter().map(|x| x.len() * BLOCK), out.len());
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

fn floats(panels: &[Panel], x: &[&[f32]], out: &mut [Sums]) {
    check(panels, x.iter().map(|x| x.len()), out.len());
    for (panel, out) in panels.iter().zip(out.chunks_mut(x.len())) {
        // SAFETY: as above.
        unsafe {
            match panel.kind {
                Kind::F32 => floats::panel::<{ floats::F32 }>(*panel, x, out),
                Kind::F16 => floats::panel::<{ floats::F16 }>(*panel, x, out),
                Kind::Bf16 => floats::panel::<{ floats::BF16 }>(*panel, x, out),
                Kind::Q8_0 | Kind::Q4_0 | Kind::Q4K | Kind::Q5K | Kind::Q6K => {
                    unreachable!("blocks have kernels of their own")
                }
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
fn check(panels: &[Panel], mut x: impl ExactSizeIterator<Item = usize>, out: usize) {
    let first = &panels[0];
    for panel in panels {
        assert!(panel.rows > 0 && panel.bytes.len() == panel.rows * first.row_bytes, "a panel is whole rows");
        assert!(panel.kind == first.kind && panel.blocks == first.blocks, "panels are of the same kind and length");
    }
    assert!(first.row_bytes == first.blocks * first.kind.block_bytes(), "a row is whole blocks");
    assert!(panels.len() * x.len() == out && x.all(|len| len == first.cols()), "activations do not fit the rows");
}
