//! Products with quantised weights and weighted sums of floats, written once for all instruction sets.
//!
//! A format's decoding (in `formats/`) is generic over [`Simd`], the primitives of an instruction set: every lane of 32
//! bits of a vector belongs to a row, and a load brings four consecutive bytes of each row, which are multiplied with
//! the same four activations in all lanes. So nothing is summed across lanes, and the order of additions is the
//! definition's.
//!
//! All functions on the way from [`Simd::run`] to an instruction are `#[inline(always)]`, so that they are compiled for
//! the instruction set, and free of closures, which would not be.

pub mod blocks;
pub mod byte_lanes;
pub mod delta_rule;
pub mod groups;
pub mod products;
pub mod strips;
pub mod tile;
pub mod token_blocks;
pub mod weighted_sums;

use self::blocks::Blocks;
use self::byte_lanes::ByteLanes;
use self::strips::SomeTokens;
use self::token_blocks::TokenBlocks;

/// f32, as a const parameter of functions.
pub const F32: u8 = 0;
/// f16, likewise.
pub const F16: u8 = 1;
/// bf16, likewise.
pub const BF16: u8 = 2;

/// What [`Simd::run`] compiles for an instruction set.
pub trait Task<S> {
    /// Must be `#[inline(always)]`.
    fn run(self, simd: S);
}

/// The primitives of an instruction set. A value of the type shows that this processor has the instructions.
///
/// Sums of integers are exact, and every operation on floats is rounded once.
pub trait Simd: ByteLanes {
    /// Lanes of a vector: rows that are computed at a time. Those of two panels if there are more than in one.
    const LANES: usize;

    /// Registers for vectors: 16 or 32.
    const REGISTERS: usize;
    /// Tokens that are multiplied with two vectors of a strip at a time: up to 6, with one scale for each block.
    const STRIP_TOKENS: usize;
    /// Tokens, likewise, with a scale for each half of a block.
    const STRIP_TOKENS_IN_HALVES: usize;
    /// Tokens, likewise, that an instruction multiplies; both numbers are multiples of it.
    const STRIP_STEP: usize = 1;

    /// An f32 of each row.
    type Floats: Copy;

    /// Runs a task, compiled for this instruction set.
    fn run<T: Task<Self>>(self, task: T);

    /// Scale `i` of every block, an f16, as f32.
    fn half<const INTERLEAVED: bool>(self, blocks: Blocks<Self, INTERLEAVED>, i: usize) -> Self::Floats;

    /// Scale `i` of every block, of one or two bytes, above which the lanes are zero.
    fn raw_scale<const INTERLEAVED: bool>(self, blocks: Blocks<Self, INTERLEAVED>, i: usize) -> Self::Bytes;

    /// Run `i` of four bytes of every block.
    fn run_of_four<const INTERLEAVED: bool>(self, blocks: Blocks<Self, INTERLEAVED>, i: usize) -> Self::Bytes;

    /// Four runs of four bytes of every block, from number `first` on.
    fn four_runs<const INTERLEAVED: bool>(self, blocks: Blocks<Self, INTERLEAVED>, first: usize) -> [Self::Bytes; 4];

    /// The unsigned byte at index `at` (0 to 3) of each lane.
    fn byte(self, bytes: Self::Bytes, at: usize) -> Self::Floats;

    /// The signed byte at index `at` (0 to 3) of each lane.
    fn signed_byte(self, bytes: Self::Bytes, at: usize) -> Self::Floats;

    /// The lower half of every lane, an f16, as f32.
    fn half_of_lanes(self, bytes: Self::Bytes) -> Self::Floats;

    /// The powers of two with these exponents, as [`mxfp4_scale`](larder_core::mxfp4_scale) defines them.
    fn powers(self, exponents: Self::Bytes) -> Self::Floats;

    /// The dot products of weights, which are the bytes (at most `MAX`) minus `OFFSET`, with a block of each token:
    /// whole, or of each of `PARTS` = 2 halves.
    fn dots<const MAX: u8, const OFFSET: i16, const PARTS: usize, const N: usize>(
        self,
        w: &[Self::Bytes; 8],
        x: TokenBlocks<N>,
    ) -> [[Self::Floats; N]; PARTS];

    /// As [`dots`](Simd::dots), of signed weights.
    fn signed_dots<const PARTS: usize, const N: usize>(
        self,
        w: &[Self::Signed; 8],
        x: TokenBlocks<N>,
    ) -> [[Self::Floats; N]; PARTS];

    /// Stores the runs of weights that are the bytes (at most `MAX`) minus `OFFSET` in the form in which
    /// [`strip_dots`](Simd::strip_dots) takes them. Returns of how many runs the products, added in pairs, fit 16 bits,
    /// if they are added so, and how much too large the bytes are.
    fn store_unsigned<const MAX: u8, const OFFSET: i16>(self, w: &[Self::Bytes; 8], to: &mut [u8]) -> (usize, i32);

    /// As [`store_unsigned`](Simd::store_unsigned), of signed weights.
    fn store_signed(self, w: &[Self::Signed; 8], to: &mut [u8]) -> (usize, i32);

    /// The dot products of a block of the rows of two vectors, whose runs are at `bytes`, with a block of each token:
    /// of part number `part` of `PARTS`. `FIT` and `offset` are what was returned when they were stored.
    ///
    /// # Safety
    /// They are there.
    #[allow(unsafe_code)]
    unsafe fn strip_dots<const FIT: usize, const PARTS: usize, const N: usize>(
        self,
        bytes: *const u8,
        part: usize,
        offset: i32,
        x: TokenBlocks<N>,
    ) -> [[Self::Floats; N]; 2];

    /// Multiplies a strip with some tokens, with `FIT` as a constant.
    fn strip_task(self, fit: usize, task: SomeTokens) {
        debug_assert!(fit == 0, "a set with several of them has a function of its own");
        task.by_form::<Self, 0>(self);
    }

    /// The same value in all lanes.
    fn splat(self, value: f32) -> Self::Floats;

    /// Products.
    fn mul(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;

    /// Sums.
    #[inline(always)]
    fn add(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        self.mul_add(a, self.splat(1.0), b)
    }

    /// `a · b + c`, rounded once.
    fn mul_add(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;

    /// `c − a · b`, rounded once.
    fn mul_sub(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;

    /// Values in the float format `KIND`, one for each lane, from address `at` on.
    ///
    /// # Safety
    /// They are readable there.
    #[allow(unsafe_code)]
    unsafe fn floats_at<const KIND: u8>(self, at: *const u8) -> Self::Floats;

    /// Stores the lanes.
    fn store(self, floats: Self::Floats, out: &mut [f32]);

    /// Prefetches bytes into the cache; the hardware prefetcher does not cross the end of a row or a page.
    fn prefetch(self, bytes: *const u8, len: usize);
}
