//! A model made ready to run: what the flags and the memory allow, said before anything is loaded.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use larder_cache::{Cache, CacheScope};
use larder_core::Gate;
use larder_engine::{PREFILL_CHUNK, Recorder, Routing, Session, StreamingPath};
use larder_lab::eval::Calibration;
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

/// A decoder with its experts.
pub struct InferenceEngine {
    /// The resident part.
    pub decoder: Decoder,
    /// The rest.
    pub experts: EngineExperts,
    /// What the eviction policy was given.
    pub policy_inputs: PolicyInputs,
    compute: Arc<ComputeContext>,
    context: usize,
    /// What was planned, and how experts are read.
    pub plan: Value,
    /// What a GPU has of it, if there is one.
    pub gpu: Option<OnGpu>,
}

impl InferenceEngine {
    /// Makes a model ready for sequences of `context` tokens; the plan and the reader are said on standard error.
    pub fn start(model: &OpenModel, flags: &EngineFlags, context: usize) -> Result<Self> {
        InferenceEngine::start_for_sequences(model, flags, context, 1)
    }

    /// The same for so many sequences at a time.
    pub fn start_for_sequences(
        model: &OpenModel,
        flags: &EngineFlags,
        context: usize,
        sequences: usize,
    ) -> Result<Self> {
        let policy_inputs = policy_inputs(&flags.eviction, model, flags.evictor.as_deref())?;
        check_reader(&flags.reader)?;
        // A GPU comes first, as its driver takes memory for itself.
        let gpu = gpu::open(&flags.device)?;
        let inputs = PlanInputs { sequences, ..plan_inputs(model, flags, context)? };
        let (context, chunk) = (inputs.context, inputs.chunk);
        let parts = match gpu {
            Some(gpu) => tiers::assemble(model, flags, inputs, &policy_inputs, gpu)?,
            None => assemble(model, flags, &inputs, &policy_inputs)?,
        };
        let EngineParts { path, slots, compute, mut report, gpu } = parts;
        let decoder = model.decoder(&compute)?;
        let recorder = flags.trace.as_ref().map(|to| new_recorder(to, &decoder, flags)).transpose()?;
        let mut experts = EngineExperts::new(path, recorder);
        experts.prepare(&decoder, chunk)?;
        experts.set_routing_strategy(&flags.routing, &decoder, model)?;
        report["routing"] = flags.routing.to_string().into();
        if flags.mlock {
            eprintln!("{}", mlock::lock(slots).describe());
        }
        Ok(InferenceEngine { decoder, experts, policy_inputs, compute, context, plan: report, gpu })
    }

    /// An empty sequence.
    pub fn session(&mut self) -> Session<'_, EngineExperts> {
        self.experts.new_sequence();
        Session::new(&self.decoder, &mut self.experts, self.context)
    }

    /// The same model with an empty cache of `slots` for each layer, which were no more than planned.
    pub fn empty_cache(&mut self, model: &OpenModel, flags: &EngineFlags, slots: usize) -> Result<()> {
        let Some(store) = model.store() else { bail!("{}: is no store", model.source().path().display()) };
        let scope = flags.cache_scope.into();
        let slots = match scope {
            CacheScope::Layer => slots,
            CacheScope::Global => slots * self.decoder.geometry().moe_layers.len(),
        };
        if flags.uses_edge() {
            bail!("--edge: what a cache of another size would do cannot be told where others compute experts");
        }
        if flags.device.is_gpu() {
            bail!("--device: what a cache of another size would do is told of memory alone; leave it out");
        }
        // The old slots go before there are new ones.
        self.experts.set_path(AnyExpertPath::AllResident(Box::new(AllResident::new(0, self.compute.clone()))));
        let StreamingParts { experts: local, .. } =
            streaming_parts(store, slots, scope, &self.compute, flags, &self.policy_inputs)?;
        self.experts.set_path(AnyExpertPath::Streaming(Box::new(local)));
        Ok(())
    }

    /// The same model with every expert in memory, whatever the plan was.
    pub fn all_resident(&mut self, model: &OpenModel) -> Result<()> {
        // The slots go before there is memory for all.
        self.experts.set_path(AnyExpertPath::AllResident(Box::new(AllResident::new(0, self.compute.clone()))));
        self.experts.set_path(AnyExpertPath::AllResident(Box::new(model.all_resident(&self.compute)?)));
        Ok(())
    }
}

/// A way to experts, before the resident weights are read.
pub struct EngineParts {
    /// The way.
    pub path: AnyExpertPath,
    /// The addresses of its slots in memory.
    pub slots: Range<usize>,
    /// Who computes products.
    pub compute: Arc<ComputeContext>,
    /// What was planned, and how experts are read.
    pub report: Value,
    /// What a GPU has of the model, if there is one.
    pub gpu: Option<OnGpu>,
}

/// On this processor. Slots come before weights: if there is no room for them, that is known before those are read.
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
        // With a slot for every expert the first token need not wait until all are read.
        (MemoryPlan::AllResident, Some(store)) if !flags.preload => {
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

/// The store, without which experts cannot be had one by one.
pub fn require_store(model: &OpenModel) -> Result<&Arc<Store>> {
    let Some(store) = model.store() else {
        let path = model.source().path().display();
        bail!("{path}: experts can be read one by one from a store only; make one with `larder convert {path} STORE`")
    };
    Ok(store)
}

/// Who computes.
pub fn new_compute(flags: &EngineFlags, inputs: &PlanInputs) -> Result<ComputeContext> {
    let compute = ComputeContext::new(flags.threads(), flags.pin).context("threads to compute on cannot be had")?;
    Ok(ComputeContext { exact: flags.exact, kv_format: inputs.kv_format, ..compute })
}

/// What there is to plan with.
pub fn plan_inputs<'a>(model: &'a OpenModel, flags: &EngineFlags, context: usize) -> Result<PlanInputs<'a>> {
    let context = context.min(model.blueprint.context);
    Ok(PlanInputs {
        blueprint: &model.blueprint,
        resident_bytes: model.bytes()?.0,
        slot_bytes: slot_bytes(model)?,
        scratch_slots: flags.cache_scratch,
        context,
        sequences: 1,
        kv_format: kv_format_of(model, flags)?,
        chunk: context.min(PREFILL_CHUNK),
        process_bytes: memory::current().unwrap_or_default(),
        available_bytes: memory::available(),
        on_gpu: false,
    })
}

/// What is computed with quantised weights loses nothing by rounded keys and values; floats stay exact.
fn kv_format_of(model: &OpenModel, flags: &EngineFlags) -> Result<KvFormat> {
    let experts = model.experts()?;
    let mut layers = model.blueprint.geometry.moe_layers.iter();
    let quantised = layers.any(|l| !experts.as_dyn().layout(*l).gate.kind.is_float());
    let usual = if quantised && !flags.exact { KvFormat::F16 } else { KvFormat::F32 };
    Ok(flags.kv.map_or(usual, KvFormat::from))
}

/// Bytes of the largest expert.
pub fn slot_bytes(model: &OpenModel) -> Result<u64> {
    let experts = model.experts()?;
    let layouts = model.blueprint.geometry.moe_layers.iter().map(|l| experts.as_dyn().layout(*l));
    Ok(layouts.map(|l| l.bytes).max().unwrap_or_default() as u64)
}

/// Experts through slots.
struct StreamingParts {
    experts: StreamingPath,
    /// How shards are read.
    reader_note: String,
    /// The addresses of the slots.
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
        CacheShape { scratch: flags.cache_scratch, ..CacheShape::new(&store.manifest().geometry, slots, scope) };
    let policies = flags.eviction.make(&shape, policy_inputs)?;
    let Slots { slots: memory, reader, reader_note, addresses } =
        Slots::new(store, shape.total_slots(), &flags.reader)?;
    let geometry = &store.manifest().geometry;
    let cache = Cache::new(geometry, &shape, policies, memory, reader, Box::new(store.clone()));
    let experts = StreamingPath::new(Routing::default(), cache, compute.clone(), flags.prefetch);
    Ok(StreamingParts { experts, reader_note, slots: addresses })
}

/// Experts through slots, with the help of others if there are any.
fn with_edge(local: StreamingPath, store: &Arc<Store>, flags: &EngineFlags) -> Result<AnyExpertPath> {
    #[cfg(feature = "edge")]
    if let Some(topology) = &flags.edge.topology {
        return Ok(AnyExpertPath::Edge(Box::new(crate::edge::connect(local, store, topology, flags)?)));
    }
    let _ = (store, flags);
    Ok(AnyExpertPath::Streaming(Box::new(local)))
}

/// Who writes down what is chosen, and how the model chooses.
fn new_recorder(to: &Path, decoder: &Decoder, flags: &EngineFlags) -> Result<(PathBuf, Recorder)> {
    let mut recorder = Recorder::new(decoder.geometry(), flags.trace_logits);
    recorder.set_meta("routing", flags.routing.to_string());
    if flags.trace_logits {
        let gates: Vec<&Gate> = decoder.gates().collect();
        recorder.set_meta(larder_lab::GATES_KEY, serde_json::to_string(&gates)?);
    }
    Ok((to.to_owned(), recorder))
}

/// The trained weights that a policy asks for.
pub fn policy_inputs(eviction: &EvictionSpec, model: &OpenModel, evictor: Option<&Path>) -> Result<PolicyInputs> {
    if eviction.name() != "learned" {
        return Ok(PolicyInputs::default());
    }
    let own = model.source().path().join("evictor.safetensors");
    if evictor.is_none() && !own.exists() {
        bail!(
            "{}: there are no trained weights for --eviction learned; make them with `larder lab train`, or name them \
             with --evictor",
            own.display()
        );
    }
    Ok(PolicyInputs {
        evictor: Some(Arc::new(larder_lab::read_evictor(evictor.unwrap_or(&own))?)),
        ..PolicyInputs::default()
    })
}

/// Where a store keeps the spread of its routers.
pub const CALIBRATION: &str = "calibration.json";

/// The calibrated spread of each layer's router, if the strategy wants it.
pub fn deltas(spec: &RoutingSpec, model: &OpenModel) -> Result<Option<Vec<f32>>> {
    if !spec.needs_calibration() {
        return Ok(None);
    }
    let path = model.source().path().join(CALIBRATION);
    if !path.exists() {
        let store = model.source().path().display();
        bail!("{}: is not there; `larder eval calibrate -m {store} TEXT` makes it", path.display());
    }
    let blueprint = &model.blueprint;
    Ok(Some(Calibration::read(&path, &blueprint.model_type, &blueprint.geometry)?.delta))
}
