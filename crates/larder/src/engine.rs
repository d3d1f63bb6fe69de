//! A model made ready to run: what the flags and the memory allow, said before anything is loaded.

use std::ops::Range;
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use larder_cache::{Cache, Scope};
use larder_core::Gate;
use larder_engine::{CHUNK, Recorder, Routing, Session, Streaming};
use larder_lab::eval::Calibration;
use larder_model::{AllResident, Compute, Decoder, Memory};
use larder_policy::eviction::{EvictionSpec, Help, Setting};
use larder_policy::routing::RoutingSpec;
use larder_store::Store;
use larder_store::reader::check_reader;
use serde_json::Value;

use crate::cli::EngineFlags;
use crate::experts::{Experts, Path};
use crate::open::Model;
use crate::plan::{Facts, Plan, decide};
use crate::slots::Slots;
use crate::tiers::OnGpu;
use crate::{gpu, lock, memory, tiers};

/// A decoder with its experts.
pub struct Engine {
    /// The resident part.
    pub decoder: Decoder,
    /// The rest.
    pub experts: Experts,
    /// What the eviction policy was given.
    pub help: Help,
    compute: Arc<Compute>,
    context: usize,
    /// What was planned, and how experts are read.
    pub plan: Value,
    /// What a GPU has of it, if there is one.
    pub gpu: Option<OnGpu>,
}

impl Engine {
    /// Makes a model ready for sequences of `context` tokens; the plan and the reader are said on standard error.
    pub fn start(model: &Model, flags: &EngineFlags, context: usize) -> Result<Self> {
        Engine::start_many(model, flags, context, 1)
    }

    /// The same for so many sequences at a time.
    pub fn start_many(model: &Model, flags: &EngineFlags, context: usize, sequences: usize) -> Result<Self> {
        let help = help(&flags.eviction, model, flags.evictor.as_deref())?;
        check_reader(&flags.reader)?;
        // A GPU comes first, as its driver takes memory for itself.
        let gpu = gpu::open(&flags.device)?;
        let facts = Facts { sequences, ..facts(model, flags, context)? };
        let (context, chunk) = (facts.context, facts.chunk);
        let ready = match gpu {
            Some(gpu) => tiers::ready(model, flags, facts, &help, gpu)?,
            None => ready(model, flags, &facts, &help)?,
        };
        let Ready { path, slots, compute, mut said, gpu } = ready;
        let decoder = model.decoder(&compute)?;
        let recorder = flags.trace.as_ref().map(|to| recorder(to, &decoder, flags)).transpose()?;
        let mut experts = Experts::new(path, recorder);
        experts.prepare(&decoder, chunk)?;
        experts.route_by(&flags.routing, &decoder, model)?;
        said["routing"] = flags.routing.to_string().into();
        if flags.mlock {
            eprintln!("{}", lock::lock(slots).sentence());
        }
        Ok(Engine { decoder, experts, help, compute, context, plan: said, gpu })
    }

    /// An empty sequence.
    pub fn session(&mut self) -> Session<'_, Experts> {
        self.experts.new_sequence();
        Session::new(&self.decoder, &mut self.experts, self.context)
    }

    /// The same model with an empty cache of `slots` for each layer, which were no more than planned.
    pub fn empty_cache(&mut self, model: &Model, flags: &EngineFlags, slots: usize) -> Result<()> {
        let Some(store) = model.store() else { bail!("{}: is no store", model.source().path().display()) };
        let scope = flags.cache_scope.into();
        let slots = match scope {
            Scope::Layer => slots,
            Scope::Global => slots * self.decoder.geometry().moe_layers.len(),
        };
        if flags.has_help() {
            bail!("--edge: what a cache of another size would do cannot be told where others compute experts");
        }
        if flags.device.is_gpu() {
            bail!("--device: what a cache of another size would do is told of memory alone; leave it out");
        }
        // The old slots go before there are new ones.
        self.experts.set_path(Path::AllResident(Box::new(AllResident::new(0, self.compute.clone()))));
        let Streamed { experts: local, .. } = stream(store, slots, scope, &self.compute, flags, &self.help)?;
        self.experts.set_path(Path::Streaming(Box::new(local)));
        Ok(())
    }

    /// The same model with every expert in memory, whatever the plan was.
    pub fn all_resident(&mut self, model: &Model) -> Result<()> {
        // The slots go before there is memory for all.
        self.experts.set_path(Path::AllResident(Box::new(AllResident::new(0, self.compute.clone()))));
        self.experts.set_path(Path::AllResident(Box::new(model.all_resident(&self.compute)?)));
        Ok(())
    }
}

/// A way to experts, before the resident weights are read.
pub struct Ready {
    /// The way.
    pub path: Path,
    /// The addresses of its slots in memory.
    pub slots: Range<usize>,
    /// Who computes products.
    pub compute: Arc<Compute>,
    /// What was planned, and how experts are read.
    pub said: Value,
    /// What a GPU has of the model, if there is one.
    pub gpu: Option<OnGpu>,
}

/// On this processor. Slots come before weights: if there is no room for them, that is known before those are read.
fn ready(model: &Model, flags: &EngineFlags, facts: &Facts, help: &Help) -> Result<Ready> {
    let plan = decide(facts, flags)?;
    if matches!(plan, Plan::Slots { .. }) {
        needs_store(model)?;
    }
    if let Some(store) = model.store().filter(|_| !flags.has_help()) {
        store.require_all()?;
    }
    eprintln!("{}", plan.sentences(facts));
    let compute = Arc::new(compute(flags, facts)?);
    let mut said = plan.json(facts);
    let (path, slots) = match (plan, model.store()) {
        (Plan::Slots { slots, scope }, Some(store)) => {
            let Streamed { experts, how, slots } = stream(store, slots, scope, &compute, flags, help)?;
            eprintln!("{how}");
            said["reader"] = how.into();
            (join(experts, store, flags)?, slots)
        }
        // With a slot for every expert the first token need not wait until all are read.
        (Plan::AllResident, Some(store)) if !flags.preload => {
            let all = facts.blueprint.geometry.experts;
            let Streamed { experts, how, slots } = stream(store, all, Scope::Layer, &compute, flags, help)?;
            said["reader"] = how.into();
            (join(experts, store, flags)?, slots)
        }
        #[cfg(feature = "edge")]
        (_, None) if flags.has_help() => crate::edge::no_store(model)?,
        _ => (Path::AllResident(Box::new(model.all_resident(&compute)?)), 0..0),
    };
    Ok(Ready { path, slots, compute, said, gpu: None })
}

/// The store, without which experts cannot be had one by one.
pub fn needs_store(model: &Model) -> Result<&Arc<Store>> {
    let Some(store) = model.store() else {
        let path = model.source().path().display();
        bail!("{path}: experts can be read one by one from a store only; make one with `larder convert {path} STORE`")
    };
    Ok(store)
}

/// Who computes.
pub fn compute(flags: &EngineFlags, facts: &Facts) -> Result<Compute> {
    let compute = Compute::new(flags.threads(), flags.pin).context("threads to compute on cannot be had")?;
    Ok(Compute { exact: flags.exact, memory: facts.memory, ..compute })
}

/// What there is to plan with.
pub fn facts<'a>(model: &'a Model, flags: &EngineFlags, context: usize) -> Result<Facts<'a>> {
    let context = context.min(model.blueprint.context);
    Ok(Facts {
        blueprint: &model.blueprint,
        resident: model.bytes()?.0,
        slot: slot_bytes(model)?,
        scratch_slots: flags.cache_scratch,
        context,
        sequences: 1,
        memory: memory_of(model, flags)?,
        chunk: context.min(CHUNK),
        process: memory::current().unwrap_or_default(),
        available: memory::available(),
        on_gpu: false,
    })
}

/// What is computed with quantised weights loses nothing by rounded keys and values; floats stay exact.
fn memory_of(model: &Model, flags: &EngineFlags) -> Result<Memory> {
    let experts = model.experts()?;
    let mut layers = model.blueprint.geometry.moe_layers.iter();
    let quantised = layers.any(|l| !experts.as_dyn().layout(*l).gate.kind.is_float());
    let usual = if quantised && !flags.exact { Memory::F16 } else { Memory::F32 };
    Ok(flags.kv.map_or(usual, Memory::from))
}

/// Bytes of the largest expert.
pub fn slot_bytes(model: &Model) -> Result<u64> {
    let experts = model.experts()?;
    let layouts = model.blueprint.geometry.moe_layers.iter().map(|l| experts.as_dyn().layout(*l));
    Ok(layouts.map(|l| l.bytes).max().unwrap_or_default() as u64)
}

/// Experts through slots.
struct Streamed {
    experts: Streaming,
    /// How shards are read.
    how: String,
    /// The addresses of the slots.
    slots: Range<usize>,
}

fn stream(
    store: &Arc<Store>,
    slots: usize,
    scope: Scope,
    compute: &Arc<Compute>,
    flags: &EngineFlags,
    help: &Help,
) -> Result<Streamed> {
    let setting = Setting { scratch: flags.cache_scratch, ..Setting::new(&store.manifest().geometry, slots, scope) };
    let policies = flags.eviction.make(&setting, help)?;
    let Slots { memory, reader, how, addresses } = Slots::new(store, setting.all_slots(), &flags.reader)?;
    let geometry = &store.manifest().geometry;
    let cache = Cache::new(geometry, &setting, policies, memory, reader, Box::new(store.clone()));
    let experts = Streaming::new(Routing::default(), cache, compute.clone(), flags.prefetch);
    Ok(Streamed { experts, how, slots: addresses })
}

/// Experts through slots, with the help of others if there are any.
fn join(local: Streaming, store: &Arc<Store>, flags: &EngineFlags) -> Result<Path> {
    #[cfg(feature = "edge")]
    if let Some(topology) = &flags.edge.topology {
        return Ok(Path::Edge(Box::new(crate::edge::join(local, store, topology, flags)?)));
    }
    let _ = (store, flags);
    Ok(Path::Streaming(Box::new(local)))
}

/// Who writes down what is chosen, and how the model chooses.
fn recorder(to: &FilePath, decoder: &Decoder, flags: &EngineFlags) -> Result<(PathBuf, Recorder)> {
    let mut recorder = Recorder::new(decoder.geometry(), flags.trace_logits);
    recorder.say("routing", flags.routing.to_string());
    if flags.trace_logits {
        let gates: Vec<&Gate> = decoder.gates().collect();
        recorder.say(larder_lab::GATES, serde_json::to_string(&gates)?);
    }
    Ok((to.to_owned(), recorder))
}

/// The trained weights that a policy asks for.
pub fn help(eviction: &EvictionSpec, model: &Model, evictor: Option<&FilePath>) -> Result<Help> {
    if eviction.name() != "learned" {
        return Ok(Help::default());
    }
    let own = model.source().path().join("evictor.safetensors");
    if evictor.is_none() && !own.exists() {
        bail!(
            "{}: there are no trained weights for --eviction learned; make them with `larder lab train`, or name them \
             with --evictor",
            own.display()
        );
    }
    Ok(Help { evictor: Some(Arc::new(larder_lab::read_evictor(evictor.unwrap_or(&own))?)), ..Help::default() })
}

/// Where a store keeps the spread of its routers.
pub const CALIBRATION: &str = "calibration.json";

/// The calibrated spread of each layer's router, if the strategy wants it.
pub fn deltas(spec: &RoutingSpec, model: &Model) -> Result<Option<Vec<f32>>> {
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
