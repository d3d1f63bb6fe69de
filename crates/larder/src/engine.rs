//! Starts a model as the flags and the memory allow, and prints the plan before anything is loaded.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use larder_cache::{Cache, CacheScope};
use larder_core::Gate;
use larder_engine::{
    Calibration, EVICTOR_BYTES_MAX, EVICTOR_FILE, PREFILL_CHUNK, Recorder, Routing, Session, StreamingPath,
    evictor_from_bytes,
};
use larder_model::{AllResident, ComputeContext, Decoder, KvFormat};
use larder_policy::eviction::{CacheShape, EvictionSpec, PolicyInputs};
use larder_policy::routing::RoutingSpec;
use larder_store::Store;
use larder_store::reader::check_reader;
use serde_json::Value;

use crate::cli::EngineFlags;
use crate::experts::{AnyExpertPath, EngineExperts};
use crate::open::OpenModel;
use crate::plan::{MemoryPlan, PlanInputs, decide};
use crate::slots::Slots;
use crate::tiers::OnGpu;
use crate::{gpu, memory, mlock, tiers};

/// A running model: a decoder with its experts.
pub struct InferenceEngine {
    /// The resident weights.
    pub decoder: Decoder,
    /// The path to the experts.
    pub experts: EngineExperts,
    /// The inputs that the eviction policy was made with.
    pub policy_inputs: PolicyInputs,
    compute: Arc<ComputeContext>,
    context: usize,
    /// The memory plan and the reader, as JSON.
    pub plan: Value,
    /// The resident weights and the throughput of the GPU, if one computes.
    pub gpu: Option<OnGpu>,
}

impl InferenceEngine {
    /// Starts a model for one sequence of up to `context` tokens. Plan and reader are printed on standard error.
    pub fn start(model: &OpenModel, flags: &EngineFlags, context: usize) -> Result<Self> {
        InferenceEngine::start_for_sequences(model, flags, context, 1)
    }

    /// As [`Self::start`], for `sequences` sequences at the same time.
    pub fn start_for_sequences(
        model: &OpenModel,
        flags: &EngineFlags,
        context: usize,
        sequences: usize,
    ) -> Result<Self> {
        let policy_inputs = policy_inputs(&flags.cache.eviction, model, flags.cache.evictor.as_deref())?;
        check_reader(&flags.performance.reader)?;
        // The GPU is opened first, because its driver allocates memory.
        let gpu = gpu::open(&flags.place.device)?;
        let inputs = plan_inputs(model, flags, context)?;
        let chunk = inputs.context.saturating_mul(sequences).min(PREFILL_CHUNK);
        let inputs = PlanInputs { sequences, chunk, ..inputs };
        let (context, chunk) = (inputs.context, inputs.chunk);
        let parts = match gpu {
            Some(gpu) => tiers::assemble(model, flags, inputs, &policy_inputs, gpu)?,
            None => assemble(model, flags, &inputs, &policy_inputs)?,
        };
        let EngineParts { path, slots, compute, mut report, gpu } = parts;
        let decoder = model.decoder(&compute)?;
        let recorder = flags.record.trace.as_ref().map(|to| new_recorder(to, &decoder, flags)).transpose()?;
        let mut experts = EngineExperts::new(path, recorder);
        experts.prepare(&decoder, chunk)?;
        experts.set_routing_strategy(&flags.routing.strategy, &decoder, model)?;
        report["routing"] = flags.routing.strategy.to_string().into();
        if flags.performance.mlock {
            eprintln!("{}", mlock::lock(slots).describe());
        }
        Ok(InferenceEngine { decoder, experts, policy_inputs, compute, context, plan: report, gpu })
    }

    /// A session with an empty sequence.
    pub fn session(&mut self) -> Session<'_, EngineExperts> {
        self.experts.new_sequence();
        Session::new(&self.decoder, &mut self.experts, self.context)
    }

    /// Replaces the cache by an empty one of `slots` per layer, which must be no more than planned. On the CPU only.
    pub fn empty_cache(&mut self, model: &OpenModel, flags: &EngineFlags, slots: usize) -> Result<()> {
        let store = require_store(model)?;
        let scope = flags.cache.scope.into();
        let slots = match scope {
            CacheScope::Layer => slots,
            CacheScope::Global => slots * self.decoder.geometry().moe_layers.len(),
        };
        // The old slots are freed before new ones are allocated.
        self.experts.set_path(AnyExpertPath::AllResident(Box::new(AllResident::new(0, self.compute.clone()))));
        let StreamingParts { experts: local, .. } =
            streaming_parts(store, slots, scope, &self.compute, flags, &self.policy_inputs)?;
        self.experts.set_path(AnyExpertPath::Streaming(Box::new(local)));
        Ok(())
    }

    /// Replaces the path to the experts by all experts in memory, regardless of the plan.
    pub fn all_resident(&mut self, model: &OpenModel) -> Result<()> {
        // The slots are freed before memory for all experts is allocated.
        self.experts.set_path(AnyExpertPath::AllResident(Box::new(AllResident::new(0, self.compute.clone()))));
        self.experts.set_path(AnyExpertPath::AllResident(Box::new(model.all_resident(&self.compute)?)));
        Ok(())
    }
}

/// The parts of an engine that exist before the resident weights are loaded.
pub struct EngineParts {
    /// The path to the experts.
    pub path: AnyExpertPath,
    /// Address range of its slots in main memory.
    pub slots: Range<usize>,
    /// Threads and devices that compute.
    pub compute: Arc<ComputeContext>,
    /// The memory plan and the reader, as JSON.
    pub report: Value,
    /// The resident weights and the throughput of the GPU, if one computes.
    pub gpu: Option<OnGpu>,
}

/// Assembles an engine on the CPU. Slots are allocated before the weights are read, so that a lack of memory shows early.
fn assemble(
    model: &OpenModel,
    flags: &EngineFlags,
    inputs: &PlanInputs,
    policy_inputs: &PolicyInputs,
) -> Result<EngineParts> {
    let plan = decide(inputs, flags)?;
    if matches!(plan, MemoryPlan::Slots { .. }) {
        require_store(model)?;
    }
    if let Some(store) = model.store().filter(|_| !flags.uses_edge()) {
        store.require_all()?;
    }
    eprintln!("{}", plan.describe(inputs));
    let compute = Arc::new(new_compute(flags, inputs)?);
    let mut report = plan.json(inputs);
    let (path, slots) = match (plan, model.store()) {
        (MemoryPlan::Slots { slots, scope }, Some(store)) => {
            let StreamingParts { experts, reader_note, slots } =
                streaming_parts(store, slots, scope, &compute, flags, policy_inputs)?;
            eprintln!("{reader_note}");
            report["reader"] = reader_note.into();
            (with_edge(experts, store, flags)?, slots)
        }
        // With a slot for every expert, the first token need not wait until all are loaded.
        (MemoryPlan::AllResident, Some(store)) if !flags.place.preload => {
            let all = inputs.blueprint.geometry.experts;
            let StreamingParts { experts, reader_note, slots } =
                streaming_parts(store, all, CacheScope::Layer, &compute, flags, policy_inputs)?;
            report["reader"] = reader_note.into();
            (with_edge(experts, store, flags)?, slots)
        }
        #[cfg(feature = "edge")]
        (_, None) if flags.uses_edge() => crate::edge::refuse_no_store(model)?,
        _ => (AnyExpertPath::AllResident(Box::new(model.all_resident(&compute)?)), 0..0),
    };
    Ok(EngineParts { path, slots, compute, report, gpu: None })
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

/// The compute threads, with the number formats of the flags.
pub fn new_compute(flags: &EngineFlags, inputs: &PlanInputs) -> Result<ComputeContext> {
    let compute = ComputeContext::new(flags.threads(), flags.performance.pin)
        .context("compute threads cannot be started; try fewer --threads")?;
    Ok(ComputeContext { exact: flags.performance.exact, kv_format: inputs.kv_format, ..compute })
}

/// The inputs of the memory plan on the CPU.
pub fn plan_inputs<'a>(model: &'a OpenModel, flags: &EngineFlags, context: usize) -> Result<PlanInputs<'a>> {
    let context = context.min(model.blueprint.context);
    Ok(PlanInputs {
        blueprint: &model.blueprint,
        resident_bytes: model.bytes()?.0,
        slot_bytes: slot_bytes(model)?,
        scratch_slots: flags.cache.scratch,
        context,
        sequences: 1,
        kv_format: kv_format_of(model, flags)?,
        chunk: context.min(PREFILL_CHUNK),
        process_bytes: memory::current().unwrap_or_default(),
        available_bytes: memory::available(),
        on_gpu: false,
    })
}

/// The format of the KV cache: f16 costs no quality beside quantised weights; with float weights it stays exact.
fn kv_format_of(model: &OpenModel, flags: &EngineFlags) -> Result<KvFormat> {
    let experts = model.experts()?;
    let mut layers = model.blueprint.geometry.moe_layers.iter();
    let quantised = layers.any(|l| !experts.as_dyn().layout(*l).gate.kind.is_float());
    let default = if quantised && !flags.performance.exact { KvFormat::F16 } else { KvFormat::F32 };
    Ok(flags.performance.kv.map_or(default, KvFormat::from))
}

/// Bytes of the largest expert.
pub fn slot_bytes(model: &OpenModel) -> Result<u64> {
    let experts = model.experts()?;
    let layouts = model.blueprint.geometry.moe_layers.iter().map(|l| experts.as_dyn().layout(*l));
    Ok(layouts.map(|l| l.bytes).max().unwrap_or_default() as u64)
}

/// A path through slots in main memory.
struct StreamingParts {
    experts: StreamingPath,
    /// The reader and how it reads, as text.
    reader_note: String,
    /// Address range of the slots.
    slots: Range<usize>,
}

fn streaming_parts(
    store: &Arc<Store>,
    slots: usize,
    scope: CacheScope,
    compute: &Arc<ComputeContext>,
    flags: &EngineFlags,
    policy_inputs: &PolicyInputs,
) -> Result<StreamingParts> {
    let shape =
        CacheShape { scratch: flags.cache.scratch, ..CacheShape::new(&store.manifest().geometry, slots, scope) };
    let policies = flags.cache.eviction.make(&shape, policy_inputs)?;
    let Slots { slots: memory, reader, reader_note, addresses } =
        Slots::new(store, shape.total_slots(), &flags.performance.reader)?;
    let geometry = &store.manifest().geometry;
    let cache = Cache::new(geometry, &shape, policies, memory, reader, Box::new(store.clone()));
    let experts = StreamingPath::new(Routing::default(), cache, compute.clone(), flags.cache.prefetch);
    Ok(StreamingParts { experts, reader_note, slots: addresses })
}

/// The path through slots, with edge workers if the flags name a topology.
fn with_edge(local: StreamingPath, store: &Arc<Store>, flags: &EngineFlags) -> Result<AnyExpertPath> {
    #[cfg(feature = "edge")]
    if let Some(topology) = &flags.place.edge.topology {
        return Ok(AnyExpertPath::Edge(Box::new(crate::edge::connect(local, store, topology, flags)?)));
    }
    let _ = (store, flags);
    Ok(AnyExpertPath::Streaming(Box::new(local)))
}

/// A recorder for `--trace`, with the strategy and, for router logits, the gates as metadata.
fn new_recorder(to: &Path, decoder: &Decoder, flags: &EngineFlags) -> Result<(PathBuf, Recorder)> {
    let mut recorder = Recorder::new(decoder.geometry(), flags.record.logits);
    recorder.set_meta("routing", flags.routing.strategy.to_string());
    if flags.record.logits {
        let gates: Vec<&Gate> = decoder.gates().collect();
        recorder.set_meta(larder_core::GATES_KEY, serde_json::to_string(&gates)?);
    }
    Ok((to.to_owned(), recorder))
}

/// The inputs of an eviction policy: trained weights for `learned`.
pub fn policy_inputs(eviction: &EvictionSpec, model: &OpenModel, evictor: Option<&Path>) -> Result<PolicyInputs> {
    if eviction.name() != "learned" {
        return Ok(PolicyInputs::default());
    }
    let own = model.source().path().join(EVICTOR_FILE);
    if evictor.is_none() && !own.exists() {
        bail!(
            "{}: not found, and --eviction learned needs trained weights; make them with `larder lab train` or name a file \
             with --evictor",
            own.display()
        );
    }
    let path = evictor.unwrap_or(&own);
    let evictor =
        evictor_from_bytes(&read_beside(path, EVICTOR_BYTES_MAX)?).map_err(|e| anyhow!("{} {e}", path.display()))?;
    Ok(PolicyInputs { evictor: Some(Arc::new(evictor)), ..PolicyInputs::default() })
}

/// Reads a regular file of at most `most` bytes.
fn read_beside(path: &Path, most: u64) -> Result<Vec<u8>> {
    let failed = || format!("{}: reading failed", path.display());
    let about = fs::metadata(path).with_context(failed)?;
    if !about.is_file() || about.len() > most {
        bail!("{} is too large, or not a regular file", path.display());
    }
    fs::read(path).with_context(failed)
}

/// The calibrated spread of each layer's router logits, if the strategy needs it.
pub fn deltas(spec: &RoutingSpec, model: &OpenModel) -> Result<Option<Vec<f32>>> {
    if !spec.needs_calibration() {
        return Ok(None);
    }
    let path = model.source().path().join(Calibration::FILE);
    if !path.exists() {
        let store = model.source().path().display();
        bail!("{}: not found; make it with `larder eval calibrate -m {store} TEXT`", path.display());
    }
    let blueprint = &model.blueprint;
    let found = read_beside(&path, Calibration::BYTES_MAX)?;
    let calibration = Calibration::from_bytes(&found, &blueprint.model_type, &blueprint.geometry)
        .map_err(|e| anyhow!("{} {e}", path.display()))?;
    Ok(Some(calibration.delta))
}
