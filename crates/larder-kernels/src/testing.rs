//! Seeded random numbers and weights for tests.

use larder_core::{NumberFormat, RowOrder, interleave};

/// A seeded stream of pseudo-random numbers (xorshift).
pub struct Noise(u64);

impl Noise {
    pub fn new(seed: u64) -> Self {
        Noise(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() >> 32) as usize % n
    }

    /// −1 to 1.
    pub fn value(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub fn values(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.value()).collect()
    }

    /// Stored weights in plain row order: every bit is random, except in the scales, which are finite.
    pub fn weights(&mut self, kind: NumberFormat, rows: usize, cols: usize) -> Vec<u8> {
        let mut bytes: Vec<u8> = match kind {
            NumberFormat::F32 => self.values(rows * cols).iter().flat_map(|v| v.to_le_bytes()).collect(),
            NumberFormat::F16 => self.values(rows * cols).iter().flat_map(|v| f16_bytes(*v)).collect(),
            NumberFormat::Bf16 => {
                self.values(rows * cols).iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect()
            }
            _ => (0..kind.matrix_bytes(rows, cols).unwrap()).map(|_| self.bits() as u8).collect(),
        };
        set_scales(kind, &mut bytes, || self.value() / 16.0);
        bytes
    }
}

/// Sets the scales of block formats that are floats; of an exponent, the power of two that is not above the value.
pub fn set_scales(kind: NumberFormat, bytes: &mut [u8], mut scale: impl FnMut() -> f32) {
    let Some(parts) = kind.parts() else { return };
    if kind == NumberFormat::Iq1M {
        return bytes.chunks_exact_mut(kind.block_bytes()).for_each(|block| set_spread_scale(block, scale()));
    }
    // The second two bytes of iq4_xs are bits of integer scales.
    let floats = if kind == NumberFormat::Iq4Xs { 1 } else { parts.scales };
    for block in bytes.chunks_exact_mut(kind.block_bytes()) {
        for bytes in block[parts.scales_at..][..parts.scale_bytes * floats].chunks_exact_mut(parts.scale_bytes) {
            match bytes {
                [exponent] => *exponent = (scale().to_bits() >> 23) as u8 + 1,
                _ => bytes.copy_from_slice(&f16_bytes(scale())),
            }
        }
    }
}

/// Sets the scale of a block of iq1_m: four bits at the top of each of its last four pairs of bytes.
fn set_spread_scale(block: &mut [u8], scale: f32) {
    let bits = u16::from_le_bytes(f16_bytes(scale));
    for (i, pair) in block[48..].as_chunks_mut::<2>().0.iter_mut().enumerate() {
        pair[1] = pair[1] & 15 | (bits >> (4 * i) << 4) as u8;
    }
}

/// Bytes of blocks and their values, as the Python package gguf has them; see `tests/blocks/README.md`.
pub fn blocks_with_values(kind: NumberFormat) -> (Vec<u8>, Vec<f32>) {
    let path = format!("{}/tests/blocks/{kind}.bin", env!("CARGO_MANIFEST_DIR"));
    let file = std::fs::read(path).unwrap();
    let blocks = file.len() / (kind.block_bytes() + 4 * kind.block_len());
    let (bytes, values) = file.split_at(blocks * kind.block_bytes());
    assert_eq!((blocks, values.len()), (16, 16 * 4 * kind.block_len()));
    (bytes.to_vec(), values.as_chunks().0.iter().map(|v| f32::from_le_bytes(*v)).collect())
}

/// Without the processor's conversion instruction, which Miri does not support.
fn f16_bytes(value: f32) -> [u8; 2] {
    half::f16::from_f32_const(value).to_le_bytes()
}

/// The weights in row order `order`, from the second byte of the vector on, so that they are not aligned.
pub fn ordered(kind: NumberFormat, order: RowOrder, rows: usize, cols: usize, plain: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0];
    bytes.extend(plain);
    if order == RowOrder::Rows8 {
        interleave(kind, rows, cols, &mut bytes[1..]);
    }
    bytes
}
