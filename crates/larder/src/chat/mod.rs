//! `larder chat`: a conversation with a model.
//!
//! Answers go to standard output, all else to standard error, so that what is piped consists of answers alone.

mod command;
mod conversation;
mod file;
mod input;
mod interrupt;
mod output;
mod reply;
mod settings;
mod stats;
mod thinking;

use std::io::IsTerminal;
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow, bail};
use larder_engine::{FinishReason, Routing, StopMatcher};

use crate::cli::chat::ChatArgs;
use crate::engine::InferenceEngine;
use crate::open::OpenModel;
use crate::{advice, print};

use command::{ChatCommand, HELP};
use conversation::{Conversation, Message};
use input::{Input, Lines};
use interrupt::Interrupt;
use output::Output;
use reply::{ChatSequence, Reply};
use settings::Settings;
use stats::ChatStats;

/// Talks until there is nothing more to read.
pub fn run(args: ChatArgs) -> Result<()> {
    let output = Output::detect();
    let interactive = output.terminal && std::io::stdin().is_terminal();
    let settings = Settings::new(&args, output.terminal)?;
    let stop = StopMatcher::new(args.stop.clone())?;
    let model = OpenModel::open_to_run(&args.model, args.engine.no_store)?;
    let text = model.text_codec()?;
    let generation = model.generation()?;
    let mut engine = InferenceEngine::start(&model, &args.engine, args.context)?;
    let context = args.context.min(model.blueprint.context);
    if text.template.is_none() {
        output.note("this model has no chat template: it writes on from what you type, and does not answer");
    }
    let mut lines = Lines::open(interactive, !args.no_history)?;
    if interactive {
        output.note("/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves");
    }
    let mut chat = ChatSession {
        sequence: ChatSequence::new(engine.session(), &text, &generation.eos, stop, context),
        model: &model,
        evictor: args.engine.evictor.clone(),
        conversation: Conversation { system: args.system, messages: vec![] },
        settings,
        stats: ChatStats::default(),
        output,
        interrupt: Interrupt::listen()?,
        interactive,
    };
    let ended = chat.run_loop(&mut lines);
    drop(chat);
    engine.experts.write_trace("larder chat")?;
    ended
}

/// Everything that a conversation takes.
struct ChatSession<'a> {
    sequence: ChatSequence<'a>,
    model: &'a OpenModel,
    /// Trained weights that are not the model's.
    evictor: Option<PathBuf>,
    conversation: Conversation,
    settings: Settings,
    stats: ChatStats,
    output: Output,
    interrupt: Interrupt,
    interactive: bool,
}

/// Whether to go on.
#[derive(PartialEq, Eq)]
enum Next {
    Continue,
    Quit,
}

impl ChatSession<'_> {
    fn run_loop(&mut self, lines: &mut Lines) -> Result<()> {
        loop {
            let done = match lines.next()? {
                Input::End => return Ok(()),
                Input::Interrupt => {
                    self.output.note("Ctrl-D or /quit leaves");
                    continue;
                }
                Input::Line(line) if line.trim().is_empty() => continue,
                Input::Line(line) => match ChatCommand::parse(&line) {
                    Some(Ok(command)) => self.execute(command).or_else(|error| self.report_error(error)),
                    Some(Err(wrong)) => self.report_error(anyhow!(wrong)),
                    None => self.send(line),
                },
                Input::Block(text) => self.send(text),
            };
            match done {
                Ok(Next::Continue) => {}
                Ok(Next::Quit) => return Ok(()),
                // Whoever pipes would take the next answer for one to this message.
                Err(error) if !self.interactive => return Err(error),
                Err(error) => drop(self.report_error(error)),
            }
        }
    }

    fn report_error(&self, error: anyhow::Error) -> Result<Next> {
        self.output.line(&format!("error: {}", advice::message(&error)));
        Ok(Next::Continue)
    }

    fn send(&mut self, message: String) -> Result<Next> {
        let before = self.conversation.clone();
        self.conversation.messages.push(Message::user(message));
        self.answer(before)
    }

    fn answer_again(&mut self) -> Result<Next> {
        let before = self.conversation.clone();
        if !self.conversation.remove_last_answer() {
            bail!("nothing was asked yet");
        }
        self.answer(before)
    }

    /// Answers what was said last, or goes back to what was `before` if there can be no answer.
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

    /// What a person should know of how an answer came about.
    fn print_notes(&self, answer: &Reply) {
        let context = self.sequence.context();
        if answer.dropped > 0 {
            self.output.note(&format!(
                "the context of {context} tokens is full: the oldest {} forgotten",
                print::count(answer.dropped, "turn was", "turns were")
            ));
        }
        match answer.finish {
            FinishReason::Context => {
                self.output.note(&format!("the context of {context} tokens is full, so the answer ends here"));
            }
            FinishReason::Length => self.output.note("the answer ends here because of max-tokens"),
            FinishReason::Cancelled => self.output.note("stopped"),
            FinishReason::EndOfText | FinishReason::StopString => {}
        }
        if self.settings.footer {
            self.output.note(&stats::footer(answer, self.sequence.session.experts().traffic().is_some()));
        }
    }

    fn execute(&mut self, command: ChatCommand) -> Result<Next> {
        match command {
            ChatCommand::Help => self.output.line(HELP),
            ChatCommand::Reset => {
                self.conversation.messages.clear();
                self.output.note("everything that was said is forgotten");
            }
            ChatCommand::System(None) => match &self.conversation.system {
                Some(system) => self.output.line(system),
                None => self.output.note("there is no system message"),
            },
            ChatCommand::System(text) => {
                self.conversation.system = text;
                self.output.note("from the next answer on");
            }
            ChatCommand::Regen => return self.answer_again(),
            ChatCommand::Save(path) => {
                file::save(Path::new(&path), &self.conversation, &self.settings)?;
                self.output.note(&format!("saved to {path}"));
            }
            ChatCommand::Load(path) => self.load(&path)?,
            ChatCommand::Stats => self.output.line(&self.stats_text()),
            ChatCommand::Set(None) => self.output.line(print::columns(&self.settings.table()).trim_end()),
            ChatCommand::Set(Some((name, value))) => {
                let new = self.settings.with(&name, &value)?;
                self.change(new)?;
            }
            ChatCommand::Quit => return Ok(Next::Quit),
        }
        Ok(Next::Continue)
    }

    fn load(&mut self, path: &str) -> Result<()> {
        let (conversation, settings) = file::load(Path::new(path), &self.settings)?;
        self.change(settings)?;
        let said = print::count(conversation.messages.len(), "message", "messages");
        self.conversation = conversation;
        self.output.note(&format!("loaded {said} from {path}"));
        Ok(())
    }

    /// Takes new settings, all or none.
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
        self.settings = new;
        Ok(())
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
            rows.push(vec![
                "experts".into(),
                format!("{:.1} % found in memory, {read} read", 100.0 * traffic.hit_rate()),
            ]);
        }
        let mut said = print::columns(&rows);
        if let Some(quality) = session.experts().routing().and_then(Routing::quality) {
            said.push_str(&print::quality(&self.settings.routing.to_string(), &quality));
        }
        said.trim_end().to_owned()
    }
}
