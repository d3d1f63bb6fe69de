//! Conversion between f32 values and the number formats that larder can write. Rounding is that of ggml's reference,
//! bit for bit.

use half::{f16, slice::HalfFloatSliceExt};
use larder_core::NumberFormat;

/// Values per step of a float conversion. Steps go through a buffer on the stack, so that bytes need no alignment.
const STEP: usize = 512;
/// Values per block of `Q8_0` and `Q4_0`.
const BLOCK: usize = 32;

/// The error for a value that is out of range for a number format.
#[derive(Clone, Copy, PartialEq, Debug, thiserror::Error)]
#[error("the value {value}, which is out of range for {kind}")]
pub struct ValueOutOfRange {
    /// The value that is out of range.
    pub value: f32,
    /// The number format.
    pub kind: NumberFormat,
}

/// Whether [`encode`] supports `kind`.
pub fn can_encode(kind: NumberFormat) -> bool {
    limit(kind).is_some()
}

/// The smallest magnitude that is out of range for `kind`; `None` if it cannot be written.
fn limit(kind: NumberFormat) -> Option<f32> {
    // From here on f16 rounds to infinity; the quantised formats store their scale as f16.
    const HALF: f32 = 65520.0;
    match kind {
        NumberFormat::F32 => Some(f32::INFINITY),
        NumberFormat::F16 => Some(HALF),
        NumberFormat::Bf16 => Some(f32::from_bits(0x7f7f_8000)),
        NumberFormat::Q8_0 => Some(HALF * 127.0),
        NumberFormat::Q4_0 => Some(HALF * 8.0),
        _ => None,
    }
}

/// Writes `values` to `out` in the format `kind`.
///
/// The caller guarantees a format that [`can_encode`] accepts, whole blocks of values, and an output of exactly their
/// length.
pub fn encode(kind: NumberFormat, values: &[f32], out: &mut [u8]) -> Result<(), ValueOutOfRange> {
    assert_eq!(kind.row_bytes(values.len()), Some(out.len()), "the output must hold exactly the blocks of {kind}");
    check(kind, values)?;
    match kind {
        NumberFormat::F32 => out.as_chunks_mut().0.iter_mut().zip(values).for_each(|(o, v)| *o = v.to_le_bytes()),
        NumberFormat::F16 => encode_f16(values, out),
        NumberFormat::Bf16 => out.as_chunks_mut().0.iter_mut().zip(values).for_each(|(o, v)| *o = bf16_bytes(*v)),
        NumberFormat::Q8_0 => blocks(values, out, q8_0),
        NumberFormat::Q4_0 => blocks(values, out, q4_0),
        _ => unreachable!("check() rejects formats that cannot be written"),
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
    let limit = limit(kind).expect("the caller must pass a format that can be written");
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

fn blocks<const N: usize>(values: &[f32], out: &mut [u8], block: impl Fn(&[f32; BLOCK], &mut [u8; N])) {
    let values = values.as_chunks().0;
    for (i, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
        block(&values[i], out);
    }
}

fn q8_0(values: &[f32; BLOCK], out: &mut [u8; 34]) {
    let largest = values.iter().fold(0, |m, v| m.max(magnitude(*v)));
    let d = f32::from_bits(largest as u32) / 127.0;
    let id = inverse(d);
    out[..2].copy_from_slice(&f16::from_f32(d).to_le_bytes());
    out[2..].copy_from_slice(&codes(values, |v| round_half_away(v * id)));
}

fn q4_0(values: &[f32; BLOCK], out: &mut [u8; 18]) {
    let d = largest_magnitude(values) / -8.0;
    let id = inverse(d);
    out[..2].copy_from_slice(&f16::from_f32(d).to_le_bytes());
    let codes = codes(values, |v| floor(v * id + 8.5));
    let (low, high) = codes.split_at(BLOCK / 2);
    for (i, nibbles) in out[2..].iter_mut().enumerate() {
        *nibbles = low[i].min(15) | (high[i].min(15) << 4);
    }
}

/// The low bytes of the integers that `whole` returns. Two plain loops compile to SIMD code, iterator adapters do not.
fn codes(values: &[f32; BLOCK], whole: impl Fn(f32) -> f32) -> [u8; BLOCK] {
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

fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

/// 1.5 * 2^23: added to a small value, it leaves no bits for the fraction, and the low byte is that of the rounded
/// value.
const SHIFT: f32 = 12_582_912.0;

/// `f32::round` for magnitudes below 2^22; compiles to SIMD code on every instruction set.
fn round_half_away(v: f32) -> f32 {
    let even = (v + SHIFT) - SHIFT;
    let rest = v - even;
    // Ties were rounded to even, which is towards zero for half of them.
    let up = if (rest == 0.5) & (v > 0.0) { 1.0 } else { 0.0 };
    let down = if (rest == -0.5) & (v < 0.0) { 1.0 } else { 0.0 };
    even + up - down
}

/// `f32::floor` for magnitudes below 2^22.
fn floor(v: f32) -> f32 {
    let near = (v + SHIFT) - SHIFT;
    near - if near > v { 1.0 } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded(kind: NumberFormat, values: &[f32]) -> Vec<u8> {
        let mut out = vec![0; kind.row_bytes(values.len()).unwrap()];
        encode(kind, values, &mut out).unwrap();
        out
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|b| format!("{b:02x}")).collect()
    }

    /// The values of the golden bytes: two blocks, the second with a tie for the largest magnitude.
    fn golden_values() -> Vec<f32> {
        let mut values: Vec<f32> = (0..64i32).map(|i| ((i * 37 + 11) % 101 - 50) as f32 * 0.03125 * 1.1).collect();
        values[40] = -3.5;
        values[50] = 3.5;
        values
    }

    #[test]
    fn blocks_equal_those_of_the_gguf_package() {
        assert_eq!(hex(&encoded(NumberFormat::Q8_0, &golden_values())), GOLDEN_Q8_0);
        assert_eq!(hex(&encoded(NumberFormat::Q4_0, &golden_values())), GOLDEN_Q4_0);
        assert_eq!(hex(&encoded(NumberFormat::Bf16, &golden_values()[..8])), GOLDEN_BF16);
        assert_eq!(hex(&encoded(NumberFormat::F16, &golden_values()[..8])), GOLDEN_F16);
    }

    #[test]
    fn zeros_and_single_values_are_encoded_exactly() {
        assert_eq!(encoded(NumberFormat::Q8_0, &[0.0; 32]), [0; 34]);
        let mut values = [0.0; 32];
        values[31] = 1.0;
        let q4 = encoded(NumberFormat::Q4_0, &values);
        assert_eq!((f16::from_le_bytes([q4[0], q4[1]]).to_f32(), q4[17]), (-0.125, 0x08));
    }

    #[test]
    fn rounding_equals_that_of_the_standard_library() {
        for v in [0.49999997f32, 0.5, 1.5, 2.5, -0.5, -0.49999997, -2.5, 126.5, -126.99999, 0.0] {
            assert_eq!(round_half_away(v), v.round(), "{v}");
            assert_eq!(codes(&[v; BLOCK], f32::round), [v.round() as i8 as u8; BLOCK], "{v}");
            assert_eq!(floor(v), v.floor(), "{v}");
        }
    }

    #[test]
    fn floats_round_trip() {
        let values: Vec<f32> = (0..2000).map(|i| (i as f32 - 1000.0) * 0.0078125).collect();
        for kind in [NumberFormat::F32, NumberFormat::F16, NumberFormat::Bf16] {
            let bytes = encoded(kind, &values);
            let mut back = vec![0.0; values.len()];
            decode_floats(kind, &bytes, &mut back);
            for (v, b) in values.iter().zip(&back) {
                assert!((v - b).abs() <= v.abs() / 256.0, "{kind}: {v} became {b}");
            }
            assert_eq!(encoded(kind, &back), bytes);
        }
    }

    #[test]
    fn values_out_of_range_are_refused() {
        for kind in [NumberFormat::F32, NumberFormat::F16, NumberFormat::Bf16, NumberFormat::Q8_0, NumberFormat::Q4_0] {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut values = [1.0; 64];
                values[47] = bad;
                let mut out = vec![0; kind.row_bytes(64).unwrap()];
                assert!(encode(kind, &values, &mut out).is_err(), "{kind} {bad}");
            }
        }
        let mut out = [0; 4];
        assert_eq!(encode(NumberFormat::F16, &[1.0, 65520.0], &mut out).unwrap_err().value, 65520.0);
        assert!(encode(NumberFormat::F16, &[1.0, 65519.0], &mut out).is_ok());
        assert!(encode(NumberFormat::Bf16, &[1.0, f32::MAX], &mut out).is_err());
    }

    const GOLDEN_Q8_0: &str = concat!(
        "ee229dfb59b61472d02e8be947a50361be1c7ad73593f14fac0a68c62481df3d9af80e272adb0937e715c5f481d2002e",
        "de0c3beb19c97f25d60432e2103eef1dcdfb29d9",
    );

    const GOLDEN_Q4_0: &str = "e032f258be1379df359bf147ac0268ce248a0037ab56f9ab5689b46790c578ab5689bc67";

    const GOLDEN_BF16: &str = "acbf8dbd9a3f7fbf8d3ec63f27bf1e3f";

    const GOLDEN_F16: &str = "5dbd66acd03cfabb6634303e3ab9f338";
}
