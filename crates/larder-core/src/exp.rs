//! The exponential function, for softmax and sigmoid, with the same bits on every machine and on a GPU.

/// e^x to within a few units in the last place, in operations that the compiler can vectorise.
///
/// Clamped to the values at −87 and 88, which are close to the smallest and the largest normal f32.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 · 2^23: adding it leaves the nearest integer in the low bits
    let x = if x < -87.0 { -87.0 } else { x };
    let x = if x > 88.0 { 88.0 } else { x };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * 0.693_359_4 - n * -2.121_944_4e-4; // ln 2 in two parts, the first of few bits
    let mut p = 1.0 / 5040.0;
    for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = p * r + c;
    }
    let power = shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23;
    p * f32::from_bits(power)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relative_error_is_below_three_in_ten_million() {
        for i in -86_999..88_000 {
            let x = i as f32 * 0.001;
            let exact = (x as f64).exp();
            assert!((exp(x) as f64 - exact).abs() <= exact * 3e-7, "{x}");
        }
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::NEG_INFINITY) < 1e-37 && exp(f32::INFINITY) > 1e38 && exp(f32::NAN).is_nan());
    }
}
