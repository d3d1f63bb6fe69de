//! `q4_k`: 256 values in groups of 32; the f16 scale of the scales and that of the minima, twelve bytes with 6-bit
//! scales and minima, and nibbles.

use larder_core::NumberFormat;

use super::{BlockFormat, WeightGroup, half};
use crate::simd::Simd;
use crate::simd::blocks::{Blocks, high, low};
use crate::simd::groups::{Groups, Unsigned};

pub struct Q4K;

impl BlockFormat for Q4K {
    const KIND: NumberFormat = NumberFormat::Q4K;

    fn group(block: &[u8], g: usize) -> WeightGroup {
        with_minimum(block, grouped_nibbles(&block[16..], g), g)
    }

    #[inline(always)]
    fn rows<S: Simd, const INTERLEAVED: bool>(block: Blocks<S, INTERLEAVED>, to: &mut impl Groups<S>) {
        let head = Minima::of(block);
        add_each_group!(add_group(block, &head, to));
    }
}

/// Nibbles of group `g` of 32. Two groups share 32 bytes: the even one has the low nibbles.
pub fn grouped_nibbles(bytes: &[u8], g: usize) -> [i8; 32] {
    std::array::from_fn(|i| (bytes[g / 2 * 32 + i] >> (4 * (g % 2)) & 15) as i8)
}

/// WeightGroup `g` of a block whose first 16 bytes are as in `q4_k`.
pub fn with_minimum(block: &[u8], q: [i8; 32], g: usize) -> WeightGroup {
    let (scale, min) = scale_min(&block[4..16], g);
    WeightGroup::of(q, half(block, 0) * scale as f32).above(half(block, 2) * min as f32)
}

/// The 6-bit scale and minimum of group `g`, packed over 12 bytes: the first four groups in the low six bits of bytes
/// 0..4 and 4..8, the last four in the nibbles of bytes 8..12 with their top bits in the high bits of the others.
pub fn scale_min(packed: &[u8], g: usize) -> (u8, u8) {
    match g {
        0..4 => (packed[g] & 63, packed[g + 4] & 63),
        _ => ((packed[g + 4] & 15) | (packed[g - 4] >> 6 << 4), (packed[g + 4] >> 4) | (packed[g] >> 6 << 4)),
    }
}

#[inline(always)]
fn add_group<S: Simd, const INTERLEAVED: bool>(
    block: Blocks<S, INTERLEAVED>,
    head: &Minima<S>,
    g: usize,
    to: &mut impl Groups<S>,
) {
    let (scale, min) = head.group(block.simd, g);
    to.add(g, &Unsigned::<S, 15, 0>(group_nibbles(block, 3 + 8 * (g / 2), g)), [scale], [min]);
}

/// The nibbles of group `g`, whose bytes, which it shares with another group, are the runs from number `first` on.
#[inline(always)]
pub fn group_nibbles<S: Simd, const INTERLEAVED: bool>(
    block: Blocks<S, INTERLEAVED>,
    first: usize,
    g: usize,
) -> [S::Bytes; 8] {
    let mut w = block.eight_runs(first);
    for w in &mut w {
        *w = if g.is_multiple_of(2) { low(block.simd, *w) } else { high(block.simd, *w) };
    }
    w
}

/// The scales and minima of a block.
pub struct Minima<S: Simd> {
    d: S::Floats,
    dmin: S::Floats,
    /// A byte for each of the first and the last four groups.
    scales: [S::Bytes; 2],
    minima: [S::Bytes; 2],
}

impl<S: Simd> Minima<S> {
    /// Unpacks them; see [`scale_min`] for the packing.
    #[inline(always)]
    pub fn of<const INTERLEAVED: bool>(block: Blocks<S, INTERLEAVED>) -> Self {
        let (simd, [a, b, c, _]) = (block.simd, block.runs(0));
        let scales = [simd.bits(a, 0, 0x3f3f_3f3f), simd.or(low(simd, c), simd.bits(a, -2, 0x3030_3030))];
        let minima = [simd.bits(b, 0, 0x3f3f_3f3f), simd.or(high(simd, c), simd.bits(b, -2, 0x3030_3030))];
        Minima { d: block.half(0), dmin: block.half(1), scales, minima }
    }

    /// A group's scale, and its minimum.
    #[inline(always)]
    pub fn group(&self, simd: S, g: usize) -> (S::Floats, S::Floats) {
        let (scale, min) = (simd.byte(self.scales[g / 4], g % 4), simd.byte(self.minima[g / 4], g % 4));
        (simd.mul(self.d, scale), simd.mul(self.dmin, min))
    }
}
