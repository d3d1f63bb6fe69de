//! Block formats whose nibbles stand for levels at unequal distances.

use larder_core::{IQ4_NL_LEVELS, MXFP4_LEVELS, mxfp4_scale};

use super::blocks32::{pack_nibbles, put_half};
use super::k_quants::integer_scales;
use super::search::{self, Group, SHIFT, inverse};
use super::{BLOCK, magnitude};

/// Values per block of `iq4_xs`.
const SUPER: usize = 256;

pub fn iq4_nl(values: &[f32; BLOCK], importance: Option<&[f32; BLOCK]>, out: &mut [u8; 18]) {
    let weights = search::weights(values, importance);
    let id = inverse(put_half(out, 0, iq4_scale(Group::new(values, &weights), values)));
    pack_nibbles(&values.map(|v| iq4_code(v * id)), &mut out[2..]);
}

pub fn iq4_xs(values: &[f32; SUPER], importance: Option<&[f32; SUPER]>, out: &mut [u8; 136]) {
    let (scales, d) = integer_scales::<8>(values, importance, -32.0, out, iq4_level, iq4_scale);
    out[2..8].fill(0);
    for (g, (values, scale)) in values.as_chunks::<BLOCK>().0.iter().zip(scales).enumerate() {
        let (id, scale) = (inverse(d * f32::from(scale)), (scale + 32) as u8);
        out[2 + g / 4] |= (scale >> 4) << (2 * (g % 4));
        out[4 + g / 2] |= (scale & 15) << (4 * (g % 2));
        pack_nibbles(&values.map(|v| iq4_code(v * id)), &mut out[8 + 16 * g..][..16]);
    }
}

/// The best scale of a group. The value of largest magnitude comes near one end of the levels or the other.
fn iq4_scale(group: Group, values: &[f32]) -> f32 {
    let inverse = inverse(search::extreme(values));
    let ends = [IQ4_NL_LEVELS[0], IQ4_NL_LEVELS[15]].map(f32::from);
    let inverses = ends.into_iter().flat_map(|end| (-10..=10).map(move |step| (end + 2.0 * step as f32) * inverse));
    search::scale(group, inverses, iq4_level)
}

/// The code and the level that are nearest to a value, by the ceiling of twice the value modulo 512: the middle between
/// two levels is a multiple of a half.
static NEAREST: [(u8, f32); 512] = nearest_levels();

const fn nearest_levels() -> [(u8, f32); 512] {
    let mut nearest = [(0, 0.0); 512];
    let (mut twice, mut code) = (-256, 0);
    while twice < 256 {
        if code < 15 && twice > IQ4_NL_LEVELS[code] as i32 + IQ4_NL_LEVELS[code + 1] as i32 {
            code += 1;
        }
        nearest[(twice & 511) as usize] = (code as u8, IQ4_NL_LEVELS[code] as f32);
        twice += 1;
    }
    nearest
}

pub fn nearest(value: f32) -> (u8, f32) {
    let twice = search::clamped(2.0 * value, -256.0, 255.0);
    let shifted = twice + SHIFT;
    let ceiling = shifted.to_bits() + u32::from(shifted - SHIFT < twice);
    NEAREST[ceiling as usize % 512]
}

fn iq4_code(value: f32) -> u8 {
    nearest(value).0
}

fn iq4_level(value: f32) -> f32 {
    nearest(value).1
}

/// The scale is a power of two: that with which the largest magnitude is within the levels or up to a third above them,
/// or twice as much.
pub fn mxfp4(values: &[f32; BLOCK], importance: Option<&[f32; BLOCK]>, out: &mut [u8; 17]) {
    let largest = values.iter().fold(0, |m, v| m.max(magnitude(*v)));
    let low = ((largest >> 23) - 2).max(0) as u8;
    // From exponent 253 on, the largest level is infinite.
    let high = (low + 1).min(252);
    let [low_error, high_error] = [low, high].map(|exponent| mxfp4_error(values, importance, mxfp4_scale(exponent)));
    out[0] = if high_error < low_error { high } else { low };
    let d = mxfp4_scale(out[0]);
    pack_nibbles(&values.map(|v| mxfp4_code(v / d)), &mut out[1..]);
}

/// The weighted error with a scale. In f64, because scales may be subnormal.
fn mxfp4_error(values: &[f32; BLOCK], importance: Option<&[f32; BLOCK]>, d: f32) -> f64 {
    let error = |v: f32| f64::from(v) - f64::from(d) * f64::from(MXFP4_LEVELS[usize::from(mxfp4_code(v / d))]);
    let weight = |i: usize| importance.map_or(1.0, |importance| f64::from(importance[i]));
    values.iter().enumerate().map(|(i, v)| error(*v).powi(2) * weight(i)).sum()
}

/// The nibble whose level is nearest.
fn mxfp4_code(value: f32) -> u8 {
    let size: u8 = [0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0].iter().map(|middle| u8::from(value.abs() > *middle)).sum();
    if value < 0.0 && size > 0 { size | 8 } else { size }
}
