//! A seeded random number generator.

/// A seeded random number generator with the same numbers on every platform (SplitMix64).
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// Starts the sequence of a seed. Equal seeds give equal numbers.
    pub fn new(seed: u64) -> Self {
        Rng(seed)
    }

    /// Starts one of the independent sequences of a seed: different values of `stream` give different ones.
    pub fn with_stream(seed: u64, stream: u64) -> Self {
        Rng(Rng::new(seed).bits() ^ stream.wrapping_mul(0xd134_2543_de82_ef95))
    }

    /// The next 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number from 0 (inclusive) to 1 (exclusive).
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// An index below `end`, which must be at least 1.
    pub fn below(&mut self, end: usize) -> usize {
        ((u128::from(self.bits()) * end as u128) >> 64) as usize
    }

    /// Shuffles `all` in place.
    pub fn shuffle<T>(&mut self, all: &mut [T]) {
        for last in (1..all.len()).rev() {
            all.swap(last, self.below(last + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_repeat_with_their_seed_and_are_spread_evenly() {
        let draw = |seed| {
            let mut rng = Rng::new(seed);
            (0..6000).map(|_| rng.below(6)).collect::<Vec<_>>()
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
        for side in 0..6 {
            let count = draw(3).into_iter().filter(|n| *n == side).count();
            assert!((850..1150).contains(&count), "{side}: {count}");
        }
        let mut rng = Rng::new(4);
        let mean = (0..4000).map(|_| rng.unit()).sum::<f64>() / 4000.0;
        assert!((mean - 0.5).abs() < 0.02, "{mean}");
    }

    #[test]
    fn the_numbers_are_those_published() {
        let mut rng = Rng::new(0);
        assert_eq!([rng.bits(), rng.bits()], [0xe220_a839_7b1d_cdaf, 0x6e78_9e6a_a1b9_65f4]);
    }

    #[test]
    fn streams_of_a_seed_differ() {
        let first = |seed, stream| Rng::with_stream(seed, stream).bits();
        assert_eq!(first(1, 0), first(1, 0));
        assert!(first(1, 0) != first(2, 0) && first(1, 0) != first(1, 1));
    }

    #[test]
    fn shuffling_keeps_everything() {
        let mut all: Vec<_> = (0..50).collect();
        Rng::new(5).shuffle(&mut all);
        assert_ne!(all, (0..50).collect::<Vec<_>>());
        all.sort();
        assert_eq!(all, (0..50).collect::<Vec<_>>());
    }
}
