//! The phases of the models of a pool, and the line of requests that wait for one.

use std::collections::VecDeque;
use std::thread::JoinHandle;
use std::time::Instant;

use axum::Router;
use tokio::sync::oneshot;

use super::lease::ModelLease;
use super::source::PlannedModel;
use crate::engine::RoutingChange;
use crate::error::ApiError;
use crate::model::ModelFacts;
use crate::state::App;

/// The models and the line.
#[derive(Default)]
pub struct PoolState {
    pub models: Vec<PoolSlot>,
    pub line: VecDeque<Waiting>,
    pub closing: bool,
    /// Counts loads, so that the end of an engine is not taken for that of the next.
    pub loads: u64,
}

/// The state of one model.
#[derive(Default)]
pub struct PoolSlot {
    pub phase: LoadPhase,
    /// Bytes of its memory plan, once that is known.
    pub bytes: u64,
    /// Context in tokens, once it was loaded.
    pub context: Option<usize>,
    /// What it is, once it was loaded.
    pub facts: ModelFacts,
    /// The routing strategy that a client has set, for the next load.
    pub routing: Option<RoutingChange>,
    pub last_used: Option<Instant>,
    /// Whether it is to be unloaded as soon as it is idle.
    pub unload_soon: bool,
}

/// The phase of a model between disk and memory.
#[derive(Default)]
pub enum LoadPhase {
    #[default]
    Unloaded,
    /// Its memory is being planned.
    Opening,
    /// It waits for memory.
    Planned(Box<dyn PlannedModel>),
    Loading,
    Loaded(Running),
    Unloading,
}

/// A loaded model. Its decode thread ends when it is dropped.
pub struct Running {
    pub app: App,
    pub router: Router,
    /// Requests that keep it loaded.
    pub leases: usize,
    pub decoding: Option<JoinHandle<()>>,
    /// The number of its load.
    pub load: u64,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.app.queue.close();
    }
}

/// The next step of a pool.
pub enum Step {
    /// Look again.
    Again,
    Open(usize),
    Load(usize),
    Unload(usize),
}

/// A request that waits for its model.
pub struct Waiting {
    pub model: usize,
    pub to: oneshot::Sender<Result<ModelLease, ApiError>>,
}

/// Answers to requests of the line, which are sent without the lock.
pub type Answers = Vec<(oneshot::Sender<Result<ModelLease, ApiError>>, Result<ModelLease, ApiError>)>;

impl PoolState {
    /// Whether the first of the line waits until other models are unloaded.
    pub fn wants_memory(&self) -> bool {
        self.line.front().is_some_and(|first| matches!(self.models[first.model].phase, LoadPhase::Planned(_)))
    }

    /// Bytes of all models in memory, and of those that are being unloaded.
    pub fn bytes(&self) -> (u64, u64) {
        let sum = |of: fn(&LoadPhase) -> bool| self.models.iter().filter(|s| of(&s.phase)).map(|s| s.bytes).sum();
        (sum(LoadPhase::has_memory), sum(|phase| matches!(phase, LoadPhase::Unloading)))
    }

    /// The idle model that was used least recently.
    pub fn idle(&self) -> Option<usize> {
        let idle = self.models.iter().enumerate().filter(|(_, slot)| slot.phase.is_idle());
        idle.min_by_key(|(_, slot)| slot.last_used).map(|(model, _)| model)
    }

    /// Fails all requests that wait for a model.
    pub fn refuse(&mut self, model: usize, error: &ApiError, answers: &mut Answers) {
        for waiting in std::mem::take(&mut self.line) {
            if waiting.model == model {
                answers.push((waiting.to, Err(error.clone())))
            } else {
                self.line.push_back(waiting)
            }
        }
    }
}

impl PoolSlot {
    /// Notes that the model was loaded.
    pub fn now_loaded(&mut self, running: Running) {
        self.context = Some(running.app.model.context.tokens);
        self.facts = running.app.model.facts.clone();
        self.last_used = Some(Instant::now());
        self.unload_soon = false;
        self.phase = LoadPhase::Loaded(running);
    }
}

impl LoadPhase {
    /// The phase as lists have it.
    pub fn name(&self) -> &'static str {
        match self {
            LoadPhase::Unloaded | LoadPhase::Planned(_) | LoadPhase::Opening | LoadPhase::Unloading => "unloaded",
            LoadPhase::Loading => "loading",
            LoadPhase::Loaded(_) => "loaded",
        }
    }

    /// The engine that answers requests.
    pub fn running(&self) -> Option<&Running> {
        match self {
            LoadPhase::Loaded(running) => Some(running),
            _ => None,
        }
    }

    /// As [`running`](Self::running), to change it.
    pub fn running_mut(&mut self) -> Option<&mut Running> {
        match self {
            LoadPhase::Loaded(running) => Some(running),
            _ => None,
        }
    }

    /// Whether it is loaded and no request needs it.
    pub fn is_idle(&self) -> bool {
        self.running().is_some_and(|running| running.leases == 0)
    }

    /// Whether a decode thread runs.
    pub fn has_engine(&self) -> bool {
        matches!(self, LoadPhase::Loaded(_) | LoadPhase::Unloading)
    }

    /// Whether it holds the memory of its plan.
    pub fn has_memory(&self) -> bool {
        self.has_engine() || matches!(self, LoadPhase::Loading)
    }
}
