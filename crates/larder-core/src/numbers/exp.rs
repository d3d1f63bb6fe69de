//! The exponential function and softplus, with the same bits on every machine and on a GPU.

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

/// `ln(1 + e^x)`, as `max(x, 0) + ln(1 + t)` with `t = e^-|x|`, and the logarithm as `2 · artanh(t / (2 + t))`.
pub fn softplus(x: f32) -> f32 {
    let t = exp(-x.abs());
    let s = t / (2.0 + t); // at most a third
    let square = s * s;
    let series = (0..7).rev().fold(1.0 / 15.0, |p, i| p * square + 1.0 / (2 * i + 1) as f32);
    let above = if x < 0.0 { 0.0 } else { x };
    above + 2.0 * s * series
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn softplus_is_close_to_its_definition() {
        for i in -4000..4000 {
            let x = i as f32 * 0.01;
            let (got, want) = (f64::from(softplus(x)), f64::from(x).exp().ln_1p());
            assert!((got - want).abs() <= 4e-7 * want, "{got} is not {want} at {x}");
        }
        assert!(softplus(f32::NAN).is_nan());
        assert_eq!((softplus(f32::INFINITY), softplus(1e30)), (f32::INFINITY, 1e30));
    }

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
