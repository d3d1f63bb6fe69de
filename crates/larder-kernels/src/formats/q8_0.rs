//! `q8_0`: 32 values; an f16 scale, and 32 signed bytes.

use half::f16;
use larder_core::NumberFormat;

use super::{BlockFormat, WeightGroup, half};
use crate::simd::Simd;
use crate::simd::blocks::Blocks;
use crate::simd::groups::{Groups, Signed};

pub struct Q8_0;

impl BlockFormat for Q8_0 {
    const KIND: NumberFormat = NumberFormat::Q8_0;

    fn group(block: &[u8], _: usize) -> WeightGroup {
        WeightGroup::of(std::array::from_fn(|i| block[2 + i] as i8), half(block, 0))
    }

    #[inline(always)]
    fn rows<S: Simd, const INTERLEAVED: bool>(block: Blocks<S, INTERLEAVED>, to: &mut impl Groups<S>) {
        let [a, b, c, d, e, f, g, h] = block.eight_runs(0);
        let s = block.simd;
        let w =
            [s.signed(a), s.signed(b), s.signed(c), s.signed(d), s.signed(e), s.signed(f), s.signed(g), s.signed(h)];
        to.add(0, &Signed(w), [block.half(0)], []);
    }
}

/// Stores a row of values as `q8_0`, the last block filled up with zeros. The scale is rounded to f16 before values are
/// divided by it; a block with a value that is not finite becomes NaN.
///
/// # Panics
/// If `bytes` is not exactly the blocks that hold `values`.
pub fn quantise_row(values: &[f32], bytes: &mut [u8]) {
    let (blocks, rest) = bytes.as_chunks_mut::<34>();
    assert!(
        rest.is_empty() && blocks.len() == values.len().div_ceil(32),
        "stored row does not fit {} values",
        values.len()
    );
    for (values, block) in values.chunks(32).zip(blocks) {
        let amax = values.iter().fold(0.0, |m: f32, v| if v.is_nan() { f32::INFINITY } else { m.max(v.abs()) });
        let d = if amax.is_finite() { f16::from_f32(amax / 127.0).min(f16::MAX) } else { f16::NAN };
        let inverse = if d.to_f32() > 0.0 { 1.0 / d.to_f32() } else { 0.0 };
        block.fill(0);
        block[..2].copy_from_slice(&d.to_le_bytes());
        for (q, v) in block[2..].iter_mut().zip(values) {
            *q = (v * inverse).round_ties_even().clamp(-127.0, 127.0) as i8 as u8;
        }
    }
}

/// Widens the first `out.len()` values of a row in `q8_0`.
pub fn widen_q8_0(row: &[u8], out: &mut [f32]) {
    for (block, out) in row.as_chunks::<34>().0.iter().zip(out.chunks_mut(32)) {
        Q8_0::group(block, 0).widen(out);
    }
}
