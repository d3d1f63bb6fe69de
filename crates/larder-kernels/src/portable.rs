//! The definition of every product, in portable Rust. All other instruction sets give the same bits: multiplications and
//! additions of f32 are the ones written here, in this order, and never fused; sums of integers are exact.
//!
//! For quantised weights, the result of a row is one f32 to which the blocks of 32 values are added in order. `d` is the
//! scale of the weights and `q` their integers; `e` is the scale of the activations, `x` their integers, and `s = Σ x`:
//!
//! | format | added for a block of 32 |
//! |---|---|
//! | `q4_0`, `q8_0` | `Σ q·x · (d · e)` |
//! | `q4_k`, `q5_k` | `(scale · Σ q·x) · (d · e) − (dmin · min) · (e · s)` |
//! | `q6_k` | `(scale₀ · Σ₀ q·x + scale₁ · Σ₁ q·x) · (d · e)`, the sums over the block's halves |
//!
//! For floats it is [`dot`](crate::dot::dot) of the widened row.

use half::bf16;
use larder_core::NumberFormat;

use crate::block::{BLOCK, Block};
use crate::dot::dot_of;
use crate::formats::{half, q4_0_quants, q4_k_quants, q5_k_quants, q6_k_quants, scale_min, widen_q8_0};
use crate::kernel_set::{KernelSet, StridedRows, Sums};
use crate::weights::Panel;

/// The portable kernels.
pub fn set() -> Option<KernelSet> {
    Some(KernelSet { name: "portable", blocks, floats, weighted_sum, widen_q8_0, quantise })
}

fn blocks(panels: &[Panel], x: &[&[Block]], out: &mut [Sums]) {
    for (panel, out) in panels.iter().zip(out.chunks_mut(x.len())) {
        blocks_of(panel, x, out);
    }
}

fn blocks_of(panel: &Panel, x: &[&[Block]], out: &mut [Sums]) {
    out.fill(Sums::default());
    let add: fn(&[u8], &[Block], f32) -> f32 = match panel.kind {
        NumberFormat::Q8_0 => q8_0,
        NumberFormat::Q4_0 => q4_0,
        NumberFormat::Q4K => q4_k,
        NumberFormat::Q5K => q5_k,
        NumberFormat::Q6K => q6_k,
        NumberFormat::F32 | NumberFormat::F16 | NumberFormat::Bf16 => {
            unreachable!("float formats have kernels of their own")
        }
    };
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

/// `out[j] += factors[i] · rows[i][j]`, for one row after the other.
pub fn weighted_sum(rows: StridedRows, factors: &[f32], out: &mut [f32]) {
    for (row, factor) in rows.bytes.chunks(rows.row_bytes).zip(factors) {
        match rows.kind {
            NumberFormat::F32 => add_row(row, *factor, out, f32::from_le_bytes),
            NumberFormat::F16 => add_row(row, *factor, out, half),
            _ => add_row(row, *factor, out, |b| bf16::from_le_bytes(b).to_f32()),
        }
    }
}

fn add_row<const B: usize>(row: &[u8], factor: f32, out: &mut [f32], widen: impl Fn([u8; B]) -> f32) {
    out.iter_mut().zip(row.as_chunks::<B>().0).for_each(|(o, v)| *o += factor * widen(*v));
}

fn q8_0(block: &[u8], x: &[Block], sum: f32) -> f32 {
    let q: [i8; 32] = std::array::from_fn(|i| block[2 + i] as i8);
    sum + integer_dot(&q, &x[0].q) as f32 * (half([block[0], block[1]]) * x[0].d)
}

fn q4_0(block: &[u8], x: &[Block], sum: f32) -> f32 {
    let q = q4_0_quants(block.as_array().expect("a block of q4_0"));
    sum + integer_dot(&q, &x[0].q) as f32 * (half([block[0], block[1]]) * x[0].d)
}

fn q4_k(block: &[u8], x: &[Block], sum: f32) -> f32 {
    with_minima(block, &q4_k_quants(block.as_array().expect("a block of q4_k")), x, sum)
}

fn q5_k(block: &[u8], x: &[Block], sum: f32) -> f32 {
    with_minima(block, &q5_k_quants(block.as_array().expect("a block of q5_k")), x, sum)
}

fn with_minima(block: &[u8], quants: &[i8; 256], x: &[Block], mut sum: f32) -> f32 {
    let (d, dmin) = (half([block[0], block[1]]), half([block[2], block[3]]));
    for (g, (q, x)) in quants.as_chunks::<32>().0.iter().zip(x).enumerate() {
        let (scale, min) = scale_min(&block[4..16], g);
        let dot = scale as i32 * integer_dot(q, &x.q);
        sum += dot as f32 * (d * x.d) - (dmin * min as f32) * x.d_sum;
    }
    sum
}

fn q6_k(block: &[u8], x: &[Block], mut sum: f32) -> f32 {
    let d = half([block[208], block[209]]);
    let quants = q6_k_quants(block.as_array().expect("a block of q6_k"));
    let scales = block[192..208].as_chunks::<2>().0;
    for ((q, scales), x) in quants.as_chunks::<32>().0.iter().zip(scales).zip(x) {
        let [first, second] = scales.map(|s| s as i8 as i32);
        let dot = first * integer_dot(&q[..16], &x.q[..16]) + second * integer_dot(&q[16..], &x.q[16..]);
        sum += dot as f32 * (d * x.d);
    }
    sum
}

#[inline]
fn integer_dot(a: &[i8], b: &[i8]) -> i32 {
    a.iter().zip(b).map(|(a, b)| *a as i32 * *b as i32).sum()
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
                NumberFormat::F16 => dot_of(bytes.as_chunks::<2>().0, x, half),
                NumberFormat::Bf16 => dot_of(bytes.as_chunks::<2>().0, x, |b| bf16::from_le_bytes(b).to_f32()),
                NumberFormat::Q8_0 | NumberFormat::Q4_0 | NumberFormat::Q4K | NumberFormat::Q5K | NumberFormat::Q6K => {
                    unreachable!("block formats have kernels of their own")
                }
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
