//! Where the models of a server come from: what a caller of this crate implements.

use std::time::Duration;

use crate::engine::Engine;
use crate::model::ServedModel;

/// Opens the models of a pool, by their index.
pub trait ModelLoader: Send + Sync {
    /// Opens a model and plans its memory, without loading weights. The error is one sentence.
    fn open(&self, index: usize) -> Result<Box<dyn PlannedModel>, String>;
}

/// A model on disk with its memory plan.
pub trait PlannedModel: Send {
    /// Bytes that the plan needs beside those of the process.
    fn bytes(&self) -> u64;

    /// Loads the model and starts its engine. The error is one sentence.
    fn start(self: Box<Self>) -> Result<(ServedModel, Box<dyn Engine>), String>;
}

/// Where the models of a server come from.
pub enum ModelSource {
    /// One model, which stays loaded.
    Loaded(Box<ServedModel>, Box<dyn Engine>),
    /// Several models, which are loaded for requests.
    OnDemand(OnDemandModels),
}

/// Models that are loaded for requests.
pub struct OnDemandModels {
    /// Their names in the API; the first is that of requests that name none.
    pub names: Vec<String>,
    /// Opens them.
    pub loader: Box<dyn ModelLoader>,
    /// Memory for all that are loaded at a time.
    pub memory_bytes: u64,
    /// A model is unloaded after this time without a request; `None` for never.
    pub unload_after: Option<Duration>,
}
