//! The definition of every product, in portable Rust, number [`DEFINITION`](larder_core::DEFINITION). All other
//! instruction sets give the same bits: every operation on f32 is the one written here, in this order, fused where it
//! is written fused, `fma(a, b, c)` = `a · b + c` rounded once; sums of integers are exact.
//!
//! For quantised weights, the result of a row is one f32 to which the blocks of 32 values are added in order. `q` are
//! the integers of the weights, `d` their scale and `m` their minimum; `x` are the integers of the activations, `e` is
//! their scale, and `s = Σ x`. What has an index is of the first or the second half of the block:
//!
//! | weights | term |
//! |---|---|
//! | with one scale | `t = d · Σ q·x` |
//! | with a scale for each half | `t = fma(d₁, Σ₁ q·x, d₀ · Σ₀ q·x)` |
//! | and with a minimum | `fma(−m, s, t)` |
//! | and with a minimum for each half | `fma(−m₁, s₁, fma(−m₀, s₀, t))` |
//!
//! and `fma(term, e, sum)` is the new sum. Sums of integers are below 2^24, so that their conversion to f32 is exact.
//! So are scales and minima, which are those of a format's file (`formats/`): a float of few digits times an integer of
//! few digits.
//!
//! For floats it is [`dot_of`](crate::dot::dot_of) of the widened row.

use half::{bf16, f16};
use larder_core::NumberFormat;

use crate::block::{BLOCK, Block};
use crate::dot::dot_of;
use crate::formats::definition;
use crate::formats::q8_0::widen_q8_0;
use crate::kernel_set::{
    DELTA_COLUMNS, DeltaKernels, DeltaRow, DeltaStep, KernelSet, StridedRows, Sums, UnavailableSet, Vectors,
};
use crate::weights::Panel;

/// The portable kernels.
pub fn set() -> Result<KernelSet, UnavailableSet> {
    let delta = DeltaKernels { read: delta_read, step: delta_step };
    Ok(KernelSet {
        name: "portable",
        blocks,
        strips: None,
        floats,
        weighted_sums,
        delta,
        widen_q8_0,
        quantise,
        vectors: Vectors::Common,
    })
}

/// Products with quantised weights of any format.
pub fn blocks(panels: &[Panel], x: &[&[Block]], out: &mut [Sums]) {
    for (panel, out) in panels.iter().zip(out.chunks_mut(x.len())) {
        blocks_of(panel, x, out);
    }
}

fn blocks_of(panel: &Panel, x: &[&[Block]], out: &mut [Sums]) {
    out.fill(Sums::default());
    let group_of = definition(panel.kind).group;
    let each = panel.kind.block_len() / BLOCK;
    for (row, i) in (0..panel.rows).flat_map(|row| (0..panel.blocks).map(move |i| (row, i))) {
        panel.with_block(row, i, |block| {
            for g in 0..each {
                let group = group_of(block, g);
                for (x, out) in x.iter().zip(&mut *out) {
                    out[row] = group.add(&x[i * each + g], out[row]);
                }
            }
        });
    }
}

/// `out[n][j] = fma(factors[n][i], rows[i][j], out[n][j])`, for one row after the other. Instruction sets compile it
/// for columns that do not fill a register: without an instruction, each `fma` is a call.
#[inline(always)]
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

#[inline(always)]
fn add_row<const B: usize>(row: &[u8], factor: f32, out: &mut [f32], widen: impl Fn([u8; B]) -> f32) {
    out.iter_mut().zip(row.as_chunks::<B>().0).for_each(|(o, v)| *o = factor.mul_add(widen(*v), *o));
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

/// `known[j] = known[j] + factors[i] · state[i][j]`, for one row after the other.
fn delta_read(state: &[DeltaRow], factors: &[f32]) -> DeltaRow {
    let mut known = [0.0; DELTA_COLUMNS];
    for (row, factor) in state.iter().zip(factors) {
        known.iter_mut().zip(row).for_each(|(known, state)| *known += factor * state);
    }
    known
}

/// `state[i][j] = decays[i] · state[i][j] + key[i] · correction[j]`, and what this token and the next one read of it.
fn delta_step(state: &mut [DeltaRow], step: DeltaStep) -> [DeltaRow; 2] {
    step.check(state.len());
    for ((row, decay), key) in state.iter_mut().zip(step.decays).zip(step.key) {
        for (state, correction) in row.iter_mut().zip(step.correction) {
            *state = decay * *state + key * correction;
        }
    }
    [step.query, step.next].map(|factors| delta_read(state, factors))
}

fn quantise(x: &[f32], out: &mut [Block]) {
    for (x, out) in x.as_chunks::<BLOCK>().0.iter().zip(out) {
        let amax_bits = x.iter().map(|v| v.abs().to_bits()).fold(0, u32::max);
        let (d, inverse) = Block::factors(amax_bits);
        // NaN becomes the integer 0.
        *out = Block::new(x.map(|v| (v * inverse).round_ties_even() as i8), d);
    }
}
