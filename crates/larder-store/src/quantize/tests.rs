//! Encoded bytes against the reference implementation, and the errors of what was encoded.

use super::blocks32::{codes, floor, round_half_away};
use super::*;

fn encoded(kind: NumberFormat, values: &[f32]) -> Vec<u8> {
    let mut out = vec![0; kind.row_bytes(values.len()).unwrap()];
    encode(kind, values, &mut out).unwrap();
    out
}

fn encoded_by(kind: NumberFormat, values: &[f32], importance: &[f32]) -> Vec<u8> {
    let mut out = vec![0; kind.row_bytes(values.len()).unwrap()];
    encode_weighted(kind, values, Some(importance), &mut out).unwrap();
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
fn levels_are_those_of_a_search() {
    let values = larder_core::IQ4_NL_LEVELS.map(f32::from);
    let odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN, 1e-45, -0.0];
    let around = (-1200..1200).map(|n| n as f32 / 8.0).flat_map(|v| [v.next_down(), v, v.next_up()]);
    for v in around.chain(odd) {
        let code = values.windows(2).filter(|pair| v > (pair[0] + pair[1]) / 2.0).count();
        assert_eq!(levels::nearest(v), (code as u8, values[code]), "{v}");
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
    for kind in NumberFormat::ALL.into_iter().filter(|k| k.is_encodable()) {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = [1.0; 256];
            values[47] = bad;
            let mut out = vec![0; kind.row_bytes(256).unwrap()];
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

/// The root mean square of the errors that ggml's quantiser makes on [`noise`]: without importances, and with those of
/// [`importance`], by which the errors are weighed. By `scripts/check/quantise_errors.py` with llama.cpp of October
/// 2026.
const REFERENCE_ERRORS: [(NumberFormat, f64, f64); 18] = [
    (NumberFormat::Q8_0, 0.005224, 0.005225),
    (NumberFormat::Q4_0, 0.083836, 0.074502),
    (NumberFormat::Q4_1, 0.076786, 0.060849),
    (NumberFormat::Q5_0, 0.041445, 0.036723),
    (NumberFormat::Q5_1, 0.037224, 0.029755),
    (NumberFormat::Iq4Nl, 0.075179, 0.067523),
    (NumberFormat::Mxfp4, 0.116230, 0.116924),
    (NumberFormat::Q2K, 0.290313, 0.221389),
    (NumberFormat::Q3K, 0.148299, 0.128737),
    (NumberFormat::Q4K, 0.069865, 0.061979),
    (NumberFormat::Q5K, 0.035619, 0.031659),
    (NumberFormat::Q6K, 0.017452, 0.015453),
    (NumberFormat::Iq4Xs, 0.075793, 0.068313),
    (NumberFormat::Iq3Xxs, 0.212615, 0.143592),
    (NumberFormat::Iq3S, 0.164247, 0.112655),
    (NumberFormat::Iq2Xxs, 0.342979, 0.280160),
    (NumberFormat::Iq2Xs, 0.299496, 0.244200),
    (NumberFormat::Iq2S, 0.261601, 0.215547),
];

const COLUMNS: usize = 512;

/// Nearly Gaussian values with standard deviation 1, the same bits as in the script.
fn noise(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 48) as i32
    };
    (0..count).map(|_| ((0..12).map(|_| next()).sum::<i32>() - 12 * 32768) as f32 / 65536.0).collect()
}

/// What the columns of [`noise`] matter, the same bits as in the script.
fn importance() -> Vec<f32> {
    noise(2, COLUMNS).into_iter().map(|v| v * v + 0.0625).collect()
}

fn decoded(kind: NumberFormat, bytes: &[u8], count: usize) -> Vec<f32> {
    let mut values = vec![0.0; count];
    larder_kernels::widen(kind, bytes, &mut values);
    values
}

/// The root mean square of the errors; those of each column count as much as it matters.
fn error(values: &[f32], decoded: &[f32], importance: &[f32]) -> f64 {
    let weights = importance.iter().cycle().map(|weight| f64::from(*weight));
    let squares = values.iter().zip(decoded).map(|(v, d)| (f64::from(*v) - f64::from(*d)).powi(2));
    let all: f64 = weights.clone().take(values.len()).sum();
    (squares.zip(weights).map(|(square, weight)| square * weight).sum::<f64>() / all).sqrt()
}

#[test]
fn errors_are_not_above_those_of_the_reference() {
    let (values, importance) = (noise(1, 16384), importance());
    let covered = REFERENCE_ERRORS.map(|(kind, ..)| kind);
    let written = NumberFormat::ALL.into_iter().filter(|kind| kind.is_encodable() && !kind.is_float());
    assert!(written.eq(covered));
    for (kind, plain, weighed) in REFERENCE_ERRORS {
        let check = |bytes: Vec<u8>, weights: &[f32], reference: f64| {
            let found = error(&values, &decoded(kind, &bytes, values.len()), weights);
            println!("{kind}: {found:.6}, {:.4} of the reference", found / reference);
            assert!(found <= 1.01 * reference, "{kind}: {found}, but the reference has {reference}");
            assert!(found > 0.5 * reference, "{kind}: {found} is too good to be true");
        };
        check(encoded(kind, &values), &[1.0], plain);
        check(encoded_by(kind, &values, &importance), &importance, weighed);
    }
}

/// Only proportions of importances matter, none at all are as none given, and those of all columns may be zero but one.
#[test]
fn importances_are_relative() {
    let (values, importance) = (noise(1, 2048), importance());
    for kind in NumberFormat::ALL.into_iter().filter(|kind| kind.is_encodable()) {
        let of = |importance: &[f32]| encoded_by(kind, &values, importance);
        let scaled = |by: f32| importance.iter().map(|weight| weight * by).collect::<Vec<_>>();
        assert!(of(&scaled(1048576.0)) == of(&importance) && of(&scaled(1.0 / 1048576.0)) == of(&importance), "{kind}");
        assert!(of(&[0.0; COLUMNS]) == encoded(kind, &values), "{kind}");
        let mut single = [0.0; COLUMNS];
        single[77] = 3.0;
        let found = decoded_any(kind, &of(&single), values.len());
        let most = values.iter().fold(0.0, |m: f32, v| m.max(v.abs()));
        assert!(found.iter().all(|v| v.abs() < 3.0 * most), "{kind}");
    }
}

fn decoded_any(kind: NumberFormat, bytes: &[u8], count: usize) -> Vec<f32> {
    let mut values = vec![0.0; count];
    if kind.is_float() {
        decode_floats(kind, bytes, &mut values)
    } else {
        larder_kernels::widen(kind, bytes, &mut values)
    }
    values
}

/// How far a value can be off, relative to the largest. Where eight values share seven signs, one may have the wrong
/// sign.
fn farthest(kind: NumberFormat) -> f32 {
    match kind {
        NumberFormat::Iq2Xxs | NumberFormat::Iq2Xs | NumberFormat::Iq3Xxs => 1.4,
        _ => 0.34,
    }
}

/// Blocks of one value, of zeros, of the least and the largest magnitudes: finite, and near where the format can be.
#[test]
fn odd_blocks_are_encoded() {
    for kind in NumberFormat::ALL.into_iter().filter(|k| k.is_encodable() && !k.is_float()) {
        let mut single = [0.0; 256];
        single[77] = -3.0;
        let wide = std::array::from_fn(|i| if i % 3 == 0 { -32759.0 } else { 32759.0 - i as f32 });
        let mut mixed = [1e-30; 256];
        mixed[200] = 30000.0;
        for values in
            [[0.0; 256], [1.0; 256], [-1.0; 256], single, mixed, [1e-45; 256], [32759.0; 256], [-32759.0; 256], wide]
        {
            for bytes in [encoded(kind, &values), encoded_by(kind, &values, &[2.0; 256])] {
                let got = decoded(kind, &bytes, 256);
                let most = values.iter().fold(0.0, |m: f32, v| m.max(v.abs()));
                for (g, v) in got.iter().zip(&values) {
                    assert!((g - v).abs() <= most * farthest(kind) + 1e-7, "{kind}: {v} became {g}");
                }
            }
        }
    }
}

/// Blocks of values of one magnitude, with any signs that the format has.
#[test]
fn values_of_one_magnitude_are_kept() {
    for kind in
        [NumberFormat::Iq3Xxs, NumberFormat::Iq3S, NumberFormat::Iq2Xxs, NumberFormat::Iq2Xs, NumberFormat::Iq2S]
    {
        let values: [f32; 256] = std::array::from_fn(|i| if i / 2 % 3 == 0 { -3.5 } else { 3.5 });
        let found = decoded(kind, &encoded(kind, &values), 256);
        assert!(found.iter().zip(&values).all(|(f, v)| (f - v).abs() < 0.01), "{kind}: {found:?}");
    }
}

#[test]
fn what_mxfp4_can_hold_is_kept_exactly() {
    for exponent in [0, 1, 2, 100, 127, 200, 252] {
        let mut block = [0x5a; 17];
        (1..17u8).for_each(|i| block[usize::from(i)] = (15 - i) | i.wrapping_mul(77) << 4);
        (block[0], block[1]) = (exponent, 0x7f);
        let values = decoded(NumberFormat::Mxfp4, &block, 32);
        let again = decoded(NumberFormat::Mxfp4, &encoded(NumberFormat::Mxfp4, &values), 32);
        assert_eq!(again, values, "exponent {exponent}");
    }
    let largest = encoded(NumberFormat::Mxfp4, &[f32::MAX; 32]);
    assert!(decoded(NumberFormat::Mxfp4, &largest, 32).iter().all(|v| v.is_finite()));
}
