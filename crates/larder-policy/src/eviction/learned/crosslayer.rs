//! The network form `crosslayer`: from the choices of all layers to the chance that an expert is needed soon.

use std::sync::Arc;

use larder_core::{ExpertKey, MoeRow};

use super::arrays::Arrays;
use super::features::{FEATURES, Features, HORIZONS, SCALES, mass};
use super::math::{exp, round_i16, sigmoid_all, silu_all};
use super::{EvictorError, MoeSize, Scorer};

/// The name of this form in metadata.
pub const FORM: &str = "crosslayer";
/// Units of the small network that all experts share.
pub const HEAD_HIDDEN: usize = 8;
/// Inputs of that network.
const HEAD_IN: usize = FEATURES + HORIZONS.len();
/// The most hidden units: sums of products of 8 and 16 bits have to fit into 32.
const HIDDEN_MAX: usize = 512;
/// Activations are quantised to whole numbers up to this one.
const QUANT_MAX: f32 = 8191.0;

/// One number for each horizon and one more, so that SIMD can process all of them at once.
type Lanes = [f32; HORIZONS.len() + 1];

/// The parameters of one expert's logits.
struct Output {
    scale: Lanes,
    bias: Lanes,
    /// The weights of the expert's own features.
    own: [Lanes; FEATURES],
}

/// The trained weights.
pub struct CrosslayerWeights {
    size: MoeSize,
    hidden: usize,
    /// `[rows, experts]`
    popularity: Vec<f32>,
    /// `[rows, experts, SCALES, hidden]`: what a choice contributes to the hidden layer, contiguous for each expert.
    gather: Vec<i8>,
    /// `[rows, experts, SCALES]`
    gather_scale: Vec<f32>,
    /// `[rows, SCALES, hidden]`: what average choices contribute in total.
    baseline: Vec<f32>,
    /// `[rows, hidden]`
    gather_bias: Vec<f32>,
    /// `[rows, experts, HORIZONS, hidden]`: 8-bit values, widened to 16 bits as the dot products need them.
    emit: Vec<i16>,
    /// `[rows, experts]`
    outputs: Vec<Output>,
    /// The weights of the small network, by input.
    head: [[f32; HEAD_HIDDEN]; HEAD_IN],
    head_bias: [f32; HEAD_HIDDEN],
    /// Its output weights, by unit.
    head_out: [Lanes; HEAD_HIDDEN],
    /// `[HORIZONS, rows]`: the factor of a use that is 1, 2, … choices later.
    fade: Vec<f32>,
}

impl CrosslayerWeights {
    pub fn from_arrays(size: MoeSize, arrays: &Arrays) -> Result<Self, EvictorError> {
        let (trained, computed) = (arrays.text("features")?.to_owned(), Features::hash());
        if trained != computed {
            return Err(EvictorError::Features { trained, computed });
        }
        let hidden = arrays.count("hidden")?;
        if !(1..=HIDDEN_MAX).contains(&hidden) {
            let wanted = format!("1 to {HIDDEN_MAX}");
            return Err(EvictorError::Unsupported { key: "hidden", found: hidden.to_string(), wanted });
        }
        let MoeSize { rows, experts, .. } = size;
        let horizons = HORIZONS.len();
        let popularity = arrays.floats("popularity", &[rows, experts])?.to_vec();
        let (gather, gather_scale) = arrays.quantised("gather", &[rows, SCALES, experts, hidden])?;
        let (emit, emit_scale) = arrays.quantised("emit", &[rows, horizons, experts, hidden])?;
        let head = arrays.floats("head", &[HEAD_HIDDEN, HEAD_IN])?;
        let head_bias = arrays.floats("head_bias", &[HEAD_HIDDEN])?;
        let head_out = arrays.floats("head_out", &[horizons, HEAD_HIDDEN])?;
        Ok(CrosslayerWeights {
            size,
            hidden,
            baseline: baseline(size, hidden, (gather, gather_scale), &popularity),
            popularity,
            gather: permuted([rows, SCALES, experts, hidden], gather).collect(),
            gather_scale: permuted([rows, SCALES, experts, 1], gather_scale).collect(),
            gather_bias: arrays.floats("gather_bias", &[rows, hidden])?.to_vec(),
            emit: permuted([rows, horizons, experts, hidden], emit).map(i16::from).collect(),
            outputs: outputs(size, arrays, emit_scale)?,
            head: std::array::from_fn(|input| std::array::from_fn(|unit| head[unit * HEAD_IN + input])),
            head_bias: std::array::from_fn(|unit| head_bias[unit]),
            head_out: std::array::from_fn(|unit| lanes(|horizon| head_out[horizon * HEAD_HIDDEN + unit])),
            fade: fades(rows),
        })
    }
}

/// From `[a, b, c, d]` to `[a, c, b, d]`.
fn permuted<T: Copy>([a, b, c, d]: [usize; 4], all: &[T]) -> impl Iterator<Item = T> {
    let pieces = (0..a).flat_map(move |i| (0..c).flat_map(move |k| (0..b).map(move |j| ((i * b + j) * c + k) * d)));
    pieces.flat_map(move |at| &all[at..at + d]).copied()
}

fn lanes(of: impl Fn(usize) -> f32) -> Lanes {
    std::array::from_fn(|horizon| if horizon < HORIZONS.len() { of(horizon) } else { 0.0 })
}

fn outputs(size: MoeSize, arrays: &Arrays, scale: &[f32]) -> Result<Vec<Output>, EvictorError> {
    let (MoeSize { rows, experts, .. }, horizons) = (size, HORIZONS.len());
    let bias = arrays.floats("emit_bias", &[rows, horizons, experts])?;
    let own = arrays.floats("own", &[rows, horizons, FEATURES, experts])?;
    let output = |cell: usize| {
        let (row, expert) = (cell / experts, cell % experts);
        let at = |horizon: usize| (row * horizons + horizon) * experts + expert;
        let own_at =
            |horizon: usize, feature: usize| own[((row * horizons + horizon) * FEATURES + feature) * experts + expert];
        Output {
            scale: lanes(|horizon| scale[at(horizon)]),
            bias: lanes(|horizon| bias[at(horizon)]),
            own: std::array::from_fn(|feature| lanes(|horizon| own_at(horizon, feature))),
        }
    };
    Ok((0..rows * experts).map(output).collect())
}

fn baseline(size: MoeSize, hidden: usize, (gather, scales): (&[i8], &[f32]), popularity: &[f32]) -> Vec<f32> {
    let mut baseline = vec![0.0; size.rows * SCALES * hidden];
    for (at, sum) in baseline.chunks_mut(hidden).enumerate() {
        for expert in 0..size.experts {
            let (from, often) = (at * size.experts + expert, popularity[at / SCALES * size.experts + expert]);
            add_i8(sum, &gather[from * hidden..(from + 1) * hidden], scales[from] * often);
        }
    }
    baseline
}

fn fades(rows: usize) -> Vec<f32> {
    let fade = |horizon: f32, steps: usize| exp(-(steps as f32) / (rows as f32 * horizon));
    let of = |horizon: f32| (1..=rows).map(move |steps| if horizon > 0.0 { fade(horizon, steps) } else { 1.0 });
    HORIZONS.into_iter().flat_map(of).collect()
}

/// Predicts, from the choices of all layers, each expert's chance of being needed within some horizons.
///
/// The experts chosen now and their moving averages, of all layers, feed one hidden layer; it and the expert's own
/// features, the latter also through a small network that all experts share, give the chances. The worth of an expert
/// is the best rate of uses per token of holding it that any horizon offers, which is what an optimal stopping rule
/// would hold it for.
pub(super) struct Crosslayer {
    weights: Arc<CrosslayerWeights>,
    features: Features,
    /// `[rows, SCALES, hidden]`: the contribution of each row's choices to the hidden layer.
    parts: Vec<f32>,
    /// `[hidden]`: the sum over rows and scales.
    sum: Vec<f32>,
    /// `[hidden]`
    active: Vec<f32>,
    /// `[rows, hidden]`: the hidden layer when each row last chose, quantised.
    quantised: Vec<i16>,
    /// `[rows]`: the quantisation step of each row.
    quant_step: Vec<f32>,
    /// `[rows, experts]`: each expert's chances since its row last chose, if they were computed.
    chances: Vec<Option<Lanes>>,
}

impl Crosslayer {
    pub fn new(weights: Arc<CrosslayerWeights>) -> Self {
        let MoeSize { rows, experts, .. } = weights.size;
        let mut new = Crosslayer {
            features: Features::new(weights.size, &weights.popularity),
            parts: vec![0.0; rows * SCALES * weights.hidden],
            sum: vec![0.0; weights.hidden],
            active: vec![0.0; weights.hidden],
            quantised: vec![0; rows * weights.hidden],
            quant_step: vec![0.0; rows],
            chances: vec![None; rows * experts],
            weights,
        };
        new.begin();
        new
    }

    /// The hidden activations.
    #[cfg(test)]
    pub fn active(&self) -> &[f32] {
        &self.active
    }

    /// Resets to no current choice and average moving averages.
    fn begin(&mut self) {
        let hidden = self.weights.hidden;
        self.parts.fill(0.0);
        for (parts, baseline) in
            self.parts.chunks_mut(SCALES * hidden).zip(self.weights.baseline.chunks(SCALES * hidden))
        {
            add(&mut parts[..hidden], &baseline[..hidden], -1.0);
        }
        self.sum_up();
        (0..self.weights.size.rows).for_each(|row| self.keep(row));
    }

    fn sum_up(&mut self) {
        self.sum.fill(0.0);
        self.parts.chunks(self.weights.hidden).for_each(|part| add(&mut self.sum, part, 1.0));
    }

    /// Updates one row's contribution. The sum is computed anew once per token, so that rounding errors do not add up.
    fn gather(&mut self, row: usize, wanted: &[usize]) {
        let (hidden, experts) = (self.weights.hidden, self.weights.size.experts);
        let keep = |scale: usize| if scale == 0 { 0.0 } else { self.features.keep()[scale - 1] };
        let mass = mass(self.weights.size, wanted);
        let range = row * SCALES * hidden..(row + 1) * SCALES * hidden;
        let (parts, baseline) = (&mut self.parts[range.clone()], &self.weights.baseline[range]);
        for (scale, (part, baseline)) in parts.chunks_mut(hidden).zip(baseline.chunks(hidden)).enumerate() {
            add(&mut self.sum, part, -1.0);
            let keep = keep(scale);
            part.iter_mut().zip(baseline).for_each(|(part, baseline)| *part = keep * *part - (1.0 - keep) * baseline);
        }
        for expert in wanted {
            let from = (row * experts + expert) * SCALES;
            let gathered = self.weights.gather[from * hidden..(from + SCALES) * hidden].chunks(hidden);
            let scales = &self.weights.gather_scale[from..from + SCALES];
            for (scale, ((part, gathered), by)) in parts.chunks_mut(hidden).zip(gathered).zip(scales).enumerate() {
                add_i8(part, gathered, (1.0 - keep(scale)) * mass * by);
            }
        }
        parts.chunks(hidden).for_each(|part| add(&mut self.sum, part, 1.0));
        if row == 0 {
            self.sum_up();
        }
    }

    /// Keeps the hidden layer, quantised, until the chances of the row's experts are needed.
    fn keep(&mut self, row: usize) {
        let hidden = self.weights.hidden;
        let bias = &self.weights.gather_bias[row * hidden..(row + 1) * hidden];
        self.active.iter_mut().zip(&self.sum).zip(bias).for_each(|((active, sum), bias)| *active = sum + bias);
        silu_all(&mut self.active);
        let most = self.active.iter().fold(f32::MIN_POSITIVE, |most, x| most.max(x.abs()));
        let by = QUANT_MAX / most;
        let kept = &mut self.quantised[row * hidden..(row + 1) * hidden];
        kept.iter_mut().zip(&self.active).for_each(|(to, x)| *to = round_i16(x * by));
        self.quant_step[row] = most / QUANT_MAX;
        let experts = self.weights.size.experts;
        self.chances[row * experts..(row + 1) * experts].fill(None);
    }

    /// For each horizon, the chance that an expert is needed within it, as of its row's last choice.
    fn chances(&self, key: ExpertKey) -> Lanes {
        let (row, expert) = (key.row.index(), key.expert.index());
        let CrosslayerWeights { size, hidden, emit, outputs, head, head_bias, head_out, .. } = &*self.weights;
        let cell = key.index(size.experts);
        let output = &outputs[cell];
        let active = &self.quantised[row * hidden..(row + 1) * hidden];
        let mut logits = output.bias;
        let tables = emit[cell * HORIZONS.len() * hidden..].chunks(*hidden).take(HORIZONS.len());
        for (horizon, table) in tables.enumerate() {
            logits[horizon] += dot(active, table) as f32 * output.scale[horizon] * self.quant_step[row];
        }
        let known = self.features.of(row, expert);
        known.iter().zip(&output.own).for_each(|(x, own)| add(&mut logits, own, *x));
        let mut units = *head_bias;
        let inputs = known.iter().chain(&logits[..HORIZONS.len()]);
        inputs.zip(head).for_each(|(x, weights)| add(&mut units, weights, *x));
        silu_all(&mut units);
        units.iter().zip(head_out).for_each(|(x, out)| add(&mut logits, out, *x));
        sigmoid_all(&mut logits);
        logits
    }
}

impl Scorer for Crosslayer {
    fn observe(&mut self, row: MoeRow, wanted: &[usize]) {
        let row = row.index();
        self.features.observe(row, wanted);
        self.gather(row, wanted);
        self.keep(row);
    }

    fn new_sequence(&mut self) {
        self.features.new_sequence();
        self.begin();
    }

    fn worth(&mut self, expert: ExpertKey, steps: usize) -> f32 {
        let MoeSize { rows, experts, .. } = self.weights.size;
        let cell = expert.index(experts);
        let chances = self.chances[cell].unwrap_or_else(|| self.chances(expert));
        self.chances[cell] = Some(chances);
        let wait = steps as f32 / rows as f32;
        let rate = |i: usize| {
            let chance = chances[i] * self.weights.fade[i * rows + steps - 1];
            let horizon = HORIZONS[i];
            if horizon > 0.0 { chance / (horizon * (1.0 - chance)) } else { chance / wait }
        };
        (0..HORIZONS.len()).map(rate).fold(0.0, f32::max)
    }
}

fn add(to: &mut [f32], from: &[f32], by: f32) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += by * from);
}

fn add_i8(to: &mut [f32], from: &[i8], by: f32) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += by * f32::from(*from));
}

fn dot(a: &[i16], b: &[i16]) -> i32 {
    a.iter().zip(b).map(|(a, b)| i32::from(*a) * i32::from(*b)).sum()
}
