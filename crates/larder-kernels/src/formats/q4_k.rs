//! `q4_k`: 256 values in groups of 32; the f16 scale of the scales and that of the minima, twelve bytes with 6-bit
//! scales and minima, and nibbles.

use larder_core::NumberFormat;

use super::{BlockFormat, half, integer_dot, sized};
use crate::block::Block;
use crate::simd::Simd;
use crate::simd::blocks::{Blocks, high, low};
use crate::simd::integers::Scaled;
use crate::simd::tile::Tile;

pub struct Q4K;

impl BlockFormat for Q4K {
    const KIND: NumberFormat = NumberFormat::Q4K;

    fn widen(block: &[u8], out: &mut [f32]) {
        widen_with_minima(block, &quants(sized(block)), out);
    }

    fn add(block: &[u8], x: &[Block], sum: f32) -> f32 {
        add_with_minima(block, &quants(sized(block)), x, sum)
    }

    #[inline(always)]
    fn add_rows<S: Simd, const INTERLEAVED: bool, const N: usize, const G: usize>(
        block: Blocks<S, INTERLEAVED>,
        tile: &mut Tile<S, N, G>,
    ) {
        let head = Minima::of(block);
        add_each_group!(add_group(block, &head, tile));
    }
}

/// The integers of a block, 0 to 15.
fn quants(block: &[u8; 144]) -> [i8; 256] {
    grouped_nibbles(&block[16..])
}

/// 256 nibbles in groups of 32. Two groups share 32 bytes: the even one has the low nibbles.
pub fn grouped_nibbles(bytes: &[u8]) -> [i8; 256] {
    let mut quants = [0; 256];
    for (g, out) in quants.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        for (o, q) in out.iter_mut().zip(&bytes[g / 2 * 32..][..32]) {
            *o = (q >> (4 * (g % 2)) & 15) as i8;
        }
    }
    quants
}

/// Widens a block whose first 16 bytes are as in `q4_k`.
pub fn widen_with_minima(block: &[u8], quants: &[i8; 256], out: &mut [f32]) {
    let (d, dmin) = (half(block, 0), half(block, 2));
    for (g, (out, quants)) in out.as_chunks_mut::<32>().0.iter_mut().zip(quants.as_chunks::<32>().0).enumerate() {
        let (scale, min) = scale_min(&block[4..16], g);
        let (d, m) = (d * scale as f32, dmin * min as f32);
        for (o, q) in out.iter_mut().zip(quants) {
            *o = d * *q as f32 - m;
        }
    }
}

/// Adds the product of a block whose first 16 bytes are as in `q4_k`.
pub fn add_with_minima(block: &[u8], quants: &[i8; 256], x: &[Block], mut sum: f32) -> f32 {
    let (d, dmin) = (half(block, 0), half(block, 2));
    for (g, (q, x)) in quants.as_chunks::<32>().0.iter().zip(x).enumerate() {
        let (scale, min) = scale_min(&block[4..16], g);
        let dot = scale as i32 * integer_dot(q, &x.q);
        sum += dot as f32 * (d * x.d) - (dmin * min as f32) * x.d_sum;
    }
    sum
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
fn add_group<S: Simd, const INTERLEAVED: bool, const N: usize, const G: usize>(
    block: Blocks<S, INTERLEAVED>,
    head: &Minima<S>,
    g: usize,
    tile: &mut Tile<S, N, G>,
) {
    let (scale, min) = head.group(block.simd, g);
    let w = Scaled::<S, 15>(group_nibbles(block, 3 + 8 * (g / 2), g), scale);
    tile.add_above(g, &w, head.d, min);
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
    /// The scale of the scales.
    pub d: S::Floats,
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
    pub fn group(&self, simd: S, g: usize) -> (S::Scale, S::Floats) {
        let min = simd.byte(self.minima[g / 4], g % 4);
        (simd.small_scale(self.scales[g / 4], g % 4), simd.mul(self.dmin, min))
    }
}
