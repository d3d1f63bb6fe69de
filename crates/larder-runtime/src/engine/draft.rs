//! Loading the draft model of an engine.

use std::sync::Arc;

use anyhow::Result;
use larder_engine::{DraftModel, SharedSource};
use larder_model::ComputeContext;
use parking_lot::Mutex;

use crate::inputs::draft_inputs;
use crate::notices::Notice;
use crate::open::{OpenModel, model_name};
use crate::options::Options;

/// Loads the draft model, whose products are computed on the threads of `compute`, for texts of up to `context` tokens
/// of `vocab`.
pub(super) fn load(
    draft: &OpenModel,
    options: &Options,
    context: usize,
    vocab: usize,
    compute: &ComputeContext,
) -> Result<SharedSource> {
    let inputs = draft_inputs(draft, options, context)?;
    if let Some(store) = draft.store() {
        store.require_all()?;
    }
    let compute = Arc::new(ComputeContext {
        kv_format: inputs.kv_format,
        kv_limit_bytes: Some(usize::try_from(inputs.kv_bytes()).unwrap_or(usize::MAX)),
        ..compute.on_same_threads()
    });
    let decoder = draft.decoder(&compute)?;
    let (experts, rates) = draft.load_experts(&compute)?;
    if let Some(rates) = rates {
        draft.notices().send(Notice::DraftPreloaded { name: model_name(draft.source().path()), rates });
    }
    Ok(Arc::new(Mutex::new(DraftModel::new(decoder, experts, inputs.context, inputs.prefill_tokens, vocab))))
}
