//! `iq1_s`: 256 values in groups of 32; an f16 scale, 32 bytes that choose eight values each from a code book of 2,048
//! entries, and for each group two bytes with three more bits of each choice, a 3-bit scale, and the sign of the eighth
//! by which the values, −1, 0 or 1, are moved.

use larder_core::{NumberFormat, code_books};

use super::grid::{numbers, octets, odd};
use super::{BlockFormat, WeightGroup, half, sized};
use crate::simd::Simd;
use crate::simd::blocks::{Blocks, high, low};
use crate::simd::groups::{Groups, Signed};

/// The code book of `iq1_s` and `iq1_m`.
pub static GRID: [u32; 2048] = octets(&code_books::IQ1);

/// Eight times the values −1, 0 and 1, moved up, and from index 4 on moved down.
const LEVELS: [i8; 16] = [-7, 1, 9, 0, -9, -1, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0];

pub struct Iq1S;

impl BlockFormat for Iq1S {
    const KIND: NumberFormat = NumberFormat::Iq1S;

    fn group(block: &[u8], g: usize) -> WeightGroup {
        WeightGroup::of(quants(block, g), half(block, 0) * 0.125 * scale(block, g) as f32)
    }

    #[inline(always)]
    fn rows<S: Simd, const INTERLEAVED: bool>(block: Blocks<S, INTERLEAVED>, to: &mut impl Groups<S>) {
        let d = block.simd.mul(block.half(0), block.simd.splat(0.125));
        add_each_group!(add_group(block, &d, to));
    }
}

/// Of group `g`, twelve bits of its choices, its scale and its sign.
fn packed(block: &[u8], g: usize) -> u32 {
    u16::from_le_bytes(*sized(&block[34 + 2 * g..][..2])).into()
}

/// The scale of group `g`, an odd number from 1 to 15.
fn scale(block: &[u8], g: usize) -> i32 {
    2 * (packed(block, g) >> 12 & 7) as i32 + 1
}

/// The integers of group `g`, −9 to 9.
fn quants(block: &[u8], g: usize) -> [i8; 32] {
    let (low, packed) = (&block[2 + 4 * g..][..4], packed(block, g) as usize);
    let chosen = std::array::from_fn::<_, 4, _>(|l| {
        moved_levels(GRID[low[l] as usize | (packed >> (3 * l) & 7) << 8], packed >> 15)
    });
    std::array::from_fn(|i| chosen[i / 8][i % 8])
}

/// The integers of an entry of the code book, moved down if `down` is 1, else up.
pub fn moved_levels(entry: u32, down: usize) -> [i8; 8] {
    numbers(entry).map(|number| LEVELS[number as usize + 4 * down])
}

/// The integers of an entry of the code book, four in each run, with a 4 in every byte of `down` if they are moved
/// down.
#[inline(always)]
pub fn moved<S: Simd>(simd: S, entry: S::Bytes, down: S::Bytes) -> [S::Signed; 2] {
    let (first, last) = (simd.or(low(simd, entry), down), simd.or(high(simd, entry), down));
    [simd.look_up_signed(&LEVELS, first), simd.look_up_signed(&LEVELS, last)]
}

/// The byte that is the lowest of every lane, in all its bytes.
#[inline(always)]
pub fn everywhere<S: Simd>(simd: S, byte: S::Bytes) -> S::Bytes {
    let two = simd.or(byte, simd.bits(byte, 8, 0xff00));
    simd.or(two, simd.bits(two, 16, 0xffff_0000))
}

#[inline(always)]
fn add_group<S: Simd, const INTERLEAVED: bool>(
    block: Blocks<S, INTERLEAVED>,
    d: &S::Floats,
    g: usize,
    to: &mut impl Groups<S>,
) {
    let (simd, chosen, packed, right) = (block.simd, block.run(g), block.run(8 + g / 2), 16 * (g as i32 % 2));
    let down = everywhere(simd, simd.bits(packed, -13 - right, 4));
    let mut w = [simd.signed(chosen); 8];
    for (l, w) in w.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        let top = simd.bits(packed, 8 - 3 * l as i32 - right, 0x700);
        let entry = simd.entries(&GRID, simd.or(simd.bits(chosen, -8 * l as i32, 0xff), top));
        *w = moved(simd, entry, down);
    }
    let scale = odd(simd, simd.bits(packed, -11 - right, 0x0e));
    to.add(g, &Signed(w), [simd.mul(*d, simd.byte(scale, 0))], []);
}
