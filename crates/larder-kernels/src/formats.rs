//! Every number format, dequantised (widened) to f32: the definition that all products are measured against.

use half::{bf16, f16};
use larder_core::NumberFormat;

/// Widens stored values to f32; block formats are dequantised.
///
/// # Panics
/// If `bytes` is not exactly `out.len()` values of `kind`.
pub fn widen(kind: NumberFormat, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(kind.row_bytes(out.len()), Some(bytes.len()), "stored row does not fit {} values", out.len());
    match kind {
        NumberFormat::F32 => each(bytes, out, |b: &[u8; 4], o: &mut [f32; 1]| o[0] = f32::from_le_bytes(*b)),
        NumberFormat::F16 => each(bytes, out, |b: &[u8; 2], o: &mut [f32; 1]| o[0] = half(*b)),
        NumberFormat::Bf16 => each(bytes, out, |b: &[u8; 2], o: &mut [f32; 1]| o[0] = bf16::from_le_bytes(*b).to_f32()),
        NumberFormat::Q8_0 => each(bytes, out, q8_0),
        NumberFormat::Q4_0 => each(bytes, out, q4_0),
        NumberFormat::Q4K => each(bytes, out, q4_k),
        NumberFormat::Q5K => each(bytes, out, q5_k),
        NumberFormat::Q6K => each(bytes, out, q6_k),
    }
}

/// Stores f32 values as `kind`, a float format.
///
/// # Panics
/// If `kind` is a block format, or `bytes` is not exactly `values.len()` values of it.
pub fn narrow(kind: NumberFormat, values: &[f32], bytes: &mut [u8]) {
    assert_eq!(kind.row_bytes(values.len()), Some(bytes.len()), "stored row does not fit {} values", values.len());
    match kind {
        NumberFormat::F32 => store(values, bytes, f32::to_le_bytes),
        NumberFormat::F16 => store(values, bytes, |v| f16::from_f32(v).to_le_bytes()),
        NumberFormat::Bf16 => store(values, bytes, |v| bf16::from_f32(v).to_le_bytes()),
        NumberFormat::Q8_0 | NumberFormat::Q4_0 | NumberFormat::Q4K | NumberFormat::Q5K | NumberFormat::Q6K => {
            panic!("{kind} is a block format, not a float format")
        }
    }
}

/// Stores a row of values as `q8_0`, the last block filled up with zeros. The scale is rounded to f16 before values are divided by
/// it; a block with a value that is not finite becomes NaN.
///
/// # Panics
/// If `bytes` is not exactly the blocks that hold `values`.
pub fn quantise_row(values: &[f32], bytes: &mut [u8]) {
    let (blocks, rest) = bytes.as_chunks_mut::<34>();
    assert!(
        rest.is_empty() && blocks.len() == values.len().div_ceil(32),
        "stored row does not fit {} values",
        values.len()
    );
    for (values, block) in values.chunks(32).zip(blocks) {
        let amax = values.iter().fold(0.0, |m: f32, v| if v.is_nan() { f32::INFINITY } else { m.max(v.abs()) });
        let d = if amax.is_finite() { f16::from_f32(amax / 127.0).min(f16::MAX) } else { f16::NAN };
        let inverse = if d.to_f32() > 0.0 { 1.0 / d.to_f32() } else { 0.0 };
        block.fill(0);
        block[..2].copy_from_slice(&d.to_le_bytes());
        for (q, v) in block[2..].iter_mut().zip(values) {
            *q = (v * inverse).round_ties_even().clamp(-127.0, 127.0) as i8 as u8;
        }
    }
}

/// Widens the first `out.len()` values of a row in `q8_0`.
pub fn widen_q8_0(row: &[u8], out: &mut [f32]) {
    for (block, out) in row.as_chunks::<34>().0.iter().zip(out.chunks_mut(32)) {
        let d = half([block[0], block[1]]);
        out.iter_mut().zip(&block[2..]).for_each(|(o, q)| *o = d * (*q as i8) as f32);
    }
}

fn store<const B: usize>(values: &[f32], bytes: &mut [u8], one: impl Fn(f32) -> [u8; B]) {
    values.iter().zip(bytes.as_chunks_mut::<B>().0).for_each(|(v, b)| *b = one(*v));
}

fn each<const B: usize, const N: usize>(bytes: &[u8], out: &mut [f32], block: impl Fn(&[u8; B], &mut [f32; N])) {
    for (b, o) in bytes.as_chunks::<B>().0.iter().zip(out.as_chunks_mut::<N>().0) {
        block(b, o);
    }
}

/// A stored f16 as f32.
pub fn half(bytes: [u8; 2]) -> f32 {
    f16::from_le_bytes(bytes).to_f32()
}

fn q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let d = half([block[0], block[1]]);
    for (o, q) in out.iter_mut().zip(&block[2..]) {
        *o = d * (*q as i8) as f32;
    }
}

fn q4_0(block: &[u8; 18], out: &mut [f32; 32]) {
    let d = half([block[0], block[1]]);
    for (o, q) in out.iter_mut().zip(q4_0_quants(block)) {
        *o = d * q as f32;
    }
}

fn q4_k(block: &[u8; 144], out: &mut [f32; 256]) {
    with_minima(block[..16].as_array().expect("16 bytes"), q4_k_quants(block), out);
}

fn q5_k(block: &[u8; 176], out: &mut [f32; 256]) {
    with_minima(block[..16].as_array().expect("16 bytes"), q5_k_quants(block), out);
}

fn with_minima(head: &[u8; 16], quants: [i8; 256], out: &mut [f32; 256]) {
    let (d, dmin) = (half([head[0], head[1]]), half([head[2], head[3]]));
    for (g, (out, quants)) in out.as_chunks_mut::<32>().0.iter_mut().zip(quants.as_chunks::<32>().0).enumerate() {
        let (scale, min) = scale_min(&head[4..], g);
        let (d, m) = (d * scale as f32, dmin * min as f32);
        for (o, q) in out.iter_mut().zip(quants) {
            *o = d * *q as f32 - m;
        }
    }
}

fn q6_k(block: &[u8; 210], out: &mut [f32; 256]) {
    let d = half([block[208], block[209]]);
    let quants = q6_k_quants(block);
    for (g, (out, quants)) in out.as_chunks_mut::<16>().0.iter_mut().zip(quants.as_chunks::<16>().0).enumerate() {
        let scale = d * (block[192 + g] as i8) as f32;
        for (o, q) in out.iter_mut().zip(quants) {
            *o = scale * *q as f32;
        }
    }
}

/// The integers of a `q4_0` block, −8 to 7.
#[inline]
pub fn q4_0_quants(block: &[u8; 18]) -> [i8; 32] {
    let mut quants = [0; 32];
    for (i, q) in block[2..].iter().enumerate() {
        quants[i] = (q & 15) as i8 - 8;
        quants[i + 16] = (q >> 4) as i8 - 8;
    }
    quants
}

/// The integers of a `q4_k` block, 0 to 15. Two groups of 32 share 32 bytes: the even one has the low nibbles.
#[inline]
pub fn q4_k_quants(block: &[u8; 144]) -> [i8; 256] {
    let mut quants = [0; 256];
    for (g, out) in quants.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let bytes = &block[16 + g / 2 * 32..][..32];
        for (o, q) in out.iter_mut().zip(bytes) {
            *o = (q >> (4 * (g % 2)) & 15) as i8;
        }
    }
    quants
}

/// The integers of a `q5_k` block, 0 to 31: as in `q4_k`, and bit `g` of 32 more bytes is the fifth bit of group `g`.
#[inline]
pub fn q5_k_quants(block: &[u8; 176]) -> [i8; 256] {
    let mut quants = [0; 256];
    for (g, out) in quants.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let bytes = &block[48 + g / 2 * 32..][..32];
        for ((o, q), h) in out.iter_mut().zip(bytes).zip(&block[16..48]) {
            *o = ((q >> (4 * (g % 2)) & 15) | (h >> g & 1) << 4) as i8;
        }
    }
    quants
}

/// The integers of a `q6_k` block, −32 to 31.
///
/// Each half of 128 values: four runs of 32; runs 0 and 1 in the low nibbles of 64 bytes, 2 and 3 in the high ones; two
/// more bits of each in 32 bytes, a run per bit pair.
#[inline]
pub fn q6_k_quants(block: &[u8; 210]) -> [i8; 256] {
    let (low, high) = (&block[..128], &block[128..192]);
    let mut quants = [0; 256];
    for (at, out) in quants.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (half, run) = (at / 4, at % 4);
        let low = &low[half * 64 + run % 2 * 32..][..32];
        let high = &high[half * 32..][..32];
        let (nibble, pair) = (4 * (run / 2) as u32, 2 * run as u32);
        for ((o, l), h) in out.iter_mut().zip(low).zip(high) {
            *o = ((l >> nibble & 15) | (h >> pair & 3) << 4) as i8 - 32;
        }
    }
    quants
}

/// The 6-bit scale and minimum of group `g`, packed over 12 bytes: the first four groups in the low six bits of bytes
/// 0..4 and 4..8, the last four in the nibbles of bytes 8..12 with their top bits in the high bits of the others.
#[inline]
pub fn scale_min(packed: &[u8], g: usize) -> (u8, u8) {
    match g {
        0..4 => (packed[g] & 63, packed[g + 4] & 63),
        _ => ((packed[g + 4] & 15) | (packed[g - 4] >> 6 << 4), (packed[g + 4] >> 4) | (packed[g] >> 6 << 4)),
    }
}

#[cfg(test)]
mod tests {
    use candle_core::quantized::{GgmlDType, QTensor};
    use candle_core::{Device, Tensor};

    use super::*;

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
}
