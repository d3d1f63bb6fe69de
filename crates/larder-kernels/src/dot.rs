use larder_core::Kind;

use crate::widen;

/// Independent sums, so that the compiler can use vector registers without changing the order of additions.
const LANES: usize = 16;

/// The dot product, summed in [`LANES`] interleaved lanes, then pairwise, then the tail.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (a_body, a_tail) = a.as_chunks::<LANES>();
    let (b_body, b_tail) = b.as_chunks::<LANES>();
    for (a, b) in a_body.iter().zip(b_body) {
        for i in 0..LANES {
            lanes[i] += a[i] * b[i];
        }
    }
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
    }
    a_tail.iter().zip(b_tail).fold(lanes[0], |sum, (a, b)| sum + a * b)
}

/// A stored row as f32: borrowed where it already is, widened into `buffer` otherwise.
pub fn as_f32<'a>(kind: Kind, row: &'a [u8], buffer: &'a mut [f32]) -> &'a [f32] {
    if kind == Kind::F32
        && cfg!(target_endian = "little")
        && let Ok(values) = bytemuck::try_cast_slice(row)
    {
        return values;
    }
    widen(kind, row, buffer);
    buffer
}
