//! Generating a text.

use anyhow::{Context, Result};
use larder_core::Trace;
use larder_engine::{FinishReason, Generated, Listener, Request, Sampler, Sampling, Sequence, StepStats, generate};
use larder_text::{Grammar, GrammarCompiler, OutputParser, OutputPart, StopMatcher};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::EngineExperts;
use crate::model::Model;
use crate::model::answer::AnswerMessage;
use crate::model::options::GenerateOptions;
use crate::model::piece::{PieceKind, PieceListener, TextPiece};
use crate::model::prompt::PromptTokens;
use crate::model::stats::SharedStats;

/// What a prompt was answered.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct GeneratedText {
    /// The text, without the prompt; of a chat without reasoning and tool calls.
    pub text: String,
    /// Its tokens, an end-of-text token included.
    pub tokens: Vec<u32>,
    /// The reason for the end: `end-of-text`, `stop-string`, `length`, `context` or `cancelled`.
    pub finish: String,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Seconds that the prompt took.
    pub prefill_seconds: f64,
    /// Seconds that the answer took.
    pub decode_seconds: f64,
    /// Of a chat: tokens of the prompt whose KV cache was there from the chat before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reused_tokens: Option<usize>,
    /// Of a chat: the answer as a message, with reasoning and tool calls.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<Value>,
    /// The experts of each token, if that was asked for.
    #[serde(skip)]
    pub trace: Option<Trace>,
}

impl Model {
    /// Generates what follows a prompt, with the sampling that the model's files recommend.
    pub fn generate(&mut self, prompt: &str) -> Result<GeneratedText> {
        self.generate_with(prompt, &GenerateOptions::default(), &mut |_: TextPiece| true)
    }

    /// As [`generate`](Self::generate), with options; hands over each piece of text, and a listener that says `false`
    /// ends it.
    pub fn generate_with(
        &mut self,
        prompt: &str,
        options: &GenerateOptions,
        listener: &mut dyn PieceListener,
    ) -> Result<GeneratedText> {
        let marked = self.marked(prompt, options.images.len())?;
        self.generate_marked(marked, options, listener)
    }

    /// As [`generate_with`](Self::generate_with), with the tokens of a prompt.
    pub fn generate_from(
        &mut self,
        tokens: &[u32],
        options: &GenerateOptions,
        listener: &mut dyn PieceListener,
    ) -> Result<GeneratedText> {
        self.check_marks(tokens, options.images.len())?;
        self.generate_marked(tokens.to_vec(), options, listener)
    }

    fn generate_marked(
        &mut self,
        marked: Vec<u32>,
        options: &GenerateOptions,
        listener: &mut dyn PieceListener,
    ) -> Result<GeneratedText> {
        let prompt = self.prompt(marked, &options.images)?;
        self.chat = None;
        self.answer(prompt, options, listener)
    }

    /// Answers a prompt, with a recorder if a trace is asked for.
    pub(crate) fn answer(
        &mut self,
        prompt: PromptTokens,
        options: &GenerateOptions,
        listener: &mut dyn PieceListener,
    ) -> Result<GeneratedText> {
        let traces = options.trace || options.trace_logits;
        let recorder = traces.then(|| self.engine.recorder(options.trace_logits)).transpose()?;
        self.engine.experts.record_with(recorder);
        let answer = self.write(prompt, options, listener);
        let recorder = self.engine.experts.record_with(None);
        self.stats.update(&self.engine.experts);
        let trace = recorder.filter(|_| answer.is_ok()).map(|recorder| recorder.into_trace()).transpose()?;
        Ok(GeneratedText { trace, ..answer? })
    }

    fn write(
        &mut self,
        prompt: PromptTokens,
        options: &GenerateOptions,
        listener: &mut dyn PieceListener,
    ) -> Result<GeneratedText> {
        let PromptTokens { tokens, images, parser, shown } = prompt;
        let config = options.over(&self.generation);
        let sampling = Sampling::from(&config);
        sampling.checked()?;
        let sampler = Sampler::new(sampling, options.seed)?;
        let stop = StopMatcher::new(options.stop.clone())?;
        let eos: &[u32] = if options.ignore_eos { &[] } else { &config.eos };
        let grammar = self.grammar(options, &config.eos)?;
        let (drafting, max_tokens) = (self.engine.experts.drafting(&self.engine.drafting()), options.max_tokens);
        let is_chat = parser.is_some();
        let mut session = match self.chat.take().filter(|sequence| sequence.common_prefix(&tokens) > 0) {
            Some(sequence) => self.engine.resume(sequence),
            None => self.engine.session(),
        };
        let reused = session.rewind(session.common_prefix(&tokens));
        session.show(&images.to_show(self.sight.as_deref(), &tokens[reused..])?);
        let prompt = &tokens[session.tokens().len()..];
        let request = Request { prompt, sampler, grammar, shown: &shown, eos, stop, max_tokens, drafting };
        let message = AnswerMessage::default();
        let mut pieces = Pieces { message, pending: vec![], parser, listener, stats: &self.stats };
        let generated = generate(&mut session, &self.text.tokenizer, request, &mut pieces)?;
        pieces.finish();
        let message = pieces.message;
        self.chat = is_chat.then(|| without_encoded(session.into_sequence()));
        Ok(answer_of(generated, message, tokens.len(), is_chat.then_some(reused)))
    }

    fn grammar(&self, options: &GenerateOptions, eos: &[u32]) -> Result<Option<Grammar>> {
        let Some(format) = options.text_format()? else { return Ok(None) };
        let compiler = GrammarCompiler::new(&self.text.tokenizer, self.model.blueprint.vocab, eos);
        let grammar = compiler.and_then(|compiler| compiler.compile(&format));
        grammar.map(Some).context("the text's format cannot be used")
    }
}

/// The sequence, which gives the memory of encoded pictures back.
fn without_encoded(mut sequence: Sequence) -> Sequence {
    sequence.drop_encoded();
    sequence
}

fn answer_of(
    generated: Generated,
    message: AnswerMessage,
    prompt_tokens: usize,
    reused_tokens: Option<usize>,
) -> GeneratedText {
    GeneratedText {
        message: reused_tokens.map(|_| message.json()),
        text: message.content,
        tokens: generated.ids,
        finish: name(generated.finish).to_owned(),
        prompt_tokens,
        prefill_seconds: generated.prefill_time.as_secs_f64(),
        decode_seconds: generated.decode_time.as_secs_f64(),
        reused_tokens,
        trace: None,
    }
}

fn name(finish: FinishReason) -> &'static str {
    match finish {
        FinishReason::EndOfText => "end-of-text",
        FinishReason::StopString => "stop-string",
        FinishReason::Length => "length",
        FinishReason::Context => "context",
        FinishReason::Cancelled => "cancelled",
    }
}

/// Hands text over in pieces with their tokens.
struct Pieces<'a> {
    message: AnswerMessage,
    /// Tokens whose text is not handed over yet.
    pending: Vec<u32>,
    parser: Option<Box<dyn OutputParser>>,
    listener: &'a mut dyn PieceListener,
    stats: &'a SharedStats,
}

impl Pieces<'_> {
    fn hand_over(&mut self, kind: PieceKind, text: &str) -> bool {
        let tokens = std::mem::take(&mut self.pending);
        self.listener.piece(TextPiece { text, tokens: &tokens, kind })
    }

    fn parts(&mut self, parts: Vec<OutputPart>) -> bool {
        let mut goes_on = true;
        for part in parts {
            self.message.add(&part);
            let (kind, text) = match part {
                OutputPart::Content(text) => (PieceKind::Content, text),
                OutputPart::Reasoning(text) => (PieceKind::Reasoning, text),
                OutputPart::CallName { name, .. } => (PieceKind::ToolName, name),
                OutputPart::CallArguments(text) => (PieceKind::ToolArguments, text),
            };
            goes_on &= self.hand_over(kind, &text);
        }
        goes_on
    }

    /// Hands over what is left when the text has ended.
    fn finish(&mut self) {
        let rest = self.parser.as_mut().map(|parser| parser.finish()).unwrap_or_default();
        self.parts(rest);
        if !self.pending.is_empty() {
            self.hand_over(PieceKind::Content, "");
        }
    }
}

impl Listener<EngineExperts> for Pieces<'_> {
    fn token(&mut self, id: u32) {
        self.pending.push(id);
    }

    fn text(&mut self, piece: &str) -> bool {
        match &mut self.parser {
            Some(parser) => {
                let parts = parser.push(piece);
                self.parts(parts)
            }
            None => {
                self.message.content.push_str(piece);
                self.hand_over(PieceKind::Content, piece)
            }
        }
    }

    fn wants_more(&mut self) -> bool {
        self.listener.wants_more()
    }

    fn step(&mut self, _: &StepStats, experts: &EngineExperts) {
        self.stats.update(experts);
    }
}
