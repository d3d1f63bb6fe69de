//! Conversion between f32 values and number formats. Block formats are written as precisely as llama.cpp's quantiser
//! writes them, with and without an importance matrix, or more precisely.

mod blocks32;
mod books;
mod k_quants;
mod levels;
mod refine;
mod search;

use half::{f16, slice::HalfFloatSliceExt};
use larder_core::NumberFormat;

/// Values per step of a float conversion. Steps go through a buffer on the stack, so that bytes need no alignment.
const STEP: usize = 512;
/// Values per block of the formats without groups.
const BLOCK: usize = 32;

/// Added to importances, relative to their mean, so that columns whose inputs were always zero count a little.
const LEAST_IMPORTANCE: f32 = 1e-6;

/// The error for a value that is out of range for a number format.
#[derive(Clone, Copy, PartialEq, Debug, thiserror::Error)]
#[error("the value {value}, which is out of range for {kind}")]
pub struct ValueOutOfRange {
    /// The value that is out of range.
    pub value: f32,
    /// The number format.
    pub kind: NumberFormat,
}

/// The smallest magnitude that is out of range for `kind`.
fn limit(kind: NumberFormat) -> f32 {
    // From here on f16 rounds to infinity; the quantised formats store their scale as f16.
    const HALF: f32 = 65520.0;
    match kind {
        NumberFormat::F32 | NumberFormat::Mxfp4 => f32::INFINITY,
        NumberFormat::F16 => HALF,
        NumberFormat::Bf16 => f32::from_bits(0x7f7f_8000),
        NumberFormat::Q8_0 => HALF * 127.0,
        NumberFormat::Q4_0 => HALF * 8.0,
        // Scales and minima that were searched for are below twice the largest magnitude.
        _ => HALF / 2.0,
    }
}

/// Writes `values` to `out` in the format `kind`.
///
/// The caller guarantees a format that [can be written](NumberFormat::is_encodable), whole blocks of values, and an
/// output of exactly their length.
pub fn encode(kind: NumberFormat, values: &[f32], out: &mut [u8]) -> Result<(), ValueOutOfRange> {
    encode_weighted(kind, values, None, out)
}

/// As [`encode`], so that the errors in the columns that matter are small, at the cost of others. `importance` has the
/// mean square of each column's inputs, or anything in proportion to it; without it, all columns matter the same.
///
/// The caller guarantees whole blocks of columns, whole rows of values, and importances that are finite and not
/// negative.
pub fn encode_weighted(
    kind: NumberFormat,
    values: &[f32],
    importance: Option<&[f32]>,
    out: &mut [u8],
) -> Result<(), ValueOutOfRange> {
    assert_eq!(kind.row_bytes(values.len()), Some(out.len()), "the output must hold exactly the blocks of {kind}");
    check(kind, values)?;
    let importance = importance.filter(|_| !kind.is_float()).and_then(|columns| relative(kind, columns, values.len()));
    let importance = importance.as_deref();
    match kind {
        NumberFormat::F32 => out.as_chunks_mut().0.iter_mut().zip(values).for_each(|(o, v)| *o = v.to_le_bytes()),
        NumberFormat::F16 => encode_f16(values, out),
        NumberFormat::Bf16 => out.as_chunks_mut().0.iter_mut().zip(values).for_each(|(o, v)| *o = bf16_bytes(*v)),
        NumberFormat::Q8_0 => blocks(values, importance, out, blocks32::q8_0),
        NumberFormat::Q4_0 => blocks(values, importance, out, blocks32::q4_0),
        NumberFormat::Q4_1 => blocks(values, importance, out, blocks32::q4_1),
        NumberFormat::Q5_0 => blocks(values, importance, out, blocks32::q5_0),
        NumberFormat::Q5_1 => blocks(values, importance, out, blocks32::q5_1),
        NumberFormat::Iq4Nl => blocks(values, importance, out, levels::iq4_nl),
        NumberFormat::Mxfp4 => blocks(values, importance, out, levels::mxfp4),
        NumberFormat::Q2K => blocks(values, importance, out, k_quants::q2_k),
        NumberFormat::Q3K => blocks(values, importance, out, k_quants::q3_k),
        NumberFormat::Q4K => blocks(values, importance, out, k_quants::q4_k),
        NumberFormat::Q5K => blocks(values, importance, out, k_quants::q5_k),
        NumberFormat::Q6K => blocks(values, importance, out, k_quants::q6_k),
        NumberFormat::Iq4Xs => blocks(values, importance, out, levels::iq4_xs),
        NumberFormat::Iq3Xxs => blocks(values, importance, out, books::iq3_xxs),
        NumberFormat::Iq3S => blocks(values, importance, out, books::iq3_s),
        NumberFormat::Iq2Xxs => blocks(values, importance, out, books::iq2_xxs),
        NumberFormat::Iq2Xs => blocks(values, importance, out, books::iq2_xs),
        NumberFormat::Iq2S => blocks(values, importance, out, books::iq2_s),
        _ => panic!("{kind} cannot be written, as `NumberFormat::is_encodable` says"),
    }
    Ok(())
}

/// Reads values of the float format `kind` from `bytes`.
///
/// The caller guarantees a float format and exactly the bytes of `out.len()` values.
pub fn decode_floats(kind: NumberFormat, bytes: &[u8], out: &mut [f32]) {
    assert!(
        kind.is_float() && kind.row_bytes(out.len()) == Some(bytes.len()),
        "the bytes must be {kind} values for the whole output"
    );
    match kind {
        NumberFormat::F16 => decode_f16(bytes, out),
        NumberFormat::Bf16 => out
            .iter_mut()
            .zip(bytes.as_chunks().0)
            .for_each(|(o, b)| *o = f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16)),
        _ => out.iter_mut().zip(bytes.as_chunks().0).for_each(|(o, b)| *o = f32::from_le_bytes(*b)),
    }
}

fn check(kind: NumberFormat, values: &[f32]) -> Result<(), ValueOutOfRange> {
    let limit = limit(kind);
    let fits = |bits: i32| bits < limit.to_bits() as i32;
    if fits(values.iter().fold(0, |m, v| m.max(magnitude(*v)))) {
        return Ok(());
    }
    let value = values.iter().copied().find(|v| !fits(magnitude(*v))).expect("the largest magnitude is out of range");
    Err(ValueOutOfRange { value, kind })
}

/// Bits that order like the magnitude of the value, with NaN above all. The maximum of integers compiles to SIMD code,
/// that of floats does not.
fn magnitude(value: f32) -> i32 {
    (value.to_bits() & 0x7fff_ffff) as i32
}

fn encode_f16(values: &[f32], out: &mut [u8]) {
    let mut halves = [f16::ZERO; STEP];
    for (values, out) in values.chunks(STEP).zip(out.chunks_mut(2 * STEP)) {
        let halves = &mut halves[..values.len()];
        halves.convert_from_f32_slice(values);
        out.as_chunks_mut().0.iter_mut().zip(halves).for_each(|(o, h)| *o = h.to_le_bytes());
    }
}

fn decode_f16(bytes: &[u8], out: &mut [f32]) {
    let mut halves = [f16::ZERO; STEP];
    for (bytes, out) in bytes.chunks(2 * STEP).zip(out.chunks_mut(STEP)) {
        let halves = &mut halves[..out.len()];
        halves.iter_mut().zip(bytes.as_chunks().0).for_each(|(h, b)| *h = f16::from_le_bytes(*b));
        halves.convert_to_f32_slice(out);
    }
}

/// Rounds to nearest, ties to even. The caller has rejected values that round to infinity.
fn bf16_bytes(value: f32) -> [u8; 2] {
    let bits = value.to_bits();
    let rounded = bits + 0x7fff + ((bits >> 16) & 1);
    ((rounded >> 16) as u16).to_le_bytes()
}

/// The importance of columns relative to their mean, with a lower bound; `None` if no column matters, or the mean is
/// too large to compute with.
fn relative(kind: NumberFormat, columns: &[f32], values: usize) -> Option<Vec<f32>> {
    let whole = columns.len().is_multiple_of(kind.block_len()) && !columns.is_empty();
    assert!(whole && values.is_multiple_of(columns.len()), "importances are of whole blocks, and values whole rows");
    let mean = columns.iter().map(|column| f64::from(*column)).sum::<f64>() / columns.len() as f64;
    (mean > 0.0 && mean.is_finite())
        .then(|| columns.iter().map(|column| (f64::from(*column) / mean) as f32 + LEAST_IMPORTANCE).collect())
}

/// Writes block by block. `importance` is that of a row, and repeats.
fn blocks<const V: usize, const N: usize>(
    values: &[f32],
    importance: Option<&[f32]>,
    out: &mut [u8],
    block: impl Fn(&[f32; V], Option<&[f32; V]>, &mut [u8; N]),
) {
    let mut importance = importance.unwrap_or_default().as_chunks().0.iter().cycle();
    for (values, out) in values.as_chunks().0.iter().zip(out.as_chunks_mut().0) {
        block(values, importance.next(), out);
    }
}

#[cfg(test)]
mod tests;
