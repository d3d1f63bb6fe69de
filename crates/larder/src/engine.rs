//! A model made ready to run: what the flags and the memory allow, said before anything is loaded.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use larder_cache::{Scope, Traffic, Visit};
use larder_core::{Gate, LayerIdx};
use larder_engine::{CHUNK, Recorder, Routing, Session, Streaming};
use larder_lab::eval::Calibration;
use larder_model::{AllResident, Call, Compute, Decoder, ExpertPath, Memory, ModelError, Routed, distinct};
use larder_policy::eviction::{EvictionSpec, Help, Setting};
use larder_policy::routing::RoutingSpec;
use larder_store::Store;
use larder_store::reader::{Slot, check_reader};
use serde_json::Value;

use crate::cli::EngineFlags;
use crate::open::Model;
use crate::plan::{Facts, Plan, decide};
use crate::{lock, memory, slots};

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

/// A way in which a model gets at its experts.
enum Path {
    /// All in memory.
    AllResident(Box<AllResident<Slot>>),
    /// Through slots.
    Streaming(Box<Streaming>),
    /// Through slots, or computed by others.
    #[cfg(feature = "edge")]
    Edge(Box<larder_remote::Edge>),
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
        if let Some(store) = model.store().filter(|_| !flags.has_help()) {
            store.require_all()?;
        }
        eprintln!("{}", plan.sentences(&facts));
        let compute = Compute::new(flags.threads(), flags.pin).context("threads to compute on cannot be had")?;
        let compute = Arc::new(Compute { exact: flags.exact, memory: facts.memory, ..compute });
        // Slots first: if there is no room for them, that is known before weights are read.
        let mut said = plan.json(&facts);
        let (path, slots) = match (plan, model.store()) {
            (Plan::Slots { slots, scope }, Some(store)) => {
                let Streamed { experts, how, slots } = stream(store, slots, scope, &compute, flags, &help)?;
                eprintln!("{how}");
                said["reader"] = how.into();
                (join(experts, store, flags)?, slots)
            }
            // With a slot for every expert the first token need not wait until all are read.
            (Plan::AllResident, Some(store)) if !flags.preload => {
                let all = facts.blueprint.geometry.experts;
                let Streamed { experts, how, slots } = stream(store, all, Scope::Layer, &compute, flags, &help)?;
                said["reader"] = how.into();
                (join(experts, store, flags)?, slots)
            }
            #[cfg(feature = "edge")]
            (_, None) if flags.has_help() => crate::edge::no_store(model)?,
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
        if flags.has_help() {
            bail!("--edge: what a cache of another size would do cannot be told where others compute experts");
        }
        // The old slots go before there are new ones.
        self.experts.path = Path::AllResident(Box::new(AllResident::new(0, self.compute.clone())));
        let Streamed { experts: local, .. } = stream(store, slots, scope, &self.compute, flags, &self.help)?;
        self.experts.path = Path::Streaming(Box::new(local));
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
    let (cache, how, slots) = slots::cache(store, &setting, policies, &flags.reader)?;
    let experts = Streaming::new(Routing::default(), cache, compute.clone(), flags.prefetch);
    Ok(Streamed { experts, how, slots })
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
        self.streaming().map(Streaming::traffic)
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
        self.streaming().map(Streaming::residency)
    }

    /// What routing did, if it chose otherwise than the model.
    pub fn routing(&self) -> Option<&Routing> {
        self.streaming().map(Streaming::routing)
    }

    /// Who else computed experts, in words and for a program; `None` if nobody was to.
    pub fn others(&self) -> Option<(String, Value)> {
        match &self.path {
            Path::AllResident(_) | Path::Streaming(_) => None,
            #[cfg(feature = "edge")]
            Path::Edge(edge) => {
                let report = edge.report();
                Some((report.sentence(), serde_json::to_value(&report).expect("text and numbers are JSON")))
            }
        }
    }

    /// Chooses in this way from now on, if experts pass through slots.
    pub fn set_routing(&mut self, routing: Routing) {
        if let Some(streaming) = self.streaming_mut() {
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
        match self.streaming_mut() {
            Some(streaming) => streaming.set_routing(routing),
            None if spec.is_lossless() => {}
            None => bail!(
                "--routing {spec} chooses by what is in the slots of a store, and {} is read whole",
                model.source().path().display()
            ),
        }
        Ok(())
    }

    /// Lets this policy say who leaves from now on; `evictor` has its trained weights, if not the model itself.
    pub fn evict_by(&mut self, spec: &EvictionSpec, model: &Model, evictor: Option<&std::path::Path>) -> Result<()> {
        let help = help(spec, model, evictor)?;
        let Some(streaming) = self.streaming_mut() else {
            bail!("nobody leaves: all experts of {} are in memory", model.source().path().display())
        };
        Ok(streaming.set_eviction(|setting| spec.make(setting, &help))?)
    }

    /// What comes has nothing to do with what was.
    pub fn new_sequence(&mut self) {
        if let Some(streaming) = self.streaming_mut() {
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
            #[cfg(feature = "edge")]
            Path::Edge(edge) => edge.as_ref(),
        }
    }

    fn path_mut(&mut self) -> &mut dyn ExpertPath {
        match &mut self.path {
            Path::AllResident(all) => all.as_mut(),
            Path::Streaming(streaming) => streaming.as_mut(),
            #[cfg(feature = "edge")]
            Path::Edge(edge) => edge.as_mut(),
        }
    }

    /// What passes through slots, if anything does.
    fn streaming(&self) -> Option<&Streaming> {
        match &self.path {
            Path::AllResident(_) => None,
            Path::Streaming(streaming) => Some(streaming),
            #[cfg(feature = "edge")]
            Path::Edge(edge) => Some(edge.local()),
        }
    }

    fn streaming_mut(&mut self) -> Option<&mut Streaming> {
        match &mut self.path {
            Path::AllResident(_) => None,
            Path::Streaming(streaming) => Some(streaming),
            #[cfg(feature = "edge")]
            Path::Edge(edge) => Some(edge.local_mut()),
        }
    }
}

impl ExpertPath for Experts {
    fn forward(&mut self, call: &Call, out: &mut [f32]) -> Result<Routed, ModelError> {
        let routed = self.path_mut().forward(call, out)?;
        if let Some((_, recorder)) = &mut self.recorder {
            recorder.note(call, &routed);
        }
        if self.visits.is_some() {
            let visit = match self.streaming() {
                Some(streaming) => streaming.last_visit().clone(),
                None => {
                    let hits = distinct(&routed.ids, call.gate.experts).iter().map(|e| e.index()).collect();
                    Visit { hits, ..Visit::default() }
                }
            };
            self.visits.get_or_insert_default().push((call.layer, visit));
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
