//! The network form `flashmoe`, after the FlashMoE paper.

use std::sync::Arc;

use larder_core::{ExpertKey, MoeRow};

use super::arrays::Arrays;
use super::math::silu_all;
use super::{EvictorError, MoeSize, Scorer};

/// The name of this form in metadata.
pub const FORM: &str = "flashmoe";
/// Units of each hidden layer.
pub const HIDDEN: usize = 128;
/// Predicted distances are shares of this many tokens; longer ones are not told apart.
pub const DISTANCE_MAX: f32 = 64.0;
/// The names of the arrays, from the first layer to the last.
const LAYERS: [&str; 3] = ["first", "second", "third"];

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
    /// For each layer of the network `[rows, outputs, inputs]` and `[rows, outputs]`.
    layers: [(Vec<f32>, Vec<f32>); 3],
}

impl FlashmoeWeights {
    pub fn from_arrays(size: MoeSize, arrays: &Arrays) -> Result<Self, EvictorError> {
        let (trained, computed) = (arrays.text("features")?.to_owned(), UsageFeatures::hash());
        if trained != computed {
            return Err(EvictorError::Features { trained, computed });
        }
        let MoeSize { rows, experts, .. } = size;
        let sizes = [2 * experts, HIDDEN, HIDDEN, experts];
        let layer = |i: usize| -> Result<_, EvictorError> {
            let (name, inputs, outputs) = (LAYERS[i], sizes[i], sizes[i + 1]);
            let weights = arrays.floats(name, &[rows, outputs, inputs])?.to_vec();
            Ok((weights, arrays.floats(&format!("{name}_bias"), &[rows, outputs])?.to_vec()))
        };
        Ok(FlashmoeWeights { size, layers: [layer(0)?, layer(1)?, layer(2)?] })
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
        let (scores, distance) = (UsageFeatures::new(weights.size), vec![DISTANCE_MAX; cells]);
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
        distances.iter_mut().zip(&self.from).for_each(|(distance, share)| *distance = share * DISTANCE_MAX);
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
