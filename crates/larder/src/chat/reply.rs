//! One answer: its prompt, the part of it that is already in the KV cache, prefill and decode.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use larder_cache::Traffic;
use larder_core::common_prefix;
use larder_engine::{
    ContextLimit, Drafting, FinishReason, Listener, OutputLoss, Picture, Request, Routing, Sampler, Session, Sight,
    StepStats, TokenInput, generate,
};
use larder_model::{LogitsFor, ModelError, Tap};
use larder_policy::routing::quality::Quality;
use larder_runtime::{EngineExperts, ImagePrompt, PictureFile, TextCodec, expand_images, pictures_to_show};
use larder_text::{
    ChatFormat, ContextFull, DialogueTurns, OutputParser, OutputPart, StopMatcher, Tokenizer, answer_room, kept_tokens,
};
use serde_json::Value;

use super::conversation::{ChatImage, Conversation, Message};
use super::interrupt::Interrupt;
use super::output::{Output, ReplyPrinter, TextPart};
use super::settings::Settings;
use crate::images;
use crate::progress::PromptLine;
use crate::run_report::RunReport;
use crate::telemetry::Totals;

/// The sequence of a conversation, with its KV cache.
pub struct ChatSequence<'a> {
    /// The session with the KV cache.
    pub session: Session<'a, EngineExperts>,
    text: &'a TextCodec,
    format: ChatFormat,
    eos: &'a [u32],
    stop: StopMatcher,
    limit: ContextLimit,
    drafting: Drafting,
    /// What turns pictures into images, if the model sees.
    sight: Option<Arc<dyn Sight>>,
    /// That of the last prompt and answer, if known.
    transcript: Option<Transcript>,
    /// Number of answers so far; each gets a seed of its own.
    answers: u64,
}

/// All tokens of a prompt and its answer, and their text.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Transcript {
    /// The tokens, those of the answer as they were generated.
    pub tokens: Vec<u32>,
    /// Their text.
    pub text: String,
    /// The numbers of the pictures of its images.
    pub images: Vec<u32>,
}

/// A prompt that fits into the context.
struct FittedPrompt {
    text: String,
    tokens: Vec<u32>,
    /// Number of turns that it leaves out.
    dropped: usize,
    /// Its images, in order.
    images: Vec<ChatImage>,
}

/// An answer with its statistics.
pub struct Reply {
    /// The answer as a message.
    pub message: Message,
    /// Why generation ended.
    pub finish: FinishReason,
    /// Number of turns dropped to fit into the context.
    pub dropped: usize,
    /// How often older tokens were dropped during the answer.
    pub shifts: usize,
    /// Prompt tokens that were already in the KV cache.
    pub reused: usize,
    /// Time to first token: from the message to the first token of the answer.
    pub ttft: Duration,
    /// What prompt and answer took.
    pub report: RunReport,
    /// Quality of the routing of prompt and answer; `None` for the model's own.
    pub quality: Option<Quality>,
    /// Of how many of its tokens the loss was measured, and what it is.
    pub loss: OutputLoss,
    /// Whether standard output was closed.
    pub closed: bool,
}

impl<'a> ChatSequence<'a> {
    /// An empty sequence.
    pub fn new(
        session: Session<'a, EngineExperts>,
        text: &'a TextCodec,
        eos: &'a [u32],
        stop: StopMatcher,
        limit: ContextLimit,
    ) -> Self {
        let plain = ChatFormat::plain;
        let format = text.template.as_ref().map_or_else(plain, |t| ChatFormat::of_template(t, &text.tokenizer));
        ChatSequence {
            session,
            text,
            format,
            eos,
            stop,
            limit,
            drafting: Drafting::default(),
            sight: None,
            transcript: None,
            answers: 0,
        }
    }

    /// The same, which drafts tokens.
    pub fn speculating(self, drafting: Drafting) -> Self {
        ChatSequence { drafting, ..self }
    }

    /// The same, which takes images if there is something that sees.
    pub fn seeing(self, sight: Option<Arc<dyn Sight>>) -> Self {
        ChatSequence { sight, ..self }
    }

    /// The image of the picture in a file.
    pub fn image(&self, path: &Path) -> Result<ChatImage> {
        let sight = self.sight.as_ref().context("images are not taken here")?;
        let picture = sight.look(&PictureFile::read(path)?).with_context(|| path.display().to_string())?;
        let picture = Picture { encoded: None, ..picture };
        Ok(ChatImage { path: path.to_owned(), picture: Some(picture) })
    }

    /// Refuses a message whose text holds the token that stands for an image.
    pub fn check_text(&self, text: &str) -> Result<()> {
        let marks = self.sight.as_ref().map(|sight| sight.marks());
        Ok(marks.map_or(Ok(()), |marks| ImagePrompt::check_text(text, marks, &self.text.tokenizer))?)
    }

    /// The same, whose last prompt and answer are those of a transcript.
    pub fn continuing(self, transcript: Option<Transcript>) -> Self {
        ChatSequence { transcript, ..self }
    }

    /// Tokens and text of the last prompt and answer, if known.
    pub fn transcript(&self) -> Option<&Transcript> {
        self.transcript.as_ref()
    }

    /// Context size in tokens.
    pub fn context(&self) -> usize {
        self.limit.tokens
    }

    /// Answers the last message, after dropping the oldest turns if the prompt does not fit. Returns `None` if
    /// interrupted before the answer starts.
    pub fn answer(
        &mut self,
        conversation: &mut Conversation,
        settings: &Settings,
        output: Output,
        interrupt: &Interrupt,
    ) -> Result<Option<Reply>> {
        let asked = Instant::now();
        let sampler = Sampler::new(settings.sampling, settings.seed.wrapping_add(self.answers))?;
        let FittedPrompt { text: prompt_text, tokens, dropped, images } = self.fit_context(conversation, settings)?;
        let keep = match settings.context_full {
            ContextFull::Shift => Some(self.kept(conversation, &tokens)?),
            ContextFull::Stop | ContextFull::DropTurns => None,
        };
        let reused = self.rewind_to(&tokens);
        self.show(&tokens, &images)?;
        let (before, quality_before) = (self.traffic(), self.quality().unwrap_or_default());
        let loss_before = self.session.output_loss();
        let (start, mut line) = (Instant::now(), PromptLine::begin(tokens.len(), reused));
        let new = &tokens[self.session.tokens().len()..];
        let Some(last) = self.prefill_pieces(new, &mut line, interrupt)? else {
            return Ok(None);
        };
        let ahead = start.elapsed();
        let tokenizer = &self.text.tokenizer;
        let mut writer = ReplyWriter {
            printer: ReplyPrinter::new(std::io::stdout().lock(), output, settings.thinking),
            parser: self.format.parser(&prompt_text, vec![]),
            interrupt,
            message: Message::assistant(),
            line,
            before: tokens.len() - last.len(),
            closed: false,
            asked,
            after_prompt: None,
            keep,
        };
        let request = Request {
            prompt: last,
            sampler,
            grammar: None,
            shown: self.format.shown_tokens(),
            eos: self.eos,
            stop: self.stop.clone(),
            // Shifts have no end of their own.
            max_tokens: settings.max_tokens.unwrap_or(if keep.is_some() { self.limit.tokens } else { usize::MAX }),
            drafting: self.session.experts().drafting(&self.drafting),
        };
        let made = generate(&mut self.session, tokenizer, request, &mut writer)?;
        if made.finish == FinishReason::Cancelled && made.ids.is_empty() {
            return Ok(None);
        }
        self.answers += 1;
        writer.finish();
        let ReplyWriter { message, closed, after_prompt, .. } = writer;
        let (ttft, after_prompt) = after_prompt.unwrap_or_default();
        let prompt = Totals { tokens: tokens.len() - reused, traffic: after_prompt - before, ..Totals::default() };
        let decode = Totals { tokens: made.ids.len(), traffic: self.traffic() - after_prompt, ..Totals::default() };
        let streaming = self.session.experts().traffic().is_some();
        let report = RunReport::of(&made, [prompt, decode], streaming);
        let report = RunReport { took: [ahead + made.prefill_time, made.decode_time], ..report };
        let quality = self.quality().map(|quality| quality - quality_before);
        let loss = self.session.output_loss() - loss_before;
        let numbers = images.iter().filter_map(|image| Some(image.picture.as_ref()?.number)).collect();
        let own = Transcript { tokens, text: prompt_text, images: numbers };
        self.transcript = Some(transcript(tokenizer, own, &made.ids, self.eos));
        let (finish, shifts) = (made.finish, made.shifts);
        Ok(Some(Reply { message, finish, dropped, shifts, reused, ttft, report, quality, loss, closed }))
    }

    /// Cache traffic so far.
    pub fn traffic(&self) -> Traffic {
        self.session.experts().traffic().unwrap_or_default()
    }

    /// Quality of the routing so far; `None` for the model's own.
    fn quality(&self) -> Option<Quality> {
        self.session.experts().routing().and_then(Routing::quality)
    }

    /// The prompt of the conversation, which loses its oldest turns if the settings say so and it does not fit together
    /// with an answer.
    fn fit_context(&self, conversation: &mut Conversation, settings: &Settings) -> Result<FittedPrompt> {
        let room = answer_room(self.limit.tokens, settings.max_tokens);
        let prompt = match settings.context_full {
            ContextFull::Stop => self.prompt(conversation, 0)?,
            ContextFull::DropTurns | ContextFull::Shift => self.longest_prompt(conversation, room)?,
        };
        (0..prompt.dropped).for_each(|_| _ = conversation.drop_oldest());
        let tokens = prompt.tokens.len();
        if tokens < self.limit.tokens {
            return Ok(prompt);
        }
        match conversation.messages.len() {
            0 | 1 => bail!("{}", self.limit.too_long("this message", tokens)),
            _ => bail!(
                "{}; or leave its oldest turns out with /set context-full drop-turns",
                self.limit.too_long("the conversation", tokens)
            ),
        }
    }

    /// The longest prompt that leaves `room` tokens for the answer, or that of the last turn alone.
    fn longest_prompt(&self, conversation: &Conversation, room: usize) -> Result<FittedPrompt> {
        let messages = conversation.json();
        let turns = DialogueTurns::of(&messages);
        let longest_text = self.text.tokenizer.longest_text(self.limit.tokens);
        let prompt = |dropped| {
            let text = self.prompt_text(conversation, dropped)?;
            if text.len() > longest_text {
                return anyhow::Ok(None);
            }
            let images = shortened(conversation, dropped).images().cloned().collect::<Vec<_>>();
            let tokens = self.tokens(&text, &images)?;
            let fits = tokens.len().saturating_add(room) <= self.limit.tokens;
            Ok(fits.then_some(FittedPrompt { text, tokens, dropped, images }))
        };
        match turns.fit(|message| self.tokens_of(message), self.limit.tokens / 4, prompt)? {
            Some((_, prompt)) => Ok(prompt),
            None => self.prompt(conversation, turns.count().saturating_sub(1)),
        }
    }

    fn prompt(&self, conversation: &Conversation, dropped: usize) -> Result<FittedPrompt> {
        let text = self.prompt_text(conversation, dropped)?;
        let images: Vec<_> = shortened(conversation, dropped).images().cloned().collect();
        Ok(FittedPrompt { tokens: self.tokens(&text, &images)?, text, dropped, images })
    }

    /// The text of the prompt without some of the oldest turns.
    fn prompt_text(&self, conversation: &Conversation, dropped: usize) -> Result<String> {
        let mark = self.sight.as_ref().map_or("", |sight| sight.marks().text.as_str());
        shortened(conversation, dropped).text(self.text.template.as_ref(), mark)
    }

    /// Tokens of a message's texts; of one that no context holds, as many as a context has. Images are not counted: the
    /// prompt shows whether they fit.
    fn tokens_of(&self, message: &Value) -> usize {
        let tokens = |text| {
            self.text.tokenizer.encode_for(self.limit.tokens, text, false).map_or(self.limit.tokens, |ids| ids.len())
        };
        let parts = message["content"].as_array().into_iter().flatten().map(|part| &part["text"]);
        let texts = parts.chain([&message["content"], &message["reasoning_content"]]);
        texts.filter_map(Value::as_str).map(tokens).sum()
    }

    /// Tokens of a prompt that shifts keep: those before the first question.
    fn kept(&self, conversation: &Conversation, prompt: &[u32]) -> Result<usize> {
        let probe = Conversation { system: conversation.system.clone(), messages: vec![Message::user("?".into())] };
        let plain = self.text.template.is_none();
        let probe =
            self.text.tokenizer.encode_for(self.limit.tokens, &probe.text(self.text.template.as_ref(), "")?, plain)?;
        Ok(kept_tokens(self.limit.tokens, common_prefix(&probe, prompt)))
    }

    /// The tokens of a prompt. If it continues the transcript, it begins with the tokens of that: the model may have
    /// generated text with other tokens than the tokenizer would choose.
    fn tokens(&self, prompt_text: &str, images: &[ChatImage]) -> Result<Vec<u32>> {
        let tokenizer = &self.text.tokenizer;
        let plain = self.text.template.is_none();
        let pictures = images.iter().map(|image| image.picture.clone().context("an image was not read"));
        let pictures = pictures.collect::<Result<Vec<_>>>()?;
        let numbers: Vec<u32> = pictures.iter().map(|picture| picture.number).collect();
        let continued = self.transcript.as_ref().filter(|transcript| numbers.starts_with(&transcript.images));
        if let Some((before, rest)) = continued.and_then(|t| Some((t, prompt_text.strip_prefix(&t.text)?))) {
            let new = tokenizer.encode_for(self.limit.tokens, rest, false)?;
            // Only a special token guarantees that the tokenizer would split the text here too.
            if new.first().is_some_and(|id| plain || tokenizer.decode(&[*id], true).is_empty()) {
                let new = self.with_images(new, &pictures[before.images.len()..])?;
                return Ok([before.tokens.as_slice(), &new].concat());
            }
        }
        let tokens = tokenizer.encode_for(self.limit.tokens, prompt_text, plain)?;
        if tokens.is_empty() {
            bail!("the message is empty, and this model has no BOS token; write some text");
        }
        self.with_images(tokens, &pictures)
    }

    /// The tokens with those of images in the places of their marks.
    fn with_images(&self, tokens: Vec<u32>, pictures: &[Picture]) -> Result<Vec<u32>> {
        match &self.sight {
            Some(sight) if !pictures.is_empty() => Ok(expand_images(&tokens, sight.marks().image, pictures)?),
            _ => Ok(tokens),
        }
    }

    /// Shows the session the pictures of a prompt. Those of tokens that have to be computed are encoded.
    fn show(&mut self, tokens: &[u32], images: &[ChatImage]) -> Result<()> {
        let Some(sight) = &self.sight else { return Ok(()) };
        let seen = images.iter().filter_map(|image| Some((image.path.as_path(), image.picture.clone()?)));
        let (paths, pictures): (Vec<&Path>, Vec<Picture>) = seen.unzip();
        let encode = |at: usize| {
            let path = paths[at];
            let encoded = images::encode(sight.as_ref(), path, &PictureFile::read(path)?)?;
            if encoded.number != pictures[at].number {
                bail!("{}: has changed since it was attached; attach it again", path.display());
            }
            Ok(encoded)
        };
        self.session.show(&pictures_to_show(&pictures, &tokens[self.session.tokens().len()..], encode)?);
        Ok(())
    }

    /// Rewinds the KV cache to the common prefix with `tokens`, and returns its length.
    fn rewind_to(&mut self, tokens: &[u32]) -> usize {
        let reused = self.session.rewind(self.session.common_prefix(tokens));
        if reused == 0 {
            self.session.experts_mut().new_sequence();
        }
        self.transcript = None;
        reused
    }

    /// Prefills all but the last piece of `tokens`, and returns that; `None` if interrupted. The pieces before stay in
    /// the KV cache.
    fn prefill_pieces<'t>(
        &mut self,
        tokens: &'t [u32],
        line: &mut PromptLine,
        interrupt: &Interrupt,
    ) -> Result<Option<&'t [u32]>> {
        let size = self.session.prefill_tokens();
        let (ahead, last) = tokens.split_at((tokens.len() - 1) / size * size);
        for piece in ahead.chunks(size) {
            let input = TokenInput { logits_for: LogitsFor::None, ..TokenInput::prompt(piece) };
            let before = self.session.tokens().len();
            let mut tap = PieceTap { interrupt, line: &mut *line, before, tokens: piece.len() };
            match self.session.forward(&input, &mut tap) {
                Err(ModelError::Cancelled) => return Ok(None),
                other => other?,
            };
        }
        Ok(Some(last).filter(|_| !interrupt.received()))
    }
}

/// A conversation without some of the oldest turns.
fn shortened(conversation: &Conversation, dropped: usize) -> Conversation {
    let mut shorter = conversation.clone();
    (0..dropped).for_each(|_| _ = shorter.drop_oldest());
    shorter
}

/// Ends the pass over a piece of a prompt at the next layer after an interrupt, and shows how far the prompt has come.
struct PieceTap<'a> {
    interrupt: &'a Interrupt,
    line: &'a mut PromptLine,
    /// Tokens of the prompt before the piece.
    before: usize,
    /// Tokens of the piece.
    tokens: usize,
}

impl Tap for PieceTap<'_> {
    fn wants_more(&mut self) -> bool {
        !self.interrupt.received()
    }

    fn progress(&mut self, done: usize, of: usize) {
        self.line.reached(self.before + self.tokens * done / of);
    }
}

/// Tokens and text of prompt and answer, without the end-of-text token.
fn transcript(tokenizer: &Tokenizer, mut prompt: Transcript, ids: &[u32], eos: &[u32]) -> Transcript {
    let written = ids.iter().take_while(|id| !eos.contains(id)).count();
    prompt.text.push_str(&tokenizer.decode(&ids[..written], false));
    prompt.tokens.extend_from_slice(&ids[..written]);
    prompt
}

/// Prints the answer as it is generated, and collects it as a message.
struct ReplyWriter<'a, W> {
    printer: ReplyPrinter<W>,
    parser: Box<dyn OutputParser>,
    interrupt: &'a Interrupt,
    message: Message,
    /// The progress of the prompt.
    line: PromptLine,
    /// Tokens of the prompt that were computed before the generation began.
    before: usize,
    closed: bool,
    /// When the message came.
    asked: Instant,
    /// Time to first token, and cache traffic at the end of prefill.
    after_prompt: Option<(Duration, Traffic)>,
    /// Tokens that shifts keep, if a full context is shifted.
    keep: Option<usize>,
}

impl<W: std::io::Write> ReplyWriter<'_, W> {
    fn show(&mut self, parts: Vec<OutputPart>) {
        for part in parts {
            let (part, text) = match part {
                OutputPart::Reasoning(text) => {
                    self.message.reasoning.push_str(&text);
                    (TextPart::Thinking, text)
                }
                OutputPart::Content(text) => {
                    self.message.content.push_str(&text);
                    (TextPart::Answer, text)
                }
                // Without tools calls are content.
                OutputPart::CallName { .. } | OutputPart::CallArguments(_) => continue,
            };
            self.closed |= self.printer.write(part, &text).is_err();
        }
    }

    fn finish(&mut self) {
        let rest = self.parser.finish();
        self.show(rest);
        self.closed |= self.printer.finish().is_err();
    }
}

impl<W: std::io::Write> Listener<EngineExperts> for ReplyWriter<'_, W> {
    fn text(&mut self, piece: &str) -> bool {
        let parts = self.parser.push(piece);
        self.show(parts);
        !self.closed && !self.interrupt.received()
    }

    fn wants_more(&mut self) -> bool {
        !self.interrupt.received()
    }

    fn prefilled(&mut self, tokens: usize) {
        self.line.reached(self.before + tokens);
    }

    fn context_full(&mut self) -> Option<usize> {
        self.keep
    }

    fn step(&mut self, _: &StepStats, experts: &EngineExperts) {
        self.line.finish();
        self.after_prompt.get_or_insert_with(|| (self.asked.elapsed(), experts.traffic().unwrap_or_default()));
    }
}
