//! Activations, and their quantisation to 8-bit integers for products with quantised weights.
#![allow(unsafe_code)]

use std::ops::Range;
use std::slice;

use crate::block::{BLOCK, Block};
use crate::dispatch;
use crate::thread_pool::ThreadPool;

/// The least number of values that one task quantises.
const TASK_VALUES: usize = 32 * 1024;

/// The least number of values that one task makes, by some arithmetic, and quantises.
const TASK_MADE_VALUES: usize = 16 * 1024;

/// Activations `[tokens, cols]` as products read them: as f32, and quantised where weights are.
#[derive(Clone, Copy)]
pub struct Inputs<'a> {
    cols: usize,
    values: &'a [f32],
    /// `[tokens, cols / 32]`; empty if not quantised.
    blocks: &'a [Block],
}

/// The memory of quantised activations, which is reused from call to call.
#[derive(Default)]
pub struct InputBuffer {
    blocks: Vec<Block>,
    /// Blocks of the activations that it was filled with last. The others stay: to shrink and grow again would clear
    /// them.
    used: usize,
}

impl InputBuffer {
    /// No memory yet.
    pub fn new() -> Self {
        InputBuffer::default()
    }

    /// Quantises `x [tokens, cols]` if `quantise` is set, as products with quantised weights want. Allocates only if
    /// there are more values than in any call before.
    ///
    /// # Panics
    /// If `x` is not a whole number of rows, or rows to be quantised are not whole blocks of 32.
    pub fn fill<'a>(&'a mut self, x: &'a [f32], cols: usize, quantise: bool) -> Inputs<'a> {
        self.fill_on(&ThreadPool::single_threaded(), x, cols, quantise)
    }

    /// As [`fill`](InputBuffer::fill), on several threads if there are more than 32 Ki values.
    ///
    /// # Panics
    /// As [`fill`](InputBuffer::fill).
    pub fn fill_on<'a>(&'a mut self, pool: &ThreadPool, x: &'a [f32], cols: usize, quantise: bool) -> Inputs<'a> {
        self.resize(x.len(), cols, quantise);
        let set = dispatch::chosen();
        pool.run_chunks(&mut self.blocks[..self.used], TASK_VALUES / BLOCK, &|task, blocks| {
            set.quantise(&x[task * TASK_VALUES..][..blocks.len() * BLOCK], blocks);
        });
        self.of(x, cols)
    }

    /// As [`fill_on`](InputBuffer::fill_on), of values that the same tasks make: `make` gets the number of a row, and
    /// the values of it and some rows behind it.
    ///
    /// # Panics
    /// As [`fill`](InputBuffer::fill).
    pub fn make_on<'a>(
        &'a mut self,
        pool: &ThreadPool,
        x: &'a mut [f32],
        cols: usize,
        quantise: bool,
        make: &(dyn Fn(usize, &mut [f32]) + Sync),
    ) -> Inputs<'a> {
        self.resize(x.len(), cols, quantise);
        let (set, rows) = (dispatch::chosen(), TASK_MADE_VALUES.div_ceil(cols));
        let blocks = &mut self.blocks[..self.used];
        if quantise {
            pool.run_pairs((x, rows * cols), (blocks, rows * cols / BLOCK), &|task, x, blocks| {
                make(task * rows, x);
                set.quantise(x, blocks);
            });
        } else {
            pool.run_chunks(x, rows * cols, &|task, x| make(task * rows, x));
        }
        self.of(x, cols)
    }

    /// The activations `x` that the buffer was filled with last.
    pub fn of<'a>(&'a self, x: &'a [f32], cols: usize) -> Inputs<'a> {
        let blocks = &self.blocks[..self.used];
        debug_assert!(blocks.is_empty() || blocks.len() * BLOCK == x.len(), "other activations");
        Inputs { cols, values: x, blocks }
    }

    fn resize(&mut self, values: usize, cols: usize, quantise: bool) {
        assert!(cols > 0 && values.is_multiple_of(cols), "activations are not whole rows of {cols}");
        assert!(!quantise || cols.is_multiple_of(BLOCK), "rows of {cols} activations are not whole blocks of {BLOCK}");
        self.used = if quantise { values / BLOCK } else { 0 };
        self.blocks.resize(self.used.max(self.blocks.len()), Block::default());
    }

    /// Bytes of the quantised form of `values` activations.
    pub const fn bytes(values: usize) -> usize {
        values.div_ceil(BLOCK) * size_of::<Block>()
    }
}

impl<'a> Inputs<'a> {
    /// Values per token.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.values.len() / self.cols.max(1)
    }

    /// Some of the tokens.
    pub fn part(&self, tokens: Range<usize>) -> Inputs<'a> {
        let (Inputs { cols, values, blocks }, per_token) = (*self, self.blocks.len() / self.tokens().max(1));
        let of_blocks = tokens.start * per_token..tokens.end * per_token;
        Inputs { cols, values: &values[tokens.start * cols..tokens.end * cols], blocks: &blocks[of_blocks] }
    }

    /// All values, `[tokens, cols]`.
    pub fn all_values(&self) -> &'a [f32] {
        self.values
    }

    /// All blocks of the quantised form, `[tokens, cols / 32]`, as bytes in this machine's byte order: for each block
    /// 32 integers, their scale, their sum and those of both halves as f32, the same three times −128 as integers, and
    /// zero. Empty if there is no quantised form.
    pub fn all_blocks(&self) -> &'a [u8] {
        // SAFETY: blocks are plain numbers without padding.
        unsafe { slice::from_raw_parts(self.blocks.as_ptr().cast(), size_of_val(self.blocks)) }
    }

    pub(crate) fn is_quantised(&self) -> bool {
        self.blocks.len() * BLOCK == self.values.len()
    }

    pub(crate) fn values(&self, token: usize) -> &'a [f32] {
        &self.values[token * self.cols..][..self.cols]
    }

    pub(crate) fn blocks(&self, token: usize) -> &'a [Block] {
        let blocks = self.cols / BLOCK;
        &self.blocks[token * blocks..][..blocks]
    }
}

/// Values as the bytes of the format f32, as which this processor stores them.
pub fn bytes_of(values: &[f32]) -> &[u8] {
    const { assert!(cfg!(target_endian = "little"), "formats are little-endian") };
    // SAFETY: floats have no padding.
    unsafe { slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantised_values_are_within_half_a_step() {
        let x: Vec<f32> = (0..3 * 96).map(|i| (i as f32 * 0.7).sin() * (i + 1) as f32).collect();
        let mut buffer = InputBuffer::new();
        let inputs = buffer.fill(&x, 96, true);
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
        let mut buffer = InputBuffer::new();
        let inputs = buffer.fill(&x, 64, true);
        let (block, bytes) = (inputs.blocks(0)[1], inputs.all_blocks());
        assert_eq!((bytes.len(), bytes[64 + 3]), (128, block.q[3] as u8));
        assert_eq!(bytes[64 + 32..][..4], block.d.to_ne_bytes());
        assert_eq!(bytes[64 + 36..][..4], block.sum.to_ne_bytes());
        assert_eq!(bytes[64 + 44..][..4], block.halves[1].to_ne_bytes());
        assert_eq!(bytes[64 + 48..][..4], block.raised.to_ne_bytes());
        assert_eq!(bytes[64 + 56..][..4], block.raised_halves[1].to_ne_bytes());
        assert_eq!(bytes[64 + 60..], [0; 4]);
    }

    #[test]
    fn zeros_subnormals_and_non_finite_values_become_zeros_or_nan() {
        let mut buffer = InputBuffer::new();
        for (odd, d_is_nan) in
            [(0.0, false), (1e-42, false), (f32::NAN, true), (f32::INFINITY, true), (f32::NEG_INFINITY, true)]
        {
            let mut x = [0.0; BLOCK];
            x[17] = odd;
            let block = buffer.fill(&x, BLOCK, true).blocks(0)[0];
            assert_eq!(block.q, [0; BLOCK]);
            assert_eq!(block.d.is_nan(), d_is_nan, "{odd}");
            assert!(d_is_nan || block.d == 0.0);
        }
    }

    #[test]
    fn threads_change_no_bit() {
        let x: Vec<f32> = (0..5 * TASK_VALUES + 64).map(|i| (i as f32).cos()).collect();
        let (mut one, mut many, pool) = (InputBuffer::new(), InputBuffer::new(), ThreadPool::new(3, false).unwrap());
        let one = one.fill(&x, 64, true);
        assert!(one.blocks == many.fill_on(&pool, &x, 64, true).blocks);
        let mut made = vec![0.0; x.len()];
        let many =
            many.make_on(&pool, &mut made, 64, true, &|row, out| out.copy_from_slice(&x[row * 64..][..out.len()]));
        assert!(one.values == many.values && one.blocks == many.blocks);
        let part = many.part(3..5);
        assert!((part.tokens(), part.values(1), part.blocks(0)) == (2, many.values(4), many.blocks(3)));
    }

    #[test]
    #[should_panic(expected = "not whole blocks of 32")]
    fn rows_that_are_not_whole_blocks_cannot_be_quantised() {
        InputBuffer::new().fill(&[0.0; 40], 40, true);
    }
}
