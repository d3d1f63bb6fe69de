//! The loss of one token.

/// Minus the natural logarithm of the probability that `logits` give to `token`, in double precision.
///
/// The caller guarantees that `token` is within `logits`.
pub fn loss(logits: &[f32], token: u32) -> f64 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let largest = f64::from(largest);
    let sum: f64 = logits.iter().map(|l| (f64::from(*l) - largest).exp()).sum();
    sum.ln() + largest - f64::from(logits[token as usize])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_sum_to_one_however_large_the_logits() {
        for shift in [0.0, 1e4, -1e4] {
            let logits = [1.5f32, -2.0, 0.25, 7.0].map(|l| l + shift);
            let sum: f64 = (0..4).map(|token| (-loss(&logits, token)).exp()).sum();
            assert!((sum - 1.0).abs() < 1e-12, "{shift}: {sum}");
        }
        assert!((loss(&[0.0; 8], 3) - 8f64.ln()).abs() < 1e-15);
    }

    #[test]
    fn impossible_tokens_cost_infinity_and_nan_is_kept() {
        assert_eq!(loss(&[0.0, f32::NEG_INFINITY], 1), f64::INFINITY);
        assert!(loss(&[0.0, f32::NAN], 0).is_nan());
    }
}
