//! The draft model of an engine: whether it can be used, and the memory that it takes.

use anyhow::{Result, bail};
use larder_core::printable;
use larder_engine::Speculation;
use larder_model::rewinds_freely;
use larder_os::give_back_freed_memory;
use larder_policy::eviction::PolicyNeeds;

use super::model::{AvailableMemory, beside_draft};
use crate::notices::{Notice, Setting};
use crate::open::{OpenModel, model_name};
use crate::options::{CacheOptions, ContextSize, Options, VisionOptions};
use crate::plan::{DraftMemory, MemoryPlan, PlanInputs};

/// Tokens of a text that a draft model computes in one step, when it begins behind a prompt.
const CHUNK_TOKENS: usize = 256;

/// Refuses what the options say of drafting and cannot be.
pub fn check_drafting(model: &OpenModel, options: &Options) -> Result<()> {
    prepare(model, options).map(drop)
}

/// The draft model that is used, if one is, checked; tells if one that the options name is not.
pub(crate) fn prepare<'o>(model: &OpenModel, options: &'o Options) -> Result<Option<&'o OpenModel>> {
    check_speculation(options)?;
    let draft = of_options(model, options)?;
    match draft {
        Some(draft) => check(model, draft)?,
        None => tell_unused(model, options)?,
    }
    Ok(draft)
}

/// Refuses speculation that was asked for where rejected tokens would change the text or the trace.
fn check_speculation(options: &Options) -> Result<()> {
    let asked = options.speculation;
    if matches!(asked, Speculation::Off | Speculation::Auto) {
        return Ok(());
    }
    if !options.routing.is_lossless() {
        let (speculate, routing) = (Setting::Speculate, Setting::Routing);
        bail!(
            "{speculate} {asked} cannot be used with {routing} {}: rejected draft tokens would change the text",
            options.routing
        );
    }
    if options.trace.is_some() {
        let (speculate, trace) = (Setting::Speculate, Setting::Trace);
        bail!("{speculate} {asked} cannot be used with {trace}, which would have the experts of rejected draft tokens");
    }
    if asked == Speculation::Mtp && options.cache.eviction.needs() == PolicyNeeds::Evictor {
        let (speculate, eviction) = (Setting::Speculate, Setting::Eviction.with("learned"));
        bail!(
            "{speculate} mtp cannot be used with {eviction}, whose weights know the experts of the other layers only"
        );
    }
    Ok(())
}

/// The draft model that the options name, unless it is of no use for `model`. Refuses what was asked for and cannot be.
fn of_options<'o>(model: &OpenModel, options: &'o Options) -> Result<Option<&'o OpenModel>> {
    let (speculate, asked) = (Setting::Speculate, options.speculation);
    match (asked, &options.draft) {
        (Speculation::Off | Speculation::Lookup | Speculation::Mtp, _) | (Speculation::Auto, None) => Ok(None),
        (Speculation::Draft, None) => {
            bail!("{speculate} {asked} needs a draft model; name one as in {speculate} draft=STORE")
        }
        (_, Some(named)) => match (why_not(model, options)?, asked) {
            (None, _) => Ok(Some(named)),
            (Some(why), Speculation::Draft) => bail!("{speculate} {asked} cannot be used: {why}"),
            (Some(_), _) => Ok(None),
        },
    }
}

/// Why no draft model can be used.
fn why_not(model: &OpenModel, options: &Options) -> Result<Option<String>> {
    let (routing, trace) = (Setting::Routing, Setting::Trace);
    Ok(match () {
        _ if !options.routing.is_lossless() => {
            Some(format!("with {routing} {}, rejected draft tokens would change the text", options.routing))
        }
        _ if options.trace.is_some() => Some(format!("{trace} would have the experts of rejected draft tokens")),
        _ if !rewinds_freely(model.source().config())? => Some(format!(
            "{} has a recurrent state or an encoder, and cannot drop rejected draft tokens",
            model_name(model.source().path())
        )),
        _ => None,
    })
}

/// Tells that the draft model of the options is not used, and why.
fn tell_unused(model: &OpenModel, options: &Options) -> Result<()> {
    if let (Speculation::Auto, Some(_), Some(why)) = (options.speculation, &options.draft, why_not(model, options)?) {
        model.notices().send(Notice::Model(format!("the draft model is not used: {why}")));
    }
    Ok(())
}

/// Refuses a draft model that cannot draft for `model`.
fn check(model: &OpenModel, draft: &OpenModel) -> Result<()> {
    let name = model_name(draft.source().path());
    if !rewinds_freely(draft.source().config())? {
        bail!(
            "{name} has a recurrent state or an encoder, and cannot go back to draft again; name another draft model"
        );
    }
    check_vocabularies(model, draft)
}

/// Refuses a draft model whose tokens stand for other text. A model without a tokenizer, as of random weights, only
/// goes with another.
fn check_vocabularies(model: &OpenModel, draft: &OpenModel) -> Result<()> {
    let file = |model: &OpenModel| model.source().sidecar("tokenizer.json");
    if file(model)? == file(draft)? {
        return Ok(());
    }
    let [of_model, of_draft] = [model, draft].map(|model| model_name(model.source().path()));
    let (Some(tokenizer), Some(other)) = (model.tokenizer()?, draft.tokenizer()?) else {
        bail!(
            "one of {of_model} and {of_draft} has no tokenizer, so their tokens cannot be compared; leave the draft model out"
        );
    };
    let difference = tokenizer.difference(&other);
    drop((tokenizer, other));
    give_back_freed_memory();
    let Some((id, ours, theirs)) = difference else { return Ok(()) };
    bail!(
        "{of_draft} cannot draft for {of_model}: token {id} is \"{}\" in one and \"{}\" in the other; name a draft model with \
         the same tokenizer, or leave it out",
        printable(&theirs),
        printable(&ours),
    )
}

/// The memory that the draft model of the options takes for texts of up to `context` tokens, if it is used.
pub(super) fn memory(model: &OpenModel, options: &Options, context: usize) -> Result<Option<DraftMemory>> {
    let Some(draft) = of_options(model, options)? else { return Ok(None) };
    let inputs = draft_inputs(draft, options, context)?;
    let bytes = MemoryPlan::AllResident.total_bytes(&inputs);
    Ok(Some(DraftMemory { name: model_name(draft.source().path()), bytes }))
}

/// The inputs of a plan of the draft model alone, for texts of up to `context` tokens, with all its experts in memory:
/// from the SSD it would hardly be faster than the model that it drafts for.
pub(crate) fn draft_inputs<'d>(draft: &'d OpenModel, options: &Options, context: usize) -> Result<PlanInputs<'d>> {
    let own = Options {
        context: ContextSize::Tokens(context),
        sequences: 1,
        kv_limit_bytes: None,
        prompt_bytes_per_token: 0,
        prefill_tokens: Some(CHUNK_TOKENS),
        cache: CacheOptions::default(),
        speculation: Speculation::Off,
        draft: None,
        vision: VisionOptions::default(),
        ..options.clone()
    };
    // The process is that of the other plan.
    let inputs = beside_draft(draft, &own, AvailableMemory { process: 0, available: None }, &|_| Ok(None))?;
    Ok(PlanInputs { growth_bytes: 0, ..inputs })
}
