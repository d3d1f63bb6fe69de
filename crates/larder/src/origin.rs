//! What saved sequences of a run depend on beside their tokens: the model, the KV cache, the arithmetic, the routing.

use anyhow::Result;
use larder_engine::SequenceOrigin;
use larder_policy::routing::RoutingSpec;
use larder_runtime::{InferenceEngine, OpenModel, Options};

/// The origin of a run's sequences, whatever its routing.
pub struct SequenceOrigins {
    /// Identity of the model; empty if no sequence is saved.
    model: String,
    settings: String,
}

impl SequenceOrigins {
    /// Of a run that saves sequences, or else does not need them told apart. Refuses a model whose sequences cannot be
    /// saved.
    pub fn new(model: &OpenModel, options: &Options, engine: &InferenceEngine, saves: bool) -> Result<Self> {
        let identity = if saves {
            engine.decoder.check_saving()?;
            model.identity()?
        } else {
            String::new()
        };
        let kv = engine.decoder.kv_pool().format().kind();
        Ok(SequenceOrigins { model: identity, settings: format!("kv={kv} exact={}", options.compute.exact) })
    }

    /// That of sequences that are routed in this way.
    pub fn with(&self, routing: &RoutingSpec) -> SequenceOrigin {
        SequenceOrigin::new(&self.model, &format!("{} routing={routing}", self.settings))
    }
}
