//! The random numbers of policies and strategies.

/// SplitMix64: a small generator whose numbers are the same on every machine.
#[derive(Clone)]
pub(crate) struct Rng(u64);

impl Rng {
    /// Different values of `stream` give independent streams.
    pub(crate) fn new(seed: u64, stream: u64) -> Self {
        let mut rng = Rng(seed);
        rng.0 = rng.next() ^ stream.wrapping_mul(0xd134_2543_de82_ef95);
        rng
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// A number below `count`, which the caller guarantees is not 0.
    pub(crate) fn below(&mut self, count: usize) -> usize {
        ((self.next() as u128 * count as u128) >> 64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_comes_about_equally_often_and_seeds_differ() {
        let mut rng = Rng::new(1, 0);
        let mut seen = [0; 7];
        (0..7000).for_each(|_| seen[rng.below(7)] += 1);
        assert!(seen.iter().all(|n| (850..1150).contains(n)), "{seen:?}");
        let first = |seed, stream| Rng::new(seed, stream).next();
        assert_eq!(first(1, 0), first(1, 0));
        assert!(first(1, 0) != first(2, 0) && first(1, 0) != first(1, 1));
    }
}
