//! Activations, and their quantisation to 8-bit integers for products with quantised weights.
#![allow(unsafe_code)]

use std::slice;

use crate::block::{BLOCK, Block};
use crate::disjoint::Disjoint;
use crate::dispatch;
use crate::thread_pool::ThreadPool;

/// The least number of values that one task copies and quantises.
const TASK_VALUES: usize = 32 * 1024;

/// Activations `[tokens, cols]`, in buffers that are reused from call to call.
#[derive(Default)]
pub struct Inputs {
    cols: usize,
    values: Vec<f32>,
    /// `[tokens, cols / 32]`; empty if not quantised.
    blocks: Vec<Block>,
}

impl Inputs {
    /// No activations yet.
    pub fn new() -> Self {
        Inputs::default()
    }

    /// Replaces the activations by `x [tokens, cols]`, and quantises them if `quantise` is set, as products with quantised
    /// weights want. Allocates only if there are more of them than in any call before.
    ///
    /// # Panics
    /// If `x` is not a whole number of rows, or rows to be quantised are not whole blocks of 32.
    pub fn fill(&mut self, x: &[f32], cols: usize, quantise: bool) {
        self.fill_on(&ThreadPool::single_threaded(), x, cols, quantise);
    }

    /// As [`fill`](Inputs::fill), on several threads if there are more than 32 Ki values.
    ///
    /// # Panics
    /// As [`fill`](Inputs::fill).
    pub fn fill_on(&mut self, pool: &ThreadPool, x: &[f32], cols: usize, quantise: bool) {
        assert!(cols > 0 && x.len().is_multiple_of(cols), "activations are not whole rows of {cols}");
        assert!(!quantise || cols.is_multiple_of(BLOCK), "rows of {cols} activations are not whole blocks of {BLOCK}");
        self.cols = cols;
        self.values.resize(x.len(), 0.0);
        self.blocks.resize(if quantise { x.len() / BLOCK } else { 0 }, Block::default());
        let set = dispatch::best();
        let (values, blocks) = (Disjoint::new(&mut self.values), Disjoint::new(&mut self.blocks));
        pool.run(x.len().div_ceil(TASK_VALUES), &|task| {
            let at = task * TASK_VALUES;
            let x = &x[at..x.len().min(at + TASK_VALUES)];
            // SAFETY: every task has a range of the values of its own.
            unsafe { values.slice(at, x.len()) }.copy_from_slice(x);
            if quantise {
                // SAFETY: likewise of the blocks, because a task is a whole number of blocks.
                set.quantise(x, unsafe { blocks.slice(at / BLOCK, x.len() / BLOCK) });
            }
        });
    }

    /// Bytes of `values` activations, in floats and quantised.
    pub const fn bytes(values: usize) -> usize {
        values * size_of::<f32>() + values.div_ceil(BLOCK) * size_of::<Block>()
    }

    /// Values per token.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.values.len() / self.cols.max(1)
    }

    /// All values, `[tokens, cols]`.
    pub fn all_values(&self) -> &[f32] {
        &self.values
    }

    /// All blocks of the quantised form, `[tokens, cols / 32]`, as bytes in this machine's byte order: for each block 32
    /// integers, the scale, the scale times their sum, eight times their sum, and the sum of each half. Empty if
    /// there is no quantised form.
    pub fn all_blocks(&self) -> &[u8] {
        // SAFETY: blocks are plain numbers without padding.
        unsafe { slice::from_raw_parts(self.blocks.as_ptr().cast(), size_of_val(&self.blocks[..])) }
    }

    pub(crate) fn is_quantised(&self) -> bool {
        self.blocks.len() * BLOCK == self.values.len()
    }

    pub(crate) fn values(&self, token: usize) -> &[f32] {
        &self.values[token * self.cols..][..self.cols]
    }

    pub(crate) fn blocks(&self, token: usize) -> &[Block] {
        let blocks = self.cols / BLOCK;
        &self.blocks[token * blocks..][..blocks]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantised_values_are_within_half_a_step() {
        let x: Vec<f32> = (0..3 * 96).map(|i| (i as f32 * 0.7).sin() * (i + 1) as f32).collect();
        let mut inputs = Inputs::new();
        inputs.fill(&x, 96, true);
        assert_eq!((inputs.tokens(), inputs.cols()), (3, 96));
        for token in 0..3 {
            for (block, x) in inputs.blocks(token).iter().zip(inputs.values(token).chunks(BLOCK)) {
                for (q, x) in block.q.iter().zip(x) {
                    assert!((block.d * *q as f32 - x).abs() <= block.d * 0.5001);
                }
                assert_eq!(*block, Block::new(block.q, block.d));
            }
        }
    }

    #[test]
    fn blocks_have_the_documented_byte_layout() {
        let x: Vec<f32> = (0..64).map(|i| i as f32 - 20.0).collect();
        let mut inputs = Inputs::new();
        inputs.fill(&x, 64, true);
        let (block, bytes) = (inputs.blocks(0)[1], inputs.all_blocks());
        assert_eq!((bytes.len(), bytes[48 + 3]), (96, block.q[3] as u8));
        assert_eq!(bytes[48 + 32..][..4], block.d.to_ne_bytes());
        assert_eq!(bytes[48 + 36..][..4], block.d_sum.to_ne_bytes());
        assert_eq!(bytes[48 + 40..][..4], block.sum8.to_ne_bytes());
        assert_eq!(bytes[48 + 46..], block.halves[1].to_ne_bytes());
        assert_eq!(inputs.all_values(), x);
    }

    #[test]
    fn zeros_subnormals_and_non_finite_values_become_zeros_or_nan() {
        let mut inputs = Inputs::new();
        for (odd, d_is_nan) in
            [(0.0, false), (1e-42, false), (f32::NAN, true), (f32::INFINITY, true), (f32::NEG_INFINITY, true)]
        {
            let mut x = [0.0; BLOCK];
            x[17] = odd;
            inputs.fill(&x, BLOCK, true);
            let block = inputs.blocks(0)[0];
            assert_eq!(block.q, [0; BLOCK]);
            assert_eq!((block.d.is_nan(), block.d_sum.is_nan()), (d_is_nan, d_is_nan), "{odd}");
            assert!(d_is_nan || block.d == 0.0);
        }
    }

    #[test]
    fn threads_change_no_bit() {
        let x: Vec<f32> = (0..5 * TASK_VALUES + 64).map(|i| (i as f32).cos()).collect();
        let (mut one, mut many) = (Inputs::new(), Inputs::new());
        one.fill(&x, 64, true);
        many.fill_on(&ThreadPool::new(3, false).unwrap(), &x, 64, true);
        assert!(one.values == many.values && one.blocks == many.blocks);
    }

    #[test]
    #[should_panic(expected = "not whole blocks of 32")]
    fn rows_that_are_not_whole_blocks_cannot_be_quantised() {
        Inputs::new().fill(&[0.0; 40], 40, true);
    }
}
