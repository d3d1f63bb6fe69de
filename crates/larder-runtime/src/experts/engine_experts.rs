//! A model's path to its experts, and what can be read from it and changed while it runs.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use larder_cache::{ExpertUses, Traffic, Visit};
use larder_core::{ExpertId, Gate, LayerIdx};
use larder_engine::{CachedPath, Drafting, Recorder, Routing, StreamingPath};
use larder_model::{
    Decoder, DeviceMoeCall, DevicePath, ExactPath, ExpertPath, HintSource, ModelError, MoeCall, Routed, Rows,
    wanted_experts,
};
use larder_os::lock::{self, LockReport, SlotAddresses};
use larder_policy::eviction::EvictionSpec;
use larder_policy::routing::RoutingSpec;
use larder_store::reader::Arena;

use super::elastic::{CapacityChanges, ElasticSlots, StepMoment};
use super::engine_path::{EnginePath, OffloadReport};
use super::hot_set_file::HotSetFile;
use super::memory_notes::MemoryWatch;
use super::policies::{make_router, policy_inputs};
use crate::notices::{Notice, Notices, Setting};
use crate::open::OpenModel;

/// A model's path to its experts, with the recorder of its trace.
pub struct EngineExperts {
    path: Box<dyn EnginePath>,
    recorder: Option<Recorder>,
    /// Where the recorded trace is written, if it is.
    trace_file: Option<PathBuf>,
    /// Recorded visits, while recording is on.
    visits: Option<Vec<(LayerIdx, Visit)>>,
    hot: Option<HotSetFile>,
    elastic: Option<ElasticSlots>,
    memory: MemoryWatch,
    notices: Notices,
}

impl EngineExperts {
    /// A path whose routing is recorded, if there is a recorder.
    pub(crate) fn new(path: Box<dyn EnginePath>, recorder: Option<(PathBuf, Recorder)>, notices: Notices) -> Self {
        let memory = MemoryWatch::new(notices.clone());
        let (trace_file, recorder) = recorder.unzip();
        EngineExperts { path, recorder, trace_file, visits: None, hot: None, elastic: None, memory, notices }
    }

    /// Replaces the path. The number of slots is fixed from then on.
    pub(crate) fn set_path(&mut self, path: Box<dyn EnginePath>) {
        self.elastic = None;
        self.path = path;
    }

    /// Lets the number of slots in use follow the available memory from now on, as long as routing is lossless.
    pub(crate) fn set_elastic(&mut self, elastic: ElasticSlots) {
        if let Some(recorder) = &mut self.recorder {
            recorder.capacity(elastic.changes().slots);
        }
        self.elastic = Some(elastic);
    }

    /// Locks all memory but that of slots that are not in use; those of `arena` that come into use later are locked
    /// then.
    pub(crate) fn lock_memory(&mut self, arena: Option<&Arena>) -> LockReport {
        let whole = |arena: &Arena| SlotAddresses { all: arena.range(), in_use: vec![arena.range()] };
        let (Some(streaming), Some(_)) = (self.path.streaming_mut(), &self.elastic) else {
            return lock::lock(&arena.map(whole).unwrap_or_default(), false);
        };
        let in_use = streaming.memory_in_use();
        let addresses =
            |arena: &Arena| SlotAddresses { all: arena.range(), in_use: arena.ranges_of(|slot| in_use[slot]) };
        // Not before it is touched: the account has it, but not the system.
        let locked = lock::lock(&arena.map(addresses).unwrap_or_default(), true);
        streaming.lock_slots();
        locked.again()
    }

    /// How the number of slots has changed; `None` if it is fixed.
    pub fn capacity_changes(&self) -> Option<CapacityChanges> {
        self.elastic.as_ref().map(ElasticSlots::changes)
    }

    /// Whether [`idle`](Self::idle) has or may get something to do.
    pub fn has_idle_work(&self) -> bool {
        self.has_hot() || self.elastic.is_some()
    }

    /// What can be done while no step is computed: reads on hot experts, and gives slots back if memory gets scarce.
    /// Takes a few milliseconds; false if a pause is due before the next call.
    pub fn idle(&mut self) -> bool {
        self.follow_memory(StepMoment::Between);
        self.read_hot()
    }

    /// Changes the number of slots at the beginning of a step or between steps, if the available memory calls for it.
    /// The text does not depend on it, except under lossy routing.
    fn follow_memory(&mut self, moment: StepMoment) {
        let (Some(elastic), Some(streaming)) = (&mut self.elastic, self.path.streaming_mut()) else {
            return self.memory.fixed();
        };
        if !streaming.routing().is_lossless() {
            return self.memory.fixed();
        }
        if let (Some(slots), Some(recorder)) = (elastic.follow(moment, streaming), &mut self.recorder) {
            recorder.capacity(slots);
        }
        self.memory.slots(elastic.changes().slots);
    }

    /// Keeps a hot set, if experts are read into slots in memory alone. Layers have `experts` experts.
    pub(crate) fn keep_hot_set(&mut self, file: HotSetFile, experts: usize) {
        if let Some(streaming) = self.path.streaming_mut() {
            streaming.start_hot(file.ranked(), ExpertUses::new(file.rows(), experts));
            self.hot = Some(file);
        }
    }

    /// Whether there are hot experts to read before the first prompt.
    pub fn has_hot(&self) -> bool {
        self.path.streaming().is_some_and(StreamingPath::has_hot)
    }

    /// Reads on experts that earlier runs used most, into free slots and until the first prompt; waits for one read at
    /// most. False if nothing is left to read.
    pub fn read_hot(&mut self) -> bool {
        self.path.streaming_mut().is_some_and(StreamingPath::read_hot)
    }

    /// Writes which experts earlier runs and this one used most, if that is kept. A failure is a notice.
    pub fn write_hot_set(&mut self) {
        if let (Some(streaming), Some(file)) = (self.path.streaming(), &mut self.hot) {
            streaming.uses().into_iter().for_each(|uses| file.write(uses));
        }
    }

    /// Cache traffic so far; `None` if all experts are in memory.
    pub fn traffic(&self) -> Option<Traffic> {
        self.path.cached().map(CachedPath::traffic)
    }

    /// Turns the recording of visits on or off.
    pub fn record_visits(&mut self, on: bool) {
        if on {
            self.visits.get_or_insert_default();
        } else {
            self.visits = None
        }
    }

    /// The visits since the last call.
    pub fn take_visits(&mut self) -> Vec<(LayerIdx, Visit)> {
        self.visits.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Which experts are resident; `None` if all are in memory.
    pub fn residency(&self) -> Option<&dyn larder_core::Residency> {
        self.path.cached().map(CachedPath::residency)
    }

    /// Slots of the cache that are in use; 0 if all experts are in memory.
    pub fn slots(&self) -> usize {
        self.path.cached().map_or(0, |cached| cached.cache_shape().total_slots())
    }

    /// Slots in use for each layer with experts, rounded down; `None` if all experts are in memory.
    pub fn slots_per_layer(&self) -> Option<usize> {
        let shape = self.path.cached()?.cache_shape();
        Some(shape.total_slots() / shape.rows.max(1))
    }

    /// The routing with its quality counters; `None` if all experts are in memory.
    pub fn routing(&self) -> Option<&Routing> {
        self.path.cached().map(CachedPath::routing)
    }

    /// The most bytes of a GPU's memory that were allocated at one time; `None` without one.
    pub fn device_peak_bytes(&self) -> Option<u64> {
        self.path.device_peak_bytes()
    }

    /// What a GPU or edge workers did: name, text and JSON; `None` if only the CPU computes experts.
    pub fn offload_report(&self) -> Option<OffloadReport> {
        self.path.offload_report()
    }

    /// How tokens may be drafted, if they shall be as in `asked`: not where rejected tokens would be recorded, or
    /// change later choices of experts.
    pub fn drafting(&self, asked: &Drafting) -> Drafting {
        if self.may_compute_drafts() { asked.clone() } else { Drafting::default() }
    }

    /// Replaces the routing, if there is a cache.
    pub fn set_routing(&mut self, routing: Routing) {
        if let Some(cached) = self.path.cached_mut() {
            cached.set_routing(routing);
        }
    }

    /// Replaces the routing strategy. Fails if it needs a cache and there is none.
    pub fn set_routing_strategy(&mut self, spec: &RoutingSpec, decoder: &Decoder, model: &OpenModel) -> Result<()> {
        let keeps_budget = spec.quality_budget().is_some();
        if keeps_budget && self.path.has_room_for(decoder.geometry().expert_count()) {
            // Nothing is missing, or only until it is loaded.
            return self.set_routing_strategy(&RoutingSpec::default(), decoder, model);
        }
        if keeps_budget && self.path.streaming().is_none() {
            bail!(
                "{} needs experts that are read into main memory alone: elsewhere the loss of outputs is not measured",
                Setting::Quality
            );
        }
        let routing = if spec.is_lossless() {
            Routing::default()
        } else {
            let router = make_router(spec, decoder.geometry().moe_layers.len(), model)?;
            decoder.gates().try_for_each(|gate| router.supports(gate))?;
            Routing::lossy(router)
        };
        let in_budget =
            || Ok::<_, anyhow::Error>(model.quality_calibration()?.is_some_and(|found| !found.small.is_empty()));
        if spec.reads_small_copies() || keeps_budget && in_budget()? {
            self.require_small_copies(spec, model)?;
        }
        // The text would depend on a file of earlier runs.
        if let (false, Some(streaming)) = (spec.is_lossless(), self.path.streaming_mut()) {
            streaming.stop_hot();
        }
        match self.path.cached_mut() {
            Some(cached) => cached.set_routing(routing),
            None if spec.is_lossless() => {}
            None => bail!(
                "{} {spec} needs a store, and {} is not one; make one with `larder convert`",
                Setting::Routing,
                model.source().path().display()
            ),
        }
        Ok(())
    }

    /// Fails unless smaller copies of experts can be read.
    fn require_small_copies(&self, spec: &RoutingSpec, model: &OpenModel) -> Result<()> {
        let path = model.source().path().display();
        match (self.path.streaming(), model.store().and_then(|store| store.small_shards())) {
            (Some(_), Some(_)) => Ok(()),
            (Some(_), None) => bail!(
                "{} {spec} reads smaller copies of experts, which {path} does not have; convert it with --shelf FORMAT",
                Setting::Routing
            ),
            (None, _) => {
                bail!("{} {spec} is for experts of a store that are read into main memory alone", Setting::Routing)
            }
        }
    }

    /// Replaces the eviction policy; its trained weights are those of `evictor`, or else the model's own.
    pub fn set_eviction_policy(
        &mut self,
        spec: &EvictionSpec,
        model: &OpenModel,
        evictor: Option<&Path>,
    ) -> Result<()> {
        let inputs = policy_inputs(spec, model, evictor)?;
        let Some(cached) = self.path.cached_mut() else {
            bail!("all experts of {} are in memory, so there is no eviction policy", model.source().path().display())
        };
        cached.set_policies(spec.make(&cached.cache_shape(), &inputs)?);
        Ok(())
    }

    /// Starts a new sequence, unrelated to the previous one.
    pub fn new_sequence(&mut self) {
        if let Some(cached) = self.path.cached_mut() {
            cached.new_sequence();
        }
        if let Some(recorder) = &mut self.recorder {
            recorder.new_sequence();
        }
    }

    /// Records the routing with `recorder` from now on, and returns the recorder before. Tokens are not drafted
    /// meanwhile.
    pub fn record_with(&mut self, recorder: Option<Recorder>) -> Option<Recorder> {
        let before = std::mem::replace(&mut self.recorder, recorder);
        if let (Some(elastic), Some(recorder)) = (&self.elastic, &mut self.recorder) {
            recorder.capacity(elastic.changes().slots);
        }
        before
    }

    /// Writes the recorded trace, if there is a file for it.
    pub fn write_trace(&mut self, note: &str) -> Result<()> {
        let (Some(path), Some(recorder)) = (self.trace_file.take(), self.recorder.take()) else { return Ok(()) };
        let mut trace = recorder.into_trace()?;
        trace.meta.insert("source".into(), note.into());
        trace.write(&path)?;
        self.notices.send(Notice::TraceWritten { tokens: trace.tokens(), path });
        Ok(())
    }

    /// Records the choice of a call, and what its visit of the cache found, if that is wanted.
    fn record(&mut self, call: &MoeCall, routed: &Routed) {
        if let Some(recorder) = &mut self.recorder {
            recorder.record(call, routed);
        }
        if self.visits.is_some() {
            let visit = match self.path.cached() {
                Some(cached) => cached.last_visit().clone(),
                None => {
                    let wanted = wanted_experts(&routed.ids, call.gate.experts);
                    let hits = wanted.iter().map(|w| w.expert.index()).collect();
                    Visit { hits, ..Visit::default() }
                }
            };
            self.visits.get_or_insert_default().push((call.layer, visit));
        }
    }
}

impl ExpertPath for EngineExperts {
    fn forward(&mut self, call: &MoeCall, out: &mut [f32]) -> Result<Routed, ModelError> {
        self.follow_memory(StepMoment::Before(call.layer));
        let routed = self.path.experts_mut().forward(call, out)?;
        self.record(call, &routed);
        Ok(routed)
    }

    fn on_device(&mut self) -> Option<&mut dyn DevicePath> {
        let is_there = self.path.experts_mut().on_device().is_some();
        is_there.then_some(self)
    }

    fn exact(&mut self) -> Option<&mut dyn ExactPath> {
        self.path.experts_mut().exact()
    }

    fn wants_hint(&self, source: HintSource, tokens: usize) -> bool {
        self.path.experts().wants_hint(source, tokens)
    }

    fn may_compute_drafts(&self) -> bool {
        self.recorder.is_none() && self.routing().is_none_or(Routing::is_lossless)
    }

    fn hint(&mut self, source: HintSource, layer: LayerIdx, gate: &Gate, logits: &[f32]) {
        self.path.experts_mut().hint(source, layer, gate, logits);
    }

    fn will_use(&mut self, layer: LayerIdx, gate: &Gate, experts: &[ExpertId]) {
        self.path.experts_mut().will_use(layer, gate, experts);
    }
}

impl EngineExperts {
    fn device(&mut self) -> &mut dyn DevicePath {
        self.path.experts_mut().on_device().expect("the path has a device")
    }
}

impl DevicePath for EngineExperts {
    fn begin(&mut self, call: &MoeCall, out: &mut [f32]) -> Result<(Routed, Option<Rows>), ModelError> {
        self.follow_memory(StepMoment::Before(call.layer));
        let (routed, sums) = self.device().begin(call, out)?;
        self.record(call, &routed);
        Ok((routed, sums))
    }

    fn chooses(&mut self, layer: LayerIdx, gate: &Gate, tokens: usize) -> bool {
        let watched = self.recorder.is_some() || self.visits.is_some();
        !watched && self.device().chooses(layer, gate, tokens)
    }

    fn begin_chosen(&mut self, call: &DeviceMoeCall) -> Result<Rows, ModelError> {
        self.device().begin_chosen(call)
    }

    fn begin_hits(&mut self, call: &DeviceMoeCall) -> Result<(), ModelError> {
        self.device().begin_hits(call)
    }

    fn step_begins(&mut self, in_flight: usize) {
        self.device().step_begins(in_flight);
    }

    fn count_chosen(&mut self) {
        self.device().count_chosen();
    }
}
