//! `larder eval mcq`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use larder_engine::TokenInput;
use larder_lab::Interval;
use larder_lab::eval::{McqPrompt, Question, mcq_preamble, read_questions, subject_of, wilson_interval};
use larder_runtime::{InferenceEngine, OpenModel, TextCodec};
use serde_json::{Value, json};

use super::measure::{Measurement, Meter, bar, step_text, tokens_per_step, warn_if_all_fit};
use crate::cli::eval::McqArgs;
use crate::models;
use crate::{print, progress};

/// The questions of one subject, as prompts with their right answers.
struct Subject {
    name: String,
    sheets: Vec<(McqPrompt, usize)>,
    /// Number of examples that did not fit into the context.
    left_out: usize,
}

/// Number of correct answers in a subject.
struct Score {
    name: String,
    right: usize,
    asked: usize,
}

/// Evaluates multiple-choice questions.
pub fn run(args: &McqArgs) -> Result<()> {
    let settings = args.record.set(args.engine.settings.clone());
    let model = models::open(&args.model)?;
    let text = model.text_codec()?;
    let files = files(&args.questions)?;
    let subjects: Vec<Subject> = files.iter().map(|file| prepare(args, file, &model, &text)).collect::<Result<_>>()?;
    let lengths = || subjects.iter().flat_map(|s| &s.sheets).map(|(sheet, _)| sheet.prompt.len());
    let mut engine = InferenceEngine::start(&model, &settings.options(lengths().max().unwrap_or(1)))?;
    let piece = tokens_per_step(&args.step, &settings.options, engine.prefill_tokens);
    warn_if_all_fit(&engine, &settings.options);
    let bar = bar(lengths().sum());
    let meter = Meter::new(&engine);
    let marks = subjects.iter().map(|s| ask(&mut engine, s, piece, &bar)).collect::<Result<Vec<Score>>>()?;
    bar.finish();
    let found = meter.finish(&engine, lengths().sum(), Vec::new());
    engine.experts.write_trace("larder eval mcq")?;
    let (right, asked) = marks.iter().fold((0, 0), |(r, a), m| (r + m.right, a + m.asked));
    let all = Score { name: "all".into(), right, asked };
    if args.json {
        let mut numbers = found.json(engine.experts.routing());
        numbers["shots"] = args.shots.into();
        numbers["tokens_at_once"] = piece.into();
        numbers["overall"] = all.json();
        numbers["subjects"] = marks.iter().map(Score::json).collect();
        println!("{numbers}");
    } else {
        print_report(args, &subjects, &marks, &all, &found, piece)
    }
    Ok(())
}

/// The file, or the CSV files in the folder, sorted by name.
fn files(path: &Path) -> Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let entries = std::fs::read_dir(path).with_context(|| path.display().to_string())?;
    let mut all: Vec<PathBuf> = entries.map(|e| e.map(|e| e.path())).collect::<std::io::Result<_>>()?;
    all.retain(|p| p.extension().is_some_and(|e| e.eq_ignore_ascii_case("csv")));
    all.sort();
    if all.is_empty() { bail!("{}: contains no .csv files", path.display()) } else { Ok(all) }
}

fn prepare(args: &McqArgs, file: &Path, model: &OpenModel, text: &TextCodec) -> Result<Subject> {
    let name = subject_of(file);
    let mut asked = read_questions(file)?;
    asked.truncate(args.limit.unwrap_or(usize::MAX));
    let shots = shots(args, file)?;
    let (mut sheets, mut left_out) = (Vec::new(), 0);
    for question in &asked {
        let (sheet, without) = sheet(&name, question, &shots, model, text)?;
        left_out += without;
        sheets.push((sheet, question.answer));
    }
    Ok(Subject { name, sheets, left_out })
}

/// The examples for the questions of a file.
fn shots(args: &McqArgs, file: &Path) -> Result<Vec<Question>> {
    if args.shots == 0 {
        return Ok(Vec::new());
    }
    let stem = file.file_stem().unwrap_or_default().to_string_lossy();
    let name = format!("{}_dev.csv", stem.strip_suffix("_test").unwrap_or(&stem));
    let path = match &args.dev {
        Some(path) if path.is_dir() => path.join(name),
        Some(path) => path.clone(),
        None => file.parent().unwrap_or(Path::new("")).join("../dev").join(name),
    };
    if !path.exists() {
        bail!("{}: not found, so there are no examples; name a file with --dev, or use --shots 0", path.display());
    }
    let mut all = read_questions(&path)?;
    if all.len() < args.shots {
        bail!("{}: contains {} questions, and --shots asks for {}", path.display(), all.len(), args.shots);
    }
    all.truncate(args.shots);
    Ok(all)
}

/// The prompt with as many examples as fit into the context, and the number of those left out.
fn sheet(
    name: &str,
    question: &Question,
    shots: &[Question],
    model: &OpenModel,
    text: &TextCodec,
) -> Result<(McqPrompt, usize)> {
    for first in 0..=shots.len() {
        let examples: String = shots[first..].iter().map(Question::example_text).collect();
        let prompt = format!("{}{examples}{}", mcq_preamble(name), question.prompt_text());
        if prompt.len() > text.tokenizer.longest_text(model.blueprint.context) {
            continue;
        }
        let Some(sheet) = McqPrompt::new(&prompt, |text_of| text.tokenizer.encode(text_of, true))? else {
            bail!("the model's tokenizer does not give the letters A to D different tokens");
        };
        if sheet.prompt.len() <= model.blueprint.context {
            return Ok((sheet, first));
        }
    }
    bail!("a question about {name} is longer than the model's context of {}", model.blueprint.context)
}

fn ask(engine: &mut InferenceEngine, subject: &Subject, piece: usize, bar: &progress::Bar) -> Result<Score> {
    let mut right = 0;
    for (sheet, answer) in &subject.sheets {
        let logits = engine.session().forward(&TokenInput::prompt(&sheet.prompt).in_chunks(piece), &mut ())?;
        bar.advance(sheet.prompt.len() as u64);
        right += usize::from(sheet.choose(&logits) == *answer);
    }
    Ok(Score { name: subject.name.clone(), right, asked: subject.sheets.len() })
}

impl Score {
    fn share(&self) -> Interval {
        wilson_interval(self.right, self.asked)
    }

    fn json(&self) -> Value {
        json!({"subject": self.name, "right": self.right, "asked": self.asked, "accuracy": self.share()})
    }
}

fn print_report(args: &McqArgs, subjects: &[Subject], marks: &[Score], all: &Score, found: &Measurement, piece: usize) {
    let mut rows = vec![["subject", "correct", "of", "accuracy", "95 % interval"].map(str::to_owned).to_vec()];
    let several = (marks.len() > 1).then_some(all);
    for mark in marks.iter().chain(several) {
        let Interval { value, low, high } = mark.share();
        let interval = format!("{:.1} to {:.1} %", 100.0 * low, 100.0 * high);
        let (right, asked) = (mark.right.to_string(), mark.asked.to_string());
        rows.push(vec![mark.name.clone(), right, asked, format!("{:.1} %", 100.0 * value), interval]);
    }
    println!("{} examples before each question, {}; chance is 25 %", args.shots, step_text(piece));
    print!("{}", print::table(&rows));
    let left_out: usize = subjects.iter().map(|s| s.left_out).sum();
    if left_out > 0 {
        println!("{left_out} examples were left out because they did not fit into the context");
    }
    print!("{}", found.lines(&args.engine.settings.options.routing.to_string()));
}
