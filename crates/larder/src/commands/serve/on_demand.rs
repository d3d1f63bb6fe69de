//! Several models, which are opened and loaded for requests.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Result;
use larder_serve::{Engine, ModelLoader, PlannedModel, ServedModel};

use super::opener::{ModelOpener, OpenedModel};

/// Opens the models of `-m`.
pub struct OnDemandLoader {
    pub opener: Arc<ModelOpener>,
    pub names: Vec<String>,
    pub paths: Vec<PathBuf>,
    /// Memory for all models.
    pub memory_bytes: u64,
    /// Memory of the process without a model.
    pub process_bytes: u64,
}

impl ModelLoader for OnDemandLoader {
    fn open(&self, index: usize) -> Result<Box<dyn PlannedModel>, String> {
        let opened = || -> Result<_> {
            let mut opened = self.opener.open(&self.paths[index])?;
            let bytes = opened.plan_alone(self.process_bytes, self.memory_bytes, self.paths.len())?;
            Ok(Planned { opened, bytes, name: self.names[index].clone() })
        };
        opened().map(|planned| Box::new(planned) as Box<dyn PlannedModel>).map_err(|error| format!("{error:#}"))
    }
}

/// A model with its memory plan.
struct Planned {
    opened: OpenedModel,
    bytes: u64,
    name: String,
}

impl PlannedModel for Planned {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn start(self: Box<Self>) -> Result<(ServedModel, Box<dyn Engine>), String> {
        self.opened.start(vec![self.name]).map_err(|error| format!("{error:#}"))
    }
}
