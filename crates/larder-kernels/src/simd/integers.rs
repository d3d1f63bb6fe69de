//! The integers of a block of 32 weights, in the forms that number formats have.

use super::Simd;
use super::token_blocks::TokenBlocks;

/// The integers of a block of 32 weights of each row.
pub trait Integers<S: Simd> {
    /// Their dot products with a block of each token, which are exact.
    fn dots<const N: usize>(&self, simd: S, x: TokenBlocks<N>) -> [S::Floats; N];
}

/// Bytes, at most `MAX`, that are `OFFSET` too large.
pub struct Unsigned<S: Simd, const MAX: u8, const OFFSET: i16>(pub [S::Bytes; 8]);

impl<S: Simd, const MAX: u8, const OFFSET: i16> Integers<S> for Unsigned<S, MAX, OFFSET> {
    #[inline(always)]
    fn dots<const N: usize>(&self, simd: S, x: TokenBlocks<N>) -> [S::Floats; N] {
        simd.dots::<MAX, OFFSET, N>(&self.0, x)
    }
}

/// Signed bytes.
pub struct Signed<S: Simd>(pub [S::Signed; 8]);

impl<S: Simd> Integers<S> for Signed<S> {
    #[inline(always)]
    fn dots<const N: usize>(&self, simd: S, x: TokenBlocks<N>) -> [S::Floats; N] {
        simd.signed_dots(&self.0, x)
    }
}

/// Bytes, at most `MAX`, times a scale. The dot products are below 2²⁴.
pub struct Scaled<S: Simd, const MAX: u8>(pub [S::Bytes; 8], pub S::Scale);

impl<S: Simd, const MAX: u8> Integers<S> for Scaled<S, MAX> {
    #[inline(always)]
    fn dots<const N: usize>(&self, simd: S, x: TokenBlocks<N>) -> [S::Floats; N] {
        simd.scaled_dots::<MAX, N>(&self.0, self.1, x)
    }
}

/// Signed bytes times a scale. The dot products are below 2²⁴.
pub struct SignedScaled<S: Simd>(pub [S::Signed; 8], pub S::Scale);

impl<S: Simd> Integers<S> for SignedScaled<S> {
    #[inline(always)]
    fn dots<const N: usize>(&self, simd: S, x: TokenBlocks<N>) -> [S::Floats; N] {
        simd.signed_scaled_dots(&self.0, self.1, x)
    }
}

/// Bytes, at most `MAX`, that are `OFFSET` too large, times a scale for each half of the block. The dot products are
/// below 2²⁴.
pub struct HalfScaled<S: Simd, const MAX: u8, const OFFSET: i16>(pub [S::Bytes; 8], pub S::HalfScales);

impl<S: Simd, const MAX: u8, const OFFSET: i16> Integers<S> for HalfScaled<S, MAX, OFFSET> {
    #[inline(always)]
    fn dots<const N: usize>(&self, simd: S, x: TokenBlocks<N>) -> [S::Floats; N] {
        simd.half_scaled_dots::<MAX, OFFSET, N>(&self.0, self.1, x)
    }
}

/// Signed bytes times a scale for each half of the block. The dot products are below 2²⁴.
pub struct SignedHalfScaled<S: Simd>(pub [S::Signed; 8], pub S::HalfScales);

impl<S: Simd> Integers<S> for SignedHalfScaled<S> {
    #[inline(always)]
    fn dots<const N: usize>(&self, simd: S, x: TokenBlocks<N>) -> [S::Floats; N] {
        simd.signed_half_scaled_dots(&self.0, self.1, x)
    }
}
