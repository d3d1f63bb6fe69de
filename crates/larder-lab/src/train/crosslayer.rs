//! The network `crosslayer`: predicts each expert's next use from the recent choices of all layers.

use candle_core::{D, Device, Result, Tensor, Var};
use candle_nn::{AdamW, Optimizer, ParamsAdamW};
use larder_policy::eviction::learned::{
    Arrays, CROSSLAYER, FEATURES, Features, HEAD_HIDDEN, HORIZONS, MoeSize, SCALES,
};

use super::lanes::Batch;
use super::learner::{Learner, normal_init, transposed};
use crate::Rng;

const HORIZONS_LEN: usize = HORIZONS.len();
/// Dropout of hidden units in training.
const DROPOUT: f64 = 0.3;

/// The network with its optimizers.
pub(super) struct Crosslayer {
    size: MoeSize,
    hidden: usize,
    popularity: Vec<f32>,
    /// `[rows, SCALES · experts, hidden]`
    gather: Var,
    /// `[rows, 1, hidden]`
    gather_bias: Var,
    /// `[rows, hidden, experts · HORIZONS]`
    emit: Var,
    /// `[rows · experts, 1, HORIZONS]`
    emit_bias: Var,
    /// `[rows · experts, FEATURES, HORIZONS]`: weights of each expert's own past, added to the shared ones.
    own: Var,
    /// `[1, FEATURES, HORIZONS]`
    own_shared: Var,
    /// `[FEATURES + HORIZONS, HEAD_HIDDEN]`
    head: Var,
    /// `[1, HEAD_HIDDEN]`
    head_bias: Var,
    /// `[HEAD_HIDDEN, HORIZONS]`
    head_out: Var,
    /// `[rows, rows]`: masks. A row sees the current token's choices of rows up to itself, and the previous token's of
    /// later rows.
    present: Tensor,
    past: Tensor,
    optimizers: [AdamW; 2],
    rng: Rng,
    /// Target for each horizon, by the passes until the next use.
    targets: Vec<[f32; HORIZONS_LEN]>,
}

impl Crosslayer {
    pub fn new(size: MoeSize, hidden: usize, popularity: Vec<f32>, seed: u64) -> Result<Self> {
        let MoeSize { rows, experts, .. } = size;
        let mut rng = Rng::new(seed);
        let (inputs, outputs, cells) = (SCALES * experts, experts * HORIZONS_LEN, rows * experts);
        let bias: Vec<f32> = popularity.iter().flat_map(|p| HORIZONS.map(|horizon| prior_logit(*p, horizon))).collect();
        let gather = normal_init(&mut rng, &[rows, inputs, hidden], 0.05)?;
        let emit = normal_init(&mut rng, &[rows, hidden, outputs], 0.03)?;
        let own = normal_init(&mut rng, &[cells, FEATURES, HORIZONS_LEN], 0.0)?;
        let head = normal_init(&mut rng, &[FEATURES + HORIZONS_LEN, HEAD_HIDDEN], 0.3)?;
        let plain = [
            normal_init(&mut rng, &[rows, 1, hidden], 0.0)?,
            Var::from_vec(bias, (cells, 1, HORIZONS_LEN), &Device::Cpu)?,
            normal_init(&mut rng, &[1, FEATURES, HORIZONS_LEN], 0.0)?,
            normal_init(&mut rng, &[1, HEAD_HIDDEN], 0.0)?,
            normal_init(&mut rng, &[HEAD_HIDDEN, HORIZONS_LEN], 0.0)?,
        ];
        let decayed = AdamW::new(vec![gather.clone(), emit.clone(), own.clone()], params(1e-2))?;
        let others = AdamW::new([vec![head.clone()], plain.to_vec()].concat(), params(0.0))?;
        let [gather_bias, emit_bias, own_shared, head_bias, head_out] = plain;
        let triangle = |present: bool| {
            let cell = |i: usize| f32::from(u8::from((i % rows <= i / rows) == present));
            Tensor::from_vec((0..rows * rows).map(cell).collect::<Vec<_>>(), (rows, rows), &Device::Cpu)
        };
        Ok(Crosslayer {
            present: triangle(true)?,
            past: triangle(false)?,
            optimizers: [decayed, others],
            targets: (0..=super::labels::NEXT_USE_MAX)
                .map(|d| HORIZONS.map(|horizon| next_use_target(d, horizon)))
                .collect(),
            size,
            hidden,
            popularity,
            gather,
            gather_bias,
            emit,
            emit_bias,
            own,
            own_shared,
            head,
            head_bias,
            head_out,
            rng,
        })
    }

    /// `[rows · experts, lanes · passes, HORIZONS]`
    fn logits(&mut self, batch: &Batch, train: bool) -> Result<Tensor> {
        let MoeSize { rows, experts, .. } = self.size;
        let (lanes, passes, hidden) = (batch.lanes, batch.passes, self.hidden);
        let positions = lanes * passes;
        let seen = (rows, lanes, 1 + passes, FEATURES * experts);
        let seen = Tensor::from_slice(&batch.inputs, seen, &Device::Cpu)?;
        let choices = seen.narrow(3, 0, SCALES * experts)?.contiguous()?;
        let choices = choices.reshape((rows, lanes * (1 + passes), SCALES * experts))?;
        let gathered = choices.matmul(self.gather.as_tensor())?.reshape((rows, lanes, 1 + passes, hidden))?;
        let part = |from| gathered.narrow(2, from, passes)?.contiguous()?.reshape((rows, positions * hidden));
        let sum = (self.present.matmul(&part(1)?)? + self.past.matmul(&part(0)?)?)?;
        let sum = sum.reshape((rows, positions, hidden))?.broadcast_add(&self.gather_bias)?;
        let mut active = sum.silu()?;
        if train {
            active = (active * self.dropout(rows * positions * hidden)?.reshape((rows, positions, hidden))?)?;
        }
        let emitted = active.matmul(self.emit.as_tensor())?.reshape((rows, positions, experts, HORIZONS_LEN))?;
        let emitted =
            emitted.permute((0, 2, 1, 3))?.contiguous()?.reshape((rows * experts, positions, HORIZONS_LEN))?;
        let own = seen.narrow(2, 1, passes)?.contiguous()?.reshape((rows, positions, FEATURES, experts))?;
        let own = own.permute((0, 3, 1, 2))?.contiguous()?.reshape((rows * experts, positions, FEATURES))?;
        let by_own = own.matmul(&self.own.broadcast_add(&self.own_shared)?)?;
        let logits = (emitted + by_own)?.broadcast_add(&self.emit_bias)?;
        let inputs = Tensor::cat(&[&own, &logits], D::Minus1)?;
        let inputs = inputs.reshape((rows * experts * positions, FEATURES + HORIZONS_LEN))?;
        let units = inputs.matmul(self.head.as_tensor())?.broadcast_add(&self.head_bias)?.silu()?;
        logits + units.matmul(self.head_out.as_tensor())?.reshape((rows * experts, positions, HORIZONS_LEN))?
    }

    fn dropout(&mut self, count: usize) -> Result<Tensor> {
        let keep = 1.0 - DROPOUT;
        let (bar, scale) = ((keep * f64::from(u32::MAX)) as u32, keep.recip() as f32);
        let mut mask = Vec::with_capacity(count + 1);
        while mask.len() < count {
            let bits = self.rng.bits();
            mask.extend([bits as u32, (bits >> 32) as u32].map(|b| if b < bar { scale } else { 0.0 }));
        }
        Tensor::from_vec(
            {
                mask.truncate(count);
                mask
            },
            count,
            &Device::Cpu,
        )
    }

    /// Mean cross entropy against the targets, and its gradient with respect to the logits. Horizons that reach beyond
    /// the sequence's end have less weight.
    fn loss_and_gradient(&self, batch: &Batch, logits: &[f32]) -> (f64, Vec<f32>) {
        let MoeSize { rows, experts, .. } = self.size;
        let positions = batch.lanes * batch.passes;
        let weight = |left: &Option<u32>| {
            left.map_or([0.0; HORIZONS_LEN], |left| HORIZONS.map(|h| 1.0 - (-(left as f32) / h.max(0.2)).exp()))
        };
        let weights: Vec<_> = batch.passes_left.iter().map(weight).collect();
        let count = (rows * experts) as f32 * weights.iter().flatten().sum::<f32>().max(1e-3) / HORIZONS_LEN as f32;
        let mut loss = 0.0;
        let mut gradient = Vec::with_capacity(logits.len());
        for (at, logits) in logits.chunks(HORIZONS_LEN).enumerate() {
            let (row, expert, position) = (at / (experts * positions), at / positions % experts, at % positions);
            let targets = &self.targets[usize::from(batch.next_use[(row * positions + position) * experts + expert])];
            for ((x, y), w) in logits.iter().zip(targets).zip(&weights[position]) {
                let tail = (-x.abs()).exp();
                let p = if *x >= 0.0 { 1.0 / (1.0 + tail) } else { tail / (1.0 + tail) };
                loss += f64::from(w * (x.max(0.0) - x * y + tail.ln_1p()));
                gradient.push(w * (p - y) / count);
            }
        }
        (loss / f64::from(count) / HORIZONS_LEN as f64, gradient)
    }
}

impl Learner for Crosslayer {
    type Input = Features;

    fn new_input(&self) -> Features {
        Features::new(self.size, &self.popularity)
    }

    fn train_step(&mut self, batch: &Batch, rate: f64) -> Result<f64> {
        let logits = self.logits(batch, true)?;
        let (loss, gradient) = self.loss_and_gradient(batch, &logits.flatten_all()?.to_vec1()?);
        let gradient = Tensor::from_vec(gradient, logits.shape(), &Device::Cpu)?;
        let gradients = (logits * gradient)?.sum_all()?.backward()?;
        for optimizer in &mut self.optimizers {
            optimizer.set_learning_rate(rate);
            optimizer.step(&gradients)?;
        }
        Ok(loss)
    }

    fn loss(&mut self, batch: &Batch) -> Result<f64> {
        let logits = self.logits(batch, false)?.detach();
        Ok(self.loss_and_gradient(batch, &logits.flatten_all()?.to_vec1()?).0)
    }

    fn variables(&self) -> Vec<Var> {
        let Crosslayer { gather, gather_bias, emit, emit_bias, own, own_shared, .. } = self;
        let all = [gather, gather_bias, emit, emit_bias, own, own_shared, &self.head, &self.head_bias, &self.head_out];
        all.into_iter().cloned().collect()
    }

    fn arrays(&self) -> Result<Arrays> {
        let MoeSize { rows, experts, .. } = self.size;
        let (hidden, horizons) = (self.hidden, HORIZONS_LEN);
        let mut arrays = Arrays::default();
        let mut set = |key: &str, value: String| arrays.meta.insert(key.to_owned(), value);
        set("form", CROSSLAYER.to_owned());
        set("features", Features::hash());
        set("hidden", hidden.to_string());
        let numbers = |tensor: &Tensor| tensor.flatten_all()?.to_vec1::<f32>();
        arrays.put("popularity", &[rows, experts], self.popularity.clone());
        arrays.put_quantised("gather", &[rows, SCALES, experts, hidden], &numbers(&self.gather)?);
        arrays.put("gather_bias", &[rows, hidden], numbers(&self.gather_bias)?);
        let emit = self.emit.reshape((rows, hidden, experts, horizons))?.permute((0, 3, 2, 1))?;
        arrays.put_quantised("emit", &[rows, horizons, experts, hidden], &numbers(&emit)?);
        let bias = self.emit_bias.reshape((rows, experts, horizons))?.permute((0, 2, 1))?;
        arrays.put("emit_bias", &[rows, horizons, experts], numbers(&bias)?);
        let own = self.own.broadcast_add(&self.own_shared)?.reshape((rows, experts, FEATURES, horizons))?;
        arrays.put("own", &[rows, horizons, FEATURES, experts], numbers(&own.permute((0, 3, 2, 1))?)?);
        arrays.put("head", &[HEAD_HIDDEN, FEATURES + horizons], numbers(&transposed(&self.head)?)?);
        arrays.put("head_bias", &[HEAD_HIDDEN], numbers(&self.head_bias)?);
        arrays.put("head_out", &[horizons, HEAD_HIDDEN], numbers(&transposed(&self.head_out)?)?);
        Ok(arrays)
    }
}

fn params(weight_decay: f64) -> ParamsAdamW {
    ParamsAdamW { lr: 1e-3, beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay }
}

/// The target's logit for an expert that is requested with the same probability in each pass: the initial bias.
fn prior_logit(popularity: f32, horizon: f32) -> f32 {
    let rate = popularity.clamp(0.01, 0.95);
    let keep = if horizon > 0.0 { (-1.0 / horizon).exp() } else { 0.0 };
    let target = rate / (1.0 - keep * (1.0 - rate));
    (target / (1.0 - target)).ln()
}

fn next_use_target(passes: u16, horizon: f32) -> f32 {
    match passes {
        0 => 0.0,
        1 => 1.0,
        _ if horizon == 0.0 => 0.0,
        more => (-f32::from(more - 1) / horizon).exp(),
    }
}
