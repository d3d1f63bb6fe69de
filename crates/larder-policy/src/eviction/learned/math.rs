//! Functions that give bit-identical results on every machine and that compilers can vectorise.

/// Adding this to a small number leaves the number, rounded to an integer, in the lowest bits.
const ROUNDS: f32 = 12_582_912.0;

/// e to the power of `x`, within a few parts in ten million.
pub(super) fn exp(x: f32) -> f32 {
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let x = x.clamp(-87.0, 87.0);
    let shifted = x * std::f32::consts::LOG2_E + ROUNDS;
    let whole = shifted - ROUNDS;
    let rest = x - whole * LN_2_HIGH - whole * LN_2_LOW;
    let terms = [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];
    let fraction = terms.iter().fold(0.0, |sum, term| sum * rest + term);
    fraction * f32::from_bits((shifted.to_bits() << 23).wrapping_add(1f32.to_bits()))
}

/// The nearest whole number of a value that fits into 16 bits.
pub(super) fn round_i16(x: f32) -> i16 {
    (x + ROUNDS).to_bits() as i16
}

/// The logistic function, from 0 to 1.
pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `x` times its [`sigmoid`].
pub(super) fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

/// [`sigmoid`] of each element. A loop of its own, since compilers do not vectorise it where few elements are inlined.
#[inline(never)]
pub(super) fn sigmoid_all(all: &mut [f32]) {
    all.iter_mut().for_each(|x| *x = sigmoid(*x));
}

/// [`silu`] of each element.
#[inline(never)]
pub(super) fn silu_all(all: &mut [f32]) {
    all.iter_mut().for_each(|x| *x = silu(*x));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_the_system() {
        for i in -8600..=8600 {
            let x = i as f32 / 100.0;
            let (ours, theirs) = (f64::from(exp(x)), f64::from(x).exp());
            assert!((ours / theirs - 1.0).abs() < 1e-6, "{x}: {ours} {theirs}");
        }
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(1e9).is_finite() && exp(-1e9) > 0.0);
        for x in [0.0, 0.4, 0.6, -0.4, -0.6, 8191.0, -8191.0, 1234.5678] {
            assert_eq!(f32::from(round_i16(x)), x.round(), "{x}");
        }
        assert!((sigmoid(2.0) - 0.880_797_1).abs() < 1e-6);
    }
}
