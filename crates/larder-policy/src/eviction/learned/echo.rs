use super::Size;
use super::math::exp;

/// Tokens that are remembered.
pub(super) const MEMORY: usize = 512;
/// How much the match of the tokens before counts beside that of the present one.
pub(super) const FADE: f32 = 0.5;
/// How sharply better matches are preferred.
pub(super) const SHARPNESS: f32 = 8.0;
/// How many of the best matching tokens are listened to.
pub(super) const LISTENED: usize = 16;
/// In place of an expert where a token chose fewer.
const NOBODY: u32 = u32::MAX;
/// The longest distance that is told from longer ones.
const FAR: usize = 255;

/// What followed when it was like this before: earlier tokens whose choices resemble those of the present one and of
/// the ones before it tell by their future, which is past by now, what comes next. Text repeats itself, and so does
/// its routing.
pub(super) struct Echo {
    size: Size,
    /// The present token, counted from the start of the sequence; `None` before the first.
    token: Option<usize>,
    last_row: usize,
    /// `[rows, experts, MEMORY]`: 1 where a token chose the expert.
    chose: Vec<u8>,
    /// `[rows, MEMORY, top_k]`: which experts that are, or [`NOBODY`].
    choices: Vec<u32>,
    /// `[rows, MEMORY, experts]`: how many tokens later the expert was chosen next; 0 if it was not so far.
    ahead: Vec<u8>,
    /// `[MEMORY]`: how well the tokens before match those before each remembered token.
    before: Vec<f32>,
    /// `[MEMORY]`: choices that the present token has in common with each remembered one, so far.
    common: Vec<u16>,
    /// `[MEMORY]`: how well each remembered token matches.
    scores: Vec<f32>,
    /// The best of them and their places, best first.
    best: Vec<(f32, u32)>,
    /// For each row, who was listened to when it last chose.
    heard: Vec<Heard>,
}

/// Whom a row listens to.
#[derive(Clone, Default)]
struct Heard {
    /// Weights, of 1 in all, and places.
    voices: Vec<(f32, u32)>,
    clarity: f32,
}

impl Echo {
    pub fn new(size: Size) -> Self {
        let cells = size.rows * size.experts * MEMORY;
        Echo {
            size,
            token: None,
            last_row: 0,
            chose: vec![0; cells],
            choices: vec![NOBODY; size.rows * MEMORY * size.top_k],
            ahead: vec![0; cells],
            before: vec![0.0; MEMORY],
            common: vec![0; MEMORY],
            scores: vec![0.0; MEMORY],
            best: Vec::with_capacity(LISTENED),
            heard: vec![Heard { voices: Vec::with_capacity(LISTENED), clarity: 0.0 }; size.rows],
        }
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.token = None;
        self.chose.fill(0);
        self.choices.fill(NOBODY);
        self.before.fill(0.0);
        self.common.fill(0);
        self.best.clear();
        self.heard.iter_mut().for_each(|heard| {
            heard.voices.clear();
            heard.clarity = 0.0;
        });
    }

    /// A row has chosen. Experts of a pass over many tokens are not the choice of one of them: pass none.
    pub fn observe(&mut self, row: usize, wanted: &[usize]) {
        if self.token.is_none() || row <= self.last_row {
            self.next_token();
        }
        self.last_row = row;
        let token = self.token.expect("has just begun, or before");
        let slot = token % MEMORY;
        let Size { experts, top_k, .. } = self.size;
        let choices = &mut self.choices[(row * MEMORY + slot) * top_k..][..top_k];
        for expert in choices.iter().filter(|expert| **expert != NOBODY) {
            self.chose[(row * experts + *expert as usize) * MEMORY + slot] = 0;
        }
        choices.fill(NOBODY);
        choices.iter_mut().zip(wanted).for_each(|(to, expert)| *to = *expert as u32);
        for expert in wanted {
            let at = (row * experts + expert) * MEMORY;
            self.common.iter_mut().zip(&self.chose[at..at + MEMORY]).for_each(|(n, chose)| *n += u16::from(*chose));
        }
        let at = (row * MEMORY + slot) * experts;
        self.ahead[at..at + experts].fill(0);
        for expert in wanted {
            self.chose[(row * experts + expert) * MEMORY + slot] = 1;
            self.tell_earlier(row, *expert, token);
        }
        self.rank();
        self.weigh(row);
    }

    /// How long it took until an expert of a row was chosen again: each of the tokens that match best gives its weight,
    /// of 1 in all, and the tokens that passed, 0 if it was not chosen since.
    pub fn listen(&self, row: usize, expert: usize) -> impl Iterator<Item = (f32, u8)> {
        let voice = move |(weight, slot): &(f32, u32)| {
            (*weight, self.ahead[(row * MEMORY + *slot as usize) * self.size.experts + expert])
        };
        self.heard[row].voices.iter().map(voice)
    }

    /// How much of what could match did match in the best case when a row last chose, from 0 to 1.
    pub fn clarity(&self, row: usize) -> f32 {
        self.heard[row].clarity
    }

    fn weigh(&mut self, row: usize) {
        let heard = &mut self.heard[row];
        let most = self.best.first().map_or(0.0, |(score, _)| *score);
        heard.voices.clear();
        heard.voices.extend(self.best.iter().map(|(score, slot)| (exp((score - most) * SHARPNESS), *slot)));
        let all: f32 = heard.voices.iter().map(|(weight, _)| weight).sum();
        heard.voices.iter_mut().for_each(|(weight, _)| *weight /= all);
        let possible = (row + 1) as f32 / self.size.rows as f32 + FADE / (1.0 - FADE);
        heard.clarity = (most / possible).min(1.0);
    }

    fn next_token(&mut self) {
        let Some(last) = self.token else {
            self.token = Some(0);
            return;
        };
        let unit = self.unit();
        self.before.iter_mut().zip(&self.common).for_each(|(b, n)| *b = FADE * (*b + f32::from(*n) * unit));
        self.before.rotate_right(1);
        self.before[(last + 1) % MEMORY] = 0.0;
        self.common.fill(0);
        self.best.clear();
        self.token = Some(last + 1);
    }

    /// One choice in common, when all of a token's choices together count 1.
    fn unit(&self) -> f32 {
        1.0 / (self.size.rows * self.size.top_k) as f32
    }

    /// The tokens since this expert's last use learn how long it took.
    fn tell_earlier(&mut self, row: usize, expert: usize, token: usize) {
        let oldest = token.saturating_sub(MEMORY - 1);
        for earlier in (oldest..token).rev() {
            let at = (row * MEMORY + earlier % MEMORY) * self.size.experts + expert;
            if self.ahead[at] != 0 {
                return;
            }
            self.ahead[at] = (token - earlier).min(FAR) as u8;
        }
    }

    /// Finds the best matching tokens, the latest first among equals.
    fn rank(&mut self) {
        let Some(token) = self.token else { return };
        let unit = self.unit();
        for ((score, before), common) in self.scores.iter_mut().zip(&self.before).zip(&self.common) {
            *score = before + f32::from(*common) * unit;
        }
        // Scores of one token only grow, so whoever is among the best now beats the worst of those who were.
        let full = self.best.len() == LISTENED;
        let worst = self.best.iter().map(|(_, slot)| self.scores[*slot as usize]).fold(f32::INFINITY, f32::min);
        let least = if full { worst } else { f32::NEG_INFINITY };
        self.best.clear();
        let slot = token % MEMORY;
        let oldest = if token < MEMORY { MEMORY } else { slot + 1 };
        for range in [0..slot, oldest..MEMORY] {
            let (start, scores) = (range.start, &self.scores[range]);
            for (nth, chunk) in scores.rchunks(16).enumerate() {
                // Most hold nobody, which is seen for all at once.
                if !chunk.iter().fold(false, |any, score| any | (*score >= least)) {
                    continue;
                }
                let first = start + scores.len().saturating_sub(16 * (nth + 1));
                for (score, slot) in chunk.iter().zip(first..first + chunk.len()).rev() {
                    if *score < least || self.best.get(LISTENED - 1).is_some_and(|(worst, _)| score <= worst) {
                        continue;
                    }
                    let at = self.best.partition_point(|(other, _)| other >= score);
                    self.best.truncate(LISTENED - 1);
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

    const SIZE: Size = Size { rows: 3, experts: 6, top_k: 2 };

    /// By looking at everything that was: the score of each earlier token, the latest first.
    fn scores(tokens: &[Vec<Vec<usize>>], rows: usize) -> Vec<(f32, usize)> {
        let now = tokens.len() - 1;
        let common = |a: usize, b: usize, rows: usize| -> f32 {
            let all = (0..rows).map(|r| tokens[a][r].iter().filter(|e| tokens[b][r].contains(e)).count());
            all.sum::<usize>() as f32 / (SIZE.rows * SIZE.top_k) as f32
        };
        let oldest = now.saturating_sub(MEMORY - 1);
        let score = |earlier: usize| -> f32 {
            let past = (1..=earlier).map(|j| FADE.powi(j as i32) * common(now - j, earlier - j, SIZE.rows));
            common(now, earlier, rows) + past.sum::<f32>()
        };
        (oldest..now).rev().map(|earlier| (score(earlier), earlier)).collect()
    }

    fn distance(tokens: &[Vec<Vec<usize>>], row: usize, earlier: usize, expert: usize) -> u8 {
        let later = tokens[earlier + 1..].iter().position(|t| t.get(row).is_some_and(|w| w.contains(&expert)));
        later.map_or(0, |d| (d + 1).min(FAR) as u8)
    }

    fn check(tokens: &[Vec<Vec<usize>>]) -> Result<(), TestCaseError> {
        let mut echo = Echo::new(SIZE);
        for now in 0..tokens.len() {
            for row in 0..SIZE.rows {
                echo.observe(row, &tokens[now][row]);
                let mut seen = tokens[..=now].to_vec();
                seen[now].truncate(row + 1);
                let mut wanted = scores(&seen, row + 1);
                wanted.sort_by(|a, b| b.0.total_cmp(&a.0));
                wanted.truncate(LISTENED);
                prop_assert_eq!(echo.best.len(), wanted.len());
                for expert in 0..SIZE.experts {
                    let heard: Vec<_> = echo.listen(row, expert).collect();
                    for (nth, (_, ahead)) in heard.iter().enumerate() {
                        let (score, slot) = echo.best[nth];
                        prop_assert!((score - wanted[nth].0).abs() < 1e-5, "{} {:?}", score, wanted[nth]);
                        let earlier = (0..now).rev().find(|s| s % MEMORY == slot as usize).unwrap();
                        prop_assert_eq!(*ahead, distance(&seen, row, earlier, expert));
                    }
                    let all: f32 = heard.iter().map(|(weight, _)| weight).sum();
                    prop_assert!(heard.len() == wanted.len() && (heard.is_empty() || (all - 1.0).abs() < 1e-5));
                }
            }
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn hears_what_a_look_at_everything_finds(
            tokens in prop::collection::vec(prop::collection::vec(
                prop::sample::subsequence((0..6usize).collect::<Vec<_>>(), 2), 3), 1..40),
        ) {
            check(&tokens)?;
        }
    }

    #[test]
    fn remembers_beyond_the_length_of_its_memory() {
        let mut echo = Echo::new(SIZE);
        for token in 0..MEMORY * 2 + 9 {
            (0..SIZE.rows).for_each(|row| echo.observe(row, &[token % 3, 3 + (token + row) % 3]));
        }
        assert_eq!(echo.clarity(2), 1.0);
        let next = (MEMORY * 2 + 9) % 3;
        assert_eq!(echo.listen(2, next).map(|(_, ahead)| ahead).collect::<Vec<_>>(), [1; LISTENED]);
        echo.clear();
        assert_eq!((echo.clarity(2), echo.listen(2, next).count()), (0.0, 0));
    }
}
