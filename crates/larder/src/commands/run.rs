use std::io::Write;

use anyhow::{Result, bail};
use larder_cache::Traffic;
use larder_engine::{ChatInput, Finish, Request, Sampler, Sampling, Session, StopMatcher, Written, generate};
use serde_json::json;

use crate::cli::{Run, SamplingFlags};
use crate::commands::text_or_stdin;
use crate::experts;
use crate::open::{Model, Text};
use crate::print;

/// Writes on from a prompt.
pub fn run(args: Run) -> Result<()> {
    let sampler = Sampler::new(sampling(&args.sampling), args.sampling.seed)?;
    let stop = StopMatcher::new(args.stop.clone())?;
    let model = Model::open(&args.model)?;
    let text = model.text()?;
    let prompt = prompt(&args, &text)?;
    let generation = model.generation()?;
    let eos: &[u32] = if args.ignore_eos { &[] } else { &generation.eos };

    let decoder = model.decoder()?;
    let mut experts = experts::open(&model, &args.cache)?;
    let mut session = Session::new(&decoder, &mut experts);
    let request = Request { prompt: &prompt, sampler, eos, stop, max_tokens: args.max_tokens };
    let mut all = String::new();
    let mut broken = false;
    let written = generate(&mut session, &text.tokenizer, request, &mut |piece| {
        all.push_str(piece);
        broken = !args.json && show(piece).is_err();
        !broken
    })?;
    let traffic = experts.traffic();
    match (args.json, broken) {
        (true, _) => println!("{}", report(&all, prompt.len(), &written, traffic)),
        (false, true) => {}
        (false, false) => {
            let _ = show("\n"); // whoever read the text may have gone by now
            eprintln!("{}", footer(prompt.len(), &written, traffic));
        }
    }
    Ok(())
}

fn show(piece: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(piece.as_bytes())?;
    out.flush()
}

fn sampling(flags: &SamplingFlags) -> Sampling {
    Sampling {
        temperature: flags.temperature,
        top_k: flags.top_k,
        top_p: flags.top_p,
        min_p: flags.min_p,
        repetition_penalty: flags.repetition_penalty,
    }
}

fn prompt(args: &Run, text: &Text) -> Result<Vec<u32>> {
    let prompt = text_or_stdin(&args.prompt)?;
    let ids = match args.chat || args.system.is_some() {
        false => text.tokenizer.encode(&prompt, true)?,
        true => {
            let Some(template) = &text.template else { bail!("the model has no chat template; leave out --chat") };
            let system = args.system.iter().map(|s| json!({"role": "system", "content": s}));
            let messages: Vec<_> = system.chain([json!({"role": "user", "content": prompt})]).collect();
            text.tokenizer.encode(&template.render(&ChatInput::new(&messages))?, false)?
        }
    };
    if ids.is_empty() {
        bail!("the prompt is empty, and this model begins a text with nothing of its own; give it some text");
    }
    Ok(ids)
}

fn rate(tokens: usize, time: std::time::Duration) -> f64 {
    tokens as f64 / time.as_secs_f64().max(1e-9)
}

fn footer(prompt: usize, written: &Written, traffic: Option<Traffic>) -> String {
    let end = match written.finish {
        Finish::EndOfText | Finish::StopString | Finish::Cancelled => "",
        Finish::Length => "; stopped at --max-tokens",
        Finish::Context => "; stopped because the context is full",
    };
    format!(
        "[{prompt} prompt tokens at {:.1}/s, {} written at {:.1}/s, {}{end}]",
        rate(prompt, written.prompt_time),
        written.ids.len(),
        rate(written.ids.len(), written.decode_time),
        traffic.map_or_else(|| "all experts in memory".into(), passed),
    )
}

fn passed(traffic: Traffic) -> String {
    let Traffic { counts, bytes, waited, .. } = traffic;
    let wanted = (counts.hits + counts.misses).max(1);
    format!(
        "{:.0} % of experts found in memory, {} read, {:.1} s waiting for it",
        100.0 * counts.hits as f64 / wanted as f64,
        print::bytes(bytes),
        waited.as_secs_f64(),
    )
}

fn report(text: &str, prompt: usize, written: &Written, traffic: Option<Traffic>) -> serde_json::Value {
    let finish = match written.finish {
        Finish::EndOfText => "eos",
        Finish::StopString => "stop",
        Finish::Length => "length",
        Finish::Context => "context",
        Finish::Cancelled => "cancelled",
    };
    let cache = traffic.map(|t| {
        json!({
            "hits": t.counts.hits,
            "misses": t.counts.misses,
            "evictions": t.counts.evictions,
            "rereads": t.counts.rereads,
            "bytes_read": t.bytes,
            "seconds_waiting": t.waited.as_secs_f64(),
            "seconds_computing": t.computed.as_secs_f64(),
        })
    });
    json!({
        "text": text,
        "ids": written.ids,
        "finish": finish,
        "prompt_tokens": prompt,
        "prompt_seconds": written.prompt_time.as_secs_f64(),
        "decode_seconds": written.decode_time.as_secs_f64(),
        "cache": cache,
    })
}
