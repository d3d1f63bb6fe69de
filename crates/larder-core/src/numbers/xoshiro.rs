//! The random generator of sampling, with equal numbers on every platform.

use crate::Rng;

/// xoshiro256++, seeded through SplitMix64: equal seeds give equal numbers on every platform.
#[derive(Clone, Debug)]
pub struct Xoshiro256 {
    state: [u64; 4],
}

impl Xoshiro256 {
    /// The generator for `seed`.
    pub fn new(seed: u64) -> Self {
        let mut mix = Rng::new(seed);
        Xoshiro256 { state: std::array::from_fn(|_| mix.bits()) }
    }

    /// The next 64 random bits.
    pub fn bits(&mut self) -> u64 {
        let [a, b, c, d] = self.state;
        let result = a.wrapping_add(d).rotate_left(23).wrapping_add(a);
        let (c2, d2) = (c ^ a, d ^ b);
        self.state = [a ^ d2, b ^ c2, c2 ^ (b << 17), d2.rotate_left(45)];
        result
    }

    /// A number from 0 (included) to 1 (excluded), in steps of 2⁻⁵³.
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_follows_the_published_recurrence() {
        // First outputs of xoshiro256++ from the state 1, 2, 3, 4, as its authors' program prints them.
        let mut rng = Xoshiro256 { state: [1, 2, 3, 4] };
        let got: Vec<u64> = (0..5).map(|_| rng.bits()).collect();
        assert_eq!(got, [41943041, 58720359, 3588806011781223, 3591011842654386, 9228616714210784205]);
    }

    #[test]
    fn units_fill_the_interval_evenly() {
        let mut rng = Xoshiro256::new(7);
        let mut counts = [0; 8];
        for _ in 0..80_000 {
            counts[(rng.unit() * 8.0) as usize] += 1;
        }
        assert!(counts.iter().all(|&n| (9_500..10_500).contains(&n)), "{counts:?}");
    }
}
