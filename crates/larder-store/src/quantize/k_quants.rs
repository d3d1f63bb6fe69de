//! Blocks of 256 values in groups, whose scales (and minima) are integers with a scale of their own.

use super::blocks32::put_half;
use super::refine::{BlockScales, CodeRange};
use super::search::{self, Group, inverse, rounded};

/// Values per block.
const SUPER: usize = 256;

/// What the columns of a block matter, if it is known.
type Importance<'a> = Option<&'a [f32; SUPER]>;

pub fn q2_k(values: &[f32; SUPER], importance: Importance, out: &mut [u8; 84]) {
    let found = with_minima::<16>(values, importance, 3.0, 15.0, &mut out[80..]);
    for (packed, (scale, min)) in out.iter_mut().zip(found.scales) {
        *packed = scale | min << 4;
    }
    pack_pairs(&found.codes, &mut out[16..80]);
}

pub fn q3_k(values: &[f32; SUPER], importance: Importance, out: &mut [u8; 110]) {
    let (scales, codes) = with_scales::<16>(values, importance, 4.0, -32.0, &mut out[108..]);
    out[..108].fill(0);
    let codes = codes.map(|code| (code + 4) as u8);
    for (i, code) in codes.iter().enumerate() {
        out[i % 32] |= (code >> 2) << (i / 32);
    }
    pack_pairs(&codes.map(|code| code & 3), &mut out[32..96]);
    for (g, scale) in scales.iter().enumerate() {
        let scale = (scale + 32) as u8;
        out[96 + g % 8] |= (scale & 15) << (4 * (g / 8));
        out[104 + g % 4] |= (scale >> 4) << (2 * (g / 4));
    }
}

pub fn q4_k(values: &[f32; SUPER], importance: Importance, out: &mut [u8; 144]) {
    let found = with_minima::<8>(values, importance, 15.0, 63.0, out);
    pack_sixes(&found.scales, &mut out[4..16]);
    pack_grouped_nibbles(&found.codes, &mut out[16..]);
}

pub fn q5_k(values: &[f32; SUPER], importance: Importance, out: &mut [u8; 176]) {
    let found = with_minima::<8>(values, importance, 31.0, 63.0, out);
    pack_sixes(&found.scales, &mut out[4..16]);
    out[16..48].fill(0);
    for (i, code) in found.codes.iter().enumerate() {
        out[16 + i % 32] |= (code >> 4) << (i / 32);
    }
    pack_grouped_nibbles(&found.codes.map(|code| code & 15), &mut out[48..]);
}

pub fn q6_k(values: &[f32; SUPER], importance: Importance, out: &mut [u8; 210]) {
    let (scales, codes) = with_scales::<16>(values, importance, 32.0, -128.0, &mut out[208..]);
    let codes = codes.map(|code| (code + 32) as u8);
    out[..192].fill(0);
    for (i, code) in codes.iter().enumerate() {
        let (half, run, at) = (i / 128, i / 32 % 4, i % 32);
        out[half * 64 + run % 2 * 32 + at] |= (code & 15) << (4 * (run / 2));
        out[128 + half * 32 + at] |= (code >> 4) << (2 * run);
    }
    out[192..208].copy_from_slice(&scales.map(|scale| scale as u8));
}

/// The scales and minima of groups, and the integers of all values.
struct Minima<const GROUPS: usize> {
    scales: [(u8, u8); GROUPS],
    codes: [u8; SUPER],
}

/// Integers from 0 to `most`, scales and minima from 0 to `most_scale`. Stores the scale of the scales and that of the
/// minima at the start of `out`.
fn with_minima<const GROUPS: usize>(
    values: &[f32; SUPER],
    importance: Importance,
    most: f32,
    most_scale: f32,
    out: &mut [u8],
) -> Minima<GROUPS> {
    let (weights, size) = (search::weights(values, importance), SUPER / GROUPS);
    let mut found = [(0.0, 0.0); GROUPS];
    for (found, group) in found.iter_mut().zip(Group::all_of(values, &weights, size)) {
        let (scale, low) = search::scale_and_minimum(group, most, true);
        *found = (scale, -low);
    }
    let largest = |of: fn(&(f32, f32)) -> f32| found.iter().map(of).fold(0.0, f32::max) / most_scale;
    let (d, dmin) = (put_half(out, 0, largest(|f| f.0)), put_half(out, 2, largest(|f| f.1)));
    let (inverse_d, inverse_dmin) = (inverse(d), inverse(dmin));
    let whole = |value: f32| rounded(value, 0.0, most_scale);
    let groups = found.map(|(scale, min)| (whole(scale * inverse_d), whole(min * inverse_dmin)));
    let mut scales = BlockScales { d, dmin, groups };
    if importance.is_some() {
        let bounds = (0.0, most_scale);
        let range = CodeRange { scales: bounds, minima: bounds, nearest: |v| rounded(v, 0.0, most) };
        scales = scales.refined(values, &weights, &range);
        put_half(out, 0, scales.d);
        put_half(out, 2, scales.dmin);
    }
    let BlockScales { d, dmin, groups } = scales;
    let mut minima = Minima { scales: groups.map(|(scale, min)| (scale as u8, min as u8)), codes: [0; SUPER] };
    for ((values, codes), (scale, min)) in
        values.chunks_exact(size).zip(minima.codes.chunks_exact_mut(size)).zip(groups)
    {
        let (id, low) = (inverse(d * scale), dmin * min);
        codes.iter_mut().zip(values).for_each(|(code, v)| *code = rounded((v + low) * id, 0.0, most) as u8);
    }
    minima
}

/// Integers from `−most` to `most − 1`, scales from `least_scale` to `−least_scale − 1`. Stores the scale of the scales
/// at the start of `out`.
fn with_scales<const GROUPS: usize>(
    values: &[f32; SUPER],
    importance: Importance,
    most: f32,
    least_scale: f32,
    out: &mut [u8],
) -> ([i8; GROUPS], [i8; SUPER]) {
    let size = SUPER / GROUPS;
    let whole = |v: f32| rounded(v, -most, most - 1.0);
    let (scales, d) = integer_scales::<GROUPS>(values, importance, least_scale, out, whole, |group, values| {
        search::scale(group, search::around(values, -most).chain(search::around(values, most - 1.0)), whole)
    });
    let mut codes = [0; SUPER];
    let groups = values.chunks_exact(size).zip(codes.chunks_exact_mut(size));
    for ((values, codes), scale) in groups.zip(scales) {
        let id = inverse(d * f32::from(scale));
        codes.iter_mut().zip(values).for_each(|(code, v)| *code = whole(v * id) as i8);
    }
    (scales, codes)
}

/// The scales that `find` gives to the groups as integers from `least` to `−least − 1`, and the scale of these scales,
/// which is stored at the start of `out`. `nearest` gives the level that is nearest to a value.
pub fn integer_scales<const GROUPS: usize>(
    values: &[f32; SUPER],
    importance: Importance,
    least: f32,
    out: &mut [u8],
    nearest: impl Fn(f32) -> f32,
    find: impl Fn(Group, &[f32]) -> f32,
) -> ([i8; GROUPS], f32) {
    let weights = search::weights(values, importance);
    let mut found = [0.0; GROUPS];
    for (found, group) in found.iter_mut().zip(Group::all_of(values, &weights, SUPER / GROUPS)) {
        *found = find(group, group.values);
    }
    let d = put_half(out, 0, search::extreme(&found) / least);
    let inverse_d = inverse(d);
    let groups = found.map(|scale| (rounded(scale * inverse_d, least, -least - 1.0), 0.0));
    let mut scales = BlockScales { d, dmin: 0.0, groups };
    if importance.is_some() {
        let range = CodeRange { scales: (least, -least - 1.0), minima: (0.0, 0.0), nearest };
        scales = scales.refined(values, &weights, &range);
        put_half(out, 0, scales.d);
    }
    (scales.groups.map(|(scale, _)| scale as i8), scales.d)
}

/// Stores integers of two bits. Each half of 128 values has 32 bytes, with a group of 32 per bit pair.
fn pack_pairs(codes: &[u8; SUPER], out: &mut [u8]) {
    out.fill(0);
    for (i, code) in codes.iter().enumerate() {
        out[i / 128 * 32 + i % 32] |= code << (i % 128 / 32 * 2);
    }
}

/// Stores integers of four bits. Two groups of 32 share 32 bytes: the even one has the low nibbles.
fn pack_grouped_nibbles(codes: &[u8; SUPER], out: &mut [u8]) {
    out.fill(0);
    for (i, code) in codes.iter().enumerate() {
        out[i / 64 * 32 + i % 32] |= (code & 15) << (i / 32 % 2 * 4);
    }
}

/// Stores eight scales and minima of six bits in twelve bytes: those of the first four groups in the low bits of four
/// bytes each; of the others the low nibbles together in four more bytes, and the two high bits above those of the
/// first groups.
fn pack_sixes(scales: &[(u8, u8); 8], out: &mut [u8]) {
    for g in 0..4 {
        let ((scale, min), (later_scale, later_min)) = (scales[g], scales[g + 4]);
        out[g] = scale | later_scale >> 4 << 6;
        out[g + 4] = min | later_min >> 4 << 6;
        out[g + 8] = (later_scale & 15) | later_min << 4;
    }
}
