//! Starts a model as the options and the memory allow, and reports the plan before anything is loaded.

mod draft;
mod on_cpu;
mod on_gpu;
mod parts;
mod sight;

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use larder_cache::{CacheScope, pass_through_slots};
use larder_core::Gate;
use larder_engine::{
    ContextLimit, Drafting, Images, LossMeter, Recorder, Sequence, Session, SharedSource, Speculation,
};
use larder_model::{AllResident, ComputeContext, Decoder};
use larder_os::lock::{self, SlotAddresses};
use larder_os::nodes;
use larder_policy::eviction::PolicyInputs;
use larder_store::reader::{Arena, TouchPace};
use serde_json::Value;

use self::on_cpu::{StreamingParts, cache_shape, streaming_parts};
use self::parts::EngineParts;
pub use self::parts::{OnGpu, require_store};
pub use self::sight::blindness;
use crate::experts::{EngineExperts, EnginePath, HotSetFile, policy_inputs, slot_sizes};
use crate::inputs::{self, expert_sizes, plan_inputs, tell_context};
use crate::machine::budget::{MemoryBudget, MemoryUse, PlannedMemory};
use crate::machine::gpu;
use crate::machine::power::PowerWatch;
use crate::notices::{Notice, Setting};
use crate::open::OpenModel;
use crate::options::{CacheSize, DeviceKind, Options, TraceOptions};

/// Draws the tokens whose loss is measured. It does not depend on the seed of sampling, so that texts of several seeds
/// are measured at the same places.
const MEASURE_SEED: u64 = 1;

/// A running model: a decoder with its experts.
pub struct InferenceEngine {
    /// The resident weights.
    pub decoder: Decoder,
    /// The path to the experts.
    pub experts: EngineExperts,
    /// The inputs that the eviction policy was made with.
    pub policy_inputs: PolicyInputs,
    /// The context of each sequence.
    pub context: ContextLimit,
    /// The most tokens of a step, by the memory plan: that of a prefill chunk.
    pub prefill_tokens: usize,
    /// Time that loading the resident weights took.
    pub load_time: Duration,
    /// The draft model, if there is one.
    draft: Option<SharedSource>,
    /// Slots in main memory that read from a store, by the memory plan; `None` if there are none or others as well.
    planned_slots: Option<(usize, CacheScope)>,
    /// The pictures that sequences of this engine may have.
    images: Images,
    compute: Arc<ComputeContext>,
    options: Options,
    meter: LossMeter,
    memory: PlannedMemory,
    /// Lets fewer threads compute on battery, if that is asked for.
    _power: Option<PowerWatch>,
    /// The memory plan and the reader, as JSON.
    pub plan: Value,
    /// The resident weights and the throughput of the GPU, if one computes.
    pub gpu: Option<OnGpu>,
}

impl InferenceEngine {
    /// Starts a model: decides the memory plan and sends it as a notice, allocates the slots, loads the resident
    /// weights.
    pub fn start(model: &OpenModel, options: &Options) -> Result<Self> {
        check_elastic(options)?;
        options.compute.kernels.apply().context(Setting::Kernels)?;
        let draft = inputs::prepare(model, options)?;
        let policy_inputs = policy_inputs(&options.cache.eviction, model, options.cache.evictor.as_deref())?;
        model.store().iter().for_each(|store| store.set_check_reads(options.cache.check_reads));
        nodes::use_all().into_iter().for_each(|nodes| model.notices().send(Notice::MemoryNodes(nodes)));
        // The GPU is opened first, because its driver allocates memory.
        let gpu = gpu::open(&options.device)?;
        tell_context(model, options);
        let planned = plan_inputs(model, options)?;
        let kept_images = planned.vision.map_or(0, |vision| usize::try_from(vision.kept_bytes).unwrap_or(usize::MAX));
        let parts = match gpu {
            Some(gpu) => on_gpu::assemble(model, options, planned, &policy_inputs, gpu)?,
            None => on_cpu::assemble(model, options, &planned, &policy_inputs)?,
        };
        let EngineParts {
            mut path,
            slots,
            elastic,
            compute,
            mut report,
            mut memory,
            context,
            prefill_tokens,
            planned_slots,
            gpu,
            runs_ahead,
        } = parts;
        [
            MemoryUse::KvCache,
            MemoryUse::Workspaces,
            MemoryUse::ResidentWeights,
            MemoryUse::DraftModel,
            MemoryUse::Images,
        ]
        .into_iter()
        .try_for_each(|part| memory.take(part))?;
        let start = Instant::now();
        let decoder = model.decoder(&compute)?;
        if runs_ahead {
            decoder.place_embedding()?;
        }
        let load_time = start.elapsed();
        if options.speculation == Speculation::Mtp && !decoder.predicts() {
            bail!("{} mtp needs a model that was opened with its layer for multi-token prediction", Setting::Speculate);
        }
        let draft =
            draft.map(|draft| draft::load(draft, options, context.tokens, decoder.vocab(), &compute)).transpose()?;
        // Not before: loading would wait for the thread at every allocation.
        slots.iter().for_each(|slots| touch_slots(slots, path.as_ref()));
        path.prepare(&decoder, prefill_tokens)?;
        let routing = options.routing.to_string();
        let recorder = |to: &TraceOptions| {
            let recorder = new_recorder(to.logits, &decoder, &routing)?;
            anyhow::Ok((to.path.clone(), recorder))
        };
        let recorder = options.trace.as_ref().map(recorder).transpose()?;
        let mut experts = EngineExperts::new(path, recorder, model.notices().clone());
        experts.set_routing_strategy(&options.routing, &decoder, model)?;
        elastic.into_iter().for_each(|elastic| experts.set_elastic(elastic));
        if let Some(store) = model.store().filter(|_| options.cache.hot_set && options.routing.is_lossless()) {
            let file = HotSetFile::open(store, model.cache_folder(), model.notices());
            experts.keep_hot_set(file, decoder.geometry().experts);
        }
        report["routing"] = options.routing.to_string().into();
        let on_battery = options.compute.on_battery.as_ref();
        let power = on_battery.map(|battery| PowerWatch::start(battery, &compute.pool, model.notices())).transpose()?;
        if options.compute.mlock {
            let locked = experts.lock_memory(slots.as_ref());
            model.notices().send(Notice::Locked(locked));
        }
        let meter = LossMeter::new(options.measure_every, MEASURE_SEED);
        Ok(InferenceEngine {
            decoder,
            experts,
            policy_inputs,
            context,
            prefill_tokens,
            load_time,
            draft,
            planned_slots,
            images: Images::new(kept_images),
            compute,
            options: options.clone(),
            meter,
            memory,
            _power: power,
            plan: report,
            gpu,
        })
    }

    /// The memory ceiling that the plan printed, and what is taken of it.
    pub fn memory(&self) -> &MemoryBudget {
        self.memory.budget()
    }

    /// The numbers of pictures, and what the tower made of recent ones.
    pub fn images(&self) -> &Images {
        &self.images
    }

    /// How tokens are to be drafted, by the options.
    pub fn drafting(&self) -> Drafting {
        let mtp = self.decoder.predicts();
        Drafting { speculation: self.options.speculation, model: self.draft.clone(), mtp }
    }

    /// A session with an empty sequence.
    pub fn session(&mut self) -> Session<'_, EngineExperts> {
        self.experts.new_sequence();
        let session = Session::new(&self.decoder, &mut self.experts, self.context.tokens);
        session.with_prefill_tokens(self.prefill_tokens).with_meter(self.meter.clone())
    }

    /// A session that goes on with a sequence of this engine.
    pub fn resume(&mut self, sequence: Sequence) -> Session<'_, EngineExperts> {
        let session = Session::resume(&self.decoder, &mut self.experts, sequence);
        session.with_prefill_tokens(self.prefill_tokens).with_meter(self.meter.clone())
    }

    /// A recorder of this engine's routing, for [`EngineExperts::record_with`].
    pub fn recorder(&self, logits: bool) -> Result<Recorder> {
        new_recorder(logits, &self.decoder, &self.options.routing.to_string())
    }

    /// Measures the loss of outputs under a lossy routing strategy, of all sessions of the engine.
    pub fn loss_meter(&self) -> &LossMeter {
        &self.meter
    }

    /// Replaces the cache by an empty one of `slots` per layer, which must be no more than planned. On the CPU only.
    pub fn empty_cache(&mut self, model: &OpenModel, slots: usize) -> Result<()> {
        let slots = match self.options.cache.scope {
            CacheScope::Layer => slots,
            CacheScope::Global => slots * self.decoder.geometry().moe_layers.len(),
        };
        self.replace_cache(model, slots, self.options.cache.scope).map(drop)
    }

    /// Replaces the cache by an empty one of the same size, in memory that was not touched yet, as at the start. False,
    /// and nothing is done, unless experts are read from a store into main memory alone.
    pub fn restart_cache(&mut self, model: &OpenModel) -> Result<bool> {
        let Some((slots, scope)) = self.planned_slots else { return Ok(false) };
        let addresses = self.replace_cache(model, slots, scope)?;
        self.experts.set_routing_strategy(&self.options.routing, &self.decoder, model)?;
        if self.options.compute.mlock {
            let in_use = vec![addresses.clone()];
            model.notices().send(Notice::Locked(lock::lock(&SlotAddresses { all: addresses, in_use }, false)));
        }
        Ok(true)
    }

    /// Replaces the cache by an empty one, whose memory is touched from now on, and returns the address range of its
    /// slots.
    fn replace_cache(&mut self, model: &OpenModel, slots: usize, scope: CacheScope) -> Result<Range<usize>> {
        let store = require_store(model)?;
        // The old slots are freed before new ones are allocated.
        self.experts.set_path(Box::new(AllResident::new(0, self.compute.clone())));
        let shape = cache_shape(store, slots, scope, &self.options);
        let sizes = slot_sizes(store, &shape, pass_through_slots(&shape));
        self.memory.replace(MemoryUse::Experts, sizes.iter().map(|bytes| *bytes as u64).sum())?;
        let StreamingParts { experts, slots, .. } =
            streaming_parts(store, slots, scope, &self.compute, &self.options, &self.policy_inputs)?;
        self.experts.set_path(Box::new(experts));
        slots.touch_ahead(TouchPace::Background);
        Ok(slots.range())
    }

    /// Replaces the path to the experts by all experts in memory, regardless of the plan.
    pub fn all_resident(&mut self, model: &OpenModel) -> Result<()> {
        // The slots are freed before memory for all experts is allocated.
        self.experts.set_path(Box::new(AllResident::new(0, self.compute.clone())));
        let bytes = model.blueprint.geometry.experts as u64 * expert_sizes(model)?.one_per_layer();
        self.memory.replace_beyond_plan(MemoryUse::Experts, bytes)?;
        self.experts.set_path(Box::new(model.all_resident(&self.compute)?));
        Ok(())
    }
}

/// Refuses a number of slots that follows the available memory where slots are not in main memory alone.
fn check_elastic(options: &Options) -> Result<()> {
    if options.cache.size == CacheSize::Auto && (options.device.kind != DeviceKind::Cpu || options.uses_edge()) {
        bail!(
            "{} auto is for experts in main memory alone; give a size together with {} or {}",
            Setting::Cache,
            Setting::Device,
            Setting::Edge
        );
    }
    Ok(())
}

/// Has the memory of all slots in use touched ahead of the reads.
fn touch_slots(slots: &Arena, path: &dyn EnginePath) {
    match path.streaming() {
        Some(streaming) => {
            let in_use = streaming.memory_in_use();
            slots.touch_ahead_if(TouchPace::Background, |slot| in_use[slot]);
        }
        None => slots.touch_ahead(TouchPace::Background),
    }
}

/// A recorder of a trace, with the strategy and, for router logits, the gates as metadata.
fn new_recorder(logits: bool, decoder: &Decoder, routing: &str) -> Result<Recorder> {
    let mut recorder = Recorder::of_decoder(decoder, logits)?;
    recorder.set_meta("routing", routing.to_owned());
    if logits {
        let gates: Vec<&Gate> = decoder.gates().collect();
        recorder.set_meta(larder_core::GATES_KEY, serde_json::to_string(&gates)?);
    }
    Ok(recorder)
}
