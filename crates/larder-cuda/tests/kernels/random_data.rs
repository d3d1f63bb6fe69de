//! Seeded random numbers and weights.

use larder_core::{NumberFormat, RowOrder, interleave};
use larder_kernels::narrow;

use crate::Aligned;

/// A seeded stream of pseudo-random numbers (xorshift).
pub struct RandomData(pub u64);

impl RandomData {
    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub fn one_of<T: Copy>(&mut self, choice: &[T]) -> T {
        choice[(self.bits() >> 32) as usize % choice.len()]
    }

    /// −1 to 1.
    pub fn value(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// Activations of very different magnitudes, with some runs of zeros and rarely a value that is not finite.
    pub fn activations(&mut self, n: usize) -> Vec<f32> {
        let mut values = Vec::with_capacity(n);
        while values.len() < n {
            let size = self.one_of(&[0.0, 1e-42, 1e-3, 0.7, 3.7, 3.7, 500.0]);
            let run = 32.min(n - values.len());
            values.extend((0..run).map(|_| self.value() * size));
        }
        if n > 0 && self.bits().is_multiple_of(16) {
            let at = self.bits() as usize % n;
            values[at] = self.one_of(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY]);
        }
        values
    }

    /// Stored weights: every bit is random, except in the scales, which are finite.
    pub fn weights(&mut self, kind: NumberFormat, order: RowOrder, rows: usize, cols: usize) -> Aligned {
        let mut stored = Aligned::new(kind.matrix_bytes(rows, cols).unwrap());
        let bytes = stored.bytes_mut();
        if let Some(parts) = kind.parts() {
            bytes.iter_mut().for_each(|b| *b = self.bits() as u8);
            for block in bytes.chunks_exact_mut(kind.block_bytes()) {
                if parts.scales > 0 && parts.scale_bytes == 1 {
                    // Exponents: subnormal scales, usual ones, and the one that is not a number in the standard.
                    block[parts.scales_at] = self.one_of(&[0, 1, 2, 90, 118, 127, 128, 133, 255]);
                    continue;
                }
                for half in block[parts.scales_at..][..2 * parts.scales].chunks_exact_mut(2) {
                    let size = self.one_of(&[1.0, 0.05, 1e-6]);
                    narrow(NumberFormat::F16, &[self.value() * size], half);
                }
            }
        } else {
            let values: Vec<f32> = (0..rows * cols).map(|_| self.value()).collect();
            narrow(kind, &values, bytes);
        }
        if order == RowOrder::Rows8 {
            interleave(kind, rows, cols, bytes);
        }
        stored
    }

    /// Values of all magnitudes and signs, and NaN.
    pub fn all_sizes(&mut self, n: usize) -> Vec<f32> {
        let odd = [0.0, 1e-45, 1e-38, 1.0, 87.0, 88.0, 1e4, 1e19, 1e20, f32::MAX, f32::INFINITY];
        let mut values: Vec<f32> = odd.iter().flat_map(|v| [*v, -v]).chain([f32::NAN]).collect();
        while values.len() < n {
            let near = self.value() * self.one_of(&[0.01, 1.0, 3.0, 12.0, 100.0, 1e6]);
            values.push(near);
            values.push(f32::from_bits(self.bits() as u32));
        }
        values.truncate(n);
        values
    }
}
