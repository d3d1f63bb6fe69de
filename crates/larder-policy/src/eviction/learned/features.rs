//! The inputs of the learned policy, computed alike in training and in use.

use super::history::{self, RoutingHistory};
use super::math::exp;
use super::{MoeSize, fnv};

/// Half-lives of the moving averages, in tokens.
pub const HALF_LIVES: [f32; 4] = [1.5, 5.0, 16.0, 60.0];
/// The current choice and its moving averages.
pub const SCALES: usize = 1 + HALF_LIVES.len();
/// The horizons of predictions, in tokens; 0 is the next token alone.
pub const HORIZONS: [f32; 3] = [0.0, 5.0, 25.0];
/// Number of features of each expert of a row.
pub const FEATURES: usize = SCALES + RECENCIES + 2 * HORIZONS.len();
const RECENCIES: usize = 3;
/// The horizons and one more, so that SIMD can add all of them at once.
const LANES: usize = HORIZONS.len() + 1;
/// Uses longer ago than this many tokens count as none.
const OLD: u16 = 600;

/// The features of each expert, from past choices: the one function that training and use share.
///
/// For each expert: whether it is chosen now and how often it was lately, less its popularity; how long ago it was
/// last chosen; and the next use that the `RoutingHistory` predicts.
pub struct Features {
    size: MoeSize,
    /// `[rows, experts]`: how often each is chosen in general, from 0 to 1.
    popularity: Vec<f32>,
    /// The factor by which each moving average decays per token.
    keep: [f32; HALF_LIVES.len()],
    /// `[rows, experts]`: tokens since the last use; 1 for an expert chosen now.
    age: Vec<u16>,
    /// By age: the recency features.
    recency: Vec<[f32; RECENCIES]>,
    history: RoutingHistory,
    /// By the tokens until a use: its weight for each horizon.
    nearness: Vec<[f32; LANES]>,
    /// `[rows, SCALES, experts]`: the current choice and its moving averages, less popularity.
    chosen: Vec<f32>,
}

impl Features {
    /// For a model of this size and the popularity of its experts, `[rows, experts]`.
    pub fn new(size: MoeSize, popularity: &[f32]) -> Self {
        let cells = size.rows * size.experts;
        let mut features = Features {
            size,
            popularity: popularity.to_vec(),
            keep: HALF_LIVES.map(halving),
            age: vec![OLD; cells],
            recency: (0..=OLD).map(|age| recency(f32::from(age.max(1)))).collect(),
            history: RoutingHistory::new(size),
            nearness: (0..=255).map(nearnesses).collect(),
            chosen: vec![0.0; cells * SCALES],
        };
        features.new_sequence();
        features
    }

    /// Forgets the past.
    pub fn new_sequence(&mut self) {
        self.age.fill(OLD);
        self.history.clear();
        self.chosen.fill(0.0);
        let experts = self.size.experts;
        for (chosen, popularity) in self.chosen.chunks_mut(SCALES * experts).zip(self.popularity.chunks(experts)) {
            chosen.iter_mut().zip(popularity).for_each(|(now, p)| *now = -p);
        }
    }

    /// A row has chosen.
    pub fn observe(&mut self, row: usize, wanted: &[usize]) {
        let single = wanted.len() <= self.size.top_k;
        self.history.observe(row, if single { wanted } else { &[] });
        let experts = self.size.experts;
        let cells = row * experts..(row + 1) * experts;
        let chosen = &mut self.chosen[cells.start * SCALES..cells.end * SCALES];
        let (now, averages) = chosen.split_at_mut(experts);
        now.iter_mut().zip(&self.popularity[cells.clone()]).for_each(|(now, p)| *now = -p);
        let mass = mass(self.size, wanted);
        wanted.iter().for_each(|expert| now[*expert] += mass);
        for (average, keep) in averages.chunks_mut(experts).zip(self.keep) {
            average.iter_mut().zip(&*now).for_each(|(a, now)| *a = keep * *a + (1.0 - keep) * now);
        }
        let age = &mut self.age[cells];
        age.iter_mut().for_each(|age| *age = (*age + 1).min(OLD));
        wanted.iter().for_each(|expert| age[*expert] = 1);
    }

    /// The features of an expert as of its row's last choice. The first [`SCALES`] are also inputs of the other rows.
    pub fn of(&self, row: usize, expert: usize) -> [f32; FEATURES] {
        let experts = self.size.experts;
        let mut all = [0.0; FEATURES];
        for (scale, to) in all[..SCALES].iter_mut().enumerate() {
            *to = self.chosen[(row * SCALES + scale) * experts + expert];
        }
        all[SCALES..SCALES + RECENCIES].copy_from_slice(&self.recency[usize::from(self.age[row * experts + expert])]);
        let mut soft = [0.0; LANES];
        for (weight, ahead) in self.history.votes_for(row, expert) {
            soft.iter_mut().zip(&self.nearness[usize::from(ahead)]).for_each(|(sum, near)| *sum += weight * near);
        }
        let confidence = (self.history.confidence(row) - 0.6) * 3.0;
        let (plain, clear) = all[SCALES + RECENCIES..].split_at_mut(HORIZONS.len());
        for ((plain, clear), soft) in plain.iter_mut().zip(clear).zip(soft) {
            (*plain, *clear) = (soft, confidence * soft);
        }
        all
    }

    /// The factor by which each moving average decays per token.
    pub fn keep(&self) -> [f32; HALF_LIVES.len()] {
        self.keep
    }

    /// A hash that changes when the definition of the features changes.
    pub fn hash() -> String {
        let (memory, fade, sharpness, listened) =
            (history::HISTORY_TOKENS, history::FADE, history::SHARPNESS, history::NEAREST);
        let definition = format!(
            "now and averages of half-lives {HALF_LIVES:?} less popularity; 1/age, 2^(-age/4), log2 age up to {OLD}; \
             echo of {memory} tokens, fade {fade}, sharpness {sharpness}, best {listened}, horizons {HORIZONS:?}, \
             plain and times clarity; version 1"
        );
        format!("{:016x}", fnv(definition.as_bytes()))
    }
}

/// The weight of each of `wanted`: 1 for a token's experts; those of a pass over many tokens weigh as much in total.
pub(super) fn mass(size: MoeSize, wanted: &[usize]) -> f32 {
    if wanted.len() <= size.top_k { 1.0 } else { size.top_k as f32 / wanted.len() as f32 }
}

fn recency(age: f32) -> [f32; RECENCIES] {
    [age.recip(), halving(4.0 / age), age.log2() / 9.0 - 0.4]
}

fn nearnesses(tokens: u32) -> [f32; LANES] {
    let mut all = [0.0; LANES];
    all.iter_mut().zip(HORIZONS).for_each(|(near, horizon)| *near = nearness(tokens, horizon));
    all
}

/// The weight of a use this many tokens ahead; 0 tokens stand for no use.
fn nearness(tokens: u32, horizon: f32) -> f32 {
    match (tokens, horizon > 0.0) {
        (0, _) => 0.0,
        (tokens, true) => exp(-((tokens - 1) as f32) / horizon),
        (tokens, false) => f32::from(u8::from(tokens == 1)),
    }
}

/// The factor per token of a value that halves after `half` tokens.
fn halving(half: f32) -> f32 {
    exp(-std::f32::consts::LN_2 / half)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SIZE: MoeSize = MoeSize { rows: 2, experts: 5, top_k: 2 };
    const POPULARITY: [f32; 10] = [0.2, 0.6, 0.4, 0.4, 0.4, 0.9, 0.3, 0.3, 0.3, 0.2];

    /// From the definition: the features of an expert after its row made these choices, the last one now.
    fn known(row: usize, expert: usize, choices: &[Vec<usize>]) -> Vec<f32> {
        let popularity = POPULARITY[row * SIZE.experts + expert];
        let used = |wanted: &Vec<usize>| f32::from(u8::from(wanted.contains(&expert))) * mass(SIZE, wanted);
        let last = choices.last().expect("the row has chosen");
        let average = |half: f32| {
            let keep = 0.5f32.powf(1.0 / half);
            choices.iter().fold(popularity, |a, wanted| keep * a + (1.0 - keep) * used(wanted)) - popularity
        };
        let age = choices.iter().rev().position(|w| w.contains(&expert)).map_or(f32::from(OLD), |a| a as f32 + 1.0);
        let chosen = std::iter::once(used(last) - popularity).chain(HALF_LIVES.map(average));
        chosen.chain(recency(age)).collect()
    }

    fn all(features: &Features) -> Vec<[f32; FEATURES]> {
        let of_row = |row| (0..SIZE.experts).map(move |expert| features.of(row, expert));
        (0..SIZE.rows).flat_map(of_row).collect()
    }

    fn step() -> impl Strategy<Value = Vec<usize>> {
        prop::sample::subsequence((0..SIZE.experts).collect::<Vec<_>>(), 0..=SIZE.experts)
    }

    proptest! {
        #[test]
        fn incremental_features_match_their_definition(tokens in prop::collection::vec([step(), step()], 1..30)) {
            let mut features = Features::new(SIZE, &POPULARITY);
            for now in 0..tokens.len() {
                for row in 0..SIZE.rows {
                    features.observe(row, &tokens[now][row]);
                    let choices: Vec<_> = tokens[..=now].iter().map(|t| t[row].clone()).collect();
                    for expert in 0..SIZE.experts {
                        for (i, wanted) in known(row, expert, &choices).into_iter().enumerate() {
                            let got = features.of(row, expert)[i];
                            prop_assert!((got - wanted).abs() < 1e-4, "feature {} of {}: {} {}", i, expert, got, wanted);
                        }
                    }
                }
            }
        }

        #[test]
        fn a_new_sequence_resets_all_features(tokens in prop::collection::vec([step(), step()], 1..12)) {
            let (mut used, mut fresh) = (Features::new(SIZE, &POPULARITY), Features::new(SIZE, &POPULARITY));
            let play = |features: &mut Features| {
                for token in &tokens {
                    (0..SIZE.rows).for_each(|row| features.observe(row, &token[row]));
                }
            };
            play(&mut used);
            used.new_sequence();
            prop_assert_eq!(all(&used), all(&fresh));
            play(&mut used);
            play(&mut fresh);
            prop_assert_eq!(all(&used), all(&fresh));
        }
    }

    #[test]
    fn a_repeating_pattern_is_predicted() {
        let mut features = Features::new(SIZE, &POPULARITY);
        let cycle = [[0, 1], [2, 3], [0, 4], [1, 2]];
        for token in 0..40 {
            (0..SIZE.rows).for_each(|row| features.observe(row, &cycle[token % 4]));
        }
        for expert in 0..SIZE.experts {
            let next_token = features.of(1, expert)[SCALES + RECENCIES];
            assert!(if expert < 2 { next_token > 0.6 } else { next_token < 0.4 }, "{expert}: {next_token}");
        }
    }
}
