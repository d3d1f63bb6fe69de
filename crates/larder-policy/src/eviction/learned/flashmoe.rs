//! The network form `flashmoe`, after the FlashMoE paper.

use std::sync::Arc;

use larder_core::{ExpertKey, MoeRow};

use super::arrays::Arrays;
use super::math::silu_all;
use super::{EvictorError, MoeSize, Scorer};

/// The name of this form in metadata.
pub const FORM: &str = "flashmoe";
/// The key of the [`DistanceScale`] in metadata; weights without it are on a linear scale of 64 tokens.
pub const DISTANCE_KEY: &str = "distance";
/// Units of each hidden layer.
pub const HIDDEN: usize = 128;
/// The distance of an expert whose row has not chosen yet, in tokens.
const UNKNOWN_DISTANCE: f32 = 64.0;
/// The names of the arrays, from the first layer to the last.
const LAYERS: [&str; 3] = ["first", "second", "third"];

/// The numbers that stand for distances in training and in the network's output: from 0 for the nearest to 1 for no
/// use.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum DistanceScale {
    /// A share of this number of tokens; longer distances are not told apart.
    Linear(f32),
    /// The logarithm as a share of the logarithm of this number of tokens; longer distances are not told apart.
    Log(f32),
    /// `1 - exp(-(distance - 1) / tokens)`: nearly linear below this number of tokens, and nearly 1 far beyond.
    Decay(f32),
}

/// The last share whose distance on a decaying scale is exact; above it, distances go on with the slope that they have
/// there.
const DECAY_SHARE_MAX: f32 = 0.999;

impl DistanceScale {
    /// The number for a distance of at least 1 token; `None` for no use.
    pub fn share(self, distance: Option<f32>) -> f32 {
        let Some(distance) = distance else { return 1.0 };
        match self {
            DistanceScale::Linear(tokens) => (distance / tokens).min(1.0),
            DistanceScale::Log(tokens) => (distance.ln() / tokens.ln()).min(1.0),
            DistanceScale::Decay(tokens) => 1.0 - (-(distance - 1.0) / tokens).exp(),
        }
    }

    /// The distance that a number stands for, rising with it; the network's numbers may be outside of 0 to 1.
    pub fn distance(self, share: f32) -> f32 {
        match self {
            DistanceScale::Linear(tokens) => share * tokens,
            DistanceScale::Log(tokens) => (share * tokens.ln()).exp(),
            DistanceScale::Decay(tokens) => {
                let beyond = (share - DECAY_SHARE_MAX).max(0.0) / (1.0 - DECAY_SHARE_MAX);
                1.0 + tokens * (beyond - (1.0 - share.min(DECAY_SHARE_MAX)).ln())
            }
        }
    }
}

/// From the form in metadata.
impl std::str::FromStr for DistanceScale {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let tokens = |tokens: &str| tokens.parse().ok().filter(|tokens| (2.0..=65536.0).contains(tokens));
        let parts = text.split_once(':').and_then(|(name, count)| Some((name, tokens(count)?)));
        match parts {
            Some(("linear", tokens)) => Ok(DistanceScale::Linear(tokens)),
            Some(("log", tokens)) => Ok(DistanceScale::Log(tokens)),
            Some(("decay", tokens)) => Ok(DistanceScale::Decay(tokens)),
            _ => Err(format!("'{text}' is not linear, log or decay with 2 to 65536 tokens, as in log:256")),
        }
    }
}

/// As in metadata: the name and the tokens.
impl std::fmt::Display for DistanceScale {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let (name, tokens) = match self {
            DistanceScale::Linear(tokens) => ("linear", tokens),
            DistanceScale::Log(tokens) => ("log", tokens),
            DistanceScale::Decay(tokens) => ("decay", tokens),
        };
        write!(f, "{name}:{tokens}")
    }
}

/// Recency and frequency of each expert: the inputs of this form, in training and in use.
pub struct UsageFeatures {
    experts: usize,
    /// `[rows, experts]`: tokens since the last use; 1 for an expert chosen now, 0 before the first use.
    age: Vec<u32>,
    /// `[rows, experts]`: the number of uses.
    count: Vec<u32>,
}

impl UsageFeatures {
    /// No expert has been used.
    pub fn new(size: MoeSize) -> Self {
        let cells = size.rows * size.experts;
        UsageFeatures { experts: size.experts, age: vec![0; cells], count: vec![0; cells] }
    }

    /// Forgets the past.
    pub fn new_sequence(&mut self) {
        self.age.fill(0);
        self.count.fill(0);
    }

    /// A row has chosen.
    pub fn observe(&mut self, row: usize, wanted: &[usize]) {
        let at = row * self.experts;
        let ages = &mut self.age[at..at + self.experts];
        ages.iter_mut().filter(|age| **age > 0).for_each(|age| *age = age.saturating_add(1));
        for expert in wanted {
            self.age[at + expert] = 1;
            self.count[at + expert] += 1;
        }
    }

    /// For each expert of a row 1 / age and, after them, count / largest count.
    pub fn input(&self, row: usize, into: &mut [f32]) {
        let range = row * self.experts..(row + 1) * self.experts;
        let (recency, frequency) = into.split_at_mut(self.experts);
        for (to, age) in recency.iter_mut().zip(&self.age[range.clone()]) {
            *to = if *age > 0 { (*age as f32).recip() } else { 0.0 };
        }
        let counts = &self.count[range];
        let most = counts.iter().copied().max().unwrap_or(0).max(1) as f32;
        frequency.iter_mut().zip(counts).for_each(|(to, count)| *to = *count as f32 / most);
    }

    /// A hash that changes when the definition of these features changes.
    pub fn hash() -> String {
        format!("{:016x}", super::fnv(b"1/age in tokens and count/largest count of a row's experts; version 1"))
    }
}

/// The trained weights.
pub struct FlashmoeWeights {
    size: MoeSize,
    scale: DistanceScale,
    /// For each layer of the network `[rows, outputs, inputs]` and `[rows, outputs]`.
    layers: [(Vec<f32>, Vec<f32>); 3],
}

impl FlashmoeWeights {
    pub fn from_arrays(size: MoeSize, arrays: &Arrays) -> Result<Self, EvictorError> {
        let (trained, computed) = (arrays.text("features")?.to_owned(), UsageFeatures::hash());
        if trained != computed {
            return Err(EvictorError::Features { trained, computed });
        }
        let scale = match arrays.meta.get(DISTANCE_KEY) {
            None => DistanceScale::Linear(UNKNOWN_DISTANCE),
            Some(found) => found.parse().map_err(|_| EvictorError::Unsupported {
                key: DISTANCE_KEY,
                found: found.clone(),
                wanted: "linear:TOKENS', 'log:TOKENS' or 'decay:TOKENS".to_owned(),
            })?,
        };
        let MoeSize { rows, experts, .. } = size;
        let sizes = [2 * experts, HIDDEN, HIDDEN, experts];
        let layer = |i: usize| -> Result<_, EvictorError> {
            let (name, inputs, outputs) = (LAYERS[i], sizes[i], sizes[i + 1]);
            let weights = arrays.floats(name, &[rows, outputs, inputs])?.to_vec();
            Ok((weights, arrays.floats(&format!("{name}_bias"), &[rows, outputs])?.to_vec()))
        };
        Ok(FlashmoeWeights { size, scale, layers: [layer(0)?, layer(1)?, layer(2)?] })
    }
}

/// The form of the FlashMoE paper: each layer has a network of three layers, from recency and frequency of all its
/// experts to the distance of their next use.
pub(super) struct Flashmoe {
    weights: Arc<FlashmoeWeights>,
    scores: UsageFeatures,
    /// `[rows, experts]`: the predicted tokens from a row's last choice to the next use.
    distance: Vec<f32>,
    from: Vec<f32>,
    to: Vec<f32>,
}

impl Flashmoe {
    pub fn new(weights: Arc<FlashmoeWeights>) -> Self {
        let cells = weights.size.rows * weights.size.experts;
        let (scores, distance) = (UsageFeatures::new(weights.size), vec![UNKNOWN_DISTANCE; cells]);
        Flashmoe { weights, scores, distance, from: Vec::new(), to: Vec::new() }
    }
}

impl Scorer for Flashmoe {
    fn observe(&mut self, row: MoeRow, wanted: &[usize]) {
        let row = row.index();
        self.scores.observe(row, wanted);
        let experts = self.weights.size.experts;
        self.from.resize(2 * experts, 0.0);
        self.scores.input(row, &mut self.from);
        for (i, (weights, bias)) in self.weights.layers.iter().enumerate() {
            let outputs = bias.len() / self.weights.size.rows;
            let inputs = self.from.len();
            let weights = weights[row * outputs * inputs..(row + 1) * outputs * inputs].chunks(inputs);
            self.to.clear();
            self.to.extend(weights.zip(&bias[row * outputs..]).map(|(weights, bias)| bias + dot(weights, &self.from)));
            if i + 1 < LAYERS.len() {
                silu_all(&mut self.to);
            }
            std::mem::swap(&mut self.from, &mut self.to);
        }
        let distances = &mut self.distance[row * experts..(row + 1) * experts];
        let scale = self.weights.scale;
        distances.iter_mut().zip(&self.from).for_each(|(distance, share)| *distance = scale.distance(*share));
    }

    fn new_sequence(&mut self) {
        self.scores.new_sequence();
    }

    fn worth(&mut self, expert: ExpertKey, steps: usize) -> f32 {
        let MoeSize { rows, experts, .. } = self.weights.size;
        -(self.distance[expert.index(experts)] + steps as f32 / rows as f32)
    }
}

/// A dot product in eight sums, which compilers can vectorise.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (a, a_rest) = a.as_chunks::<8>();
    let (b, b_rest) = b.as_chunks::<8>();
    let mut sums = [0.0; 8];
    for (a, b) in a.iter().zip(b) {
        (0..8).for_each(|i| sums[i] += a[i] * b[i]);
    }
    sums.iter().sum::<f32>() + a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum::<f32>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_and_shares_are_inverse_and_rise_together() {
        for text in ["linear:64", "log:256", "decay:12.5"] {
            let scale: DistanceScale = text.parse().unwrap();
            assert_eq!(scale.to_string(), text);
            for distance in [1.0, 2.0, 7.0, 60.0] {
                let share = scale.share(Some(distance));
                assert!((0.0..1.0).contains(&share), "{text}: {share}");
                assert!((scale.distance(share) - distance).abs() < 1e-3 * distance, "{text}: {distance}");
            }
            assert_eq!(scale.share(None), 1.0);
            let rising = (-20..=240).map(|at| scale.distance(at as f32 / 100.0));
            assert!(rising.clone().all(f32::is_finite) && rising.is_sorted_by(|a, b| a < b), "{text}");
        }
        for wrong in ["", "linear", "linear:0", "linear:nan", "root:64", "decay:1e9"] {
            assert!(wrong.parse::<DistanceScale>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn scores_are_those_of_the_paper() {
        let mut scores = UsageFeatures::new(MoeSize { rows: 2, experts: 3, top_k: 1 });
        let mut input = [0.0; 6];
        for expert in [0, 1, 0, 0] {
            scores.observe(1, &[expert]);
        }
        scores.input(1, &mut input);
        assert_eq!(input, [1.0, 1.0 / 3.0, 0.0, 1.0, 1.0 / 3.0, 0.0]);
        scores.input(0, &mut input);
        assert_eq!(input, [0.0; 6]);
    }
}
