//! `larder eval gsm8k`.

use std::path::Path;

use anyhow::{Result, bail};
use larder_engine::{Drafting, FinishReason, Listener, Request, Sampler, Sampling, generate};
use larder_lab::eval::{MathProblem, final_number, read_problems, wilson_interval};
use larder_runtime::{EngineExperts, InferenceEngine, OpenModel, TextCodec};
use larder_text::StopMatcher;
use serde_json::{Value, json};

use super::measure::{Meter, warn_if_all_fit};
use crate::cli::eval::Gsm8kArgs;
use crate::models;
use crate::progress;

/// Stop string of a solution: the beginning of the next problem.
const NEXT: &str = "\nQuestion:";

/// The result for one problem.
struct Solved {
    found: Option<f64>,
    right: bool,
    tokens: usize,
    finish: FinishReason,
    text: String,
}

/// Generates solutions and compares the number at the end of each.
pub fn run(args: &Gsm8kArgs) -> Result<()> {
    let settings = args.record.set(args.engine.settings.clone());
    let model = models::open(&args.model)?;
    let text = model.text_codec()?;
    let mut asked = read_problems(&args.problems)?;
    asked.truncate(args.limit.unwrap_or(usize::MAX));
    let shots = shots(args)?;
    let prompts: Vec<Vec<u32>> = asked.iter().map(|p| prompt(args, &shots, p, &model, &text)).collect::<Result<_>>()?;
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(1);
    let eos = model.generation()?.eos;
    let mut engine = InferenceEngine::start(&model, &settings.options(longest + args.max_tokens))?;
    warn_if_all_fit(&engine, &settings.options);
    let bar = progress::count("solving", "problems", asked.len() as u64);
    let meter = Meter::new(&engine);
    let mut all = Vec::new();
    for (problem, prompt) in asked.iter().zip(&prompts) {
        all.push(solve(&mut engine, problem, prompt, &eos, &text, args.max_tokens)?);
        bar.advance(1);
    }
    bar.finish();
    let written: usize = all.iter().map(|s| s.tokens).sum();
    let found = meter.finish(&engine, prompts.iter().map(Vec::len).sum::<usize>() + written, Vec::new());
    engine.experts.write_trace("larder eval gsm8k")?;
    let right = all.iter().filter(|s| s.right).count();
    let share = wilson_interval(right, all.len());
    if args.json {
        let mut numbers = found.json(engine.experts.routing());
        numbers["shots"] = args.shots.into();
        numbers["right"] = right.into();
        numbers["asked"] = all.len().into();
        numbers["accuracy"] = json!(share);
        numbers["tokens_written"] = written.into();
        numbers["problems"] = asked.iter().zip(&all).map(|(problem, solved)| row(problem, solved)).collect();
        println!("{numbers}");
        return Ok(());
    }
    println!(
        "{right} of {} problems correct: {:.1} %, 95 % interval {:.1} to {:.1} %; {} examples before each",
        all.len(),
        100.0 * share.value,
        100.0 * share.low,
        100.0 * share.high,
        args.shots
    );
    let cut = all.iter().filter(|s| matches!(s.finish, FinishReason::Length | FinishReason::Context)).count();
    let silent = all.iter().filter(|s| s.found.is_none()).count();
    println!("{written} tokens generated; {cut} solutions were cut off, {silent} contain no number");
    print!("{}", found.lines(&args.engine.settings.options.routing.to_string()));
    Ok(())
}

fn shots(args: &Gsm8kArgs) -> Result<Vec<MathProblem>> {
    if args.shots == 0 {
        return Ok(Vec::new());
    }
    let beside = args.problems.parent().unwrap_or(Path::new("")).join("train.jsonl");
    let path = args.dev.as_ref().unwrap_or(&beside);
    if !path.exists() {
        bail!("{}: not found, so there are no examples; name a file with --dev, or use --shots 0", path.display());
    }
    let mut all = read_problems(path)?;
    if all.len() < args.shots {
        bail!("{}: contains {} problems, and --shots asks for {}", path.display(), all.len(), args.shots);
    }
    all.truncate(args.shots);
    Ok(all)
}

fn prompt(
    args: &Gsm8kArgs,
    shots: &[MathProblem],
    problem: &MathProblem,
    model: &OpenModel,
    text: &TextCodec,
) -> Result<Vec<u32>> {
    let context = model.blueprint.context;
    let examples: String = shots.iter().map(MathProblem::example_text).collect();
    let ids = text.tokenizer.encode_for(context, &format!("{examples}{}", problem.prompt_text()), true)?;
    let need = ids.len() + args.max_tokens;
    if need > context {
        bail!(
            "{} examples, a problem and {} tokens for its solution take {need} tokens, and the model's context is \
             {context}; use fewer --shots",
            shots.len(),
            args.max_tokens
        )
    } else {
        Ok(ids)
    }
}

/// Collects the generated text.
#[derive(Default)]
struct Solution(String);

impl Listener<EngineExperts> for Solution {
    fn text(&mut self, piece: &str) -> bool {
        self.0.push_str(piece);
        true
    }
}

fn solve(
    engine: &mut InferenceEngine,
    problem: &MathProblem,
    prompt: &[u32],
    eos: &[u32],
    text: &TextCodec,
    max_tokens: usize,
) -> Result<Solved> {
    let sampler = Sampler::new(Sampling::default(), 0)?;
    let stop = StopMatcher::new(vec![NEXT.into()])?;
    let mut solution = Solution::default();
    let drafting = Drafting::default();
    let request = Request { prompt, sampler, grammar: None, shown: &[], eos, stop, max_tokens, drafting };
    let written = generate(&mut engine.session(), &text.tokenizer, request, &mut solution)?;
    let found = final_number(&solution.0);
    let right = found == Some(problem.number);
    Ok(Solved { found, right, tokens: written.ids.len(), finish: written.finish, text: solution.0 })
}

fn row(problem: &MathProblem, solved: &Solved) -> Value {
    json!({"number": problem.number, "found": solved.found, "right": solved.right, "text": solved.text})
}
