//! The definition of every product, in portable Rust. All other instruction sets give the same bits: multiplications
//! and additions of f32 are the ones written here, in this order, and never fused; sums of integers are exact.
//!
//! For quantised weights, the result of a row is one f32 to which the blocks of 32 values are added in order. `d` is
//! the scale of the weights and `q` their integers; `e` is the scale of the activations, `x` their integers, and `s = Σ
//! x`. Sums with an index are over the first or the second half of the block:
//!
//! | format | added for a block of 32 |
//! |---|---|
//! | `q4_0`, `q5_0`, `q8_0`, `iq4_nl`, `mxfp4`, `q2_0`, `tq2_0`, `q1_0`, `tq1_0` | `Σ q·x · (d · e)` |
//! | `q4_1`, `q5_1` | `Σ q·x · (d · e) + min · (e · s)` |
//! | `q4_k`, `q5_k` | `(scale · Σ q·x) · (d · e) − (dmin · min) · (e · s)` |
//! | `iq4_xs`, `iq3_s` | `(scale · Σ q·x) · (d · e)` |
//! | `iq3_xxs` | `(scale · Σ q·x) · (d/4 · e)` |
//! | `iq2_xxs`, `iq1_s` | `(scale · Σ q·x) · (d/8 · e)` |
//! | `q3_k`, `q6_k` | `(scale₀ · Σ₀ q·x + scale₁ · Σ₁ q·x) · (d · e)` |
//! | `iq2_xs`, `iq2_s`, `iq1_m` | `(scale₀ · Σ₀ q·x + scale₁ · Σ₁ q·x) · (d/8 · e)` |
//! | `nvfp4` | `(d₀ · Σ₀ q·x + d₁ · Σ₁ q·x) · e` |
//! | `q2_k` | `(scale₀ · Σ₀ q·x + scale₁ · Σ₁ q·x) · (d · e) − (min₀ · s₀ + min₁ · s₁) · (dmin · e)` |
//!
//! The expressions in brackets of integers are integers, exact and below 2^24, so that their conversion to f32 is exact
//! as well. The scales of `nvfp4` have four digits of base 2, so that `d₀ · Σ₀ q·x` is exact too.
//!
//! For floats it is [`dot`](crate::dot::dot) of the widened row.

use half::{bf16, f16};
use larder_core::NumberFormat;

use crate::block::{BLOCK, Block};
use crate::dot::dot_of;
use crate::formats::definition;
use crate::formats::q8_0::widen_q8_0;
use crate::kernel_set::{KernelSet, StridedRows, Sums};
use crate::weights::Panel;

/// The portable kernels.
pub fn set() -> Option<KernelSet> {
    Some(KernelSet { name: "portable", blocks, floats, weighted_sums, widen_q8_0, quantise })
}

/// Products with quantised weights of any format.
pub fn blocks(panels: &[Panel], x: &[&[Block]], out: &mut [Sums]) {
    for (panel, out) in panels.iter().zip(out.chunks_mut(x.len())) {
        blocks_of(panel, x, out);
    }
}

fn blocks_of(panel: &Panel, x: &[&[Block]], out: &mut [Sums]) {
    out.fill(Sums::default());
    let add = definition(panel.kind).add;
    let each = panel.kind.block_len() / BLOCK;
    for row in 0..panel.rows {
        for i in 0..panel.blocks {
            panel.with_block(row, i, |block| {
                for (x, out) in x.iter().zip(&mut *out) {
                    out[row] = add(block, &x[i * each..][..each], out[row]);
                }
            });
        }
    }
}

/// `out[n][j] += factors[n][i] · rows[i][j]`, for one row after the other.
pub fn weighted_sums(rows: StridedRows, factors: &[&[f32]], out: &mut [&mut [f32]]) {
    for (factors, out) in factors.iter().zip(out) {
        for (row, factor) in rows.bytes.chunks(rows.row_bytes).zip(*factors) {
            match rows.kind {
                NumberFormat::F32 => add_row(row, *factor, out, f32::from_le_bytes),
                NumberFormat::F16 => add_row(row, *factor, out, |b| f16::from_le_bytes(b).to_f32()),
                _ => add_row(row, *factor, out, |b| bf16::from_le_bytes(b).to_f32()),
            }
        }
    }
}

fn add_row<const B: usize>(row: &[u8], factor: f32, out: &mut [f32], widen: impl Fn([u8; B]) -> f32) {
    out.iter_mut().zip(row.as_chunks::<B>().0).for_each(|(o, v)| *o += factor * widen(*v));
}

fn floats(panels: &[Panel], x: &[&[f32]], out: &mut [Sums]) {
    for (panel, out) in panels.iter().zip(out.chunks_mut(x.len())) {
        floats_of(panel, x, out);
    }
}

fn floats_of(panel: &Panel, x: &[&[f32]], out: &mut [Sums]) {
    for row in 0..panel.rows {
        let bytes = panel.row(row);
        for (x, out) in x.iter().zip(&mut *out) {
            out[row] = match panel.kind {
                NumberFormat::F32 => dot_of(bytes.as_chunks::<4>().0, x, f32::from_le_bytes),
                NumberFormat::F16 => dot_of(bytes.as_chunks::<2>().0, x, |b| f16::from_le_bytes(b).to_f32()),
                NumberFormat::Bf16 => dot_of(bytes.as_chunks::<2>().0, x, |b| bf16::from_le_bytes(b).to_f32()),
                _ => unreachable!("block formats have kernels of their own"),
            };
        }
    }
}

fn quantise(x: &[f32], out: &mut [Block]) {
    for (x, out) in x.as_chunks::<BLOCK>().0.iter().zip(out) {
        let amax_bits = x.iter().map(|v| v.abs().to_bits()).fold(0, u32::max);
        let (d, inverse) = Block::factors(amax_bits);
        // NaN becomes the integer 0.
        *out = Block::new(x.map(|v| (v * inverse).round_ties_even() as i8), d);
    }
}
