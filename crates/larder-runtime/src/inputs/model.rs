//! The inputs of the memory plan of one model: its sizes, the options, and the memory of the machine.

use anyhow::Result;
use larder_core::CheckpointPolicy;
use larder_engine::{DRAFT_MAX, Speculation};
use larder_model::{KvFormat, rewinds_freely};
use larder_os::memory;

use super::vision;
use crate::open::OpenModel;
use crate::options::Options;
use crate::plan::{DraftMemory, ExpertSizes, LEAST_TOKENS, PlanInputs, prefill_tokens, with_context};

/// The memory of the process and of the machine before a model is loaded.
#[derive(Clone, Copy, Debug)]
pub struct AvailableMemory {
    /// Bytes that the process takes.
    pub process: u64,
    /// Bytes that are available beside it; `None` if unknown.
    pub available: Option<u64>,
}

impl AvailableMemory {
    /// The memory as it is now.
    pub fn now() -> Self {
        AvailableMemory { process: memory::current().unwrap_or_default(), available: memory::available() }
    }
}

/// The memory of a draft model for texts of up to this number of tokens.
pub(super) type DraftFor<'f> = &'f dyn Fn(usize) -> Result<Option<DraftMemory>>;

/// The inputs of the memory plan on the CPU, in this memory and beside this draft model.
pub(super) fn beside_draft<'a>(
    model: &'a OpenModel,
    options: &Options,
    now: AvailableMemory,
    draft: DraftFor,
) -> Result<PlanInputs<'a>> {
    let any = inputs_of_any_context(model, options, now)?;
    let inputs = with_context(options, &|tokens| at_context(&any, tokens, draft))?;
    Ok(PlanInputs { prefill_tokens: prefill_tokens(&inputs, options), ..inputs })
}

/// The same inputs with a context of `tokens` tokens or the model's, prefill chunks being as small as they get.
pub(super) fn at_context<'a>(inputs: &PlanInputs<'a>, tokens: usize, draft: DraftFor) -> Result<PlanInputs<'a>> {
    let context = tokens.min(inputs.blueprint.context);
    let prefill_tokens = context.saturating_mul(inputs.sequences).min(LEAST_TOKENS);
    Ok(PlanInputs { context, prefill_tokens, draft: draft(context)?, ..inputs.clone() })
}

fn inputs_of_any_context<'a>(model: &'a OpenModel, options: &Options, now: AvailableMemory) -> Result<PlanInputs<'a>> {
    Ok(PlanInputs {
        blueprint: &model.blueprint,
        resident_bytes: model.bytes()?.0,
        expert_sizes: expert_sizes(model)?,
        scratch_slots: options.cache.scratch,
        context: 0,
        sequences: options.sequences,
        whole_contexts: options.whole_contexts,
        drafts: if options.speculation == Speculation::Off { 0 } else { DRAFT_MAX },
        draft: None,
        vision: vision::memory(model, options)?,
        kv_limit_bytes: options.kv_limit_bytes,
        kv_format: kv_format_of(model, options)?,
        kv_checkpoints: CheckpointPolicy { pins: options.pins, ..CheckpointPolicy::default() },
        measures_in_copy: !options.routing.is_lossless() && !rewinds_freely(model.source().config())?,
        prefill_tokens: 0,
        threads: options.compute.threads,
        process_bytes: now.process,
        growth_bytes: memory::growth(options.compute.threads, false) + options.program_bytes,
        tokenising_bytes_per_token: options.tokenising_bytes_per_token(),
        available_bytes: now.available,
        limit_bytes: memory::limit(),
        on_gpu: false,
        vram_kv_layers: usize::MAX,
    })
}

/// The format of the KV cache: f16 costs no quality beside quantised weights; with float weights it stays exact.
fn kv_format_of(model: &OpenModel, options: &Options) -> Result<KvFormat> {
    let experts = model.experts()?;
    let mut layers = model.blueprint.geometry.moe_layers.iter();
    let quantised = layers.any(|l| !experts.as_dyn().layout(*l).up.kind.is_float());
    let default = if quantised && !options.compute.exact { KvFormat::F16 } else { KvFormat::F32 };
    Ok(options.compute.kv.unwrap_or(default))
}

/// The sizes of the experts of each layer.
pub fn expert_sizes(model: &OpenModel) -> Result<ExpertSizes> {
    let experts = model.experts()?;
    let layouts = model.blueprint.geometry.moe_layers.iter().map(|l| experts.as_dyn().layout(*l));
    Ok(ExpertSizes::new(layouts.map(|l| l.bytes as u64)))
}
