//! The parts of an engine that are the same with and without a GPU.

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use larder_cache::CacheScope;
use larder_engine::ContextLimit;
use larder_model::ComputeContext;
use larder_store::Store;
use larder_store::reader::Arena;
use serde_json::Value;

use crate::experts::{ElasticSlots, EnginePath};
use crate::machine::budget::PlannedMemory;
use crate::machine::gpu::GpuThroughput;
use crate::notices::Setting;
use crate::open::OpenModel;
use crate::options::Options;
use crate::plan::PlanInputs;

/// The resident weights on a GPU, and its throughput.
#[derive(Clone, Copy, Debug)]
pub struct OnGpu {
    /// Bytes of resident weights in VRAM.
    pub resident_bytes: u64,
    /// Measured before anything runs.
    pub throughput: GpuThroughput,
}

/// The parts of an engine that exist before the resident weights are loaded.
pub(super) struct EngineParts {
    /// The path to the experts.
    pub path: Box<dyn EnginePath>,
    /// The memory of its slots, if it has any.
    pub slots: Option<Arena>,
    /// What changes the number of slots in use, if that follows the available memory.
    pub elastic: Option<ElasticSlots>,
    /// Threads and devices that compute.
    pub compute: Arc<ComputeContext>,
    /// The memory plan and the reader, as JSON.
    pub report: Value,
    /// The budget, of which process and experts are taken.
    pub memory: PlannedMemory,
    /// The context of each sequence.
    pub context: ContextLimit,
    /// The most tokens of a step.
    pub prefill_tokens: usize,
    /// Slots in main memory that read from a store; `None` if there are none or others as well.
    pub planned_slots: Option<(usize, CacheScope)>,
    /// The resident weights and the throughput of the GPU, if one computes.
    pub gpu: Option<OnGpu>,
    /// Whether the GPU computes async steps: those that begin before their token is known.
    pub runs_ahead: bool,
}

/// The model's store; refuses a model that is not one, because its experts cannot be read one by one.
pub fn require_store(model: &OpenModel) -> Result<&Arc<Store>> {
    let Some(store) = model.store() else {
        let path = model.source().path().display();
        bail!(
            "{path}: is not a store, and experts can be read one by one from a store only; make one with `larder convert {path} \
             STORE`"
        )
    };
    Ok(store)
}

/// The compute threads, with the number formats of the options.
pub fn new_compute(options: &Options, inputs: &PlanInputs) -> Result<ComputeContext> {
    let compute = ComputeContext::new(options.compute.threads, options.compute.pin)
        .with_context(|| format!("compute threads cannot be started; try fewer {}", Setting::Threads))?;
    let kv_limit_bytes = Some(usize::try_from(inputs.kv_bytes()).unwrap_or(usize::MAX));
    let (kv_format, kv_checkpoints) = (inputs.kv_format, inputs.kv_checkpoints);
    Ok(ComputeContext { exact: options.compute.exact, kv_format, kv_limit_bytes, kv_checkpoints, ..compute })
}
