//! Opening, loading and unloading of models, each on a thread of its own: loading takes seconds.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Instant;

use larder_os::give_back_freed_memory;

use super::ModelPool;
use super::source::PlannedModel;
use super::state::{Answers, LoadPhase, PoolState, Running, Step};
use crate::decode::{self, PictureEncoder};
use crate::engine::Engine;
use crate::error::ApiError;
use crate::model::ServedModel;
use crate::queue::RequestQueue;
use crate::sequences::sessions::{SessionDisk, Sessions};
use crate::state::{App, ServerState};

impl ModelPool {
    /// Begins a step.
    pub(super) fn begin(self: &Arc<Self>, state: &mut PoolState, step: Step, answers: &mut Answers) {
        let (model, started) = match step {
            Step::Again => return,
            Step::Open(model) => {
                state.models[model].phase = LoadPhase::Opening;
                (model, self.spawn(model, move |pool| pool.open(model)))
            }
            Step::Load(model) => match std::mem::replace(&mut state.models[model].phase, LoadPhase::Loading) {
                LoadPhase::Planned(planned) => (model, self.spawn(model, move |pool| pool.load(model, planned))),
                other => return state.models[model].phase = other,
            },
            Step::Unload(model) => {
                let slot = &mut state.models[model];
                slot.unload_soon = false;
                match std::mem::replace(&mut slot.phase, LoadPhase::Unloading) {
                    LoadPhase::Loaded(running) => (model, self.spawn(model, move |pool| pool.finish(model, running))),
                    other => return slot.phase = other,
                }
            }
        };
        if let Err(error) = started {
            // What the thread was to work on is dropped, which ends an engine too.
            state.models[model].phase = LoadPhase::Unloaded;
            let message = format!("No thread can be started for the model '{}': {error}.", self.name(model));
            state.refuse(model, &ApiError::engine_failed(message), answers);
        }
    }

    /// Runs work on a model on a thread; if it panics, the model is unloaded and its requests fail.
    fn spawn(self: &Arc<Self>, model: usize, work: impl FnOnce(&Arc<Self>) + Send + 'static) -> io::Result<()> {
        let pool = self.clone();
        let run = move || {
            if catch_unwind(AssertUnwindSafe(|| work(&pool))).is_err() {
                pool.failed(model, "a thread panicked");
            }
        };
        thread::Builder::new().name("load".into()).spawn(run).map(drop)
    }

    fn open(self: &Arc<Self>, model: usize) {
        let Some(loader) = &self.loader else { return };
        match loader.open(model) {
            Ok(planned) => self.change(|state| {
                let slot = &mut state.models[model];
                slot.bytes = planned.bytes();
                slot.phase = LoadPhase::Planned(planned);
            }),
            Err(error) => self.failed(model, &error),
        }
    }

    fn load(self: &Arc<Self>, model: usize, planned: Box<dyn PlannedModel>) {
        let since = Instant::now();
        let routing = self.lock().models[model].routing.clone();
        let started = planned.start().and_then(|(served, mut engine)| {
            if let Some(change) = routing {
                engine.set_routing(&change).map_err(|refused| refused.to_string())?;
            }
            self.run(model, served, engine).map_err(|error| error.to_string())
        });
        match started {
            Ok(running) => {
                tracing::info!(model = self.name(model), ms = since.elapsed().as_millis() as u64, "loaded");
                self.change(|state| {
                    // A server that shuts down meanwhile does not wait for it.
                    if state.closing {
                        running.app.queue.close();
                    }
                    state.models[model].now_loaded(running);
                });
            }
            Err(error) => self.failed(model, &error),
        }
    }

    /// Fails the requests that wait for a model.
    fn failed(self: &Arc<Self>, model: usize, why: &str) {
        let message = format!("The model '{}' cannot be loaded: {why}.", self.name(model));
        tracing::error!("{message}");
        let error = ApiError::engine_failed(message);
        let mut answers = Vec::new();
        self.change(|state| {
            state.models[model].phase = LoadPhase::Unloaded;
            state.refuse(model, &error, &mut answers);
        });
        answers.into_iter().for_each(|(to, answer)| drop(to.send(answer)));
    }

    /// Starts the decode thread of a model.
    pub(super) fn run(
        self: &Arc<Self>,
        model: usize,
        served: ServedModel,
        engine: Box<dyn Engine>,
    ) -> io::Result<Running> {
        let server = self.server.clone();
        let disk = server.options.session_disk.as_ref().map(|disk| self.disk_of(model, disk));
        let images = &served.vision.images;
        let open = |disk| Sessions::open(disk, &engine.sequence_origin(), served.context.tokens, images.clone());
        let sessions = disk.as_ref().map(open).transpose()?;
        let encoder = served.vision.sight.clone().map(PictureEncoder::start).transpose()?;
        let app = Arc::new(ServerState {
            queue: RequestQueue::new(server.options.queue, server.options.parallel),
            server,
            model: served,
            metrics: self.entries[model].metrics.clone(),
            grammars: OnceLock::new(),
        });
        let load = {
            let mut state = self.lock();
            state.loads += 1;
            state.loads
        };
        let end = EndOnDrop { pool: self.clone(), app: app.clone(), model, load };
        let decoding = thread::Builder::new()
            .name("decode".into())
            .spawn(move || decode::run(&end.app, engine, sessions, encoder))?;
        Ok(Running { router: (self.routes)(app.clone()), app, leases: 0, decoding: Some(decoding), load })
    }

    /// The folder of a model's sequences: several models have one each.
    fn disk_of(&self, model: usize, disk: &SessionDisk) -> SessionDisk {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        let name: String = self.name(model).chars().map(|c| if is_plain(c) { c } else { '_' }).collect();
        let folder = match self.loader {
            Some(_) => disk.folder.join(format!("{model}-{name}")),
            None => disk.folder.clone(),
        };
        SessionDisk { folder, ..disk.clone() }
    }

    /// Ends the engine of a model that no request needs.
    fn finish(self: &Arc<Self>, model: usize, mut running: Running) {
        running.app.queue.close();
        if running.decoding.take().is_some_and(|decoding| decoding.join().is_err()) {
            tracing::error!(model = self.name(model), "the decode thread panicked");
        }
        drop(running);
        self.entries[model].metrics.lock().engine_ended();
        give_back_freed_memory();
        tracing::info!(model = self.name(model), "unloaded");
        self.change(|state| state.models[model].phase = LoadPhase::Unloaded);
    }

    /// The decode thread of a load has ended, which nothing but a shutdown or [`finish`](Self::finish) has asked for.
    fn engine_ended(self: &Arc<Self>, model: usize, load: u64) {
        let mut is_unexpected = false;
        if self.loader.is_none() && thread::panicking() {
            self.has_failed.store(true, Ordering::Release);
        }
        self.change(|state| {
            let is_this = state.models[model].phase.running().is_some_and(|running| running.load == load);
            if is_this {
                is_unexpected = !state.closing;
                state.models[model].phase = LoadPhase::Unloaded;
            }
        });
        if is_unexpected {
            eprintln!("{}: the engine has failed", self.name(model));
            self.metrics(model).lock().engine_ended();
            if self.loader.is_none() {
                self.close();
            }
        }
    }
}

/// Tells the pool that a decode thread has ended, also by a panic.
struct EndOnDrop {
    pool: Arc<ModelPool>,
    app: App,
    model: usize,
    load: u64,
}

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        self.app.queue.close();
        self.pool.engine_ended(self.model, self.load);
    }
}
