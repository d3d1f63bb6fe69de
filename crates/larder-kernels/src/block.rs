//! A block of quantised activations, which the kernels of all instruction sets take.

/// Activations that share a scale.
pub const BLOCK: usize = 32;

/// 32 activations as integers: `value ≈ d · q`.
///
/// With `amax` the largest magnitude, `d = amax / 127` and `q = round(value · (127 / amax))`, ties to even. A block
/// whose `127 / amax` is not finite counts as all zeros. If a value is not finite, then `d` is NaN, and so is every
/// product with the block.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
#[repr(C, align(16))]
pub struct Block {
    /// −127 to 127.
    pub q: [i8; BLOCK],
    /// The scale.
    pub d: f32,
    /// `d · Σ q`
    pub d_sum: f32,
    /// `8 · Σ q`
    pub sum8: i32,
    /// `Σ q` of the first and the second half.
    pub halves: [i16; 2],
}

impl Block {
    /// A block of zeros.
    pub const ZERO: Block = Block { q: [0; BLOCK], d: 0.0, d_sum: 0.0, sum8: 0, halves: [0; 2] };

    /// A block of these integers, with their sums.
    #[inline]
    pub fn new(q: [i8; BLOCK], d: f32) -> Block {
        let half = |q: &[i8]| q.iter().map(|q| *q as i16).sum::<i16>();
        let halves = [half(&q[..16]), half(&q[16..])];
        let sum = halves[0] as i32 + halves[1] as i32;
        Block { q, d, d_sum: d * sum as f32, sum8: 8 * sum, halves }
    }

    /// The scale `d` of a block, and the factor that turns its values into integers, from the bits of its largest
    /// magnitude.
    #[inline]
    pub fn factors(amax_bits: u32) -> (f32, f32) {
        let amax = f32::from_bits(amax_bits);
        let (d, inverse) = (amax / 127.0, 127.0 / amax);
        match (amax.is_finite(), inverse.is_finite()) {
            (true, true) => (d, inverse),
            (true, false) => (0.0, 0.0),
            (false, _) => (f32::NAN, 0.0),
        }
    }
}
