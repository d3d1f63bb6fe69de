//! Number formats: dequantised (widened) to f32, and the product of a block with activations in portable Rust.
//!
//! A block format is one file of this folder and one row of [`TABLE`]. Everything here is a definition: `widen` is what
//! the exact product is measured against, and the products in SIMD ([`BlockFormat::add_rows`]) give the bits of
//! [`BlockFormat::add`].

/// Calls a format's function for each of the eight groups of 32 values of a block of 256. The number of the group is a
/// constant in each call, as the shifts of instruction sets need it.
macro_rules! add_each_group {
    ($add:ident($block:expr, $head:expr, $tile:expr)) => {
        add_each_group!($add, $block, $head, $tile, 0 1 2 3 4 5 6 7)
    };
    ($add:ident, $block:expr, $head:expr, $tile:expr, $($group:literal)*) => {
        $($add($block, $head, $group, $tile);)*
    };
}

mod grid;

pub mod iq1_m;
pub mod iq1_s;
pub mod iq2_s;
pub mod iq2_xs;
pub mod iq2_xxs;
pub mod iq3_s;
pub mod iq3_xxs;
pub mod iq4_nl;
pub mod iq4_xs;
pub mod mxfp4;
pub mod nvfp4;
pub mod q1_0;
pub mod q2_0;
pub mod q2_k;
pub mod q3_k;
pub mod q4_0;
pub mod q4_1;
pub mod q4_k;
pub mod q5_0;
pub mod q5_1;
pub mod q5_k;
pub mod q6_k;
pub mod q8_0;
pub mod tq1_0;
pub mod tq2_0;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use larder_core::NumberFormat;

use crate::block::Block;
use crate::simd::Simd;
use crate::simd::blocks::Blocks;
use crate::simd::tile::Tile;

/// A block format in portable Rust.
pub trait BlockFormat {
    /// The format.
    const KIND: NumberFormat;

    /// Widens one block. The lengths are those of the format.
    fn widen(block: &[u8], out: &mut [f32]);

    /// Adds the product of a block with its blocks of activations to a row's sum, as the table in
    /// [`portable`](crate::portable) says. The lengths are those of the format.
    fn add(block: &[u8], x: &[Block], sum: f32) -> f32;

    /// As [`add`](BlockFormat::add), for the same block of several rows, and with several tokens: to the bit what `add`
    /// computes for each row and token. Must be `#[inline(always)]`, and so must what it calls.
    fn add_rows<S: Simd, const INTERLEAVED: bool, const N: usize, const G: usize>(
        block: Blocks<S, INTERLEAVED>,
        tile: &mut Tile<S, N, G>,
    );
}

/// One row for each block format.
macro_rules! table {
    ($($format:path,)*) => {
        const TABLE: &[Definition] = &[$(Definition::of::<$format>()),*];

        /// Runs a task with a block format, by its name.
        pub fn with_format(kind: NumberFormat, task: impl FormatTask) {
            match kind {
                $(<$format>::KIND => task.run::<$format>(),)*
                _ => unreachable!("every block format has a row, and floats have kernels of their own"),
            }
        }
    };
}

table! {
    q8_0::Q8_0,
    q4_0::Q4_0,
    q4_1::Q4_1,
    q5_0::Q5_0,
    q5_1::Q5_1,
    iq4_nl::Iq4Nl,
    mxfp4::Mxfp4,
    q2_k::Q2K,
    q3_k::Q3K,
    q4_k::Q4K,
    q5_k::Q5K,
    q6_k::Q6K,
    iq4_xs::Iq4Xs,
    nvfp4::Nvfp4,
    iq3_xxs::Iq3Xxs,
    iq3_s::Iq3S,
    iq2_xxs::Iq2Xxs,
    iq2_xs::Iq2Xs,
    iq2_s::Iq2S,
    q2_0::Q2_0,
    tq2_0::Tq2_0,
    q1_0::Q1_0,
    iq1_s::Iq1S,
    iq1_m::Iq1M,
    tq1_0::Tq1_0,
}

/// What [`with_format`] runs.
pub trait FormatTask {
    /// With the format's type.
    fn run<F: BlockFormat>(self);
}

/// The functions of a [`BlockFormat`].
pub struct Definition {
    kind: NumberFormat,
    /// Widens whole blocks.
    widen: fn(&[u8], &mut [f32]),
    /// [`BlockFormat::add`].
    pub add: fn(&[u8], &[Block], f32) -> f32,
}

impl Definition {
    const fn of<F: BlockFormat>() -> Self {
        Definition { kind: F::KIND, widen: widen_blocks::<F>, add: F::add }
    }
}

/// The row of a block format.
pub fn definition(kind: NumberFormat) -> &'static Definition {
    TABLE
        .iter()
        .find(|row| row.kind == kind)
        .expect("every block format has a row, and floats have kernels of their own")
}

fn widen_blocks<F: BlockFormat>(bytes: &[u8], out: &mut [f32]) {
    let (bytes, values) = (bytes.chunks_exact(F::KIND.block_bytes()), F::KIND.block_len());
    bytes.zip(out.chunks_exact_mut(values)).for_each(|(block, out)| F::widen(block, out));
}

/// Widens stored values to f32; block formats are dequantised.
///
/// # Panics
/// If `bytes` is not exactly `out.len()` values of `kind`.
pub fn widen(kind: NumberFormat, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(kind.row_bytes(out.len()), Some(bytes.len()), "stored row does not fit {} values", out.len());
    match kind {
        NumberFormat::F32 => load(bytes, out, f32::from_le_bytes),
        NumberFormat::F16 => load_f16(bytes, out),
        NumberFormat::Bf16 => load(bytes, out, |b| bf16::from_le_bytes(b).to_f32()),
        _ => (definition(kind).widen)(bytes, out),
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
        NumberFormat::F16 => store_f16(values, bytes),
        NumberFormat::Bf16 => store(values, bytes, |v| bf16::from_f32(v).to_le_bytes()),
        _ => panic!("{kind} is a block format, not a float format"),
    }
}

fn load<const B: usize>(bytes: &[u8], out: &mut [f32], one: impl Fn([u8; B]) -> f32) {
    out.iter_mut().zip(bytes.as_chunks::<B>().0).for_each(|(o, b)| *o = one(*b));
}

fn store<const B: usize>(values: &[f32], bytes: &mut [u8], one: impl Fn(f32) -> [u8; B]) {
    values.iter().zip(bytes.as_chunks_mut::<B>().0).for_each(|(v, b)| *b = one(*v));
}

/// Values of f16 that are converted together, which processors do much faster than one by one.
const SOME: usize = 32;

fn load_f16(bytes: &[u8], out: &mut [f32]) {
    for (out, bytes) in out.chunks_mut(SOME).zip(bytes.chunks(2 * SOME)) {
        let mut halves = [f16::ZERO; SOME];
        halves.iter_mut().zip(bytes.as_chunks().0).for_each(|(half, bytes)| *half = f16::from_le_bytes(*bytes));
        halves[..out.len()].convert_to_f32_slice(out);
    }
}

fn store_f16(values: &[f32], bytes: &mut [u8]) {
    for (values, bytes) in values.chunks(SOME).zip(bytes.chunks_mut(2 * SOME)) {
        let mut halves = [f16::ZERO; SOME];
        halves[..values.len()].convert_from_f32_slice(values);
        bytes.as_chunks_mut().0.iter_mut().zip(halves).for_each(|(bytes, half)| *bytes = half.to_le_bytes());
    }
}

/// The f16 at an offset of a block, as f32.
#[inline]
pub fn half(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// A block, whose length the caller has checked.
#[inline]
fn sized<const BYTES: usize>(block: &[u8]) -> &[u8; BYTES] {
    block.as_array().expect("a block is as long as its format says")
}

/// The integers of 16 bytes: the low nibbles first, then the high ones.
#[inline]
fn nibbles(bytes: &[u8]) -> [u8; 32] {
    std::array::from_fn(|i| bytes[i % 16] >> (i / 16 * 4) & 15)
}

/// The integers of 64 bytes, 0 to 3. Each half of 128 values has 32 bytes, with a group of 32 per bit pair.
#[inline]
fn bit_pairs(bytes: &[u8]) -> [i8; 256] {
    std::array::from_fn(|i| (bytes[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3) as i8)
}

#[inline]
fn integer_dot(a: &[i8], b: &[i8]) -> i32 {
    a.iter().zip(b).map(|(a, b)| *a as i32 * *b as i32).sum()
}

/// The dot products of the first and the last 16 values, each times its scale.
#[inline]
fn half_dots(q: &[i8; 32], x: &[i8; 32], [first, second]: [i32; 2]) -> i32 {
    first * integer_dot(&q[..16], &x[..16]) + second * integer_dot(&q[16..], &x[16..])
}

#[cfg(test)]
mod tests;
