//! The models of a server: each is loaded when a request needs it, and unloaded when it was idle for long or when
//! another model needs its memory.
//!
//! A request takes a [`ModelLease`], which keeps its model loaded. If the model is not loaded, the request waits in a
//! line, first come, first served. The first of the line decides what happens next ([`ModelPool::advance`]): its model
//! is opened, idle models are unloaded until its memory plan fits, and it is loaded. While it waits for memory, later
//! requests wait behind it, also those for models that are loaded, so that every model gets its turn.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use larder_core::format_bytes;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{Notify, oneshot};

use crate::engine::{Engine, RoutingChange};
use crate::error::ApiError;
use crate::model::{ModelFacts, ServedModel};
use crate::state::{App, Shared};
use crate::telemetry::metrics::{Metrics, ModelMetrics};

mod lease;
mod source;
mod state;
mod work;

use lease::Lender;
pub use lease::ModelLease;
pub use source::{ModelLoader, ModelSource, OnDemandModels, PlannedModel};
use state::{Answers, LoadPhase, PoolSlot, PoolState, Step, Waiting};

/// The models of a server, of which some are loaded.
pub struct ModelPool {
    server: Shared,
    /// Makes the routes of a loaded model.
    routes: fn(App) -> Router,
    loader: Option<Box<dyn ModelLoader>>,
    memory_bytes: u64,
    unload_after: Option<Duration>,
    entries: Vec<PoolEntry>,
    state: Mutex<PoolState>,
    /// Notified when no engine runs any more after the pool was closed.
    ended: Notify,
    /// Whether the decode thread of a model panicked that cannot be loaded again.
    has_failed: AtomicBool,
}

/// Names and counters of a model, whether it is loaded or not.
struct PoolEntry {
    name: String,
    aliases: Vec<String>,
    metrics: Arc<Metrics>,
}

/// A model as lists have it.
pub struct ListedModel<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its other names.
    pub aliases: &'a [String],
    /// Its phase, as llama.cpp's router names it.
    pub status: &'static str,
    /// Its context in tokens, if that is known.
    pub context: Option<usize>,
    /// Bytes of its memory plan; 0 if that is not known.
    pub bytes: u64,
    /// What it is, once it was loaded.
    pub facts: ModelFacts,
}

impl ModelPool {
    /// A pool of models that are loaded for requests.
    pub fn on_demand(server: Shared, routes: fn(App) -> Router, models: OnDemandModels) -> Arc<Self> {
        let OnDemandModels { names, loader, memory_bytes, unload_after } = models;
        let entry = |name| PoolEntry { name, aliases: vec![], metrics: Arc::default() };
        let entries = names.into_iter().map(entry).collect();
        Arc::new(Self::of(server, routes, entries, Some(loader), memory_bytes, unload_after))
    }

    /// A pool of one model, which stays loaded.
    pub fn loaded(
        server: Shared,
        routes: fn(App) -> Router,
        model: ServedModel,
        engine: Box<dyn Engine>,
    ) -> std::io::Result<Arc<Self>> {
        let entry = PoolEntry { name: model.name.clone(), aliases: model.aliases.clone(), metrics: Arc::default() };
        let pool = Arc::new(Self::of(server, routes, vec![entry], None, u64::MAX, None));
        let running = pool.run(0, model, engine)?;
        pool.lock().models[0].now_loaded(running);
        Ok(pool)
    }

    fn of(
        server: Shared,
        routes: fn(App) -> Router,
        entries: Vec<PoolEntry>,
        loader: Option<Box<dyn ModelLoader>>,
        memory_bytes: u64,
        unload_after: Option<Duration>,
    ) -> Self {
        let models = entries.iter().map(|_| PoolSlot::default()).collect();
        let state = Mutex::new(PoolState { models, ..PoolState::default() });
        ModelPool {
            server,
            routes,
            loader,
            memory_bytes,
            unload_after,
            entries,
            state,
            ended: Notify::new(),
            has_failed: AtomicBool::new(false),
        }
    }

    /// The model of a name.
    pub fn find(&self, name: &str) -> Option<usize> {
        self.entries.iter().position(|entry| entry.name == name || entry.aliases.iter().any(|alias| alias == name))
    }

    /// The name of a model.
    pub fn name(&self, model: usize) -> &str {
        &self.entries[model].name
    }

    /// The counters of a model, over all engines that ran it.
    pub fn metrics(&self, model: usize) -> &Metrics {
        &self.entries[model].metrics
    }

    /// All models.
    pub fn list(&self) -> Vec<ListedModel<'_>> {
        let state = self.lock();
        let listed = |slot: &PoolSlot| (slot.phase.name(), slot.context, slot.bytes, slot.facts.clone());
        let slots: Vec<_> = state.models.iter().map(listed).collect();
        drop(state);
        let with_slots = self.entries.iter().zip(slots);
        with_slots
            .map(|(PoolEntry { name, aliases, .. }, (status, context, bytes, facts))| ListedModel {
                name,
                aliases,
                status,
                context,
                bytes,
                facts,
            })
            .collect()
    }

    /// The routes of the only model of a pool that neither loads nor unloads any.
    pub fn fixed(&self) -> Option<Router> {
        if self.loader.is_some() {
            return None;
        }
        self.lock().models.first().and_then(|slot| slot.phase.running()).map(|running| running.router.clone())
    }

    /// The loaded model that was used last.
    pub fn recent(&self) -> Option<usize> {
        let state = self.lock();
        let loaded = state.models.iter().enumerate().filter(|(_, slot)| slot.phase.running().is_some());
        loaded.max_by_key(|(_, slot)| slot.last_used).map(|(model, _)| model)
    }

    /// Keeps a model loaded if it is; does not load it, nor count as use of it.
    pub fn peek(self: &Arc<Self>, model: usize) -> Option<ModelLease> {
        let mut state = self.lock();
        let before = state.models[model].last_used;
        let lease = self.lease(&mut state, model);
        state.models[model].last_used = before;
        lease
    }

    /// Keeps a model loaded, after it was loaded if it is not. Waits in the line up to the time limit of a request.
    pub async fn acquire(self: &Arc<Self>, model: usize) -> Result<ModelLease, ApiError> {
        let (to, admitted) = oneshot::channel();
        if let Some(lease) = self.enter(model, to)? {
            return Ok(lease);
        }
        let limit = self.server.options.timeout;
        match tokio::time::timeout(limit, admitted).await {
            Ok(Ok(lease)) => lease,
            Ok(Err(_)) => Err(ApiError::shutting_down()),
            Err(_) => Err(ApiError::timed_out(limit.as_secs())),
        }
    }

    /// A lease at once, or none and a place in the line.
    fn enter(
        self: &Arc<Self>,
        model: usize,
        to: oneshot::Sender<Result<ModelLease, ApiError>>,
    ) -> Result<Option<ModelLease>, ApiError> {
        let mut state = self.lock();
        if state.closing {
            return Err(ApiError::shutting_down());
        }
        if !state.wants_memory()
            && let Some(lease) = self.lease(&mut state, model)
        {
            return Ok(Some(lease));
        }
        state.line.retain(|waiting| !waiting.to.is_closed());
        let most = self.server.options.queue + self.server.options.parallel;
        if state.line.len() >= most {
            return Err(ApiError::too_many_requests(state.line.len(), "requests wait for a model", 5));
        }
        state.line.push_back(Waiting { model, to });
        drop(state);
        self.change(|_| {});
        Ok(None)
    }

    /// A lease of a model that is loaded.
    fn lease(self: &Arc<Self>, state: &mut PoolState, model: usize) -> Option<ModelLease> {
        let slot = &mut state.models[model];
        let running = slot.phase.running_mut()?;
        running.leases += 1;
        slot.last_used = Some(Instant::now());
        let running = slot.phase.running()?;
        Some(ModelLease::new(self.clone(), model, running.load, running.router.clone()))
    }

    /// Changes the state, and then does all that has become possible.
    fn change(self: &Arc<Self>, change: impl FnOnce(&mut PoolState)) {
        let mut state = self.lock();
        change(&mut state);
        let mut answers = Vec::new();
        while let Some(step) = self.advance(&mut state, &mut answers) {
            self.begin(&mut state, step, &mut answers);
        }
        let is_over = state.closing && state.models.iter().all(|slot| !slot.phase.has_engine());
        drop(state);
        if is_over {
            self.ended.notify_one();
        }
        // Not under the lock: the lease of a client that has gone is given back here.
        for (to, answer) in answers {
            let _ = to.send(answer);
        }
    }

    /// Admits what can be admitted, and decides the next step for the first of the line.
    fn advance(self: &Arc<Self>, state: &mut PoolState, answers: &mut Answers) -> Option<Step> {
        if state.closing {
            answers.extend(state.line.drain(..).map(|waiting| (waiting.to, Err(ApiError::shutting_down()))));
            return None;
        }
        if !state.wants_memory() {
            self.admit(state, answers);
        }
        if let Some(model) = state.models.iter().position(|slot| slot.unload_soon && slot.phase.is_idle()) {
            return Some(Step::Unload(model));
        }
        let first = state.line.front()?.model;
        match &state.models[first].phase {
            LoadPhase::Unloaded => Some(Step::Open(first)),
            LoadPhase::Planned(_) => self.make_room(state, first, answers),
            // A loaded one was admitted above.
            LoadPhase::Opening | LoadPhase::Loading | LoadPhase::Loaded(_) | LoadPhase::Unloading => None,
        }
    }

    /// Loads a model whose plan fits, or unloads another one for it.
    fn make_room(&self, state: &mut PoolState, model: usize, answers: &mut Answers) -> Option<Step> {
        let needs = state.models[model].bytes;
        if needs > self.memory_bytes {
            let error = self.too_large(model, needs);
            state.models[model].phase = LoadPhase::Unloaded;
            state.refuse(model, &error, answers);
            return Some(Step::Again);
        }
        let (used, going) = state.bytes();
        if used.saturating_add(needs) <= self.memory_bytes {
            return Some(Step::Load(model));
        }
        if (used - going).saturating_add(needs) <= self.memory_bytes {
            return None;
        }
        state.idle().map(Step::Unload)
    }

    fn too_large(&self, model: usize, needs: u64) -> ApiError {
        let message = format!(
            "The model '{}' needs {}, more than the {} for models; start the server with a smaller --cache or --context.",
            self.name(model),
            format_bytes(needs),
            format_bytes(self.memory_bytes)
        );
        ApiError::engine_failed(message)
    }

    /// Gives a lease to each request of the line whose model is loaded.
    fn admit(self: &Arc<Self>, state: &mut PoolState, answers: &mut Answers) {
        for waiting in std::mem::take(&mut state.line) {
            match self.lease(state, waiting.model) {
                Some(lease) => answers.push((waiting.to, Ok(lease))),
                None => state.line.push_back(waiting),
            }
        }
    }

    /// Has a model unloaded as soon as no request needs it, as Ollama's clients ask for.
    pub fn unload(self: &Arc<Self>, model: usize) {
        if self.loader.is_some() {
            self.change(|state| state.models[model].unload_soon = true);
        }
    }

    /// Remembers the routing strategy of a model for its next load.
    pub fn remember_routing(&self, model: usize, change: RoutingChange) {
        self.lock().models[model].routing = Some(change);
    }

    /// Numbers of waiting and of active requests of a model.
    pub fn lengths(&self, model: usize) -> (usize, usize) {
        let state = self.lock();
        let in_line = state.line.iter().filter(|waiting| waiting.model == model).count();
        let (queued, active) = state.models[model].phase.running().map_or((0, 0), |r| r.app.queue.lengths());
        (queued + in_line, active)
    }

    /// Numbers of waiting and of active requests of all models.
    pub fn all_lengths(&self) -> (usize, usize) {
        let of_models = (0..self.entries.len()).map(|model| self.lengths(model));
        of_models.fold((0, 0), |(queued, active), (q, a)| (queued + q, active + a))
    }

    /// The counters of all models.
    pub fn all_metrics(&self) -> Vec<ModelMetrics<'_>> {
        let several = self.loader.is_some();
        let numbered = self.entries.iter().enumerate();
        numbered
            .map(|(model, PoolEntry { name, metrics, .. })| ModelMetrics {
                name: several.then_some(name),
                metrics,
                lengths: self.lengths(model),
            })
            .collect()
    }

    /// Whether all ended as it should: an error if a decode thread panicked that was to run for as long as the server.
    pub fn result(&self) -> std::io::Result<()> {
        if self.has_failed.load(Ordering::Acquire) {
            Err(std::io::Error::other("the decode thread panicked"))
        } else {
            Ok(())
        }
    }

    /// Whether the server shuts down.
    pub fn is_closed(&self) -> bool {
        self.lock().closing
    }

    /// Refuses new requests from now on; active ones are completed.
    pub fn close(self: &Arc<Self>) {
        self.change(|state| {
            state.closing = true;
            state.models.iter().filter_map(|slot| slot.phase.running()).for_each(|running| running.app.queue.close());
        });
    }

    /// Returns when the pool was closed and no engine runs any more.
    pub async fn ended(&self) {
        self.ended.notified().await;
    }

    /// Unloads models that were idle for too long, until the pool is closed.
    pub async fn unload_idle(self: Arc<Self>) {
        let Some(after) = self.unload_after else { return };
        let pause = (after / 4).clamp(Duration::from_millis(50), Duration::from_secs(5));
        while !self.is_closed() {
            tokio::time::sleep(pause).await;
            self.change(|state| {
                let is_late = |slot: &PoolSlot| slot.last_used.is_some_and(|at| at.elapsed() >= after);
                for slot in &mut state.models {
                    slot.unload_soon |= slot.phase.is_idle() && is_late(slot);
                }
            });
        }
    }

    fn lock(&self) -> MutexGuard<'_, PoolState> {
        // No code here panics halfway through a change.
        self.state.lock()
    }
}

impl Lender for ModelPool {
    fn give_back(self: Arc<Self>, model: usize, load: u64) {
        self.change(|state| {
            let slot = &mut state.models[model];
            slot.last_used = Some(Instant::now());
            if let Some(running) = slot.phase.running_mut().filter(|running| running.load == load) {
                running.leases = running.leases.saturating_sub(1);
            }
        });
    }
}
