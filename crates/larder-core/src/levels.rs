//! What the nibbles of `iq4_nl`, `iq4_xs` and `mxfp4` stand for.

/// The integers that the sixteen nibbles of `iq4_nl` and `iq4_xs` stand for, in ascending order.
pub const IQ4_NL_LEVELS: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Twice what the sixteen nibbles of `mxfp4` stand for, so that they are integers.
pub const MXFP4_LEVELS: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// The scale that belongs to [`MXFP4_LEVELS`]: 2^(exponent − 128); the two smallest are subnormal. The standard's NaN,
/// 255, is 2^127, as it is to ggml.
#[inline]
pub const fn mxfp4_scale(exponent: u8) -> f32 {
    f32::from_bits(match exponent {
        0 | 1 => 0x0020_0000 << exponent,
        _ => (exponent as u32 - 1) << 23,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_are_powers_of_two() {
        for exponent in 0..=u8::MAX {
            assert_eq!(f64::from(mxfp4_scale(exponent)), 2f64.powi(i32::from(exponent) - 128));
        }
    }
}
