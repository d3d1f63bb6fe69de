//! `larder run`.

use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result, bail};
use larder_core::printable;
use larder_engine::{FinishReason, ImageMarks, Listener, Picture, Request, Routing, Sampler, StepStats, generate};
use larder_os::memory;
use larder_runtime::{
    EngineExperts, InferenceEngine, OpenModel, PictureFile, PromptWithImages, TextCodec, VisionUse, blindness,
    expand_images, plan_inputs,
};
use larder_text::{Grammar, GrammarCompiler, StopMatcher, TextFormat};
use serde_json::json;

use crate::cli::RunArgs;
use crate::commands::text_or_stdin;
use crate::images;
use crate::models;
use crate::print;
use crate::progress::PromptLine;
use crate::run_report::RunReport;
use crate::telemetry::Telemetry;

/// Generates text from a prompt.
pub fn run(args: RunArgs) -> Result<()> {
    let stop = StopMatcher::new(args.stop.clone())?;
    let mut settings = args.record.set(args.engine.settings.clone());
    let model = models::open_to_run(&args.model, &settings, &args.ignore_config)?;
    let text = model.text_codec()?;
    let files: Vec<(&Path, PictureFile)> =
        args.image.iter().map(|path| Ok((path.as_path(), PictureFile::read(path)?))).collect::<Result<_>>()?;
    if files.is_empty() {
        settings.options.vision.tower = VisionUse::Off;
    }
    let vision = settings.options.vision;
    let marks = if files.is_empty() { None } else { Some(images::marks(&model, &text, vision.tower)?) };
    let marked = prompt(&args, &text, model.blueprint.context, marks.as_ref())?;
    let (image_tokens, image_bytes) = if files.is_empty() { (0, 0) } else { images::sizes(&model, &files, &vision)? };
    let prompt_tokens = marked.len().saturating_sub(files.len()).saturating_add(image_tokens);
    let generation = args.sampling.over(model.generation()?)?;
    let sampler = Sampler::new((&generation).into(), args.seed.seed)?;
    let eos: &[u32] = if args.ignore_eos { &[] } else { &generation.eos };

    let grammar =
        args.format.text_format()?.map(|format| grammar(&format, &text, model.blueprint.vocab, &generation.eos));
    let grammar = grammar.transpose()?;

    let mut telemetry = Telemetry::new(args.telemetry.as_deref())?;
    let asked = settings.options.context;
    let context = asked.or_needed(prompt_tokens.saturating_add(args.max_tokens), model.blueprint.context);
    let mut options = models::options(&settings, context)?;
    options.program_bytes += image_bytes;
    let limit = plan_inputs(&model, &options)?.context_limit();
    if prompt_tokens >= limit.tokens {
        bail!("{}", limit.too_long("the prompt", prompt_tokens));
    }
    let mut engine = InferenceEngine::start(&model, &options)?;
    let plan = std::mem::take(&mut engine.plan);
    let drafting = engine.experts.drafting(&engine.drafting());
    let (prompt, pictures) = match marks {
        Some(marks) => shown(&engine, &model, &text, (&marked, marks.image), &files)?,
        None => (marked, vec![]),
    };
    drop(files);
    let mut session = engine.session();
    session.show(&pictures);
    drop(pictures);
    let max_tokens = args.max_tokens;
    let request = Request { prompt: &prompt, sampler, grammar, shown: &[], eos, stop, max_tokens, drafting };
    let mut printer = TextPrinter {
        text: String::new(),
        line: PromptLine::begin(prompt.len(), 0),
        silent: args.json,
        closed: false,
        telemetry: &mut telemetry,
    };
    let written = generate(&mut session, &text.tokenizer, request, &mut printer)?;
    let (all, closed) = (printer.text, printer.closed);
    telemetry.finish()?;
    engine.experts.write_trace("larder run")?;
    engine.experts.write_hot_set();
    let routing = engine.experts.routing().and_then(Routing::quality);
    let streaming = engine.experts.traffic().is_some();
    let report = RunReport {
        ngram_rows: engine.decoder.ngram_rows(),
        ..RunReport::of(&written, [telemetry.prompt, telemetry.decode], streaming)
    };
    match (args.json, closed) {
        (true, _) => println!("{}", {
            let mut json = serde_json::to_value(&report)?;
            let meter = engine.loss_meter().loss();
            let drives = drives(&model).map(|(folder, bytes)| json!({"folder": folder, "bytes": bytes}));
            let own = json!({
                "text": all,
                "ids": written.ids,
                "finish": finish_name(written.finish),
                "prompt_tokens": prompt.len(),
                "prompt_seconds": written.prefill_time.as_secs_f64(),
                "decode_seconds": written.decode_time.as_secs_f64(),
                "peak_bytes": memory::peak(),
                "plan": plan,
                "routing": engine.experts.routing().map(|routing| print::routing(routing, &meter)),
                "capacity": engine.experts.capacity_changes().map(|changes| changes.json()),
                "gpu_peak_bytes": engine.experts.device_peak_bytes(),
                "drives": drives.collect::<Vec<_>>(),
            });
            json.as_object_mut().zip(own.as_object()).into_iter().for_each(|(json, own)| json.extend(own.clone()));
            if let Some((name, _, others)) = engine.experts.offload_report() {
                json[name] = others;
            }
            json
        }),
        (false, true) => {}
        (false, false) => {
            let _ = print_now("\n"); // the reader of the text may have closed the pipe
            eprintln!("{}", footer(&report, written.finish));
            if let Some(quality) = routing {
                eprintln!("[{}]", print::quality(&settings.options.routing.to_string(), &quality));
                let expected = print::expected_loss(&settings.options.routing, engine.experts.routing());
                expected.iter().for_each(|line| eprintln!("[{line}]"));
                eprintln!("[{}]", print::output_loss(&engine.loss_meter().loss(), written.decode_time));
            }
            if let Some(changes) = engine.experts.capacity_changes() {
                eprintln!("[{changes}]");
            }
            if let Some((_, others, _)) = engine.experts.offload_report() {
                eprintln!("[{others}]");
            }
            if let Some(rows) = report.ngram_rows {
                eprintln!("[{}]", print::ngram_rows(rows));
            }
            let drives = drives(&model).map(|(folder, bytes)| format!("{} from {folder}", print::bytes(bytes)));
            let drives: Vec<String> = drives.collect();
            if !drives.is_empty() {
                eprintln!("[read: {}]", drives.join(", "));
            }
        }
    }
    Ok(())
}

/// The folders of a store on two drives, and the bytes that were read from each.
fn drives(model: &OpenModel) -> impl Iterator<Item = (String, u64)> {
    let store = model.store().filter(|store| store.drive_folders().len() > 1);
    store.into_iter().flat_map(|store| {
        let folders = store.drive_folders().iter().map(|folder| printable(&folder.to_string_lossy()));
        folders.zip(store.drive_log().bytes())
    })
}

fn grammar(format: &TextFormat, text: &TextCodec, vocab: usize, eos: &[u32]) -> Result<Grammar> {
    let grammar = GrammarCompiler::new(&text.tokenizer, vocab, eos).and_then(|compiler| compiler.compile(format));
    grammar.context("the text's format cannot be used")
}

/// Prints the text as it is generated, before that the progress of the prompt, and collects telemetry.
struct TextPrinter<'a> {
    text: String,
    line: PromptLine,
    silent: bool,
    closed: bool,
    telemetry: &'a mut Telemetry,
}

impl Listener<EngineExperts> for TextPrinter<'_> {
    fn text(&mut self, piece: &str) -> bool {
        self.text.push_str(piece);
        self.closed = !self.silent && print_now(piece).is_err();
        !self.closed
    }

    fn prefilled(&mut self, tokens: usize) {
        self.line.reached(tokens);
    }

    fn step(&mut self, step: &StepStats, experts: &EngineExperts) {
        self.line.finish();
        self.telemetry.step(step, experts.traffic());
    }
}

fn print_now(piece: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(piece.as_bytes())?;
    out.flush()
}

/// The prompt with the tokens of its images, and their pictures.
fn shown(
    engine: &InferenceEngine,
    model: &OpenModel,
    text: &TextCodec,
    (marked, image): (&[u32], u32),
    files: &[(&Path, PictureFile)],
) -> Result<(Vec<u32>, Vec<Picture>)> {
    let Some(sight) = engine.sight(model, &text.tokenizer)? else { bail!(blindness(model, VisionUse::OnDemand)) };
    let pictures = files.iter().map(|(path, file)| images::encode(sight.as_ref(), path, file));
    let pictures = pictures.collect::<Result<Vec<_>>>()?;
    Ok((expand_images(marked, image, &pictures)?, pictures))
}

/// The tokens of the prompt, in which a token stands for each image.
fn prompt(args: &RunArgs, text: &TextCodec, context: usize, marks: Option<&ImageMarks>) -> Result<Vec<u32>> {
    let prompt = text_or_stdin(args.prompt.as_deref().unwrap_or_default(), text.tokenizer.longest_text(context))?;
    let (system, is_chat) = (args.system.as_deref(), args.chat || args.system.is_some());
    let ids = match marks {
        Some(marks) if !is_chat || text.template.is_some() => {
            PromptWithImages { marks, images: args.image.len(), system, text: &prompt }.tokens(text, context)?
        }
        None if !is_chat => text.tokenizer.encode_for(context, &prompt, true)?,
        _ => {
            let tokens = text.encode_turn(context, system, prompt.into())?;
            tokens.context("the model has no chat template; leave out --chat and --system")?
        }
    };
    if ids.is_empty() {
        bail!("the prompt is empty, and this model has no BOS token; --prompt needs some text");
    }
    Ok(ids)
}

fn finish_name(finish: FinishReason) -> &'static str {
    match finish {
        FinishReason::EndOfText => "eos",
        FinishReason::StopString => "stop",
        FinishReason::Length => "length",
        FinishReason::Context => "context",
        FinishReason::Cancelled => "cancelled",
    }
}

/// The footer of a text.
fn footer(report: &RunReport, finish: FinishReason) -> String {
    let end = match finish {
        FinishReason::EndOfText | FinishReason::StopString | FinishReason::Cancelled => "",
        FinishReason::Length => "; stopped at --max-tokens",
        FinishReason::Context => "; stopped: context full",
    };
    format!("[{report:#}, peak memory {}{end}]", print::bytes(memory::peak().unwrap_or_default()))
}
