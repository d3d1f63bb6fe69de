//! `larder run`.

use std::io::Write;

use anyhow::{Context, Result, bail};
use larder_core::printable;
use larder_engine::{DraftCounts, FinishReason, Generated, Listener, Request, Routing, Sampler, StepStats, generate};
use larder_os::memory;
use larder_runtime::{EngineExperts, InferenceEngine, OpenModel, TextCodec, plan_inputs};
use larder_text::{ChatInput, Grammar, GrammarCompiler, StopMatcher, TextFormat};
use serde_json::{Value, json};

use crate::cli::RunArgs;
use crate::commands::text_or_stdin;
use crate::models;
use crate::print;
use crate::telemetry::{Telemetry, Totals};

/// Generates text from a prompt.
pub fn run(args: RunArgs) -> Result<()> {
    let stop = StopMatcher::new(args.stop.clone())?;
    let settings = args.record.set(args.engine.settings.clone());
    let model = models::open_to_run(&args.model, &settings, &args.ignore_config)?;
    let text = model.text_codec()?;
    let prompt = prompt(&args, &text, model.blueprint.context)?;
    let generation = args.sampling.over(model.generation()?)?;
    let sampler = Sampler::new((&generation).into(), args.seed.seed)?;
    let eos: &[u32] = if args.ignore_eos { &[] } else { &generation.eos };

    let grammar =
        args.format.text_format()?.map(|format| grammar(&format, &text, model.blueprint.vocab, &generation.eos));
    let grammar = grammar.transpose()?;

    let mut telemetry = Telemetry::new(args.telemetry.as_deref())?;
    let asked = settings.options.context;
    let context = asked.or_needed(prompt.len().saturating_add(args.max_tokens), model.blueprint.context);
    let options = models::options(&settings, context)?;
    let limit = plan_inputs(&model, &options)?.context_limit();
    if prompt.len() >= limit.tokens {
        bail!("{}", limit.too_long("the prompt", prompt.len()));
    }
    let mut engine = InferenceEngine::start(&model, &options)?;
    let plan = std::mem::take(&mut engine.plan);
    let drafting = engine.experts.drafting(&engine.drafting());
    let mut session = engine.session();
    let max_tokens = args.max_tokens;
    let request = Request { prompt: &prompt, sampler, grammar, shown: &[], eos, stop, max_tokens, drafting };
    let mut printer = TextPrinter { text: String::new(), silent: args.json, closed: false, telemetry: &mut telemetry };
    let written = generate(&mut session, &text.tokenizer, request, &mut printer)?;
    let (all, closed) = (printer.text, printer.closed);
    telemetry.finish()?;
    engine.experts.write_trace("larder run")?;
    engine.experts.write_hot_set();
    let routing = engine.experts.routing().and_then(Routing::quality);
    let streaming = engine.experts.traffic().is_some();
    match (args.json, closed) {
        (true, _) => println!("{}", {
            let mut report = report(&all, prompt.len(), &written, &telemetry, streaming, plan);
            report["routing"] = engine
                .experts
                .routing()
                .map_or(Value::Null, |routing| print::routing(routing, &engine.loss_meter().loss()));
            report["capacity"] = engine.experts.capacity_changes().map_or(Value::Null, |changes| changes.json());
            if let Some((name, _, others)) = engine.experts.offload_report() {
                report[name] = others;
            }
            report["gpu_peak_bytes"] = json!(engine.experts.device_peak_bytes());
            report["ngram_rows"] = engine.decoder.ngram_rows().map_or(Value::Null, print::ngram_rows_json);
            report["drives"] =
                drives(&model).map(|(folder, bytes)| json!({"folder": folder, "bytes": bytes})).collect();
            report
        }),
        (false, true) => {}
        (false, false) => {
            let _ = print_now("\n"); // the reader of the text may have closed the pipe
            eprintln!("{}", footer(prompt.len(), &written, &telemetry, streaming));
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
            if let Some(rows) = engine.decoder.ngram_rows() {
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

/// Prints the text as it is generated, and collects telemetry.
struct TextPrinter<'a> {
    text: String,
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

    fn step(&mut self, step: &StepStats, experts: &EngineExperts) {
        self.telemetry.step(step, experts.traffic());
    }
}

fn print_now(piece: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(piece.as_bytes())?;
    out.flush()
}

fn prompt(args: &RunArgs, text: &TextCodec, context: usize) -> Result<Vec<u32>> {
    let prompt = text_or_stdin(args.prompt.as_deref().unwrap_or_default(), text.tokenizer.longest_text(context))?;
    let ids = if args.chat || args.system.is_some() {
        let Some(template) = &text.template else {
            bail!("the model has no chat template; leave out --chat and --system")
        };
        let system = args.system.iter().map(|s| json!({"role": "system", "content": s}));
        let messages: Vec<_> = system.chain([json!({"role": "user", "content": prompt})]).collect();
        text.tokenizer.encode_for(context, &template.render(&ChatInput::new(&messages))?, false)?
    } else {
        text.tokenizer.encode_for(context, &prompt, true)?
    };
    if ids.is_empty() {
        bail!("the prompt is empty, and this model has no BOS token; --prompt needs some text");
    }
    Ok(ids)
}

fn rate(tokens: usize, time: std::time::Duration) -> f64 {
    tokens as f64 / time.as_secs_f64().max(1e-9)
}

fn footer(prompt: usize, written: &Generated, telemetry: &Telemetry, streaming: bool) -> String {
    let end = match written.finish {
        FinishReason::EndOfText | FinishReason::StopString | FinishReason::Cancelled => "",
        FinishReason::Length => "; stopped at --max-tokens",
        FinishReason::Context => "; stopped: context full",
    };
    let DraftCounts { drafted, accepted, .. } = written.drafts;
    let drafts = if drafted > 0 { format!(", {accepted} of {drafted} drafts accepted") } else { String::new() };
    format!(
        "[prefill {prompt} tokens at {:.1}/s, decode {} tokens at {:.1}/s{drafts}, {}, peak memory {}{end}]",
        rate(prompt, written.prefill_time),
        written.ids.len(),
        rate(written.ids.len(), written.decode_time),
        if streaming { cache_text(&telemetry.decode) } else { "all experts in memory".into() },
        print::bytes(memory::peak().unwrap_or_default()),
    )
}

fn cache_text(totals: &Totals) -> String {
    let Totals { tokens, time, traffic, .. } = totals;
    let per_token = |bytes: u64| print::bytes(bytes / (*tokens).max(1) as u64);
    let waiting =
        format!("{:.0} % of the time waiting", 100.0 * traffic.waited.as_secs_f64() / time.as_secs_f64().max(1e-9));
    let read = per_token(traffic.bytes());
    let Some(tiers) = traffic.tiers else {
        let certain = match traffic.reads_ahead.certain {
            0 => String::new(),
            reads => format!(" ({:.1} experts ahead, known to be wanted)", reads as f64 / (*tokens).max(1) as f64),
        };
        let small = match traffic.small_reads {
            0 => String::new(),
            reads => format!(" ({:.1} smaller copies)", reads as f64 / (*tokens).max(1) as f64),
        };
        let hits = 100.0 * traffic.hit_rate();
        return format!("{hits:.0} % cache hits, {read} read per token{small}{certain}, {waiting} for reads");
    };
    let share = |n: u64, of: u64| 100.0 * n as f64 / of.max(1) as f64;
    let (counts, wanted) = (tiers.counts, tiers.counts.wanted());
    format!(
        "{:.0} % hits in VRAM and {:.0} % in memory, {:.0} % computed on the GPU, {read} read and {} copied to the GPU per \
         token, {waiting}",
        share(counts.device_hits, wanted),
        share(counts.host_hits, wanted),
        share(tiers.on_device, tiers.on_device + tiers.on_host),
        per_token(tiers.to_device_bytes),
    )
}

fn report(
    text: &str,
    prompt: usize,
    written: &Generated,
    telemetry: &Telemetry,
    streaming: bool,
    plan: Value,
) -> Value {
    let finish = match written.finish {
        FinishReason::EndOfText => "eos",
        FinishReason::StopString => "stop",
        FinishReason::Length => "length",
        FinishReason::Context => "context",
        FinishReason::Cancelled => "cancelled",
    };
    json!({
        "text": text,
        "ids": written.ids,
        "finish": finish,
        "speculation": json!({
            "steps": written.drafts.steps,
            "drafted": written.drafts.drafted,
            "accepted": written.drafts.accepted,
        }),
        "ahead": {"steps": written.ahead.steps, "dropped": written.ahead.dropped},
        "prompt_tokens": prompt,
        "prompt_seconds": written.prefill_time.as_secs_f64(),
        "decode_seconds": written.decode_time.as_secs_f64(),
        "prompt": telemetry.prompt.json(streaming),
        "decode": telemetry.decode.json(streaming),
        "peak_bytes": memory::peak(),
        "plan": plan,
    })
}
