//! `nvfp4`: 64 values in groups of sixteen; four bytes that are the groups' scales, floats of three bits of mantissa,
//! and for each group eight bytes of nibbles: the low ones are its first eight values. A nibble is a float of four
//! bits, as in `mxfp4`.

use larder_core::{MXFP4_LEVELS, NumberFormat, nvfp4_scale};

use super::mxfp4::RAISED_LEVELS;
use super::{BlockFormat, integer_dot, sized};
use crate::block::Block;
use crate::simd::Simd;
use crate::simd::blocks::{Blocks, high, low};
use crate::simd::tile::Tile;

pub struct Nvfp4;

impl BlockFormat for Nvfp4 {
    const KIND: NumberFormat = NumberFormat::Nvfp4;

    fn widen(block: &[u8], out: &mut [f32]) {
        let block: &[u8; 36] = sized(block);
        for (g, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            *out = quants(block, g).map(|q| nvfp4_scale(block[g]) * f32::from(q));
        }
    }

    fn add(block: &[u8], x: &[Block], mut sum: f32) -> f32 {
        let block: &[u8; 36] = sized(block);
        for (i, x) in x.iter().enumerate() {
            let halves = x.q.as_chunks::<16>().0;
            let [first, second] = [0, 1].map(|half| {
                let g = 2 * i + half;
                // 16 · 12 · 127 has fifteen digits of base 2, and the scale has four.
                nvfp4_scale(block[g]) * integer_dot(&quants(block, g), &halves[half]) as f32
            });
            sum += (first + second) * x.d;
        }
        sum
    }

    #[inline(always)]
    fn add_rows<S: Simd, const INTERLEAVED: bool, const N: usize, const G: usize>(
        block: Blocks<S, INTERLEAVED>,
        tile: &mut Tile<S, N, G>,
    ) {
        let scales = without_nan(block.simd, block.run(0));
        add_each_group!(add_pair, block, &scales, tile, 0 1);
    }
}

/// The integers of group `g` of a block, −12 to 12.
fn quants(block: &[u8; 36], g: usize) -> [i8; 16] {
    std::array::from_fn(|i| MXFP4_LEVELS[usize::from(block[4 + 8 * g + i % 8] >> (i / 8 * 4) & 15)])
}

/// The bytes without the sign, with 0 for 0x7f.
#[inline(always)]
fn without_nan<S: Simd>(simd: S, bytes: S::Bytes) -> S::Bytes {
    // The top bit of a byte becomes set if one is added to 0x7f, and to no other that does not have it.
    let changed = simd.xor(bytes, simd.minus(bytes, 0xff));
    let set = simd.xor(simd.or(changed, bytes), bytes);
    let mut masks = [0; 16];
    masks[1] = 0x7f;
    let mask = simd.look_up(&masks, simd.bits(set, -7, 0x0101_0101));
    simd.bits(simd.xor(bytes, mask), 0, 0x7f7f_7f7f)
}

/// The scale of group `g`. Its bits are those of an f16 that is smaller by 2^8, also where they are subnormal.
#[inline(always)]
fn scale<S: Simd>(simd: S, bytes: S::Bytes, g: usize) -> S::Floats {
    let half = simd.half_of_lanes(simd.bits(bytes, 7 - 8 * g as i32, 0x3f80));
    simd.mul(half, simd.splat(128.0))
}

/// Adds groups `2 · i` and `2 · i + 1`.
#[inline(always)]
fn add_pair<S: Simd, const INTERLEAVED: bool, const N: usize, const G: usize>(
    block: Blocks<S, INTERLEAVED>,
    scales: &S::Bytes,
    i: usize,
    tile: &mut Tile<S, N, G>,
) {
    let (simd, [a, b, c, d]) = (block.simd, block.runs(1 + 4 * i));
    let mut w = [
        low(simd, a),
        low(simd, b),
        high(simd, a),
        high(simd, b),
        low(simd, c),
        low(simd, d),
        high(simd, c),
        high(simd, d),
    ];
    for w in &mut w {
        *w = simd.look_up(&RAISED_LEVELS, *w);
    }
    tile.add_halves::<24, 12>(i, &w, [scale(simd, *scales, 2 * i), scale(simd, *scales, 2 * i + 1)]);
}
