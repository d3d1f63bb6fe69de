use std::sync::Arc;

use super::arrays::Arrays;
use super::features::{FEATURES, Features, HORIZONS, SCALES, mass};
use super::math::{exp, sigmoid, silu};
use super::{EvictorError, Scorer, Size};

/// The name of this form.
pub const FORM: &str = "crosslayer";
/// Units of the small network that all experts share.
pub const HEAD_HIDDEN: usize = 8;
/// What that network sees.
const HEAD_IN: usize = FEATURES + HORIZONS.len();
/// The most units between the layers: sums of products of 8 and 16 bits have to fit into 32.
const HIDDEN_MAX: usize = 512;
/// Activations become whole numbers up to this one.
const STEPS: f32 = 8191.0;

/// The trained numbers.
pub struct Weights {
    size: Size,
    hidden: usize,
    /// `[rows, experts]`
    popularity: Vec<f32>,
    /// `[rows, SCALES, experts, hidden]`: what a choice says.
    gather: Vec<f32>,
    /// `[rows, SCALES, hidden]`: what choices as usual say in all.
    usual: Vec<f32>,
    /// `[rows, hidden]`
    gather_bias: Vec<f32>,
    /// `[rows, HORIZONS, experts, hidden]`, of 8 bits; wider here, as products want them.
    emit: Vec<i16>,
    /// `[rows, HORIZONS, experts]`
    emit_scale: Vec<f32>,
    /// `[rows, HORIZONS, experts]`
    emit_bias: Vec<f32>,
    /// `[rows, HORIZONS, FEATURES, experts]`: what an expert's own past says.
    own: Vec<f32>,
    /// `[HEAD_HIDDEN, HEAD_IN]`
    head: Vec<f32>,
    /// `[HEAD_HIDDEN]`
    head_bias: Vec<f32>,
    /// `[HORIZONS, HEAD_HIDDEN]`
    head_out: Vec<f32>,
    /// `[HORIZONS, rows]`: how much less a use counts that is 1, 2, … choices later.
    fade: Vec<f32>,
}

impl Weights {
    pub fn from_arrays(size: Size, arrays: &Arrays) -> Result<Self, EvictorError> {
        let (theirs, ours) = (arrays.said("features")?.to_owned(), Features::hash());
        if theirs != ours {
            return Err(EvictorError::Features { theirs, ours });
        }
        let hidden = arrays.count("hidden")?;
        if !(1..=HIDDEN_MAX).contains(&hidden) {
            let wanted = format!("1 to {HIDDEN_MAX}");
            return Err(EvictorError::Foreign { key: "hidden", said: hidden.to_string(), wanted });
        }
        let Size { rows, experts, .. } = size;
        let horizons = HORIZONS.len();
        let popularity = arrays.floats("popularity", &[rows, experts])?.to_vec();
        let gather = dequantized(arrays.scaled("gather", &[rows, SCALES, experts, hidden])?, hidden);
        let (emit, emit_scale) = arrays.scaled("emit", &[rows, horizons, experts, hidden])?;
        Ok(Weights {
            size,
            hidden,
            usual: usual(size, hidden, &gather, &popularity),
            popularity,
            gather,
            gather_bias: arrays.floats("gather_bias", &[rows, hidden])?.to_vec(),
            emit: emit.iter().map(|w| i16::from(*w)).collect(),
            emit_scale: emit_scale.to_vec(),
            emit_bias: arrays.floats("emit_bias", &[rows, horizons, experts])?.to_vec(),
            own: arrays.floats("own", &[rows, horizons, FEATURES, experts])?.to_vec(),
            head: arrays.floats("head", &[HEAD_HIDDEN, HEAD_IN])?.to_vec(),
            head_bias: arrays.floats("head_bias", &[HEAD_HIDDEN])?.to_vec(),
            head_out: arrays.floats("head_out", &[horizons, HEAD_HIDDEN])?.to_vec(),
            fade: fades(rows),
        })
    }
}

fn dequantized((wholes, scales): (&[i8], &[f32]), run: usize) -> Vec<f32> {
    wholes.chunks(run).zip(scales).flat_map(|(run, scale)| run.iter().map(move |w| f32::from(*w) * scale)).collect()
}

fn usual(size: Size, hidden: usize, gather: &[f32], popularity: &[f32]) -> Vec<f32> {
    let mut usual = vec![0.0; size.rows * SCALES * hidden];
    for (at, (sum, inputs)) in usual.chunks_mut(hidden).zip(gather.chunks(size.experts * hidden)).enumerate() {
        let row = at / SCALES;
        let popularity = &popularity[row * size.experts..(row + 1) * size.experts];
        inputs.chunks(hidden).zip(popularity).for_each(|(input, p)| add(sum, input, *p));
    }
    usual
}

fn fades(rows: usize) -> Vec<f32> {
    let fade = |horizon: f32, steps: usize| exp(-(steps as f32) / (rows as f32 * horizon));
    let of = |horizon: f32| (1..=rows).map(move |steps| if horizon > 0.0 { fade(horizon, steps) } else { 1.0 });
    HORIZONS.into_iter().flat_map(of).collect()
}

/// From the choices of all layers, now and lately, to every expert's chance of being needed within some horizons.
///
/// The experts chosen now and their moving averages, of all layers, feed one hidden layer; it and the expert's own
/// features, the latter also through a small network that all experts share, give the chances. What an expert is worth
/// is the best rate of uses per token of holding it that any horizon offers: what an optimal stopping rule would hold
/// it for.
pub(super) struct Crosslayer {
    weights: Arc<Weights>,
    features: Features,
    /// `[rows, SCALES, hidden]`: what each row's choices say.
    parts: Vec<f32>,
    /// `[hidden]`: the sum over rows and scales.
    sum: Vec<f32>,
    /// `[hidden]`
    active: Vec<f32>,
    /// `[hidden]`
    whole: Vec<i16>,
    /// `[HEAD_IN, experts]`
    inputs: Vec<f32>,
    /// `[experts]`
    unit: Vec<f32>,
    /// `[HORIZONS, experts]`
    logits: Vec<f32>,
    /// `[rows, HORIZONS, experts]`
    chances: Vec<f32>,
}

impl Crosslayer {
    pub fn new(weights: Arc<Weights>) -> Self {
        let Size { rows, experts, .. } = weights.size;
        let mut new = Crosslayer {
            features: Features::new(weights.size, &weights.popularity),
            parts: vec![0.0; rows * SCALES * weights.hidden],
            sum: vec![0.0; weights.hidden],
            active: vec![0.0; weights.hidden],
            whole: vec![0; weights.hidden],
            inputs: vec![0.0; HEAD_IN * experts],
            unit: vec![0.0; experts],
            logits: vec![0.0; HORIZONS.len() * experts],
            chances: vec![0.0; rows * HORIZONS.len() * experts],
            weights,
        };
        new.begin();
        new
    }

    /// What the units between the layers say.
    #[cfg(test)]
    pub fn active(&self) -> &[f32] {
        &self.active
    }

    /// Nothing is chosen now, and averages are as usual.
    fn begin(&mut self) {
        let hidden = self.weights.hidden;
        self.parts.fill(0.0);
        for (parts, usual) in self.parts.chunks_mut(SCALES * hidden).zip(self.weights.usual.chunks(SCALES * hidden)) {
            add(&mut parts[..hidden], &usual[..hidden], -1.0);
        }
        self.sum_up();
    }

    fn sum_up(&mut self) {
        self.sum.fill(0.0);
        self.parts.chunks(self.weights.hidden).for_each(|part| add(&mut self.sum, part, 1.0));
    }

    /// Brings one row's part up to date. The sum is made anew once per token, so that rounding does not add up.
    fn gather(&mut self, row: usize, wanted: &[usize]) {
        let (hidden, experts) = (self.weights.hidden, self.weights.size.experts);
        let mass = mass(self.weights.size, wanted);
        for scale in 0..SCALES {
            let at = row * SCALES + scale;
            let part = &mut self.parts[at * hidden..(at + 1) * hidden];
            let usual = &self.weights.usual[at * hidden..(at + 1) * hidden];
            let keep = if scale == 0 { 0.0 } else { self.features.keep()[scale - 1] };
            self.sum.iter_mut().zip(&*part).for_each(|(sum, part)| *sum -= part);
            part.iter_mut().zip(usual).for_each(|(part, usual)| *part = keep * *part - (1.0 - keep) * usual);
            for expert in wanted {
                let from = (at * experts + expert) * hidden;
                add(part, &self.weights.gather[from..from + hidden], (1.0 - keep) * mass);
            }
            add(&mut self.sum, part, 1.0);
        }
        if row == 0 {
            self.sum_up();
        }
        let bias = &self.weights.gather_bias[row * hidden..(row + 1) * hidden];
        for ((active, sum), bias) in self.active.iter_mut().zip(&self.sum).zip(bias) {
            *active = silu(sum + bias);
        }
    }

    /// What all layers' choices say of a row's experts.
    fn emit(&mut self, row: usize) {
        let most = self.active.iter().fold(f32::MIN_POSITIVE, |most, x| most.max(x.abs()));
        let by = STEPS / most;
        self.whole.iter_mut().zip(&self.active).for_each(|(whole, x)| *whole = (x * by) as i16);
        let outputs = self.logits.len();
        let range = row * outputs..(row + 1) * outputs;
        let hidden = self.weights.hidden;
        let tables = self.weights.emit[range.start * hidden..range.end * hidden].chunks(hidden);
        let scales = self.weights.emit_scale[range.clone()].iter().zip(&self.weights.emit_bias[range]);
        for ((logit, table), (scale, bias)) in self.logits.iter_mut().zip(tables).zip(scales) {
            *logit = dot(&self.whole, table) as f32 * scale / by + bias;
        }
    }

    /// What their own past says of a row's experts.
    fn own(&mut self, row: usize) {
        let experts = self.weights.size.experts;
        let known = self.features.row(row);
        let own = &self.weights.own[row * HORIZONS.len() * known.len()..][..HORIZONS.len() * known.len()];
        for (logits, own) in self.logits.chunks_mut(experts).zip(own.chunks(known.len())) {
            for (own, known) in own.chunks(experts).zip(known.chunks(experts)) {
                logits.iter_mut().zip(own.iter().zip(known)).for_each(|(logit, (w, x))| *logit += w * x);
            }
        }
        self.inputs[..known.len()].copy_from_slice(known);
        self.inputs[known.len()..].copy_from_slice(&self.logits);
        for (i, (weights, bias)) in self.weights.head.chunks(HEAD_IN).zip(&self.weights.head_bias).enumerate() {
            self.unit.fill(*bias);
            weights.iter().zip(self.inputs.chunks(experts)).for_each(|(w, input)| add(&mut self.unit, input, *w));
            self.unit.iter_mut().for_each(|x| *x = silu(*x));
            for (horizon, logits) in self.logits.chunks_mut(experts).enumerate() {
                add(logits, &self.unit, self.weights.head_out[horizon * HEAD_HIDDEN + i]);
            }
        }
    }
}

impl Scorer for Crosslayer {
    fn observe(&mut self, row: usize, wanted: &[usize]) {
        self.features.observe(row, wanted);
        self.gather(row, wanted);
        self.emit(row);
        self.own(row);
        let chances = &mut self.chances[row * self.logits.len()..(row + 1) * self.logits.len()];
        chances.iter_mut().zip(&self.logits).for_each(|(chance, logit)| *chance = sigmoid(*logit));
    }

    fn new_sequence(&mut self) {
        self.features.new_sequence();
        self.begin();
    }

    fn worth(&self, row: usize, expert: usize, steps: usize) -> f32 {
        let Size { rows, experts, .. } = self.weights.size;
        let chances = &self.chances[(row * HORIZONS.len()) * experts + expert..];
        let wait = steps as f32 / rows as f32;
        let rate = |i: usize| {
            let chance = chances[i * experts] * self.weights.fade[i * rows + steps - 1];
            let horizon = HORIZONS[i];
            if horizon > 0.0 { chance / (horizon * (1.0 - chance)) } else { chance / wait }
        };
        (0..HORIZONS.len()).map(rate).fold(0.0, f32::max)
    }
}

fn add(to: &mut [f32], from: &[f32], by: f32) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += by * from);
}

fn dot(a: &[i16], b: &[i16]) -> i32 {
    a.iter().zip(b).map(|(a, b)| i32::from(*a) * i32::from(*b)).sum()
}
