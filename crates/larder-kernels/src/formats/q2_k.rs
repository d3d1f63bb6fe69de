//! `q2_k`: 256 values in groups of sixteen; for each group a byte with a 4-bit scale and, above it, a 4-bit minimum; 64
//! bytes of values; the f16 scale of the scales and that of the minima.

use larder_core::NumberFormat;

use super::{BlockFormat, WeightGroup, bit_pairs, half, pairs_of_rows, two_bytes};
use crate::simd::Simd;
use crate::simd::blocks::{Blocks, high, low};
use crate::simd::groups::{Groups, Unsigned};

pub struct Q2K;

impl BlockFormat for Q2K {
    const KIND: NumberFormat = NumberFormat::Q2K;

    fn group(block: &[u8], g: usize) -> WeightGroup {
        let (d, dmin, packed) = (half(block, 80), half(block, 82), [block[2 * g], block[2 * g + 1]]);
        let scales = packed.map(|p| d * (p & 15) as f32);
        WeightGroup::in_halves(bit_pairs(&block[16..80], g), scales).above_each(packed.map(|p| dmin * (p >> 4) as f32))
    }

    #[inline(always)]
    fn rows<S: Simd, const INTERLEAVED: bool>(block: Blocks<S, INTERLEAVED>, to: &mut impl Groups<S>) {
        let head = Head::of(block);
        add_each_group!(add_group(block, &head, to));
    }
}

/// The scales and minima of the groups, and what they are multiplied by.
struct Head<S: Simd> {
    packed: [S::Bytes; 4],
    d: S::Floats,
    dmin: S::Floats,
}

impl<S: Simd> Head<S> {
    #[inline(always)]
    fn of<const INTERLEAVED: bool>(block: Blocks<S, INTERLEAVED>) -> Self {
        Head { packed: block.runs(0), d: block.half(0), dmin: block.half(1) }
    }
}

#[inline(always)]
fn add_group<S: Simd, const INTERLEAVED: bool>(
    block: Blocks<S, INTERLEAVED>,
    head: &Head<S>,
    g: usize,
    to: &mut impl Groups<S>,
) {
    let (simd, packed, at) = (block.simd, head.packed[g / 2], 2 * (g % 2));
    let (scales, minima) = (low(simd, packed), high(simd, packed));
    let (scales, minima) = (two_bytes(simd, head.d, scales, at), two_bytes(simd, head.dmin, minima, at));
    to.add(g, &Unsigned::<S, 3, 0>(pairs_of_rows(block, 4, g)), scales, minima);
}
