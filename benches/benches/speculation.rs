//! Decoding an answer that is given, with and without draft tokens: the speed on real text whatever the model's weights
//! are. Compares the bits of all logits, too.
//!
//!     cargo bench -p larder-benches --bench speculation -- STORE PROMPT ANSWER [ROUNDS [EXPERTS [DRAFT]]]
//!
//! PROMPT and ANSWER are text files. The modes run in turns; all experts are in memory, or EXPERTS per layer if that is
//! not 0. DRAFT is the store of a draft model.

use std::error::Error;
use std::fs;
use std::hash::Hasher;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use larder_engine::{DraftCounts, Drafting, Session, SessionDecoding, Speculation, TokenChoice, TokenInput};
use larder_model::{BestLogits, Logits, LogitsRow};
use larder_runtime::{
    CacheOptions, CacheSize, EngineExperts, InferenceEngine, ModelOptions, Notices, OpenModel, Options,
};
use twox_hash::XxHash3_64;

const MODES: [Speculation; 4] = [Speculation::Off, Speculation::Lookup, Speculation::Draft, Speculation::Auto];

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let [store, prompt, answer, numbers @ ..] = &args[..] else {
        println!("skipped: name a store, a prompt and an answer: STORE PROMPT ANSWER [ROUNDS [EXPERTS [DRAFT]]]");
        return Ok(());
    };
    let number = |at: usize| numbers.get(at).map(|text: &String| text.parse::<usize>()).transpose();
    let (rounds, experts) = (number(0)?.unwrap_or(3), number(1)?.filter(|experts| *experts > 0));

    let notices = Notices::to(|notice| eprintln!("{notice}"));
    let model_options = ModelOptions { notices, ..Default::default() };
    let model = OpenModel::open(Path::new(store), &model_options)?;
    let draft =
        numbers.get(2).map(|draft| OpenModel::open(Path::new(draft), &model_options).map(Arc::new)).transpose()?;
    let tokenizer = model.text_codec()?.tokenizer;
    let prompt = tokenizer.encode(&fs::read_to_string(prompt)?, true)?;
    let answer = tokenizer.encode(&fs::read_to_string(answer)?, false)?;

    let size = experts.map_or(CacheSize::Available, CacheSize::ExpertsPerLayer);
    let (context, speculation) = (prompt.len() + answer.len(), Speculation::Auto);
    let cache = CacheOptions { size, ..Default::default() };
    let options = Options { context: context.into(), cache, speculation, draft, ..Default::default() };
    let mut engine = InferenceEngine::start(&model, &options)?;
    let asked = engine.drafting();
    let mut session = engine.session();
    session.forward(&TokenInput::prompt(&prompt), &mut ())?;
    println!("prompt of {} tokens, answer of {}", prompt.len(), answer.len());

    let mut runs: Vec<Vec<Run>> = MODES.iter().map(|_| Vec::new()).collect();
    for round in 0..rounds {
        let modes = (0..MODES.len()).filter(|mode| MODES[*mode] != Speculation::Draft || asked.model.is_some());
        let order: Vec<usize> = if round % 2 == 0 { modes.collect() } else { modes.rev().collect() };
        for mode in order {
            session.rewind(prompt.len());
            runs[mode].push(decode(&mut session, &answer, &Drafting { speculation: MODES[mode], ..asked.clone() })?);
        }
    }
    for (mode, all) in MODES.iter().zip(&runs).filter(|(_, all)| !all.is_empty()) {
        assert!(all.iter().all(|run| run.bits == runs[0][0].bits), "{mode}: other logits");
        let DraftCounts { steps, drafted, accepted } = all[0].counts;
        let mut ratios: Vec<f64> = all.iter().zip(&runs[0]).map(|(run, off)| off.seconds / run.seconds).collect();
        ratios.sort_by(f64::total_cmp);
        println!(
            "{mode}: {:.2} tokens/s, {:.2} x off ({:.2} to {:.2}); {accepted} of {drafted} draft tokens accepted in {steps} steps",
            answer.len() as f64 / all[all.len() / 2].seconds,
            ratios[ratios.len() / 2],
            ratios[0],
            ratios[ratios.len() - 1],
        );
    }
    Ok(())
}

struct Run {
    seconds: f64,
    counts: DraftCounts,
    /// A hash of the logits behind each token.
    bits: u64,
}

/// Reads all logits.
struct AllLogits;

impl TokenChoice for AllLogits {
    fn best(&mut self, _: &[&[u32]]) -> Option<BestLogits> {
        None
    }
}

fn decode(session: &mut Session<EngineExperts>, answer: &[u32], drafting: &Drafting) -> Result<Run, Box<dyn Error>> {
    let (start, mut hash) = (Instant::now(), XxHash3_64::new());
    let mut decoding = SessionDecoding::new(session, Logits::default(), drafting);
    for (at, id) in answer.iter().enumerate() {
        if !decoding.confirm(*id) {
            decoding.settle();
            decoding.next(*id, answer.len() - at - 1, &mut AllLogits, &mut ())?;
        }
        if let LogitsRow::All(logits) = decoding.logits() {
            logits.iter().for_each(|logit| hash.write_u32(logit.to_bits()));
        }
    }
    decoding.settle();
    Ok(Run { seconds: start.elapsed().as_secs_f64(), counts: decoding.draft_counts(), bits: hash.finish() })
}
