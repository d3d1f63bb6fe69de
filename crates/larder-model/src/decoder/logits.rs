//! The logits that a step returns, or the best of them, as the choice of a token reads them.

use crate::ops::LogitChanges;

/// Logits of some tokens, as a step returns them.
#[derive(Clone, PartialEq, Debug)]
pub enum Logits {
    /// All of them: `[rows, vocab]`.
    All(Vec<f32>),
    /// Of each row what [`BestLogits`] wants, those equal to the last of the highest, and maybe others; in the order of
    /// ids.
    Best(Vec<Vec<TokenLogit>>),
}

/// The logits of a row that the choice of a token reads, where it does not read all.
#[derive(Clone, PartialEq, Default, Debug)]
pub struct BestLogits {
    /// How many of the highest.
    pub count: usize,
    /// How the choice changes logits first. The logits of the listed tokens are wanted too, as the model yields them,
    /// and do not count as any of the highest.
    pub changes: LogitChanges,
}

impl BestLogits {
    /// The logits that two choices read. How each of them changes logits is not kept.
    pub fn and(mut self, other: &BestLogits) -> Self {
        let tokens = &mut self.changes.tokens;
        tokens.extend_from_slice(&other.changes.tokens);
        tokens.sort_unstable_by_key(|token| token.id);
        tokens.dedup_by_key(|token| token.id);
        BestLogits { count: self.count.max(other.count), ..self }
    }

    /// The logits that the choice reads when the answer has one more token.
    pub fn with(self, id: u32) -> Self {
        BestLogits { changes: self.changes.with(id), ..self }
    }
}

/// The logit of a token.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct TokenLogit {
    /// Id of the token.
    pub id: u32,
    /// Its logit.
    pub logit: f32,
}

/// One row of logits.
#[derive(PartialEq, Debug)]
pub enum LogitsRow<'a> {
    /// The logit of each token.
    All(&'a mut [f32]),
    /// What [`BestLogits`] wants of them, in the order of ids.
    Best(&'a [TokenLogit]),
}

impl Default for Logits {
    fn default() -> Self {
        Logits::All(Vec::new())
    }
}

impl From<Vec<f32>> for Logits {
    fn from(all: Vec<f32>) -> Self {
        Logits::All(all)
    }
}

impl Logits {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        match self {
            Logits::All(all) => all.is_empty(),
            Logits::Best(rows) => rows.is_empty(),
        }
    }

    /// Row `row` of `rows`.
    pub fn row(&mut self, row: usize, rows: usize) -> LogitsRow<'_> {
        match self {
            Logits::All(all) => {
                let vocab = all.len() / rows;
                LogitsRow::All(&mut all[row * vocab..][..vocab])
            }
            Logits::Best(best) => LogitsRow::Best(&best[row]),
        }
    }

    /// All logits.
    ///
    /// # Panics
    /// If a step was asked for the best ones alone.
    pub fn into_all(self) -> Vec<f32> {
        match self {
            Logits::All(all) => all,
            Logits::Best(_) => unreachable!("logits of all tokens were asked for"),
        }
    }

    /// The parts of these numbers of rows.
    pub fn split(self, rows: &[usize], vocab: usize) -> Vec<Logits> {
        if rows.len() == 1 {
            return vec![self];
        }
        match self {
            Logits::All(all) => {
                let mut rest = &all[..];
                let part = |rows: &usize| Logits::All(rest.split_off(..rows * vocab).unwrap_or_default().to_vec());
                rows.iter().map(part).collect()
            }
            Logits::Best(best) => {
                let mut rest = best.into_iter();
                rows.iter().map(|rows| Logits::Best(rest.by_ref().take(*rows).collect())).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_logits_have_their_rows() {
        let mut all = Logits::All(vec![0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!(all.row(1, 3), LogitsRow::All(&mut [2.0, 3.0]));
        let parts = all.split(&[2, 0, 1], 2);
        assert_eq!(parts, [vec![0.0, 1.0, 2.0, 3.0], vec![], vec![4.0, 5.0]].map(Logits::All));
        let [a, b] = [1, 2].map(|id| vec![TokenLogit { id, logit: 0.5 }]);
        let mut best = Logits::Best(vec![a.clone(), b.clone()]);
        assert_eq!(best.row(1, 2), LogitsRow::Best(&b));
        assert_eq!(best.split(&[1, 1], 9), [Logits::Best(vec![a]), Logits::Best(vec![b])]);
    }
}
