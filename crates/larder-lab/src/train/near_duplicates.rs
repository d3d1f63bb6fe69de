//! Sequences of nearly equal text, recognised by their routing: traces have no text.

use std::sync::atomic::{AtomicUsize, Ordering};

use larder_core::Trace;

/// Tokens of the stretches that are compared.
const STRETCH: usize = 4;
/// Two stretches are alike if they have at least this share of their choices in common, token by token.
const ALIKE: f64 = 0.7;
/// Two sequences are near-duplicates if at least this share of the stretches of either is alike to one of the other.
const RECURRING: f64 = 0.5;
/// Tokens of a sequence that are compared, from its start: it bounds the time for long sequences.
const TOKENS_MAX: usize = 1024;

/// For each sequence of a trace, the number of the first one that it belongs together with: its own if no other
/// sequence is nearly equal. Groups are transitive: if the first is like the second and the second like the third, all
/// three are one.
pub fn near_duplicates(trace: &Trace, threads: usize) -> Vec<usize> {
    let sequences: Vec<Choices> = trace.sequence_ranges().map(|range| Choices::of(trace, range)).collect();
    let pairs: Vec<(usize, usize)> = (0..sequences.len()).flat_map(|a| (0..a).map(move |b| (b, a))).collect();
    let next = AtomicUsize::new(0);
    let search = || {
        let mut found = Vec::new();
        while let Some((a, b)) = pairs.get(next.fetch_add(1, Ordering::Relaxed)) {
            if alike(&sequences[*a], &sequences[*b]) {
                found.push((*a, *b));
            }
        }
        found
    };
    let mut found: Vec<(usize, usize)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(search)).collect();
        threads.into_iter().flat_map(|t| t.join().unwrap_or_else(|e| std::panic::resume_unwind(e))).collect()
    });
    found.sort_unstable();
    let mut group: Vec<usize> = (0..sequences.len()).collect();
    for (a, b) in found {
        let (keep, join) = (group[a].min(group[b]), group[a].max(group[b]));
        group.iter_mut().filter(|g| **g == join).for_each(|g| *g = keep);
    }
    group
}

/// The choices of the first tokens of a sequence, a bit for each expert of each row.
struct Choices {
    /// 64-bit words per token.
    words: usize,
    /// `[tokens, words]`
    bits: Vec<u64>,
    /// The number of experts that each token chose, over all rows.
    counts: Vec<u32>,
}

impl Choices {
    fn of(trace: &Trace, tokens: std::ops::Range<usize>) -> Self {
        let words = (trace.rows * trace.experts).div_ceil(64);
        let tokens = tokens.start..tokens.end.min(tokens.start + TOKENS_MAX);
        let mut bits = vec![0u64; tokens.len() * words];
        for (token, bits) in tokens.clone().zip(bits.chunks_mut(words.max(1))) {
            for row in 0..trace.rows {
                for expert in trace.chosen(token, row) {
                    let at = row * trace.experts + usize::from(*expert);
                    bits[at / 64] |= 1 << (at % 64);
                }
            }
        }
        let counts = bits.chunks(words.max(1)).map(|token| token.iter().map(|word| word.count_ones()).sum()).collect();
        Choices { words, bits, counts }
    }

    fn tokens(&self) -> usize {
        self.counts.len()
    }

    /// Number of stretches, each beginning with another token.
    fn stretches(&self) -> usize {
        (self.tokens() + 1).saturating_sub(STRETCH)
    }

    fn token(&self, at: usize) -> &[u64] {
        &self.bits[at * self.words..(at + 1) * self.words]
    }

    /// The number of choices of a stretch.
    fn stretch_count(&self, at: usize) -> u32 {
        self.counts[at..at + STRETCH].iter().sum()
    }
}

/// Whether two sequences are near-duplicates.
fn alike(a: &Choices, b: &Choices) -> bool {
    if a.stretches() == 0 || b.stretches() == 0 {
        return false;
    }
    let mut recurs = [vec![false; a.stretches()], vec![false; b.stretches()]];
    // Diagonal by diagonal: all pairs of tokens whose places differ by one number.
    for (from_a, from_b) in (0..a.stretches()).map(|at| (at, 0)).chain((1..b.stretches()).map(|at| (0, at))) {
        let mut common = [0u32; STRETCH];
        for step in 0..(a.tokens() - from_a).min(b.tokens() - from_b) {
            let (at_a, at_b) = (from_a + step, from_b + step);
            let both = a.token(at_a).iter().zip(b.token(at_b));
            common[step % STRETCH] = both.map(|(a, b)| (a & b).count_ones()).sum();
            let Some(first) = (step + 1).checked_sub(STRETCH) else { continue };
            let most = a.stretch_count(from_a + first).max(b.stretch_count(from_b + first));
            if f64::from(common.iter().sum::<u32>()) >= ALIKE * f64::from(most) {
                recurs[0][from_a + first] = true;
                recurs[1][from_b + first] = true;
            }
        }
    }
    recurs.iter().all(|recurs| {
        let count = recurs.iter().filter(|recurs| **recurs).count();
        count as f64 >= RECURRING * recurs.len() as f64
    })
}

#[cfg(test)]
mod tests {
    use larder_core::TracePass;

    use super::*;
    use crate::Rng;

    const ROWS: usize = 4;
    const EXPERTS: usize = 16;

    /// The experts of a token of some vocabulary, always the ones that it has everywhere, with a few changed at random.
    fn choices(word: usize, changed: usize, rng: &mut Rng) -> Vec<u16> {
        let mut of_word = Rng::new(word as u64);
        let mut ids: Vec<u16> =
            (0..ROWS).flat_map(|_| [of_word.below(8), 8 + of_word.below(8)]).map(|e| e as u16).collect();
        for _ in 0..changed {
            let at = rng.below(ids.len());
            ids[at] = (if at.is_multiple_of(2) { rng.below(8) } else { 8 + rng.below(8) }) as u16;
        }
        ids
    }

    fn text(words: usize, rng: &mut Rng) -> Vec<usize> {
        (0..words).map(|_| rng.below(300)).collect()
    }

    fn push(trace: &mut Trace, text: &[usize], rng: &mut Rng) {
        for (at, word) in text.iter().enumerate() {
            let ids = choices(*word, 1, rng);
            trace.push(&TracePass { ids: &ids, starts_sequence: at == 0, ..TracePass::default() }).unwrap();
        }
    }

    #[test]
    fn sequences_of_nearly_equal_text_are_one_group() {
        let mut rng = Rng::new(4);
        let mut trace = Trace::new(ROWS, EXPERTS, 2);
        let texts: Vec<_> = (0..4).map(|_| text(60, &mut rng)).collect();
        texts.iter().for_each(|text| push(&mut trace, text, &mut rng));
        // The second text again, behind another beginning and with another end.
        let again = [&text(15, &mut rng)[..], &texts[1][5..50], &text(12, &mut rng)].concat();
        push(&mut trace, &again, &mut rng);
        // The third text with a sixth of the words replaced: every other stretch or so is as before.
        let edited = texts[2].iter().enumerate().map(|(at, word)| if at % 12 == 3 { 299 - word } else { *word });
        push(&mut trace, &edited.collect::<Vec<_>>(), &mut rng);
        // A beginning that all texts might have in common is too little.
        let start = [&texts[3][..10], &text(50, &mut rng)].concat();
        push(&mut trace, &start, &mut rng);
        // A short sequence that occurs in a long one: the long one has much that the short one has not.
        push(&mut trace, &texts[0][..12], &mut rng);
        for threads in [1, 3] {
            assert_eq!(near_duplicates(&trace, threads), [0, 1, 2, 3, 1, 2, 6, 7]);
        }
    }

    #[test]
    fn groups_are_transitive_and_short_sequences_are_alone() {
        let mut rng = Rng::new(9);
        let mut trace = Trace::new(ROWS, EXPERTS, 2);
        let [v, w, x, y, z] = [(); 5].map(|()| text(20, &mut rng));
        for part in [[&v[..], &w, &x], [&w[..], &x, &y], [&x[..], &y, &z]] {
            push(&mut trace, &part.concat(), &mut rng);
        }
        push(&mut trace, &x[..3], &mut rng);
        push(&mut trace, &x[..3], &mut rng);
        assert_eq!(near_duplicates(&trace, 2), [0, 0, 0, 3, 4]);
        assert!(near_duplicates(&Trace::default(), 2).is_empty());
    }
}
