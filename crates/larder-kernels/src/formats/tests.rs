//! The definitions against other implementations.

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};

use super::q8_0::{quantise_row, widen_q8_0};
use super::*;
use crate::testing::blocks_with_values;

fn noise(n: usize) -> Vec<f32> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    (0..n)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
        .collect()
}

/// candle quantises; `widen` on its bytes must agree with candle's own dequantisation.
#[test]
fn block_formats_agree_with_candle() {
    let values = Tensor::from_vec(noise(1024), (2, 512), &Device::Cpu).unwrap();
    for (kind, dtype) in [
        (NumberFormat::Q8_0, GgmlDType::Q8_0),
        (NumberFormat::Q4_0, GgmlDType::Q4_0),
        (NumberFormat::Q4K, GgmlDType::Q4K),
        (NumberFormat::Q5K, GgmlDType::Q5K),
        (NumberFormat::Q6K, GgmlDType::Q6K),
    ] {
        let stored = QTensor::quantize(&values, dtype).unwrap();
        let bytes = stored.data().unwrap();
        let want: Vec<f32> = stored.dequantize(&Device::Cpu).unwrap().flatten_all().unwrap().to_vec1().unwrap();
        let mut got = vec![0.0; 1024];
        widen(kind, &bytes, &mut got);
        for (g, w) in got.iter().zip(&want) {
            assert!((g - w).abs() <= 1e-6, "{kind}: {g} is not {w}");
        }
    }
}

/// To the bit, with scales that are zero, subnormal, infinite and NaN; any NaN stands for another.
#[test]
fn block_formats_have_the_bits_of_the_gguf_package() {
    let bits =
        |values: &[f32]| values.iter().map(|v| if v.is_nan() { None } else { Some(v.to_bits()) }).collect::<Vec<_>>();
    for kind in NumberFormat::ALL.into_iter().filter(|k| !k.is_float()) {
        let (bytes, want) = blocks_with_values(kind);
        let mut got = vec![0.0; want.len()];
        widen(kind, &bytes, &mut got);
        for (i, (got, want)) in got.chunks(kind.block_len()).zip(want.chunks(kind.block_len())).enumerate() {
            assert_eq!(bits(got), bits(want), "{kind}, block {i}");
        }
    }
}

#[test]
fn the_table_has_a_row_for_each_block_format() {
    let rows: Vec<_> = TABLE.iter().map(|row| row.kind).collect();
    let blocks: Vec<_> = NumberFormat::ALL.into_iter().filter(|k| !k.is_float()).collect();
    assert_eq!(rows, blocks);
}

#[test]
fn quantised_rows_are_near_and_padded() {
    for (len, size) in [(1, 1.0), (32, 1e-3), (40, 3.0), (100, 1e4), (64, 1e9)] {
        let mut values: Vec<f32> = noise(len).iter().map(|v| v * size).collect();
        let mut row = vec![0xff; len.div_ceil(32) * 34];
        quantise_row(&values, &mut row);
        let mut padded = vec![f32::NAN; len.next_multiple_of(32)];
        widen(NumberFormat::Q8_0, &row, &mut padded);
        let mut found = vec![f32::NAN; len];
        widen_q8_0(&row, &mut found);
        assert_eq!(found, padded[..len]);
        assert!(padded[len..].iter().all(|v| *v == 0.0));
        for (block, found) in values.chunks(32).zip(found.chunks(32)) {
            // Half a step, and what the rounding of the scale leaves beyond the largest integer.
            let amax = block.iter().fold(0.0, |m: f32, v| m.max(v.abs()));
            let bound = amax / 254.0 * 1.13 + (amax - 127.0 * 65504.0).max(0.0) + 1e-7;
            assert!(block.iter().zip(found).all(|(v, f)| (v - f).abs() <= bound), "{len} of {size}");
        }
        values[0] = f32::INFINITY;
        quantise_row(&values, &mut row);
        widen_q8_0(&row, &mut found);
        assert!(found[..len.min(32)].iter().all(|v| v.is_nan()));
    }
}

#[test]
fn floats_widen_exactly() {
    let mut out = [0.0; 2];
    widen(NumberFormat::F16, &[0x00, 0x3c, 0x00, 0xc0], &mut out);
    assert_eq!(out, [1.0, -2.0]);
    widen(NumberFormat::Bf16, &[0x80, 0x3f, 0x00, 0xc0], &mut out);
    assert_eq!(out, [1.0, -2.0]);
}

#[test]
fn f16_is_converted_together_as_one_by_one() {
    let bits: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    let one_by_one: Vec<f32> = (0..=u16::MAX).map(|bits| f16::from_bits(bits).to_f32()).collect();
    let mut widened = vec![0.0; one_by_one.len()];
    widen(NumberFormat::F16, &bits, &mut widened);
    assert!(widened.iter().zip(&one_by_one).all(|(a, b)| a.to_bits() == b.to_bits()));
    // Between two values, beyond the largest, and of lengths that are no multiple of anything.
    let values: Vec<f32> = (0..4099_u32).map(|i| f32::from_bits(i.wrapping_mul(0x9e37_79b9))).collect();
    for len in [0, 1, 7, 31, 32, 33, 100, values.len()] {
        let mut narrowed = vec![0; 2 * len];
        narrow(NumberFormat::F16, &values[..len], &mut narrowed);
        let expected: Vec<u8> = values[..len].iter().flat_map(|value| f16::from_f32(*value).to_le_bytes()).collect();
        assert_eq!(narrowed, expected, "{len} values");
    }
}
