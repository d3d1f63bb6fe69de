//! What the nibbles of `iq4_nl`, `iq4_xs`, `mxfp4` and `nvfp4` stand for, the values in entries of code books, and what
//! the bytes of scales do.

/// The integers that the sixteen nibbles of `iq4_nl` and `iq4_xs` stand for, in ascending order.
pub const IQ4_NL_LEVELS: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// The levels of the magnitudes of `iq2_xxs`, `iq2_xs` and `iq2_s`, in eighths of the scale.
pub const IQ2_LEVELS: [i8; 3] = [8, 25, 43];

/// The levels of the magnitudes of `iq3_xxs`, in quarters of the scale.
pub const IQ3_XXS_LEVELS: [i8; 8] = [4, 12, 20, 28, 36, 44, 52, 62];

/// The levels of the magnitudes of `iq3_s`.
pub const IQ3_S_LEVELS: [i8; 8] = [1, 3, 5, 7, 9, 11, 13, 15];

/// Twice what the sixteen nibbles of `mxfp4` and `nvfp4` stand for, so that they are integers.
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

/// The scale of `nvfp4` that belongs to [`MXFP4_LEVELS`]: half of a float with four bits of exponent (bias 7) and three
/// of mantissa. The sign is ignored, and the standard's NaN, 0x7f, is 0, as they are to ggml.
#[inline]
pub const fn nvfp4_scale(bits: u8) -> f32 {
    let (exponent, mantissa) = (bits as u32 >> 3 & 15, bits as u32 & 7);
    match (bits, exponent) {
        (0x7f, _) => 0.0,
        // Subnormal: mantissa · 2^-9, of which half.
        (_, 0) => mantissa as f32 / 1024.0,
        // The exponents of f32 have a bias of 127; one less is half of the value.
        _ => f32::from_bits((exponent + 119) << 23 | mantissa << 20),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_of_three_bits_are_halved() {
        let known = [(0x00, 0.0), (0x01, 2f32.powi(-10)), (0x07, 7.0 * 2f32.powi(-10)), (0x08, 2f32.powi(-7))];
        for (bits, value) in known.into_iter().chain([(0x38, 0.5), (0x39, 0.5625), (0x7e, 224.0), (0x7f, 0.0)]) {
            assert_eq!(nvfp4_scale(bits), value, "{bits:#x}");
        }
        assert_eq!([0x80, 0xb8, 0xff].map(nvfp4_scale), [0.0, 0.5, 240.0]);
    }

    #[test]
    fn scales_are_powers_of_two() {
        for exponent in 0..=u8::MAX {
            assert_eq!(f64::from(mxfp4_scale(exponent)), 2f64.powi(i32::from(exponent) - 128));
        }
    }
}
