//! The dot product of f32 in a fixed order of fused multiply-adds.

/// Independent sums, so that the compiler can use vector registers without changing the order of additions.
pub const LANES: usize = 16;

/// The dot product, summed in [`LANES`] interleaved lanes, then pairwise, then the tail. `a` is in a stored float
/// format that `widen` converts.
///
/// Inlined so that it is compiled for the instruction set of its caller.
#[inline(always)]
pub fn dot_of<T: Copy>(a: &[T], b: &[f32], widen: impl Fn(T) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (a_body, a_tail) = a.as_chunks::<LANES>();
    let (b_body, b_tail) = b.as_chunks::<LANES>();
    for (a, b) in a_body.iter().zip(b_body) {
        for i in 0..LANES {
            lanes[i] = widen(a[i]).mul_add(b[i], lanes[i]);
        }
    }
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
    }
    a_tail.iter().zip(b_tail).fold(lanes[0], |sum, (a, b)| widen(*a).mul_add(*b, sum))
}

/// The dot product of f32.
#[cfg(test)]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    dot_of(a, b, |a| a)
}
