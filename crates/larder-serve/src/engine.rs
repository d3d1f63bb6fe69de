//! The engine as the server sees it: a trait that the command implements.

use larder_cache::{Traffic, Visit};
use larder_core::MoeRow;
use larder_engine::{Drafting, LossMeter, OutputLoss, SequenceOrigin};
use larder_model::{Decoder, ExpertPath};
use serde_json::{Map, Value};

/// A decoder with its experts: what the decode thread drives.
pub trait Engine: Send {
    /// The decoder, and the path that its experts are read and computed on.
    fn decoder_and_experts(&mut self) -> (&Decoder, &mut dyn ExpertPath);

    /// The most tokens of a step, at least one: the memory plan counts the activations of as many.
    fn step_tokens(&self) -> usize;

    /// The most bytes of the KV cache of a sequence of this many tokens.
    fn sequence_bytes(&self, tokens: usize) -> u64;

    /// The most bytes by which a sequence of `from` tokens grows when those up to `to` are computed, of which `pins`
    /// are pinned.
    fn growth_bytes(&self, from: usize, to: usize, pins: usize) -> u64;

    /// Tells eviction and routing that the next tokens are unrelated to the last ones.
    fn new_sequence(&mut self);

    /// Called again and again while no request is active: does a few milliseconds of work that can wait. False if there
    /// is none.
    fn idle(&mut self) -> bool;

    /// Called once, after the last request.
    fn end(&mut self);

    /// Cache traffic and routing so far.
    fn status(&self) -> EngineStatus;

    /// Switches the routing. On an error nothing changes.
    fn set_routing(&mut self, change: &RoutingChange) -> Result<(), RoutingRefused>;

    /// What λ costs, as the state of the engine has it: the object of the keys `lambda_costs` and `lambda_cost`.
    fn lambda_costs(&self) -> Map<String, Value>;

    /// Measures the loss of outputs under a lossy routing strategy.
    fn loss_meter(&self) -> LossMeter;

    /// How tokens of an answer may be drafted now.
    fn drafting(&self) -> Drafting;

    /// What the state of a sequence depends on now, beside its tokens.
    fn sequence_origin(&self) -> SequenceOrigin;

    /// Turns the recording of cache visits for [`take_visits`](Self::take_visits) on or off.
    fn record_visits(&mut self, on: bool);

    /// The visits since the last call, in order of computation.
    fn take_visits(&mut self) -> Vec<LayerVisit>;

    /// The resident experts of each MoE row.
    fn resident_experts(&self) -> Vec<Vec<usize>>;
}

/// Why routing is not switched: one sentence for the client.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct RoutingRefused(pub String);

/// A change of routing that a client asks for.
#[derive(Clone, PartialEq, Debug)]
pub enum RoutingChange {
    /// The strategy `prior` with this λ; 0 is the model's own choice.
    Lambda(f32),
    /// A strategy with its options.
    Spec(String),
}

/// One layer's visit to the cache.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LayerVisit {
    /// The layer.
    pub row: MoeRow,
    /// Its hits, misses and evictions.
    pub visit: Visit,
}

/// Cache traffic and routing of an engine.
#[derive(Clone, Default, Debug)]
pub struct EngineStatus {
    /// Cache traffic so far; `None` if all experts are resident, so that none are read.
    pub traffic: Option<Traffic>,
    /// Slots of the expert cache that are in use; 0 if all experts are resident.
    pub slots: usize,
    /// The routing strategy and its options.
    pub routing: String,
    /// The strategy's λ (cache bias), if it has one.
    pub lambda: Option<f64>,
    /// Difference from the model's own choice of experts; `None` for the strategy `original`.
    pub quality: Option<RoutingQuality>,
    /// Difference of the outputs from exact ones, at tokens that were decoded twice.
    pub loss: OutputLoss,
    /// The loss that a routing strategy with a budget expects; `None` for one without.
    pub expected: Option<ExpectedLoss>,
}

/// A budget of output loss and what it is expected to be, in nats per token.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub struct ExpectedLoss {
    /// The most that is allowed on average.
    pub budget: f64,
    /// The mean that is predicted for the tokens so far, corrected by those that were decoded twice.
    pub mean: f64,
}

/// Agreement of the chosen experts with the model's own choice, over generated tokens.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub struct RoutingQuality {
    /// Share of the model's own experts that were chosen.
    pub agreement: f64,
    /// Mean router probability of the chosen experts, relative to the model's own choice.
    pub kept_mass: f64,
    /// Mean KL divergence to the model's own choice, in nats.
    pub kl: f64,
}
