//! The hash by which the n-grams that end with a token get their rows of a table.

/// Hashes n-grams of two and more tokens, each to several rows.
pub struct NGramHash {
    /// One for each token of the longest n-gram, at least two, the last token first.
    multipliers: Vec<i64>,
    /// Rows and first row of the part of the table that each head has, those of the shortest n-grams first.
    heads: Vec<(i64, u32)>,
    /// The token that ends a text: n-grams do not reach beyond it.
    end: u32,
}

impl NGramHash {
    /// The caller guarantees as many heads for n-grams of each length, and positive numbers of rows.
    pub fn new(multipliers: Vec<i64>, heads: Vec<(i64, u32)>, end: u32) -> Self {
        NGramHash { multipliers, heads, end }
    }

    /// Appends the rows of `tokens [tokens, heads]`, which follow `before` in their sequence. Of these as many count as
    /// an n-gram has before its last token.
    pub fn rows(&self, before: &[u32], tokens: &[u32], rows: &mut Vec<u32>) {
        let known = before.len().min(self.multipliers.len() - 1);
        let all = [&before[before.len() - known..], tokens].concat();
        for at in known..all.len() {
            self.rows_at(&all[..=at], rows);
        }
    }

    /// Appends the rows of the last token of `text`.
    fn rows_at(&self, text: &[u32], rows: &mut Vec<u32>) {
        let per_length = self.heads.len() / (self.multipliers.len() - 1);
        let mut heads = self.heads.chunks_exact(per_length);
        let (mut hash, mut ended) = (0i64, false);
        for (back, multiplier) in self.multipliers.iter().enumerate() {
            let token = text.iter().rev().nth(back).copied();
            // The end of a text before the last token hides all that is before it.
            ended |= back > 0 && token.is_none_or(|token| token == self.end);
            let token = token.filter(|_| !ended).unwrap_or(self.end);
            hash ^= i64::from(token).wrapping_mul(*multiplier);
            if back > 0 {
                let heads = heads.next().into_iter().flatten();
                rows.extend(heads.map(|(size, first)| first + hash.rem_euclid(*size) as u32));
            }
        }
    }
}

/// The first `count` primes from `least` on.
pub fn primes(least: u64, count: usize) -> Vec<u64> {
    let is_prime = |n: &u64| {
        let mut divisors = (3..).step_by(2).take_while(|divisor: &u64| divisor * divisor <= *n);
        *n == 2 || *n > 2 && n % 2 == 1 && divisors.all(|divisor| !n.is_multiple_of(divisor))
    };
    (least..).filter(is_prime).take(count).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const END: u32 = 5;

    fn hash() -> NGramHash {
        let heads = vec![(401, 0), (409, 401), (419, 810), (421, 1229)];
        NGramHash::new(vec![0x7fff_1234_5678_9abd, -77_777_777_777, 13], heads, END)
    }

    /// The rows by the definition: where an earlier token was the end, or there is none, tokens are the end.
    fn naive(text: &[u32], at: usize) -> Vec<u32> {
        let NGramHash { multipliers, heads, .. } = hash();
        let start = text[..at].iter().rposition(|token| *token == END).map_or(0, |end| end + 1);
        let token = |back: usize| i128::from(if back <= at - start { text[at - back] } else { END });
        let product = |back: usize| (token(back) * i128::from(multipliers[back])) as i64;
        let hashes = [product(0) ^ product(1), product(0) ^ product(1) ^ product(2)];
        let row = |(i, (size, first)): (usize, &(i64, u32))| {
            let hash = i128::from(hashes[i / 2]);
            (((hash % i128::from(*size)) + i128::from(*size)) % i128::from(*size)) as u32 + first
        };
        heads.iter().enumerate().map(row).collect()
    }

    #[test]
    fn rows_are_those_of_the_definition_in_any_chunks() {
        let text = [7, 5, 5, 1, 2, 9, 1, 2, 9, 5, 3, 3, 3, 3, 0, 5];
        let want: Vec<u32> = (0..text.len()).flat_map(|at| naive(&text, at)).collect();
        for chunk in [1, 2, 3, 7, 16] {
            let mut rows = vec![];
            for start in (0..text.len()).step_by(chunk) {
                hash().rows(&text[..start], &text[start..text.len().min(start + chunk)], &mut rows);
            }
            assert_eq!(rows, want, "chunks of {chunk}");
        }
        assert_eq!(want[4 * 5..4 * 6], want[4 * 8..4 * 9], "the same three tokens");
        assert_eq!(
            (want[4 * 11], want[4 * 11 + 2] == want[4 * 12 + 2]),
            (want[4 * 12], false),
            "3 3 behind the end, or 3"
        );
        assert!(want.iter().all(|row| *row < 1650));
    }

    #[test]
    fn primes_are_in_order() {
        assert_eq!(primes(0, 6), [2, 3, 5, 7, 11, 13]);
        assert_eq!(primes(400, 4), [401, 409, 419, 421]);
        assert_eq!(primes(20_000_000, 2), [20_000_003, 20_000_023]);
        assert_eq!(primes(401, 1), [401]);
    }
}
