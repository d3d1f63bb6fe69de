//! A block of quantised activations, which the kernels of all instruction sets take.

/// Activations that share a scale.
pub const BLOCK: usize = 32;

/// 32 activations as integers: `value ≈ d · q`.
///
/// With `amax` the largest magnitude, `d = amax / 127` and `q = round(value · (127 / amax))`, ties to even. A block
/// whose `127 / amax` is not finite counts as all zeros. If a value is not finite, then `d` is NaN, and so is every
/// product with the block.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
#[repr(C, align(64))]
pub struct Block {
    /// −127 to 127.
    pub q: [i8; BLOCK],
    /// The scale.
    pub d: f32,
    /// `Σ q`, which is exact.
    pub sum: f32,
    /// `Σ q` of the first and the second half.
    pub halves: [f32; 2],
    /// `−128 · Σ q`: what the product with weights that are raised by 128 begins with.
    pub raised: i32,
    /// The same of the first and the second half.
    pub raised_halves: [i32; 2],
    /// Fills up a line of the cache.
    pub zero: u32,
}

impl Block {
    /// A block of zeros.
    pub const ZERO: Block =
        Block { q: [0; BLOCK], d: 0.0, sum: 0.0, halves: [0.0; 2], raised: 0, raised_halves: [0; 2], zero: 0 };

    /// A block of these integers, with their sums.
    #[inline]
    pub fn new(q: [i8; BLOCK], d: f32) -> Block {
        let half = |q: &[i8]| q.iter().map(|q| *q as i32).sum::<i32>();
        Block::with_sums(q, d, [half(&q[..16]), half(&q[16..])])
    }

    /// A block of these integers, whose halves have these sums.
    #[inline]
    pub fn with_sums(q: [i8; BLOCK], d: f32, [first, last]: [i32; 2]) -> Block {
        let sum = first + last;
        let (halves, raised_halves) = ([first as f32, last as f32], [-128 * first, -128 * last]);
        Block { q, d, sum: sum as f32, halves, raised: -128 * sum, raised_halves, zero: 0 }
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
