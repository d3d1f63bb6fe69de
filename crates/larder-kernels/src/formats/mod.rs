//! Number formats: what the bytes of a block stand for.
//!
//! A block format is one file of this folder and one row of [`TABLE`]. All formats are groups of 32 integers with one
//! or two scales, and some with minima: [`BlockFormat::group`] says so in portable Rust, and [`BlockFormat::rows`]
//! finds the same in the blocks of several rows at a time.

/// Calls a format's function for each of the eight groups of 32 values of a block of 256. The number of the group is a
/// constant in each call, as the shifts of instruction sets need it.
macro_rules! add_each_group {
    ($add:ident($block:expr, $head:expr, $to:expr)) => {
        add_each_group!($add, $block, $head, $to, 0 1 2 3 4 5 6 7)
    };
    ($add:ident, $block:expr, $head:expr, $to:expr, $($group:literal)*) => {
        $($add($block, $head, $group, $to);)*
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

use crate::block::{BLOCK, Block};
use crate::simd::Simd;
use crate::simd::blocks::Blocks;
use crate::simd::groups::Groups;

/// 32 weights: the integers `q`, times the scale of their half, minus its minimum.
pub struct WeightGroup {
    q: [i8; BLOCK],
    scales: [f32; 2],
    minima: [f32; 2],
    /// Whether the halves have scales, and minima, of their own.
    in_halves: bool,
}

impl WeightGroup {
    /// With one scale.
    fn of(q: [i8; BLOCK], scale: f32) -> Self {
        WeightGroup { q, scales: [scale; 2], minima: [0.0; 2], in_halves: false }
    }

    /// With a scale for each half.
    fn in_halves(q: [i8; BLOCK], scales: [f32; 2]) -> Self {
        WeightGroup { q, scales, minima: [0.0; 2], in_halves: true }
    }

    /// With a minimum.
    fn above(self, minimum: f32) -> Self {
        WeightGroup { minima: [minimum; 2], ..self }
    }

    /// With a minimum for each half.
    fn above_each(self, minima: [f32; 2]) -> Self {
        WeightGroup { minima, ..self }
    }

    /// The values as f32.
    fn widen(&self, out: &mut [f32]) {
        for (i, (o, q)) in out.iter_mut().zip(self.q).enumerate() {
            *o = self.scales[i / 16] * f32::from(q) - self.minima[i / 16];
        }
    }

    /// Adds the product with a block of activations to a row's sum, as [`portable`](crate::portable) says.
    pub fn add(&self, x: &Block, sum: f32) -> f32 {
        let ([first, last], [below, below_last]) = (self.scales, self.minima);
        let dots = [0..16, 16..32].map(|half| integer_dot(&self.q[half.clone()], &x.q[half]));
        let term = if self.in_halves {
            let term = last.mul_add(dots[1] as f32, first * dots[0] as f32);
            (-below_last).mul_add(x.halves[1], (-below).mul_add(x.halves[0], term))
        } else {
            (-below).mul_add(x.sum, first * (dots[0] + dots[1]) as f32)
        };
        term.mul_add(x.d, sum)
    }
}

/// A block format.
pub trait BlockFormat {
    /// The format.
    const KIND: NumberFormat;

    /// WeightGroup `g` of a block, whose length is that of the format.
    fn group(block: &[u8], g: usize) -> WeightGroup;

    /// The groups of the same block of several rows, first to last, to the bit what [`group`](BlockFormat::group) says
    /// of each. Must be `#[inline(always)]`, and so must what it calls.
    fn rows<S: Simd, const INTERLEAVED: bool>(block: Blocks<S, INTERLEAVED>, to: &mut impl Groups<S>);
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

/// The portable functions of a [`BlockFormat`].
pub struct Definition {
    kind: NumberFormat,
    /// [`BlockFormat::group`].
    pub group: fn(&[u8], usize) -> WeightGroup,
    /// Widens whole blocks.
    widen: fn(&[u8], &mut [f32]),
}

impl Definition {
    const fn of<F: BlockFormat>() -> Self {
        Definition { kind: F::KIND, group: F::group, widen: widen_blocks::<F> }
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
    for (block, out) in bytes.zip(out.chunks_exact_mut(values)) {
        out.chunks_exact_mut(BLOCK).enumerate().for_each(|(g, out)| F::group(block, g).widen(out));
    }
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

/// The integers of group `g` of 64 bytes, 0 to 3. Each half of 128 values has 32 bytes, with a group per bit pair.
#[inline]
fn bit_pairs(bytes: &[u8], g: usize) -> [i8; BLOCK] {
    std::array::from_fn(|i| (bytes[g / 4 * 32 + i] >> (2 * (g % 4)) & 3) as i8)
}

#[inline]
fn integer_dot(a: &[i8], b: &[i8]) -> i32 {
    a.iter().zip(b).map(|(a, b)| *a as i32 * *b as i32).sum()
}

/// As [`bit_pairs`], of the runs of several rows from number `first` on.
#[inline(always)]
fn pairs_of_rows<S: Simd, const INTERLEAVED: bool>(
    block: Blocks<S, INTERLEAVED>,
    first: usize,
    g: usize,
) -> [S::Bytes; 8] {
    let mut w = block.eight_runs(first + 8 * (g / 4));
    for w in &mut w {
        *w = block.simd.bits(*w, -2 * (g as i32 % 4), 0x0303_0303);
    }
    w
}

/// `d` times the bytes at the indices `at` and `at + 1` of each lane.
#[inline(always)]
fn two_bytes<S: Simd>(simd: S, d: S::Floats, bytes: S::Bytes, at: usize) -> [S::Floats; 2] {
    [simd.mul(d, simd.byte(bytes, at)), simd.mul(d, simd.byte(bytes, at + 1))]
}

/// As [`two_bytes`], of signed bytes.
#[inline(always)]
fn two_signed<S: Simd>(simd: S, d: S::Floats, bytes: S::Bytes, at: usize) -> [S::Floats; 2] {
    [simd.mul(d, simd.signed_byte(bytes, at)), simd.mul(d, simd.signed_byte(bytes, at + 1))]
}

#[cfg(test)]
mod tests;
