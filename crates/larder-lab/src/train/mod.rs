//! From traces to the weights of the policy `learned`.

mod crosslayer;
mod evaluate;
mod file;
mod flashmoe;
mod labels;
mod lanes;
mod learner;
mod split;
#[cfg(test)]
mod tests;

use candle_core::{Tensor, Var};
use larder_core::Trace;
use larder_policy::eviction::learned::{Arrays, FORMAT, MoeSize, VERSION};

use crate::{LabError, Requests, Rng};
use labels::Sequence;
use lanes::Lanes;
use learner::Learner;

pub use evaluate::{Baseline, EvictorEvaluation, evaluate_evictor};
pub use file::{evictor_metadata, read_evictor, write_evictor};
pub use split::{Split, subset};

/// Passes of each sequence in a batch.
const PASSES: usize = 32;

/// A kind of network.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NetworkKind {
    /// Ours: from the recent choices of all layers.
    Crosslayer,
    /// The FlashMoE paper's: from recency and frequency in each layer.
    Flashmoe,
}

/// How to train.
#[derive(Clone, Debug)]
pub struct TrainingConfig {
    /// Which network.
    pub network: NetworkKind,
    /// Equal seeds give equal weights on one kind of machine.
    pub seed: u64,
    /// How often every sequence is seen, at most.
    pub epochs: usize,
    /// Epochs without a better result on the sequences for choosing after which training ends.
    pub patience: usize,
    /// The size of the first steps.
    pub learning_rate: f64,
    /// Whether steps get smaller until the end.
    pub cosine_decay: bool,
    /// Sequences in a batch.
    pub lanes: usize,
    /// Units between the layers, for `crosslayer`.
    pub hidden: usize,
    /// Slots per layer that Belady's targets are for, for `flashmoe`.
    pub slots: usize,
}

impl TrainingConfig {
    /// What served each form best.
    pub fn new(network: NetworkKind, experts: usize) -> Self {
        let base = TrainingConfig {
            network,
            seed: 0,
            epochs: 8,
            patience: 8,
            learning_rate: 3e-3,
            cosine_decay: true,
            lanes: 12,
            hidden: 128,
            slots: (experts / 4).max(1),
        };
        match network {
            NetworkKind::Crosslayer => base,
            NetworkKind::Flashmoe => {
                TrainingConfig { epochs: 200, patience: 10, learning_rate: 1e-3, cosine_decay: false, ..base }
            }
        }
    }
}

/// How training goes.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum TrainingProgress {
    /// That many passes of this epoch are done, of about so many in all.
    Passes(usize, usize),
    /// An epoch is over.
    Epoch {
        /// Counted from 1.
        epoch: usize,
        /// The mean loss on the sequences to train on.
        train: f64,
        /// The same on the sequences to choose by, if there are any.
        validation: Option<f64>,
    },
}

/// Trains on some sequences of a trace and, where there are others to choose by, keeps what did best on those.
pub fn train(
    trace: &Trace,
    split: &Split,
    config: &TrainingConfig,
    progress: &mut dyn FnMut(TrainingProgress),
) -> Result<Arrays, LabError> {
    if split.train.is_empty() {
        return Err(LabError::InvalidInput("there is no sequence to train on".into()));
    }
    let size = MoeSize { rows: trace.rows, experts: trace.experts, top_k: trace.top_k };
    let requests = Requests::by_sequence(trace);
    let pick = |of: &[usize]| -> Vec<Sequence> { of.iter().map(|i| Sequence::new(&requests[*i])).collect() };
    let (train, validation) = (pick(&split.train), pick(&split.validation));
    let popularity = labels::popularity(size, &train);
    let mut arrays = match config.network {
        NetworkKind::Crosslayer => {
            let net = crosslayer::Crosslayer::new(size, config.hidden, popularity, config.seed).map_err(failed)?;
            fit(net, size, &train, &validation, config, progress).map_err(failed)?
        }
        NetworkKind::Flashmoe => {
            let net = flashmoe::Flashmoe::new(size, config.seed).map_err(failed)?;
            fit(net, size, &train, &validation, config, progress).map_err(failed)?
        }
    };
    let mut say = |key: &str, value: String| arrays.meta.insert(key.to_owned(), value);
    say("format", FORMAT.to_owned());
    say("version", VERSION.to_owned());
    say("layers", size.rows.to_string());
    say("experts", size.experts.to_string());
    say("top_k", size.top_k.to_string());
    Ok(arrays)
}

fn failed(error: candle_core::Error) -> LabError {
    LabError::InvalidInput(format!("training failed: {error}"))
}

fn fit<L: Learner>(
    mut learner: L,
    size: MoeSize,
    train: &[Sequence],
    validation: &[Sequence],
    config: &TrainingConfig,
    progress: &mut dyn FnMut(TrainingProgress),
) -> candle_core::Result<Arrays> {
    let mut rng = Rng::new(config.seed);
    let passes: usize = train.iter().map(Sequence::passes).sum();
    let mut done = 0;
    let mut best: Option<(f64, Vec<Tensor>)> = None;
    let mut idle = 0;
    for epoch in 1..=config.epochs {
        let mut lanes = Lanes::new(size, train, (config.lanes, config.slots), Some(&mut rng), || learner.new_input());
        let (mut sum, mut here) = (0.0, 0);
        while let Some(batch) = lanes.next(PASSES) {
            let count = batch.passes_left.iter().flatten().count();
            let rate = config.learning_rate * learning_rate_scale(config, done, passes * config.epochs);
            sum += learner.train_step(&batch, rate)? * count as f64;
            done += count;
            here += count;
            progress(TrainingProgress::Passes(here, passes));
        }
        let chosen =
            if validation.is_empty() { None } else { Some(mean_loss(&mut learner, size, validation, config)?) };
        progress(TrainingProgress::Epoch { epoch, train: sum / here.max(1) as f64, validation: chosen });
        let Some(loss) = chosen else { continue };
        if best.as_ref().is_none_or(|(least, _)| loss < *least) {
            let copy = |variable: &Var| variable.as_tensor().copy();
            best = Some((loss, learner.variables().iter().map(copy).collect::<candle_core::Result<_>>()?));
            idle = 0;
        } else {
            idle += 1;
            if idle >= config.patience {
                break;
            }
        }
    }
    for (variable, kept) in learner.variables().iter().zip(best.map(|(_, kept)| kept).unwrap_or_default()) {
        variable.set(&kept)?;
    }
    learner.arrays()
}

/// How large a step is, as a share of the first ones: it grows over the first of them, and shrinks to the end.
fn learning_rate_scale(config: &TrainingConfig, done: usize, all: usize) -> f64 {
    if !config.cosine_decay {
        return 1.0;
    }
    let share = done as f64 / all.max(1) as f64;
    let warm = (share * 16.0 + 0.02).min(1.0);
    warm * (0.51 + 0.49 * (std::f64::consts::PI * share.min(1.0)).cos())
}

fn mean_loss<L: Learner>(
    learner: &mut L,
    size: MoeSize,
    sequences: &[Sequence],
    config: &TrainingConfig,
) -> candle_core::Result<f64> {
    let mut lanes = Lanes::new(size, sequences, (config.lanes, config.slots), None, || learner.new_input());
    let (mut sum, mut all) = (0.0, 0);
    while let Some(batch) = lanes.next(PASSES) {
        let count = batch.passes_left.iter().flatten().count();
        sum += learner.loss(&batch)? * count as f64;
        all += count;
    }
    Ok(sum / all.max(1) as f64)
}
