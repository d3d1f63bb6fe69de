//! Some blocks of several rows, unpacked to bytes, which the kernels of all instruction sets make and take.
#![allow(unsafe_code)]

use larder_core::ROW_GROUP;

use crate::block::BLOCK;

/// Panels of a strip.
pub const STRIP_PANELS: usize = 4;

/// Rows of a strip.
pub const STRIP_ROWS: usize = STRIP_PANELS * ROW_GROUP;

/// The most blocks of 32 values of a strip: with the activations of a few tokens they stay in the first-level cache.
pub const STRIP_BLOCKS: usize = 16;

/// The sums of a token with the rows of a strip.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct StripSums(pub [f32; STRIP_ROWS]);

/// Some blocks of 32 rows, unpacked.
#[repr(C, align(64))]
pub struct Strip {
    /// `[blocks][vectors][8][lanes]` runs of four bytes, those of a vector in an order that a set may choose.
    pub bytes: [u8; STRIP_BLOCKS * STRIP_ROWS * BLOCK],
    /// `[blocks][scales][rows]`
    pub scales: [f32; STRIP_BLOCKS * 2 * STRIP_ROWS],
    /// `[blocks][minima][rows]`
    pub minima: [f32; STRIP_BLOCKS * 2 * STRIP_ROWS],
    /// Blocks that it has.
    pub blocks: usize,
    pub form: StripForm,
}

/// What the bytes and scales of a strip are.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct StripForm {
    /// Scales, and minima, of a block.
    pub scales: usize,
    pub minima: usize,
    /// Runs of bytes whose products with activations, added in pairs, fit 16 bits; 0 if the bytes are signed, or the
    /// set does not add in 16 bits.
    pub fit: usize,
    /// By how much the bytes are too large.
    pub offset: i32,
}

impl Strip {
    /// Of zeros.
    pub fn new() -> Box<Self> {
        // SAFETY: all parts are numbers, for which zeros are values.
        unsafe { Box::new_zeroed().assume_init() }
    }
}
