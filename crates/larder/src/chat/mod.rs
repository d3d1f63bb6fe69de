//! `larder chat`: a conversation with a model in the terminal.
//!
//! Answers go to standard output and everything else to standard error, so that a pipe receives answers only.

mod command;
mod completion;
mod conversation;
mod file;
mod input;
mod interrupt;
mod output;
mod reply;
mod session_file;
mod settings;
mod stats;

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use larder_engine::{CostNote, FinishReason, QualityCalibration, Routing, Session, lambda_cost_note};
use larder_runtime::{InferenceEngine, OpenModel, Options, blindness, error_message};
use larder_text::StopMatcher;

use crate::cli::chat::ChatArgs;
use crate::models;
use crate::print;

use command::ChatCommand;
use conversation::{ChatImage, Conversation, Message};
use input::{Input, Lines};
use interrupt::Interrupt;
use output::Output;
use reply::{ChatSequence, Reply};
use session_file::{SavedChat, SessionFile};
use settings::{LAMBDA, Settings};
use stats::ChatStats;

/// Time between looks at the memory while the user types.
const IDLE_PAUSE: Duration = Duration::from_millis(500);

/// Runs a chat until the input ends.
pub fn run(args: ChatArgs) -> Result<()> {
    let output = Output::detect();
    let interactive = output.terminal && std::io::stdin().is_terminal();
    let stop = StopMatcher::new(args.stop.clone())?;
    args.session.iter().try_for_each(|path| SessionFile::check(path))?;
    let flags = args.record.set(args.engine.settings.clone());
    let model = models::open_to_run(&args.model, &flags, &args.ignore_config)?;
    let text = model.text_codec()?;
    let generation = args.sampling.over(model.generation()?)?;
    let calibration = model.usable_quality_calibration();
    let settings = Settings::new(&args, &generation, output.terminal);
    let prompt_bytes_per_token = text.tokenizer.longest_text(1);
    let options = Options { prompt_bytes_per_token, ..models::options(&flags, flags.options.context)? };
    let mut engine = InferenceEngine::start(&model, &options)?;
    let (limit, context) = (engine.context.clone(), engine.context.tokens);
    let session_file = match args.session {
        Some(path) => Some(SessionFile::open(path, &model, &options, &engine)?),
        None => None,
    };
    let load = |file: &SessionFile| file.load(&engine.decoder, context, &settings.routing);
    let saved = session_file.as_ref().map(load).transpose()?.flatten();
    if text.template.is_none() {
        output.note("this model has no chat template: it continues your text instead of answering");
    }
    let mut lines = Lines::open(interactive, !args.no_history)?;
    if interactive {
        model.welcome()?.iter().for_each(|welcome| output.note(&welcome.heading));
        output.note("/help lists the commands, Ctrl-C stops an answer, Ctrl-D ends the chat");
    }
    if let Some(SavedChat { conversation, sequence, .. }) = &saved {
        let messages = print::count(conversation.messages.len(), "message", "messages");
        output.note(&format!("continuing a conversation of {messages}, {} tokens", sequence.tokens().len()));
    }
    let SavedChat { mut conversation, transcript, sequence } =
        saved.unwrap_or_else(|| SavedChat::new(&engine.decoder, context));
    conversation.system = args.system.or(conversation.system);
    engine.experts.new_sequence();
    let sight = engine.sight(&model, &text.tokenizer)?;
    let blindness = sight.is_none().then(|| blindness(&model, options.vision.tower));
    let drafting = engine.drafting();
    let meter = engine.loss_meter().clone();
    let session = Session::resume(&engine.decoder, &mut engine.experts, sequence);
    let session = session.with_prefill_tokens(engine.prefill_tokens).with_meter(meter);
    let mut chat = ChatSession {
        sequence: ChatSequence::new(session, &text, &generation.eos, stop, limit)
            .speculating(drafting)
            .seeing(sight)
            .continuing(transcript),
        session_file,
        model: &model,
        evictor: flags.options.cache.evictor.clone(),
        conversation,
        attached: vec![],
        settings,
        blindness,
        calibration,
        stats: ChatStats::default(),
        output,
        interrupt: Interrupt::listen()?,
        interactive,
    };
    chat.read_images();
    let ended = chat.run_loop(&mut lines);
    let saved = chat.save_session();
    drop(chat);
    engine.experts.write_hot_set();
    engine.experts.write_trace("larder chat")?;
    ended.and(saved)
}

/// The state of a running chat.
struct ChatSession<'a> {
    sequence: ChatSequence<'a>,
    /// Where the chat is saved at its end.
    session_file: Option<SessionFile>,
    model: &'a OpenModel,
    /// Trained weights for eviction other than the model's own.
    evictor: Option<PathBuf>,
    conversation: Conversation,
    /// Images of the next message.
    attached: Vec<ChatImage>,
    settings: Settings,
    /// Why images are refused, if they are.
    blindness: Option<String>,
    /// What λ costs, if that was measured.
    calibration: Option<QualityCalibration>,
    stats: ChatStats,
    output: Output,
    interrupt: Interrupt,
    interactive: bool,
}

/// Whether the chat continues.
#[derive(PartialEq, Eq)]
enum Next {
    Continue,
    Quit,
}

impl ChatSession<'_> {
    fn run_loop(&mut self, lines: &mut Lines) -> Result<()> {
        loop {
            let done = match self.next_input(lines)? {
                Input::End => return Ok(()),
                Input::Interrupt => {
                    self.output.note("use Ctrl-D or /quit to end the chat");
                    continue;
                }
                Input::Line(line) if line.trim().is_empty() => continue,
                Input::Line(line) => match ChatCommand::parse(&line) {
                    Some(Ok(command)) => self.execute(command, lines).or_else(|error| self.report_error(error)),
                    Some(Err(wrong)) => self.report_error(anyhow!(wrong)),
                    None => self.send(line),
                },
                Input::Block(text) => self.send(text),
            };
            match done {
                Ok(Next::Continue) => {}
                Ok(Next::Quit) => return Ok(()),
                // In a pipe, the next answer would be taken for the answer to this message.
                Err(error) if !self.interactive => return Err(error),
                Err(error) => drop(self.report_error(error)),
            }
        }
    }

    /// The next message or command. Until it is there, hot experts are read if there was no answer yet, and slots given
    /// back if memory gets scarce.
    fn next_input(&mut self, lines: &mut Lines) -> Result<Input> {
        let experts = self.sequence.session.experts_mut();
        // A pipe's prompt is there at once.
        if !self.interactive || !experts.has_idle_work() {
            return lines.next();
        }
        let is_there = AtomicBool::new(false);
        thread::scope(|scope| {
            let idle = || {
                while !is_there.load(Ordering::Relaxed) && experts.has_idle_work() {
                    if !experts.idle() {
                        thread::park_timeout(IDLE_PAUSE);
                    }
                }
            };
            // Without a thread, nothing is read ahead.
            let idling = thread::Builder::new().name("chat-idle".into()).spawn_scoped(scope, idle);
            let input = lines.next();
            is_there.store(true, Ordering::Relaxed);
            idling.iter().for_each(|idling| idling.thread().unpark());
            input
        })
    }

    fn report_error(&self, error: anyhow::Error) -> Result<Next> {
        self.output.line(&format!("error: {}", error_message(&error)));
        Ok(Next::Continue)
    }

    fn send(&mut self, message: String) -> Result<Next> {
        self.sequence.check_text(&message)?;
        let before = self.conversation.clone();
        let images = self.attached.clone();
        self.conversation.messages.push(Message { images, ..Message::user(message) });
        let next = self.answer(before)?;
        self.attached.clear();
        Ok(next)
    }

    /// Attaches the picture in a file to the next message.
    fn attach(&mut self, path: &Path) -> Result<()> {
        if let Some(blindness) = &self.blindness {
            bail!("{blindness}");
        }
        let image = self.sequence.image(path)?;
        let tokens = image.picture.as_ref().map_or(0, |picture| picture.grid.tokens());
        self.attached.push(image);
        self.output.note(&format!("{} is shown before the next message, {tokens} tokens", path.display()));
        Ok(())
    }

    /// Reads the files of the images of a conversation that was loaded.
    fn read_images(&mut self) {
        if self.conversation.images().all(|image| image.picture.is_some()) {
            return;
        }
        let ChatSession { sequence, blindness, conversation, .. } = self;
        let errors = conversation.read_images(|path| match blindness.as_ref() {
            Some(blindness) => Err(anyhow!("{}: {blindness}", path.display())),
            None => sequence.image(path),
        });
        errors.iter().for_each(|error| self.output.note(&format!("an image is left out: {}", error_message(error))));
    }

    fn answer_again(&mut self) -> Result<Next> {
        let before = self.conversation.clone();
        if !self.conversation.remove_last_answer() {
            bail!("there is no message to answer yet");
        }
        self.answer(before)
    }

    /// Answers the last message, or restores the conversation `before` if there is no answer.
    fn answer(&mut self, before: Conversation) -> Result<Next> {
        self.interrupt.arm();
        let answer = self.sequence.answer(&mut self.conversation, &self.settings, self.output, &self.interrupt);
        self.interrupt.disarm();
        let answer = match answer {
            Ok(Some(answer)) => answer,
            Ok(None) => {
                self.conversation = before;
                self.output.note("stopped before the answer began");
                return Ok(Next::Continue);
            }
            Err(error) => {
                self.conversation = before;
                return Err(error);
            }
        };
        self.conversation.messages.push(answer.message.clone());
        self.stats.add(&answer);
        if answer.closed {
            return Ok(Next::Quit);
        }
        self.print_notes(&answer);
        Ok(Next::Continue)
    }

    /// Prints notes about an answer: dropped turns, why it ended, and the footer.
    fn print_notes(&self, answer: &Reply) {
        let context = self.sequence.context();
        if answer.dropped > 0 {
            self.output.note(&format!(
                "the context of {context} tokens is full: {} from the prompt",
                print::count(answer.dropped, "oldest turn dropped", "oldest turns dropped")
            ));
        }
        if answer.shifts > 0 {
            self.output.note(&format!(
                "the context of {context} tokens was full during the answer: older tokens dropped {}",
                print::count(answer.shifts, "time", "times")
            ));
        }
        match answer.finish {
            FinishReason::Context => {
                self.output.note(&format!("answer cut off: the context of {context} tokens is full"));
            }
            FinishReason::Length => self.output.note("answer cut off at max-tokens"),
            FinishReason::Cancelled => self.output.note("stopped"),
            FinishReason::EndOfText | FinishReason::StopString => {}
        }
        if self.settings.footer {
            let session = &self.sequence.session;
            let footer = stats::footer(answer);
            self.output.note(&format!("{footer}, context {} of {context}", session.tokens().len()));
            if let Some(quality) = &answer.quality {
                self.output.note(&print::quality(&self.settings.routing.to_string(), quality));
                let expected = print::expected_loss(&self.settings.routing, session.experts().routing());
                expected.iter().for_each(|line| self.output.note(line));
                self.output.note(&print::output_loss(&answer.loss, answer.report.took[1]));
                if self.calibration.is_some() {
                    self.print_cost();
                }
            }
        }
    }

    fn execute(&mut self, command: ChatCommand, lines: &mut Lines) -> Result<Next> {
        match command {
            ChatCommand::Help => self.output.line(&command::help()),
            ChatCommand::Image(path) => self.attach(Path::new(&path))?,
            ChatCommand::Reset => {
                self.attached.clear();
                self.conversation.messages.clear();
                self.output.note("conversation cleared");
            }
            ChatCommand::System(None) => match &self.conversation.system {
                Some(system) => self.output.line(system),
                None => self.output.note("there is no system message"),
            },
            ChatCommand::System(text) => {
                self.conversation.system = text;
                self.output.note("system message set, from the next answer on");
            }
            ChatCommand::Regen => return self.answer_again(),
            ChatCommand::SaveSession => match &self.session_file {
                Some(file) => {
                    self.save_session()?;
                    self.output.note(&format!("saved to {}", file.path().display()));
                }
                None => bail!("/save needs a file name, or a chat that was started with --session"),
            },
            ChatCommand::Save { path, replace } => self.save(&path, replace, lines)?,
            ChatCommand::Load(path) => self.load(&path)?,
            ChatCommand::Stats => self.output.line(&self.stats_text()),
            ChatCommand::Lambda(None) => self.output.line(&self.lambda_text()),
            ChatCommand::Lambda(Some(value)) => {
                let new = self.settings.with(LAMBDA, &value)?;
                self.change(new)?;
            }
            ChatCommand::Set(None) => self.output.line(print::columns(&self.settings.table()).trim_end()),
            ChatCommand::Set(Some((name, value))) => {
                let new = self.settings.with(&name, &value)?;
                self.change(new)?;
            }
            ChatCommand::Quit => return Ok(Next::Quit),
        }
        Ok(Next::Continue)
    }

    /// Saves conversation and settings to a file; one that exists is replaced only if that is wanted.
    fn save(&self, path: &str, replace: bool, lines: &mut Lines) -> Result<()> {
        if file::is_there(Path::new(path), &self.settings)? && !replace {
            if !self.interactive {
                bail!("{path} exists and was not replaced; /save! {path} replaces it");
            }
            if !lines.confirm(&format!("{path} exists; replace it?"))? {
                self.output.note("not saved");
                return Ok(());
            }
        }
        file::save(Path::new(path), &self.conversation, &self.settings)?;
        self.output.note(&format!("saved to {path}"));
        Ok(())
    }

    /// Saves the chat to the file of `--session`, if there is one and anything to save.
    fn save_session(&self) -> Result<()> {
        let Some(file) = &self.session_file else { return Ok(()) };
        let (sequence, transcript) = (self.sequence.session.sequence(), self.sequence.transcript());
        if sequence.tokens().is_empty() && self.conversation.messages.is_empty() && !file.path().exists() {
            return Ok(());
        }
        file.save(sequence, &self.conversation, transcript, &self.settings.routing)
    }

    fn load(&mut self, path: &str) -> Result<()> {
        let (conversation, settings) = file::load(Path::new(path), &self.settings)?;
        self.change(settings)?;
        let count = print::count(conversation.messages.len(), "message", "messages");
        self.conversation = conversation;
        self.read_images();
        self.output.note(&format!("loaded {count} from {path}"));
        Ok(())
    }

    /// Applies new settings, all or none.
    fn change(&mut self, new: Settings) -> Result<()> {
        let decoder = self.sequence.session.decoder();
        let experts = self.sequence.session.experts_mut();
        let reroutes = new.routing.to_string() != self.settings.routing.to_string();
        if reroutes {
            experts.set_routing_strategy(&new.routing, decoder, self.model)?;
        }
        if new.eviction.to_string() != self.settings.eviction.to_string()
            && let Err(refused) = experts.set_eviction_policy(&new.eviction, self.model, self.evictor.as_deref())
        {
            if reroutes {
                experts.set_routing_strategy(&self.settings.routing, decoder, self.model)?;
            }
            return Err(refused);
        }
        if reroutes && self.session_file.is_some() {
            // What is saved belongs to one strategy.
            self.sequence.session.rewind(0);
        }
        self.settings = new;
        if reroutes {
            self.print_cost();
        }
        Ok(())
    }

    /// What the λ in use costs by measurement; `None` without λ.
    fn cost_note(&self) -> Option<CostNote> {
        self.sequence.session.experts().slots_per_layer()?;
        lambda_cost_note(self.calibration.as_ref(), &self.settings.routing)
    }

    fn print_cost(&self) {
        let Some(CostNote { cost, warning }) = self.cost_note() else { return };
        self.output.note(&format!("cost of λ: {cost}"));
        warning.iter().for_each(|warning| self.output.note(&format!("warning: {warning}")));
    }

    /// λ, its cost, and how that was measured.
    fn lambda_text(&self) -> String {
        let (routing, slots) = (&self.settings.routing, self.sequence.session.experts().slots_per_layer());
        let lambda = routing.lambda().map_or_else(|| "none".to_owned(), |lambda| lambda.to_string());
        let mut lines = vec![format!("λ: {lambda} ({routing})")];
        lines.extend(
            self.cost_note()
                .into_iter()
                .flat_map(|note| [Some(format!("cost of λ: {}", note.cost)), note.warning])
                .flatten(),
        );
        lines.extend(self.calibration.as_ref().zip(slots).map(|(made, slots)| made.lambda_source(slots)));
        lines.join("\n")
    }

    fn stats_text(&self) -> String {
        let session = &self.sequence.session;
        let mut rows = self.stats.rows();
        rows.push(vec![
            "context".into(),
            format!(
                "{} of {} tokens, {}",
                session.tokens().len(),
                self.sequence.context(),
                print::bytes(session.kv_bytes() as u64)
            ),
        ]);
        if let Some(traffic) = session.experts().traffic() {
            let read = print::bytes(traffic.bytes());
            rows.push(vec!["experts".into(), format!("{:.1} % cache hits, {read} read", 100.0 * traffic.hit_rate())]);
            let changes = session.experts().capacity_changes();
            rows.extend(changes.map(|changes| vec!["memory".into(), changes.to_string()]));
        }
        let mut text = print::columns(&rows);
        if let Some(quality) = session.experts().routing().and_then(Routing::quality) {
            text.push_str(&print::quality(&self.settings.routing.to_string(), &quality));
        }
        text.trim_end().to_owned()
    }
}
