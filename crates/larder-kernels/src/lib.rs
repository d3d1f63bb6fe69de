//! Products of f32 activations with weights in the format they are stored in, on borrowed bytes.
//!
//! Nothing is repacked and nothing is allocated per call beyond one row. Each output is computed by the same
//! operations in the same order whatever the number of tokens, so batching never changes a bit.

mod blocks;
mod dot;

use larder_core::Kind;

pub use blocks::widen;

/// A weight matrix `[rows, cols]` in stored form.
#[derive(Clone, Copy)]
pub struct Weights<'a> {
    /// How its numbers are stored.
    pub kind: Kind,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// Exactly `kind.matrix_bytes(rows, cols)` bytes, at any alignment.
    pub bytes: &'a [u8],
}

impl<'a> Weights<'a> {
    /// One row's bytes.
    pub fn row(&self, row: usize) -> &'a [u8] {
        let len = self.row_bytes();
        &self.bytes[row * len..(row + 1) * len]
    }

    fn row_bytes(&self) -> usize {
        self.kind.row_bytes(self.cols).expect("a matrix has rows of whole blocks")
    }
}

/// `out[t, r] = Σ_c weights[r, c] · x[t, c]` for `x [tokens, cols]`, `out [tokens, rows]`.
///
/// # Panics
/// If a length does not fit the shapes: the shapes are checked once here, and nowhere below.
pub fn matmul(weights: Weights, x: &[f32], out: &mut [f32]) {
    let Weights { rows, cols, .. } = weights;
    assert_eq!(Some(weights.bytes.len()), weights.kind.matrix_bytes(rows, cols), "weight bytes do not fit the shape");
    assert!(cols > 0 && x.len().is_multiple_of(cols), "activations are not whole rows of {cols}");
    let tokens = x.len() / cols;
    assert_eq!(out.len(), tokens * rows, "output does not fit the shape");

    let mut wide = vec![0.0; cols]; // [cols]
    for r in 0..rows {
        let row = dot::as_f32(weights.kind, weights.row(r), &mut wide);
        for (t, x) in x.chunks_exact(cols).enumerate() {
            out[t * rows + r] = dot::dot(row, x);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn f32_bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|v| v.to_le_bytes()).collect()
    }

    #[test]
    fn f32_product_matches_the_definition_at_any_alignment() {
        let (rows, cols, tokens) = (5, 37, 3);
        let w: Vec<f32> = (0..rows * cols).map(|i| ((i * 7 % 13) as f32) - 6.0).collect();
        let x: Vec<f32> = (0..tokens * cols).map(|i| ((i * 5 % 11) as f32) * 0.25).collect();
        let mut shifted = vec![0u8];
        shifted.extend(f32_bytes(&w));
        for bytes in [&f32_bytes(&w)[..], &shifted[1..]] {
            let mut out = vec![0.0; tokens * rows];
            matmul(Weights { kind: Kind::F32, rows, cols, bytes }, &x, &mut out);
            for t in 0..tokens {
                for r in 0..rows {
                    let exact: f64 = (0..cols).map(|c| w[r * cols + c] as f64 * x[t * cols + c] as f64).sum();
                    assert!((out[t * rows + r] as f64 - exact).abs() < 1e-4);
                }
            }
        }
    }

    #[test]
    fn a_batch_gives_the_bits_of_single_tokens() {
        let (rows, cols) = (4, 64);
        let bytes: Vec<u8> = (0..Kind::Q4_0.matrix_bytes(rows, cols).unwrap())
            .map(|i| if i % 18 == 1 { 0x2c } else { (i * 37 % 251) as u8 })
            .collect();
        let weights = Weights { kind: Kind::Q4_0, rows, cols, bytes: &bytes };
        let x: Vec<f32> = (0..3 * cols).map(|i| (i as f32 * 0.37).sin()).collect();
        let mut batch = vec![0.0; 3 * rows];
        matmul(weights, &x, &mut batch);
        for t in 0..3 {
            let mut one = vec![0.0; rows];
            matmul(weights, &x[t * cols..(t + 1) * cols], &mut one);
            assert_eq!(one, batch[t * rows..(t + 1) * rows]);
        }
    }

    #[test]
    #[should_panic(expected = "weight bytes do not fit")]
    fn short_weights_are_caught_at_the_edge() {
        matmul(Weights { kind: Kind::F32, rows: 2, cols: 4, bytes: &[0; 31] }, &[0.0; 4], &mut [0.0; 2]);
    }
}
