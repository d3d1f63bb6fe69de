//! Counts of a loaded model.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::{EngineExperts, InferenceEngine};
use larder_engine::LossMeter;
use serde::{Deserialize, Serialize};

/// Traffic of the expert cache and loss of the output, since the model was loaded. Fields of the cache are 0 if all
/// experts are resident.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ModelStats {
    /// Slots of the expert cache that are in use.
    pub slots: usize,
    /// Wanted experts that were resident.
    pub hits: u64,
    /// Wanted experts that were being read already.
    pub in_flight_hits: u64,
    /// Wanted experts that had to be read.
    pub misses: u64,
    /// Experts that were evicted.
    pub evictions: u64,
    /// Share of wanted experts that were resident.
    pub hit_rate: f64,
    /// Bytes of experts that were read.
    pub read_bytes: u64,
    /// Seconds in which computing waited for reads.
    pub wait_seconds: f64,
    /// Seconds spent computing experts.
    pub compute_seconds: f64,
    /// Tokens that were decoded twice, to measure the loss of a lossy routing strategy.
    pub measured_tokens: u64,
    /// Mean KL divergence of the output at these tokens, in nats; 0 without one.
    pub output_kl: f64,
}

impl ModelStats {
    /// The counts of an engine.
    pub fn of(engine: &InferenceEngine) -> Self {
        ModelStats::of_parts(&engine.experts, engine.loss_meter())
    }

    fn of_parts(experts: &EngineExperts, meter: &LossMeter) -> Self {
        let (traffic, loss) = (experts.traffic().unwrap_or_default(), meter.loss());
        ModelStats {
            slots: experts.slots(),
            hits: traffic.counts.hits,
            in_flight_hits: traffic.counts.in_flight_hits,
            misses: traffic.counts.misses,
            evictions: traffic.counts.evictions,
            hit_rate: traffic.hit_rate(),
            read_bytes: traffic.bytes(),
            wait_seconds: traffic.waited.as_secs_f64(),
            compute_seconds: traffic.computed.as_secs_f64(),
            measured_tokens: loss.measured,
            output_kl: loss.mean_kl().unwrap_or_default(),
        }
    }
}

/// The counts of a model as of its last step, which can be read while it generates.
#[derive(Clone)]
pub struct SharedStats {
    last: Arc<Mutex<ModelStats>>,
    meter: LossMeter,
}

impl SharedStats {
    pub(crate) fn new(engine: &InferenceEngine) -> Self {
        SharedStats { last: Arc::new(Mutex::new(ModelStats::of(engine))), meter: engine.loss_meter().clone() }
    }

    /// The counts.
    pub fn get(&self) -> ModelStats {
        self.last.lock().clone()
    }

    pub(crate) fn update(&self, experts: &EngineExperts) {
        *self.last.lock() = ModelStats::of_parts(experts, &self.meter);
    }
}
