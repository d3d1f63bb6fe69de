//! Groups of 32 weights of several rows, in the forms that number formats have.

use super::Simd;
use super::token_blocks::TokenBlocks;

/// What takes the groups of several rows.
pub trait Groups<S: Simd> {
    /// Takes group `g` of the current block: its integers, one scale or one for each half, and no minimum, one, or one
    /// for each half. Must be `#[inline(always)]`.
    fn add<const SCALES: usize, const MINIMA: usize>(
        &mut self,
        g: usize,
        w: &impl Integers<S>,
        scales: [S::Floats; SCALES],
        minima: [S::Floats; MINIMA],
    );
}

/// The integers of a group of each row.
pub trait Integers<S: Simd> {
    /// Their exact dot products with a block of each token: whole, or of each of `PARTS` = 2 halves.
    fn dots<const PARTS: usize, const N: usize>(&self, simd: S, x: TokenBlocks<N>) -> [[S::Floats; N]; PARTS];

    /// Stores them as the bytes of a strip: returns what [`Simd::store_unsigned`] does.
    fn store(&self, simd: S, to: &mut [u8]) -> (usize, i32);
}

/// Bytes, at most `MAX`, that are `OFFSET` too large.
pub struct Unsigned<S: Simd, const MAX: u8, const OFFSET: i16>(pub [S::Bytes; 8]);

impl<S: Simd, const MAX: u8, const OFFSET: i16> Integers<S> for Unsigned<S, MAX, OFFSET> {
    #[inline(always)]
    fn dots<const PARTS: usize, const N: usize>(&self, simd: S, x: TokenBlocks<N>) -> [[S::Floats; N]; PARTS] {
        simd.dots::<MAX, OFFSET, PARTS, N>(&self.0, x)
    }

    #[inline(always)]
    fn store(&self, simd: S, to: &mut [u8]) -> (usize, i32) {
        simd.store_unsigned::<MAX, OFFSET>(&self.0, to)
    }
}

/// Signed bytes.
pub struct Signed<S: Simd>(pub [S::Signed; 8]);

impl<S: Simd> Integers<S> for Signed<S> {
    #[inline(always)]
    fn dots<const PARTS: usize, const N: usize>(&self, simd: S, x: TokenBlocks<N>) -> [[S::Floats; N]; PARTS] {
        simd.signed_dots::<PARTS, N>(&self.0, x)
    }

    #[inline(always)]
    fn store(&self, simd: S, to: &mut [u8]) -> (usize, i32) {
        simd.store_signed(&self.0, to)
    }
}
