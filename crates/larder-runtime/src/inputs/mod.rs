//! The inputs of a memory plan: from a model, options, and the memory of the machine to the numbers that decide it.

mod draft;
mod model;
mod tiers;
mod vision;

use anyhow::Result;

pub use draft::check_drafting;
pub(crate) use draft::{draft_inputs, prepare};
pub use model::{AvailableMemory, expert_sizes};
pub use tiers::tier_inputs;

use crate::notices::{Notice, Setting};
use crate::open::OpenModel;
use crate::options::{ContextSize, Options};
use crate::plan::PlanInputs;

/// The inputs of the memory plan on the CPU.
pub fn plan_inputs<'a>(model: &'a OpenModel, options: &Options) -> Result<PlanInputs<'a>> {
    plan_inputs_in(model, options, AvailableMemory::now())
}

/// As [`plan_inputs`], in this memory.
pub fn plan_inputs_in<'a>(model: &'a OpenModel, options: &Options, now: AvailableMemory) -> Result<PlanInputs<'a>> {
    model::beside_draft(model, options, now, &|context| draft::memory(model, options, context))
}

/// Tells that a context was asked for that is longer than the model's.
pub fn tell_context(model: &OpenModel, options: &Options) {
    let own = model.blueprint.context;
    if let ContextSize::Tokens(tokens) = options.context
        && tokens > own
    {
        let context = Setting::Context;
        let note = format!("{context} {tokens} is more than the model's own {own} tokens, which are used");
        model.notices().send(Notice::Model(note));
    }
}
