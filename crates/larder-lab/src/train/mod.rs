//! Training of the weights of the eviction policy `learned` on traces.

mod crosslayer;
mod evaluate;
mod file;
mod flashmoe;
mod labels;
mod lanes;
mod learner;
mod near_duplicates;
mod split;
#[cfg(test)]
mod tests;

use candle_core::{Tensor, Var};
use larder_core::Trace;
use larder_policy::eviction::learned::{Arrays, DistanceScale, FORMAT, MoeSize, VERSION};

use crate::{LabError, Requests, Rng};
use labels::Sequence;
use lanes::Lanes;
use learner::Learner;

pub use evaluate::{Baseline, EvictorEvaluation, evaluate_evictor};
pub use file::{evictor_metadata, read_evictor, write_evictor};
pub use near_duplicates::near_duplicates;
pub use split::{Split, subset};

/// Passes of each sequence in a batch.
const PASSES: usize = 32;

/// The network to train.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NetworkKind {
    /// larder's own: predicts from the recent choices of all layers.
    Crosslayer,
    /// The FlashMoE paper's: predicts from recency and frequency within a layer.
    Flashmoe,
}

/// Settings of a training run.
#[derive(Clone, Debug)]
pub struct TrainingConfig {
    /// The network.
    pub network: NetworkKind,
    /// Seed; equal seeds give equal weights on the same kind of machine.
    pub seed: u64,
    /// Limit of epochs.
    pub epochs: usize,
    /// Early stopping: epochs without a smaller validation loss after which training ends.
    pub patience: usize,
    /// Initial learning rate.
    pub learning_rate: f64,
    /// Whether the learning rate decays by a cosine schedule, after a short warm-up.
    pub cosine_decay: bool,
    /// Sequences per batch.
    pub lanes: usize,
    /// Hidden units, for `crosslayer`.
    pub hidden: usize,
    /// The scale of predicted distances, for `flashmoe`.
    pub distance: DistanceScale,
    /// Slots per layer of the simulated Belady cache whose residents have targets, for `flashmoe`; `None` if all
    /// experts have.
    pub belady_slots: Option<usize>,
}

impl TrainingConfig {
    /// The settings that worked best for each network.
    pub fn new(network: NetworkKind) -> Self {
        let base = TrainingConfig {
            network,
            seed: 0,
            epochs: 8,
            patience: 8,
            learning_rate: 3e-3,
            cosine_decay: true,
            lanes: 12,
            hidden: 128,
            distance: DistanceScale::Decay(8.0),
            belady_slots: None,
        };
        match network {
            NetworkKind::Crosslayer => base,
            NetworkKind::Flashmoe => TrainingConfig { epochs: 10, patience: 10, ..base },
        }
    }
}

/// Progress of a training run.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum TrainingProgress {
    /// Passes done in this epoch, and about how many it has.
    Passes(usize, usize),
    /// The end of an epoch.
    Epoch {
        /// Number of the epoch, from 1.
        epoch: usize,
        /// Mean training loss.
        train: f64,
        /// Mean validation loss, if there are validation sequences.
        validation: Option<f64>,
    },
}

/// Trains on the training sequences of a trace. With validation sequences, the weights of the epoch with the smallest
/// validation loss are kept, else those of the last epoch.
pub fn train(
    trace: &Trace,
    split: &Split,
    config: &TrainingConfig,
    progress: &mut dyn FnMut(TrainingProgress),
) -> Result<Arrays, LabError> {
    if split.train.is_empty() {
        return Err(LabError::InvalidInput("there are no sequences to train on".into()));
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
            let net = flashmoe::Flashmoe::new(size, config.distance, config.seed).map_err(failed)?;
            fit(net, size, &train, &validation, config, progress).map_err(failed)?
        }
    };
    let mut set = |key: &str, value: String| arrays.meta.insert(key.to_owned(), value);
    set("format", FORMAT.to_owned());
    set("version", VERSION.to_owned());
    set("layers", size.rows.to_string());
    set("experts", size.experts.to_string());
    set("top_k", size.top_k.to_string());
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
        let mut lanes =
            Lanes::new(size, train, (config.lanes, config.belady_slots), Some(&mut rng), || learner.new_input());
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
        if best.as_ref().is_none_or(|(smallest, _)| loss < *smallest) {
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

/// The learning rate as a share of the initial one: a linear warm-up and a cosine decay.
fn learning_rate_scale(config: &TrainingConfig, done: usize, all: usize) -> f64 {
    if !config.cosine_decay {
        return 1.0;
    }
    let share = done as f64 / all.max(1) as f64;
    let warm_up = (share * 16.0 + 0.02).min(1.0);
    warm_up * (0.51 + 0.49 * (std::f64::consts::PI * share.min(1.0)).cos())
}

fn mean_loss<L: Learner>(
    learner: &mut L,
    size: MoeSize,
    sequences: &[Sequence],
    config: &TrainingConfig,
) -> candle_core::Result<f64> {
    let mut lanes = Lanes::new(size, sequences, (config.lanes, config.belady_slots), None, || learner.new_input());
    let (mut sum, mut all) = (0.0, 0);
    while let Some(batch) = lanes.next(PASSES) {
        let count = batch.passes_left.iter().flatten().count();
        sum += learner.loss(&batch)? * count as f64;
        all += count;
    }
    Ok(sum / all.max(1) as f64)
}
