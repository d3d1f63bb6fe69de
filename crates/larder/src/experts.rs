//! A model's way to its experts, as planned, and what can be asked and changed while it runs.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use larder_cache::{Traffic, Visit};
use larder_core::{Gate, LayerIdx};
use larder_engine::{CachedPath, Recorder, Routing, StreamingPath, TieredPath};
use larder_model::{AllResident, Decoder, ExpertPath, ModelError, MoeCall, Routed, distinct};
use larder_policy::eviction::EvictionSpec;
use larder_policy::routing::RoutingSpec;
use larder_store::reader::Slot;
use serde_json::{Value, json};

use crate::engine::{deltas, policy_inputs};
use crate::open::OpenModel;

/// A model's way to its experts, and who writes down what it chooses.
pub struct EngineExperts {
    path: AnyExpertPath,
    recorder: Option<(PathBuf, Recorder)>,
    /// What layers found in the cache, while somebody wants to know.
    visits: Option<Vec<(LayerIdx, Visit)>>,
}

/// A way in which a model gets at its experts.
pub enum AnyExpertPath {
    /// All in memory.
    AllResident(Box<AllResident<Slot>>),
    /// Through slots.
    Streaming(Box<StreamingPath>),
    /// Through slots on a GPU and slots in memory.
    Tiered {
        /// Themselves.
        tiered: Box<TieredPath>,
        /// How copies to the GPU find their bytes.
        how: Box<dyn Display + Send>,
    },
    /// Through slots, or computed by others.
    #[cfg(feature = "edge")]
    Edge(Box<larder_edge::Edge>),
}

impl EngineExperts {
    /// By this way, written down by the recorder, if there is one.
    pub fn new(path: AnyExpertPath, recorder: Option<(PathBuf, Recorder)>) -> Self {
        EngineExperts { path, recorder, visits: None }
    }

    /// Has whoever computes them make ready for calls with at most so many tokens, or say what is lacking.
    pub fn prepare(&mut self, decoder: &Decoder, tokens: usize) -> Result<()> {
        match &mut self.path {
            AnyExpertPath::Tiered { tiered, .. } => Ok(tiered.prepare(decoder, tokens)?),
            _ => Ok(()),
        }
    }

    /// Goes another way from now on.
    pub fn set_path(&mut self, path: AnyExpertPath) {
        self.path = path;
    }

    /// What passed through the cache, if there is one.
    pub fn traffic(&self) -> Option<Traffic> {
        self.cached().map(CachedPath::traffic)
    }

    /// Whether to remember what layers find in the cache.
    #[cfg(feature = "serve")]
    pub fn record_visits(&mut self, on: bool) {
        match on {
            true => {
                self.visits.get_or_insert_default();
            }
            false => self.visits = None,
        }
    }

    /// What layers found in the cache since the last call.
    #[cfg(feature = "serve")]
    pub fn take_visits(&mut self) -> Vec<(LayerIdx, Visit)> {
        self.visits.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Which experts are in memory; `None` if all are.
    #[cfg(feature = "serve")]
    pub fn residency(&self) -> Option<&dyn larder_core::Residency> {
        self.cached().map(CachedPath::residency)
    }

    /// What routing did, if it chose otherwise than the model.
    pub fn routing(&self) -> Option<&Routing> {
        self.cached().map(CachedPath::routing)
    }

    /// Who else computed experts: their name, and what is to be said of them, in words and for a program; `None` if
    /// nobody was to.
    pub fn offload_report(&self) -> Option<(&'static str, String, Value)> {
        match &self.path {
            AnyExpertPath::AllResident(_) | AnyExpertPath::Streaming(_) => None,
            AnyExpertPath::Tiered { how, .. } => Some(("gpu", how.to_string(), json!(how.to_string()))),
            #[cfg(feature = "edge")]
            AnyExpertPath::Edge(edge) => {
                let report = edge.report();
                let json = serde_json::to_value(&report).expect("text and numbers are JSON");
                Some(("edge", report.summary(), json))
            }
        }
    }

    /// Chooses in this way from now on, if experts pass through slots.
    pub fn set_routing(&mut self, routing: Routing) {
        if let Some(cached) = self.cached_mut() {
            cached.set_routing(routing);
        }
    }

    /// Chooses by this strategy from now on.
    pub fn set_routing_strategy(&mut self, spec: &RoutingSpec, decoder: &Decoder, model: &OpenModel) -> Result<()> {
        let routing = match spec.is_lossless() {
            true => Routing::default(),
            false => {
                let deltas = deltas(spec, model)?;
                let router = spec.make(decoder.geometry().moe_layers.len(), deltas.as_deref())?;
                decoder.gates().try_for_each(|gate| router.supports(gate))?;
                Routing::lossy(router)
            }
        };
        match self.cached_mut() {
            Some(cached) => cached.set_routing(routing),
            None if spec.is_lossless() => {}
            None => bail!(
                "--routing {spec} chooses by what is in the slots of a store, and {} is read whole",
                model.source().path().display()
            ),
        }
        Ok(())
    }

    /// Lets this policy say who leaves from now on; `evictor` has its trained weights, if not the model itself.
    pub fn set_eviction_policy(
        &mut self,
        spec: &EvictionSpec,
        model: &OpenModel,
        evictor: Option<&Path>,
    ) -> Result<()> {
        let inputs = policy_inputs(spec, model, evictor)?;
        let Some(cached) = self.cached_mut() else {
            bail!("nobody leaves: all experts of {} are in memory", model.source().path().display())
        };
        cached.set_policies(spec.make(&cached.cache_shape(), &inputs)?);
        Ok(())
    }

    /// What comes has nothing to do with what was.
    pub fn new_sequence(&mut self) {
        if let Some(cached) = self.cached_mut() {
            cached.new_sequence();
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
            AnyExpertPath::AllResident(all) => all.as_ref(),
            AnyExpertPath::Streaming(streaming) => streaming.as_ref(),
            AnyExpertPath::Tiered { tiered, .. } => tiered.as_ref(),
            #[cfg(feature = "edge")]
            AnyExpertPath::Edge(edge) => edge.as_ref(),
        }
    }

    fn path_mut(&mut self) -> &mut dyn ExpertPath {
        match &mut self.path {
            AnyExpertPath::AllResident(all) => all.as_mut(),
            AnyExpertPath::Streaming(streaming) => streaming.as_mut(),
            AnyExpertPath::Tiered { tiered, .. } => tiered.as_mut(),
            #[cfg(feature = "edge")]
            AnyExpertPath::Edge(edge) => edge.as_mut(),
        }
    }

    /// The slots on the way, if it leads through some.
    fn cached(&self) -> Option<&dyn CachedPath> {
        match &self.path {
            AnyExpertPath::AllResident(_) => None,
            AnyExpertPath::Streaming(streaming) => Some(streaming.as_ref()),
            AnyExpertPath::Tiered { tiered, .. } => Some(tiered.as_ref()),
            #[cfg(feature = "edge")]
            AnyExpertPath::Edge(edge) => Some(edge.local()),
        }
    }

    fn cached_mut(&mut self) -> Option<&mut dyn CachedPath> {
        match &mut self.path {
            AnyExpertPath::AllResident(_) => None,
            AnyExpertPath::Streaming(streaming) => Some(streaming.as_mut()),
            AnyExpertPath::Tiered { tiered, .. } => Some(tiered.as_mut()),
            #[cfg(feature = "edge")]
            AnyExpertPath::Edge(edge) => Some(edge.local_mut()),
        }
    }
}

impl ExpertPath for EngineExperts {
    fn forward(&mut self, call: &MoeCall, out: &mut [f32]) -> Result<Routed, ModelError> {
        let routed = self.path_mut().forward(call, out)?;
        if let Some((_, recorder)) = &mut self.recorder {
            recorder.record(call, &routed);
        }
        if self.visits.is_some() {
            let visit = match self.cached() {
                Some(cached) => cached.last_visit().clone(),
                None => {
                    let hits = distinct(&routed.ids, call.gate.experts).iter().map(|e| e.index()).collect();
                    Visit { hits, ..Visit::default() }
                }
            };
            self.visits.get_or_insert_default().push((call.layer, visit));
        }
        Ok(routed)
    }

    fn wants_hints(&self) -> bool {
        self.path().wants_hints()
    }

    fn hint_next(&mut self, layer: LayerIdx, gate: &Gate, logits: &[f32]) {
        self.path_mut().hint_next(layer, gate, logits);
    }
}
