//! `larder prove`: the same texts by every way to compute them, compared bit by bit.

use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result};
use larder_kernels::{SetUse, instruction_set, instruction_sets};
use larder_os::read_regular;
use larder_policy::routing::RoutingSpec;
use larder_runtime::plan::{MemoryPlan, decide};
use larder_runtime::{
    CacheOptions, CacheSize, ComputeOptions, InferenceEngine, OpenModel, Options, error_message, plan_inputs,
};
use larder_store::reader::{READERS, ReaderSpec};
use larder_store::{StoreError, StoreErrorKind, checksum_of};

use self::report::{Outcome, ProofReport};
use self::texts::{BATCH, TextPlan, WrittenAs};
use self::written::{TEXTS, WrittenTexts};
use crate::cli::prove::ProveArgs;
use crate::{models, output, print};

mod process;
mod report;
mod texts;
mod written;

/// The most bytes of a file of `--save` that are read.
const SAVED_BYTES_MAX: u64 = 4 << 30;

/// Computes texts once, and compares them with the same texts of each other way, or with saved ones.
pub fn run(args: &ProveArgs) -> Result<()> {
    let settings = &args.engine.settings;
    let saved = args.against.as_deref().map(read_saved).transpose()?;
    let model = models::open_to_run(&args.model, settings, &args.ignore_config)?;
    let plan = TextPlan::new(&model, saved.as_ref().map_or(args.tokens, WrittenTexts::tokens_each))?;
    let vocab = model.blueprint.vocab;
    let shown = args.against.as_deref().map(|path| path.display().to_string()).unwrap_or_default();
    saved.iter().try_for_each(|saved| saved.check(&plan.prompt, vocab)).with_context(|| shown.clone())?;
    let options = Options { sequences: BATCH, program_bytes: plan.bytes(vocab), ..settings.options(plan.context()) };
    let mut engine = InferenceEngine::start(&model, &options)?;
    let first = plan.write(&mut engine, WrittenAs::Alone)?;
    let bytes = first.to_bytes()?;
    let mut report = ProofReport::begin(&describe(&plan, &options), checksum_of(&bytes), args.json);
    if let Some(saved) = saved {
        report.add(shown, Outcome::of(&saved, &first));
        return report.finish(&args.model, &options.routing);
    }
    args.save.iter().try_for_each(|path| output::write(path, &bytes))?;
    for (name, how) in [
        ("half of the prompt kept, experts as left", WrittenAs::Continued),
        ("in a batch of four sequences", WrittenAs::Batch),
    ] {
        report.add(name, Outcome::of(&first, &plan.write(&mut engine, how)?));
    }
    drop(engine);
    // The plan of each engine would hide the results.
    let model = model.without_notices();
    for Case { name, setup } in cases(&model, &options)? {
        report.add(name, compare(&model, &plan, setup, &first)?);
    }
    for (name, of) in instruction_sets() {
        let outcome = match of {
            SetUse::Used => continue,
            SetUse::Missing(features) => {
                Outcome::LeftOut { why: format!("this processor has no {}", features.join(", ")) }
            }
            SetUse::Slower | SetUse::Faster => process::compare(name, &bytes)?,
        };
        report.add(format!("kernels {name}"), outcome);
    }
    report.finish(&args.model, &options.routing)
}

/// The texts in a file of `--save`, or on standard input.
fn read_saved(path: &Path) -> Result<WrittenTexts> {
    let read = || {
        if path != Path::new("-") {
            return read_regular(path, SAVED_BYTES_MAX);
        }
        let mut bytes = Vec::new();
        std::io::stdin().lock().take(SAVED_BYTES_MAX).read_to_end(&mut bytes).map(|_| bytes)
    };
    let bytes = read().map_err(anyhow::Error::from);
    bytes.and_then(|bytes| WrittenTexts::from_bytes(&bytes)).with_context(|| path.display().to_string())
}

/// The first run, in one line.
fn describe(plan: &TextPlan, options: &Options) -> String {
    let (threads, texts) = (options.compute.threads, TEXTS.join(" and "));
    format!(
        "first run: {} with {} kernels; {texts}, {} each behind a prompt of {}",
        print::count(threads, "thread", "threads"),
        instruction_set(),
        print::count(plan.tokens, "token", "tokens"),
        plan.prompt.len()
    )
}

/// A way to compute the texts with an engine of its own.
struct Case {
    name: String,
    setup: Setup,
}

enum Setup {
    Engine(Box<Options>),
    LeftOut(String),
}

/// All of them: another number of threads, all experts in memory, and each reader with few experts there.
fn cases(model: &OpenModel, options: &Options) -> Result<Vec<Case>> {
    let threads = if options.compute.threads == 1 { 2 } else { 1 };
    let compute = ComputeOptions { threads, ..options.compute.clone() };
    let mut cases = vec![
        Case {
            name: print::count(threads, "thread", "threads"),
            setup: Setup::Engine(Box::new(Options { compute, ..options.clone() })),
        },
        Case { name: "all experts in memory".into(), setup: all_in_memory(model, options)? },
    ];
    let geometry = &model.blueprint.geometry;
    for reader in READERS.iter().filter(|reader| reader.name != ReaderSpec::AUTO.name) {
        let name = format!("{} of {} experts per layer, reader {reader}", geometry.top_k, geometry.experts);
        let setup = if model.store().is_some() {
            let size = CacheSize::ExpertsPerLayer(geometry.top_k);
            let cache = CacheOptions { size, reader: *reader, ..options.cache.clone() };
            Setup::Engine(Box::new(Options { cache, ..options.clone() }))
        } else {
            Setup::LeftOut("the model is not a store".into())
        };
        cases.push(Case { name, setup });
    }
    Ok(cases)
}

/// All experts in memory from the start, where there is room for them; the model's own routing, as nothing is missing.
fn all_in_memory(model: &OpenModel, options: &Options) -> Result<Setup> {
    if model.store().is_none() || options.cache.size == CacheSize::All && options.routing.is_lossless() {
        return Ok(Setup::LeftOut("they are in the first run".into()));
    }
    let cache = CacheOptions { size: CacheSize::All, ..options.cache.clone() };
    let options = Options { cache, routing: RoutingSpec::default(), ..options.clone() };
    let inputs = plan_inputs(model, &options)?;
    Ok(match decide(&inputs, &options)? {
        MemoryPlan::AllResident => Setup::Engine(Box::new(options)),
        _ => Setup::LeftOut(format!("{} of experts do not fit", print::bytes(inputs.all_expert_bytes()))),
    })
}

/// Writes the texts with an engine of this setup, and compares them. What this machine does not have is left out.
fn compare(model: &OpenModel, plan: &TextPlan, setup: Setup, first: &WrittenTexts) -> Result<Outcome> {
    let options = match setup {
        Setup::Engine(options) => options,
        Setup::LeftOut(why) => return Ok(Outcome::LeftOut { why }),
    };
    let mut engine = match InferenceEngine::start(model, &options) {
        Err(error) if is_unsupported(&error) => return Ok(Outcome::LeftOut { why: error_message(&error) }),
        engine => engine?,
    };
    Ok(Outcome::of(first, &plan.write(&mut engine, WrittenAs::Alone)?))
}

fn is_unsupported(error: &anyhow::Error) -> bool {
    error.downcast_ref::<StoreError>().is_some_and(|error| error.kind == StoreErrorKind::Unsupported)
}
