//! A model made ready to run: what the flags and the memory allow, said before anything is loaded.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use larder_cache::{Cache, Scope, Traffic, Visit};
use larder_core::{Gate, LayerIdx};
use larder_engine::{CHUNK, Recorder, Routing, Session, Streaming};
use larder_lab::eval::Calibration;
use larder_model::{AllResident, Call, Compute, Decoder, ExpertPath, Memory, ModelError, Routed, distinct};
use larder_policy::eviction::{EvictionSpec, Help, Setting};
use larder_policy::routing::RoutingSpec;
use larder_store::Store;
use larder_store::reader::{Arena, Files, Slot, check_reader, open_reader};
use serde_json::Value;

use crate::cli::EngineFlags;
use crate::open::Model;
use crate::plan::{Facts, Plan, decide};
use crate::{lock, memory, print};

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
}

/// A model's way to its experts, and who writes down what it chooses.
pub struct Experts {
    path: Path,
    recorder: Option<(PathBuf, Recorder)>,
    /// What layers found in the cache, while somebody wants to know.
    visits: Option<Vec<(LayerIdx, Visit)>>,
}

/// Either way in which a model gets at its experts.
enum Path {
    /// All in memory.
    AllResident(Box<AllResident<Slot>>),
    /// Through slots.
    Streaming(Box<Streaming>),
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
        let facts = Facts { sequences, ..facts(model, flags, context)? };
        let plan = decide(&facts, flags)?;
        if matches!(plan, Plan::Slots { .. }) && model.store().is_none() {
            let path = model.source().path().display();
            bail!(
                "{path}: experts can be read one by one from a store only; make one with `larder convert {path} STORE`"
            );
        }
        eprintln!("{}", plan.sentences(&facts));
        let compute = Compute::new(flags.threads(), flags.pin).context("threads to compute on cannot be had")?;
        let compute = Arc::new(Compute { exact: flags.exact, memory: facts.memory, ..compute });
        // Slots first: if there is no room for them, that is known before weights are read.
        let mut said = plan.json(&facts);
        let (path, slots) = match (plan, model.store()) {
            (Plan::Slots { slots, scope }, Some(store)) => {
                let (path, how, slots) = stream(store, slots, scope, &compute, flags, &help)?;
                eprintln!("{how}");
                said["reader"] = how.into();
                (path, slots)
            }
            // With a slot for every expert the first token need not wait until all are read.
            (Plan::AllResident, Some(store)) if !flags.preload => {
                let (path, how, slots) =
                    stream(store, facts.blueprint.geometry.experts, Scope::Layer, &compute, flags, &help)?;
                said["reader"] = how.into();
                (path, slots)
            }
            _ => (Path::AllResident(Box::new(model.all_resident(&compute)?)), 0..0),
        };
        let decoder = model.decoder(&compute)?;
        let recorder = flags.trace.as_ref().map(|to| recorder(to, &decoder, flags)).transpose()?;
        let mut experts = Experts { path, recorder, visits: None };
        experts.route_by(&flags.routing, &decoder, model)?;
        said["routing"] = flags.routing.to_string().into();
        if flags.mlock {
            eprintln!("{}", lock::lock(slots).sentence());
        }
        Ok(Engine { decoder, experts, help, compute, context: facts.context, plan: said })
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
        // The old slots go before there are new ones.
        self.experts.path = Path::AllResident(Box::new(AllResident::new(0, self.compute.clone())));
        self.experts.path = stream(store, slots, scope, &self.compute, flags, &self.help)?.0;
        Ok(())
    }

    /// The same model with every expert in memory, whatever the plan was.
    pub fn all_resident(&mut self, model: &Model) -> Result<()> {
        self.experts.path = Path::AllResident(Box::new(model.all_resident(&self.compute)?));
        Ok(())
    }
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

fn stream(
    store: &Arc<Store>,
    slots: usize,
    scope: Scope,
    compute: &Arc<Compute>,
    flags: &EngineFlags,
    help: &Help,
) -> Result<(Path, String, Range<usize>)> {
    let manifest = store.manifest();
    let (geometry, slot_bytes) = (&manifest.geometry, manifest.experts.data_bytes);
    let setting = Setting { scratch: flags.cache_scratch, ..Setting::new(geometry, slots, scope) };
    let policies = flags.eviction.make(&setting, help)?;
    let total = setting.all_slots();
    let (arena, memory) = Arena::new(total, slot_bytes)
        .with_context(|| format!("{total} slots of {} cannot be had", print::bytes(slot_bytes as u64)))?;
    let (paths, bytes) = store.shard_files();
    let files = Arc::new(Files::new(paths.len(), bytes, move |shard| paths[shard].clone())?);
    let (reader, how) = open_reader(&flags.reader, &files, &arena)?;
    let cache = Cache::new(geometry, &setting, policies, memory, reader, Box::new(store.clone()));
    let streaming = Streaming::new(Routing::default(), cache, compute.clone(), flags.prefetch);
    Ok((Path::Streaming(Box::new(streaming)), how, arena.range()))
}

/// Who writes down what is chosen, and how the model chooses.
fn recorder(to: &std::path::Path, decoder: &Decoder, flags: &EngineFlags) -> Result<(PathBuf, Recorder)> {
    let mut recorder = Recorder::new(decoder.geometry(), flags.trace_logits);
    recorder.say("routing", flags.routing.to_string());
    if flags.trace_logits {
        let gates: Vec<&Gate> = decoder.gates().collect();
        recorder.say(larder_lab::GATES, serde_json::to_string(&gates)?);
    }
    Ok((to.to_owned(), recorder))
}

/// The trained weights that a policy asks for.
fn help(eviction: &EvictionSpec, model: &Model, evictor: Option<&std::path::Path>) -> Result<Help> {
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

impl Experts {
    /// What passed through the cache, if there is one.
    pub fn traffic(&self) -> Option<Traffic> {
        match &self.path {
            Path::AllResident(_) => None,
            Path::Streaming(streaming) => Some(streaming.traffic()),
        }
    }

    /// Whether to remember what layers find in the cache.
    #[cfg(feature = "serve")]
    pub fn watch(&mut self, on: bool) {
        match on {
            true => {
                self.visits.get_or_insert_default();
            }
            false => self.visits = None,
        }
    }

    /// What layers found in the cache since the last call.
    #[cfg(feature = "serve")]
    pub fn visits(&mut self) -> Vec<(LayerIdx, Visit)> {
        self.visits.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Which experts are in memory; `None` if all are.
    #[cfg(feature = "serve")]
    pub fn residency(&self) -> Option<&dyn larder_core::Residency> {
        match &self.path {
            Path::AllResident(_) => None,
            Path::Streaming(streaming) => Some(streaming.residency()),
        }
    }

    /// What routing did, if it chose otherwise than the model.
    pub fn routing(&self) -> Option<&Routing> {
        match &self.path {
            Path::AllResident(_) => None,
            Path::Streaming(streaming) => Some(streaming.routing()),
        }
    }

    /// Chooses in this way from now on, if experts pass through slots.
    pub fn set_routing(&mut self, routing: Routing) {
        if let Path::Streaming(streaming) = &mut self.path {
            streaming.set_routing(routing);
        }
    }

    /// Chooses by this strategy from now on.
    pub fn route_by(&mut self, spec: &RoutingSpec, decoder: &Decoder, model: &Model) -> Result<()> {
        let routing = match spec.is_lossless() {
            true => Routing::default(),
            false => {
                let deltas = deltas(spec, model)?;
                let router = spec.make(decoder.geometry().moe_layers.len(), deltas.as_deref())?;
                decoder.gates().try_for_each(|gate| router.suits(gate))?;
                Routing::lossy(router)
            }
        };
        match &mut self.path {
            Path::Streaming(streaming) => streaming.set_routing(routing),
            Path::AllResident(_) if spec.is_lossless() => {}
            Path::AllResident(_) => bail!(
                "--routing {spec} chooses by what is in the slots of a store, and {} is read whole",
                model.source().path().display()
            ),
        }
        Ok(())
    }

    /// Lets this policy say who leaves from now on; `evictor` has its trained weights, if not the model itself.
    pub fn evict_by(&mut self, spec: &EvictionSpec, model: &Model, evictor: Option<&std::path::Path>) -> Result<()> {
        let help = help(spec, model, evictor)?;
        match &mut self.path {
            Path::Streaming(streaming) => streaming.set_eviction(|setting| spec.make(setting, &help))?,
            Path::AllResident(_) => {
                bail!("nobody leaves: all experts of {} are in memory", model.source().path().display())
            }
        }
        Ok(())
    }

    /// What comes has nothing to do with what was.
    pub fn new_sequence(&mut self) {
        if let Path::Streaming(streaming) = &mut self.path {
            streaming.new_sequence();
        }
        if let Some((_, recorder)) = &mut self.recorder {
            recorder.new_sequence();
        }
    }

    /// Writes what was recorded, if anything was to be.
    pub fn write_trace(&mut self, note: &str) -> Result<()> {
        let Some((path, recorder)) = self.recorder.take() else { return Ok(()) };
        let mut trace = recorder.into_trace()?;
        trace.meta.insert("source".into(), note.into());
        trace.write(&path)?;
        eprintln!("trace: {} tokens in {}", trace.tokens(), path.display());
        Ok(())
    }

    fn path(&self) -> &dyn ExpertPath {
        match &self.path {
            Path::AllResident(all) => all.as_ref(),
            Path::Streaming(streaming) => streaming.as_ref(),
        }
    }

    fn path_mut(&mut self) -> &mut dyn ExpertPath {
        match &mut self.path {
            Path::AllResident(all) => all.as_mut(),
            Path::Streaming(streaming) => streaming.as_mut(),
        }
    }
}

impl ExpertPath for Experts {
    fn forward(&mut self, call: &Call, out: &mut [f32]) -> Result<Routed, ModelError> {
        let routed = self.path_mut().forward(call, out)?;
        if let Some((_, recorder)) = &mut self.recorder {
            recorder.note(call, &routed);
        }
        if let Some(visits) = &mut self.visits {
            let visit = match &self.path {
                Path::Streaming(streaming) => streaming.last_visit().clone(),
                Path::AllResident(_) => {
                    let hits = distinct(&routed.ids, call.gate.experts).iter().map(|e| e.index()).collect();
                    Visit { hits, ..Visit::default() }
                }
            };
            visits.push((call.layer, visit));
        }
        Ok(routed)
    }

    fn looks_ahead(&self) -> bool {
        self.path().looks_ahead()
    }

    fn expect(&mut self, layer: LayerIdx, gate: &Gate, logits: &[f32]) {
        self.path_mut().expect(layer, gate, logits);
    }
}
