//! Nearest earlier tokens by routing, and the uses that followed them.

use super::MoeSize;
use super::math::exp;

/// Number of tokens that are remembered.
pub(super) const HISTORY_TOKENS: usize = 512;
/// The weight of the preceding tokens' match relative to that of the present one.
pub(super) const FADE: f32 = 0.5;
/// How strongly better matches are preferred.
pub(super) const SHARPNESS: f32 = 8.0;
/// Number of best-matching tokens that vote.
pub(super) const NEAREST: usize = 16;
/// Stands for no expert where a token chose fewer than `top_k`.
const NO_EXPERT: u32 = u32::MAX;
/// Longer distances are not told apart.
const DISTANCE_MAX: usize = 255;

/// Predicts the next use of experts from similar situations: the earlier tokens whose choices resemble those of the
/// present token and of the tokens before it vote with what they used next, which is past by now. Text repeats itself,
/// and so does its routing.
pub(super) struct RoutingHistory {
    size: MoeSize,
    /// The present token, counted from the start of the sequence; `None` before the first.
    token: Option<usize>,
    last_row: usize,
    /// `[rows, experts, HISTORY_TOKENS]`: 1 where a token chose the expert.
    chose: Vec<u8>,
    /// `[rows, HISTORY_TOKENS, top_k]`: the experts that a token chose, or [`NO_EXPERT`].
    choices: Vec<u32>,
    /// `[rows, HISTORY_TOKENS, experts]`: tokens until the expert was chosen next; 0 if it was not chosen since.
    next_use: Vec<u8>,
    /// `[HISTORY_TOKENS]`: how well the tokens before the present one match those before each remembered token.
    past_match: Vec<f32>,
    /// `[HISTORY_TOKENS]`: choices so far that the present token shares with each remembered one.
    overlap: Vec<u16>,
    /// `[HISTORY_TOKENS]`: how well each remembered token matches.
    scores: Vec<f32>,
    /// The best scores and the places of their tokens, best first.
    best: Vec<(f32, u32)>,
    /// For each row, the tokens that matched best when it last chose.
    matches: Vec<Matches>,
}

/// The best-matching tokens of one row.
#[derive(Clone, Default)]
struct Matches {
    /// Weights, which sum to 1, and places.
    votes: Vec<(f32, u32)>,
    confidence: f32,
}

impl RoutingHistory {
    pub fn new(size: MoeSize) -> Self {
        let cells = size.rows * size.experts * HISTORY_TOKENS;
        RoutingHistory {
            size,
            token: None,
            last_row: 0,
            chose: vec![0; cells],
            choices: vec![NO_EXPERT; size.rows * HISTORY_TOKENS * size.top_k],
            next_use: vec![0; cells],
            past_match: vec![0.0; HISTORY_TOKENS],
            overlap: vec![0; HISTORY_TOKENS],
            scores: vec![0.0; HISTORY_TOKENS],
            best: Vec::with_capacity(NEAREST),
            matches: vec![Matches { votes: Vec::with_capacity(NEAREST), confidence: 0.0 }; size.rows],
        }
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.token = None;
        self.chose.fill(0);
        self.choices.fill(NO_EXPERT);
        self.past_match.fill(0.0);
        self.overlap.fill(0);
        self.best.clear();
        self.matches.iter_mut().for_each(|matches| {
            matches.votes.clear();
            matches.confidence = 0.0;
        });
    }

    /// A row has chosen. A pass over many tokens has no choice of a single token: pass an empty slice.
    pub fn observe(&mut self, row: usize, wanted: &[usize]) {
        if self.token.is_none() || row <= self.last_row {
            self.next_token();
        }
        self.last_row = row;
        let token = self.token.expect("a token has begun");
        let slot = token % HISTORY_TOKENS;
        let MoeSize { experts, top_k, .. } = self.size;
        let choices = &mut self.choices[(row * HISTORY_TOKENS + slot) * top_k..][..top_k];
        for expert in choices.iter().filter(|expert| **expert != NO_EXPERT) {
            self.chose[(row * experts + *expert as usize) * HISTORY_TOKENS + slot] = 0;
        }
        choices.fill(NO_EXPERT);
        choices.iter_mut().zip(wanted).for_each(|(to, expert)| *to = *expert as u32);
        for expert in wanted {
            let at = (row * experts + expert) * HISTORY_TOKENS;
            self.overlap
                .iter_mut()
                .zip(&self.chose[at..at + HISTORY_TOKENS])
                .for_each(|(n, chose)| *n += u16::from(*chose));
        }
        let at = (row * HISTORY_TOKENS + slot) * experts;
        self.next_use[at..at + experts].fill(0);
        for expert in wanted {
            self.chose[(row * experts + expert) * HISTORY_TOKENS + slot] = 1;
            self.record_next_use(row, *expert, token);
        }
        self.rank();
        self.weigh(row);
    }

    /// The tokens until an expert of a row was chosen again, as each of the best-matching tokens saw it: the token's
    /// weight
    /// (the weights sum to 1) and the distance, 0 if the expert was not chosen since.
    pub fn votes_for(&self, row: usize, expert: usize) -> impl Iterator<Item = (f32, u8)> {
        let vote = move |(weight, slot): &(f32, u32)| {
            (*weight, self.next_use[(row * HISTORY_TOKENS + *slot as usize) * self.size.experts + expert])
        };
        self.matches[row].votes.iter().map(vote)
    }

    /// The best match as a share of a perfect one when a row last chose, from 0 to 1.
    pub fn confidence(&self, row: usize) -> f32 {
        self.matches[row].confidence
    }

    fn weigh(&mut self, row: usize) {
        let matches = &mut self.matches[row];
        let most = self.best.first().map_or(0.0, |(score, _)| *score);
        matches.votes.clear();
        matches.votes.extend(self.best.iter().map(|(score, slot)| (exp((score - most) * SHARPNESS), *slot)));
        let all: f32 = matches.votes.iter().map(|(weight, _)| weight).sum();
        matches.votes.iter_mut().for_each(|(weight, _)| *weight /= all);
        let possible = (row + 1) as f32 / self.size.rows as f32 + FADE / (1.0 - FADE);
        matches.confidence = (most / possible).min(1.0);
    }

    fn next_token(&mut self) {
        let Some(last) = self.token else {
            self.token = Some(0);
            return;
        };
        let unit = self.unit();
        self.past_match.iter_mut().zip(&self.overlap).for_each(|(b, n)| *b = FADE * (*b + f32::from(*n) * unit));
        self.past_match.rotate_right(1);
        self.past_match[(last + 1) % HISTORY_TOKENS] = 0.0;
        self.overlap.fill(0);
        self.best.clear();
        self.token = Some(last + 1);
    }

    /// The score of one shared choice; all choices of a token together count 1.
    fn unit(&self) -> f32 {
        1.0 / (self.size.rows * self.size.top_k) as f32
    }

    /// Records the distance to this use for the tokens since the expert's previous use.
    fn record_next_use(&mut self, row: usize, expert: usize, token: usize) {
        let oldest = token.saturating_sub(HISTORY_TOKENS - 1);
        for earlier in (oldest..token).rev() {
            let at = (row * HISTORY_TOKENS + earlier % HISTORY_TOKENS) * self.size.experts + expert;
            if self.next_use[at] != 0 {
                return;
            }
            self.next_use[at] = (token - earlier).min(DISTANCE_MAX) as u8;
        }
    }

    /// Finds the best matching tokens, the latest first among equals.
    fn rank(&mut self) {
        let Some(token) = self.token else { return };
        let unit = self.unit();
        for ((score, before), overlap) in self.scores.iter_mut().zip(&self.past_match).zip(&self.overlap) {
            *score = before + f32::from(*overlap) * unit;
        }
        // Scores of one token only grow, so a token among the best now beats the worst of the previous best.
        let full = self.best.len() == NEAREST;
        let worst = self.best.iter().map(|(_, slot)| self.scores[*slot as usize]).fold(f32::INFINITY, f32::min);
        let least = if full { worst } else { f32::NEG_INFINITY };
        self.best.clear();
        let slot = token % HISTORY_TOKENS;
        let oldest = if token < HISTORY_TOKENS { HISTORY_TOKENS } else { slot + 1 };
        for range in [0..slot, oldest..HISTORY_TOKENS] {
            let (start, scores) = (range.start, &self.scores[range]);
            for (nth, chunk) in scores.rchunks(16).enumerate() {
                // Most chunks hold no such token, which is checked for a whole chunk at once.
                if !chunk.iter().fold(false, |any, score| any | (*score >= least)) {
                    continue;
                }
                let first = start + scores.len().saturating_sub(16 * (nth + 1));
                for (score, slot) in chunk.iter().zip(first..first + chunk.len()).rev() {
                    if *score < least || self.best.get(NEAREST - 1).is_some_and(|(worst, _)| score <= worst) {
                        continue;
                    }
                    let at = self.best.partition_point(|(other, _)| other >= score);
                    self.best.truncate(NEAREST - 1);
                    self.best.insert(at, (*score, slot as u32));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SIZE: MoeSize = MoeSize { rows: 3, experts: 6, top_k: 2 };

    /// From the definition, over the whole past: the score of each earlier token, the latest first.
    fn scores(tokens: &[Vec<Vec<usize>>], rows: usize) -> Vec<(f32, usize)> {
        let now = tokens.len() - 1;
        let overlap = |a: usize, b: usize, rows: usize| -> f32 {
            let all = (0..rows).map(|r| tokens[a][r].iter().filter(|e| tokens[b][r].contains(e)).count());
            all.sum::<usize>() as f32 / (SIZE.rows * SIZE.top_k) as f32
        };
        let oldest = now.saturating_sub(HISTORY_TOKENS - 1);
        let score = |earlier: usize| -> f32 {
            let past = (1..=earlier).map(|j| FADE.powi(j as i32) * overlap(now - j, earlier - j, SIZE.rows));
            overlap(now, earlier, rows) + past.sum::<f32>()
        };
        (oldest..now).rev().map(|earlier| (score(earlier), earlier)).collect()
    }

    fn distance(tokens: &[Vec<Vec<usize>>], row: usize, earlier: usize, expert: usize) -> u8 {
        let later = tokens[earlier + 1..].iter().position(|t| t.get(row).is_some_and(|w| w.contains(&expert)));
        later.map_or(0, |d| (d + 1).min(DISTANCE_MAX) as u8)
    }

    fn check(tokens: &[Vec<Vec<usize>>]) -> Result<(), TestCaseError> {
        let mut history = RoutingHistory::new(SIZE);
        for now in 0..tokens.len() {
            for row in 0..SIZE.rows {
                history.observe(row, &tokens[now][row]);
                let mut seen = tokens[..=now].to_vec();
                seen[now].truncate(row + 1);
                let mut wanted = scores(&seen, row + 1);
                wanted.sort_by(|a, b| b.0.total_cmp(&a.0));
                wanted.truncate(NEAREST);
                prop_assert_eq!(history.best.len(), wanted.len());
                for expert in 0..SIZE.experts {
                    let matches: Vec<_> = history.votes_for(row, expert).collect();
                    for (nth, (_, next_use)) in matches.iter().enumerate() {
                        let (score, slot) = history.best[nth];
                        prop_assert!((score - wanted[nth].0).abs() < 1e-5, "{} {:?}", score, wanted[nth]);
                        let earlier = (0..now).rev().find(|s| s % HISTORY_TOKENS == slot as usize).unwrap();
                        prop_assert_eq!(*next_use, distance(&seen, row, earlier, expert));
                    }
                    let all: f32 = matches.iter().map(|(weight, _)| weight).sum();
                    prop_assert!(matches.len() == wanted.len() && (matches.is_empty() || (all - 1.0).abs() < 1e-5));
                }
            }
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn finds_what_a_search_of_the_whole_past_finds(
            tokens in prop::collection::vec(prop::collection::vec(
                prop::sample::subsequence((0..6usize).collect::<Vec<_>>(), 2), 3), 1..40),
        ) {
            check(&tokens)?;
        }
    }

    #[test]
    fn works_beyond_the_length_of_the_history() {
        let mut history = RoutingHistory::new(SIZE);
        for token in 0..HISTORY_TOKENS * 2 + 9 {
            (0..SIZE.rows).for_each(|row| history.observe(row, &[token % 3, 3 + (token + row) % 3]));
        }
        assert_eq!(history.confidence(2), 1.0);
        let next = (HISTORY_TOKENS * 2 + 9) % 3;
        assert_eq!(history.votes_for(2, next).map(|(_, next_use)| next_use).collect::<Vec<_>>(), [1; NEAREST]);
        history.clear();
        assert_eq!((history.confidence(2), history.votes_for(2, next).count()), (0.0, 0));
    }
}
