//! The error function, for GELU.

use std::f32::consts::FRAC_2_SQRT_PI;

use larder_core::exp;

/// The error function to within 2e-7, in steps that give the same bits everywhere.
#[inline(always)]
pub fn erf(x: f32) -> f32 {
    let (size, square) = (x.abs(), x * x);
    if size < 0.75 {
        // Its power series: the term of x^(2n + 1) is divided by n! · (2n + 1).
        let mut p = -1.0 / 75_600.0;
        for c in [1.0 / 9360.0, -1.0 / 1320.0, 1.0 / 216.0, -1.0 / 42.0, 0.1, -1.0 / 3.0, 1.0] {
            p = p * square + c;
        }
        return FRAC_2_SQRT_PI * x * p;
    }
    // What is missing to 1 falls as e^(-x²); the factor before that, smooth in 1 / (1 + x / 2), is fitted from 0.75 on.
    let t = 1.0 / (1.0 + 0.5 * size);
    let mut p = -0.209_253_36;
    for c in [0.570_443_8, 0.016_690_21, 0.347_276_42, 0.274_753_5] {
        p = p * t + c;
    }
    let whole = 1.0 - p * t * exp(-square);
    if x < 0.0 { -whole } else { whole }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Against the integral by Simpson's rule, from one multiple of 0.001 to the next, in f64.
    #[test]
    fn error_is_below_two_in_ten_million() {
        let density = |x: f64| std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp();
        let mut exact = 0.0f64;
        for i in 0..=12_000 {
            let x = i as f32 * 0.001;
            let step = |d: f64| density(x as f64 + d * 0.5e-3);
            for x in [x, -x] {
                let miss = erf(x) as f64 - exact.copysign(x as f64);
                assert!(miss.abs() <= 2e-7, "erf({x}) is off by {miss:e}");
            }
            exact += ((i + 1) as f32 * 0.001 - x) as f64 / 6.0 * (step(0.0) + 4.0 * step(1.0) + step(2.0));
        }
    }

    #[test]
    fn saturates_at_one_and_propagates_nan() {
        for far in [12.0, 1e20, f32::MAX, f32::INFINITY] {
            assert_eq!((erf(far), erf(-far)), (1.0, -1.0));
        }
        assert_eq!(erf(0.0), 0.0);
        assert!(erf(f32::NAN).is_nan());
    }
}
