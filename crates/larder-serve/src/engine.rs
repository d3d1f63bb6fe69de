use larder_cache::{Traffic, Visit};
use larder_model::{Decoder, ExpertPath};

/// A decoder with its experts, as the decode thread needs it.
pub trait Engine: Send {
    /// The decoder, and where its experts come from.
    fn decoder_and_experts(&mut self) -> (&Decoder, &mut dyn ExpertPath);

    /// What comes has nothing to do with what was.
    fn new_sequence(&mut self);

    /// How things stand.
    fn status(&self) -> EngineStatus;

    /// Chooses experts by this strategy from now on; otherwise says in one sentence why not, and nothing changes.
    fn set_routing(&mut self, spec: &str) -> Result<(), String>;

    /// Whether to remember what each layer found in the cache, for [`take_visits`](Self::take_visits).
    fn record_visits(&mut self, on: bool);

    /// What layers found since the last call, in order of computation.
    fn take_visits(&mut self) -> Vec<LayerVisit>;

    /// The experts in memory, for each layer that has experts.
    fn resident_experts(&self) -> Vec<Vec<usize>>;
}

/// What one layer found in the cache.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LayerVisit {
    /// Which layer, among those with experts.
    pub row: usize,
    /// What it found.
    pub visit: Visit,
}

/// How an engine stands.
#[derive(Clone, Default, Debug)]
pub struct EngineStatus {
    /// What passed through the cache so far; `None` if all experts are in memory for good.
    pub traffic: Option<Traffic>,
    /// The routing strategy and its options.
    pub routing: String,
    /// Its λ, if it has one.
    pub lambda: Option<f64>,
    /// How far it is from the model's own choice; `None` if every choice is the model's own.
    pub quality: Option<RoutingQuality>,
}

/// How near choices were to the model's own, over tokens that were written.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub struct RoutingQuality {
    /// Share of the model's own experts that were chosen.
    pub agreement: f64,
    /// The mean part of the router's probability that was kept.
    pub kept_mass: f64,
    /// The mean KL divergence in nats.
    pub kl: f64,
}
