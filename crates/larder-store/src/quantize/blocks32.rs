//! Blocks of 32 values with a scale in f16. `q8_0`, and `q4_0` without an importance, are those of ggml's reference,
//! bit for bit; the scales of the others are searched for.

use half::f16;

use super::search::{self, Group, SHIFT, inverse, rounded};
use super::{BLOCK, magnitude};

/// What the columns of a block matter, if it is known.
type Importance<'a> = Option<&'a [f32; BLOCK]>;

pub fn q8_0(values: &[f32; BLOCK], _: Importance, out: &mut [u8; 34]) {
    let largest = values.iter().fold(0, |m, v| m.max(magnitude(*v)));
    let d = f32::from_bits(largest as u32) / 127.0;
    let id = inverse(d);
    out[..2].copy_from_slice(&f16::from_f32(d).to_le_bytes());
    out[2..].copy_from_slice(&codes(values, |v| round_half_away(v * id)));
}

pub fn q4_0(values: &[f32; BLOCK], importance: Importance, out: &mut [u8; 18]) {
    if importance.is_some() {
        let scale = signed_scale(values, importance, 8.0);
        let id = inverse(put_half(out, 0, scale));
        return pack_nibbles(&values.map(|v| (rounded(v * id, -8.0, 7.0) + 8.0) as u8), &mut out[2..]);
    }
    let d = largest_magnitude(values) / -8.0;
    let id = inverse(d);
    out[..2].copy_from_slice(&f16::from_f32(d).to_le_bytes());
    let codes = codes(values, |v| floor(v * id + 8.5));
    pack_nibbles(&codes.map(|code| code.min(15)), &mut out[2..]);
}

pub fn q5_0(values: &[f32; BLOCK], importance: Importance, out: &mut [u8; 22]) {
    let scale = signed_scale(values, importance, 16.0);
    let id = inverse(put_half(out, 0, scale));
    pack_fives(&values.map(|v| (rounded(v * id, -16.0, 15.0) + 16.0) as u8), &mut out[2..]);
}

/// The best scale for integers from `−most` to `most − 1`.
fn signed_scale(values: &[f32; BLOCK], importance: Importance, most: f32) -> f32 {
    let weights = search::weights(values, importance);
    search::scale(Group::new(values, &weights), search::around(values, -most), |v| rounded(v, -most, most - 1.0))
}

pub fn q4_1(values: &[f32; BLOCK], importance: Importance, out: &mut [u8; 20]) {
    let codes = above_minimum(values, importance, 15.0, out);
    pack_nibbles(&codes, &mut out[4..]);
}

pub fn q5_1(values: &[f32; BLOCK], importance: Importance, out: &mut [u8; 24]) {
    let codes = above_minimum(values, importance, 31.0, out);
    pack_fives(&codes, &mut out[4..]);
}

/// Stores the best scale and minimum at the start of a block, and returns the integers, 0 to `most`.
fn above_minimum(values: &[f32; BLOCK], importance: Importance, most: f32, out: &mut [u8]) -> [u8; BLOCK] {
    let weights = search::weights(values, importance);
    let (scale, low) = search::scale_and_minimum(Group::new(values, &weights), most, false);
    let (id, low) = (inverse(put_half(out, 0, scale)), put_half(out, 2, low));
    values.map(|v| rounded((v - low) * id, 0.0, most) as u8)
}

/// Stores a scale as f16, and returns what it was rounded to.
pub fn put_half(out: &mut [u8], at: usize, scale: f32) -> f32 {
    let scale = f16::from_f32(scale);
    out[at..at + 2].copy_from_slice(&scale.to_le_bytes());
    scale.to_f32()
}

/// Stores 32 integers of four bits: the first half in the low nibbles of 16 bytes, the second in the high ones.
pub fn pack_nibbles(codes: &[u8; BLOCK], out: &mut [u8]) {
    let (low, high) = codes.split_at(BLOCK / 2);
    for (i, nibbles) in out.iter_mut().enumerate() {
        *nibbles = (low[i] & 15) | high[i] << 4;
    }
}

/// Stores 32 integers of five bits: the fifth bits in four bytes, then the nibbles.
fn pack_fives(codes: &[u8; BLOCK], out: &mut [u8]) {
    let fifths = codes.iter().enumerate().fold(0, |bits, (i, code)| bits | u32::from(code >> 4) << i);
    out[..4].copy_from_slice(&fifths.to_le_bytes());
    pack_nibbles(codes, &mut out[4..]);
}

/// The low bytes of the integers that `whole` returns. Two plain loops compile to SIMD code, iterator adapters do not.
pub fn codes(values: &[f32; BLOCK], whole: impl Fn(f32) -> f32) -> [u8; BLOCK] {
    let (mut bits, mut codes) = ([0; BLOCK], [0; BLOCK]);
    for (i, bits) in bits.iter_mut().enumerate() {
        *bits = (whole(values[i]) + SHIFT).to_bits();
    }
    for (i, code) in codes.iter_mut().enumerate() {
        *code = bits[i] as u8;
    }
    codes
}

/// The value of largest magnitude; the first of equals.
fn largest_magnitude(values: &[f32; BLOCK]) -> f32 {
    let above = values.iter().fold(i32::MIN, |m, v| m.max(v.to_bits() as i32));
    let below = values.iter().fold(i32::MIN, |m, v| m.max((-v).to_bits() as i32));
    if above > below {
        f32::from_bits(above as u32)
    } else if below > above {
        -f32::from_bits(below as u32)
    } else {
        values.iter().copied().find(|v| magnitude(*v) == above).unwrap_or_default()
    }
}

/// `f32::round` for magnitudes below 2^22; compiles to SIMD code on every instruction set.
pub fn round_half_away(v: f32) -> f32 {
    let even = (v + SHIFT) - SHIFT;
    let rest = v - even;
    // Ties were rounded to even, which is towards zero for half of them.
    let up = if (rest == 0.5) & (v > 0.0) { 1.0 } else { 0.0 };
    let down = if (rest == -0.5) & (v < 0.0) { 1.0 } else { 0.0 };
    even + up - down
}

/// `f32::floor` for magnitudes below 2^22.
pub fn floor(v: f32) -> f32 {
    let near = (v + SHIFT) - SHIFT;
    near - if near > v { 1.0 } else { 0.0 }
}
