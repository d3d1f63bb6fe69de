//! Compiles grammars for the vocabulary of a model, within bounds of time, memory and stack.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use larder_os::give_back_freed_memory;
use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::InferenceCapabilities;
use llguidance::{Matcher, ParserFactory};
use serde_json::json;

use super::expansion;
use super::gbnf::to_lark;
use super::json_schema::{RULES_BYTES_MAX, with_white_space};
use super::vocabulary::vocabulary;
use super::{Grammar, GrammarError, TextFormat, failed};
use crate::chat_output::AnswerRules;
use crate::tokens::Tokenizer;

/// Largest source of a grammar.
const GRAMMAR_BYTES_MAX: usize = 64 << 10;
/// Addresses for the stack of the thread that compiles: rules may refer to each other in long chains.
const STACK_BYTES: usize = 512 << 20;
/// Deepest nesting of brackets in a source.
const NESTING_MAX: usize = 128;
/// States of the lexer, 1 to 2 kB each.
const LEXER_STATES_MAX: usize = 16_384;
/// Steps of the lexer while it is made, two or more for each unit of the grammar's size.
const LEXER_FUEL: u64 = 400_000;

/// The most time that a grammar may take; most take some milliseconds.
const COMPILE_TIME_MAX: Duration = Duration::from_secs(5);

/// Most bytes of a compiled grammar.
const GRAMMAR_BYTES: u64 = 8 << 20;
/// Most bytes beside it while it is compiled.
const COMPILE_BYTES: u64 = 16 << 20;
/// Bytes of a token in a prepared vocabulary.
const TOKEN_BYTES: u64 = 440;

/// The most bytes of a compiler for a vocabulary of `tokens` tokens, the grammar that it compiles, and `grammars`
/// compiled ones.
pub fn grammar_bytes(tokens: usize, grammars: usize) -> u64 {
    TOKEN_BYTES * tokens as u64 + COMPILE_BYTES + GRAMMAR_BYTES.saturating_mul(grammars as u64)
}

/// Compiles grammars for one model, one at a time.
pub struct GrammarCompiler {
    tasks: Sender<CompileTask>,
}

struct CompileTask {
    source: TopLevelGrammar,
    /// When the caller ceases to wait.
    begin: Instant,
    time: Duration,
    to: SyncSender<Result<Grammar, GrammarError>>,
}

impl GrammarCompiler {
    /// For a model with `rows` logits, whose texts end with any of the tokens `eos`. With 150,000 tokens that takes
    /// half a second once, and memory as long as it lives.
    pub fn new(tokenizer: &Tokenizer, rows: usize, eos: &[u32]) -> Result<Self, GrammarError> {
        let vocabulary = vocabulary(tokenizer, rows, eos)?;
        let slices = SlicedBiasComputer::general_slices();
        let mut factory = ParserFactory::new(&vocabulary, InferenceCapabilities::default(), &slices)
            .map_err(|error| failed(&error))?;
        factory.quiet();
        give_back_freed_memory();
        *factory.limits_mut() = ParserLimits {
            initial_lexer_fuel: LEXER_FUEL,
            max_lexer_states: LEXER_STATES_MAX,
            verbose_errors: false,
            ..ParserLimits::default()
        };
        let (tasks, received) = channel();
        let thread = thread::Builder::new().name("grammars".into());
        thread.spawn(move || compile_all(&factory, &received)).map_err(|error| failed(&error))?;
        Ok(GrammarCompiler { tasks })
    }

    /// Compiles a grammar.
    pub fn compile(&self, format: &TextFormat) -> Result<Grammar, GrammarError> {
        self.compile_source(source(format)?)
    }

    /// Compiles the rules of an answer; `format` is that of `@answer` in them.
    pub fn compile_answer(&self, rules: &AnswerRules, format: Option<&TextFormat>) -> Result<Grammar, GrammarError> {
        if rules.lark().len() > RULES_BYTES_MAX {
            return Err(GrammarError(format!("the tools have more than {RULES_BYTES_MAX} bytes")));
        }
        let mut whole = TopLevelGrammar::from_lark(rules.lark().to_owned());
        for mut inner in format.map(source).transpose()?.into_iter().flat_map(|source| source.grammars) {
            inner.name = Some("answer".into());
            whole.grammars.push(inner);
        }
        self.compile_source(whole)
    }

    fn compile_source(&self, source: TopLevelGrammar) -> Result<Grammar, GrammarError> {
        self.compile_within(source, COMPILE_TIME_MAX)
    }

    /// Compiles in a thread that cannot be ended: after `time`, it is left to end by itself.
    pub(super) fn compile_within(&self, source: TopLevelGrammar, time: Duration) -> Result<Grammar, GrammarError> {
        let (to, compiled) = sync_channel(1);
        // If the thread has ended, so has the channel of the answer.
        let _ = self.tasks.send(CompileTask { source, begin: Instant::now(), time, to });
        compiled.recv_timeout(time).unwrap_or_else(|error| match error {
            RecvTimeoutError::Timeout => Err(too_long(time)),
            RecvTimeoutError::Disconnected => Err(GrammarError::of("its compiler failed")),
        })
    }
}

fn compile_all(factory: &ParserFactory, tasks: &Receiver<CompileTask>) {
    for CompileTask { source, begin, time, to } in tasks {
        let in_time = begin.elapsed() < time;
        let compiled = if in_time { compile_apart(factory, source) } else { Err(too_long(time)) };
        // The caller may have ceased to wait.
        let _ = to.send(compiled);
    }
}

fn too_long(time: Duration) -> GrammarError {
    GrammarError(format!("it takes more than {time:?} to compile"))
}

/// Compiles in a thread of its own, for its stack.
fn compile_apart(factory: &ParserFactory, source: TopLevelGrammar) -> Result<Grammar, GrammarError> {
    thread::scope(|scope| {
        let thread = thread::Builder::new().name("grammar".into()).stack_size(STACK_BYTES);
        let thread = thread.spawn_scoped(scope, || compile(factory, source)).map_err(|error| failed(&error))?;
        thread.join().unwrap_or_else(|_| Err(GrammarError::of("its compiler failed")))
    })
}

fn compile(factory: &ParserFactory, source: TopLevelGrammar) -> Result<Grammar, GrammarError> {
    expansion::check(&source)?;
    let parser = factory.create_parser(source).map_err(|error| failed(&error))?;
    if parser.parser.lexer_stats().num_bytes as u64 > GRAMMAR_BYTES {
        return Err(GrammarError(format!(
            "it is too large when it is compiled; at most {} MiB are supported",
            GRAMMAR_BYTES >> 20
        )));
    }
    let mut matcher = Matcher::new(Ok(parser));
    // The first mask tells whether any text matches at all.
    matcher.compute_mask_or_eos().map(|_| Grammar { matcher }).map_err(|error| failed(&error))
}

fn source(format: &TextFormat) -> Result<TopLevelGrammar, GrammarError> {
    Ok(match format {
        TextFormat::JsonObject => TopLevelGrammar::from_json_schema(with_white_space(&json!({ "type": "object" }))?),
        TextFormat::JsonSchema(value) => TopLevelGrammar::from_json_schema(with_white_space(value)?),
        TextFormat::Regex(regex) => TopLevelGrammar::from_regex(bounded(regex)?),
        TextFormat::Gbnf(grammar) => TopLevelGrammar::from_lark(to_lark(bounded(grammar)?)?),
        TextFormat::Lark(grammar) => TopLevelGrammar::from_lark(bounded(grammar)?.to_owned()),
    })
}

/// A source that is neither too long nor nested too deeply. Brackets are counted wherever they are.
fn bounded(source: &str) -> Result<&str, GrammarError> {
    if source.len() > GRAMMAR_BYTES_MAX {
        return Err(GrammarError(format!("it has {} bytes; at most {GRAMMAR_BYTES_MAX} are supported", source.len())));
    }
    let (mut depth, mut deepest) = (0usize, 0);
    for byte in source.bytes() {
        match byte {
            b'(' | b'[' => depth += 1,
            b')' | b']' => depth = depth.saturating_sub(1),
            _ => {}
        }
        deepest = deepest.max(depth);
    }
    if deepest > NESTING_MAX {
        Err(GrammarError(format!("brackets are nested {deepest} deep; at most {NESTING_MAX} are supported")))
    } else {
        Ok(source)
    }
}
