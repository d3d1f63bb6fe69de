//! `larder chat`: a conversation with a model.
//!
//! Answers go to standard output, all else to standard error, so that what is piped consists of answers alone.

mod command;
mod conversation;
mod file;
mod input;
mod interrupt;
mod settings;
mod show;
mod stats;
mod talk;
mod thinking;

use std::io::IsTerminal;
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow, bail};
use larder_engine::{Finish, Routing, StopMatcher};

use crate::cli::chat::Chat;
use crate::engine::Engine;
use crate::open::Model;
use crate::{advice, print};

use command::{Command, HELP};
use conversation::{Conversation, Message};
use input::{Input, Lines};
use interrupt::Interrupt;
use settings::Settings;
use show::Screen;
use stats::Stats;
use talk::{Answer, Talk};

/// Talks until there is nothing more to read.
pub fn run(args: Chat) -> Result<()> {
    let screen = Screen::find();
    let interactive = screen.terminal && std::io::stdin().is_terminal();
    let settings = Settings::new(&args, screen.terminal)?;
    let stop = StopMatcher::new(args.stop.clone())?;
    let model = Model::open_to_run(&args.model, args.engine.no_store)?;
    let text = model.text()?;
    let generation = model.generation()?;
    let mut engine = Engine::start(&model, &args.engine, args.context)?;
    let context = args.context.min(model.blueprint.context);
    if text.template.is_none() {
        screen.note("this model has no chat template: it writes on from what you type, and does not answer");
    }
    let mut lines = Lines::open(interactive, !args.no_history)?;
    if interactive {
        screen.note("/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves");
    }
    let mut room = Room {
        talk: Talk::new(engine.session(), &text, &generation.eos, stop, context),
        model: &model,
        evictor: args.engine.evictor.clone(),
        conversation: Conversation { system: args.system, messages: vec![] },
        settings,
        stats: Stats::default(),
        screen,
        interrupt: Interrupt::listen()?,
        interactive,
    };
    let ended = room.visit(&mut lines);
    drop(room);
    engine.experts.write_trace("larder chat")?;
    ended
}

/// Everything that a conversation takes.
struct Room<'a> {
    talk: Talk<'a>,
    model: &'a Model,
    /// Trained weights that are not the model's.
    evictor: Option<PathBuf>,
    conversation: Conversation,
    settings: Settings,
    stats: Stats,
    screen: Screen,
    interrupt: Interrupt,
    interactive: bool,
}

/// Whether to go on.
#[derive(PartialEq, Eq)]
enum Next {
    Go,
    Leave,
}

impl Room<'_> {
    fn visit(&mut self, lines: &mut Lines) -> Result<()> {
        loop {
            let done = match lines.next()? {
                Input::End => return Ok(()),
                Input::Interrupt => {
                    self.screen.note("Ctrl-D or /quit leaves");
                    continue;
                }
                Input::Line(line) if line.trim().is_empty() => continue,
                Input::Line(line) => match Command::parse(&line) {
                    Some(Ok(command)) => self.obey(command).or_else(|error| self.complain(error)),
                    Some(Err(wrong)) => self.complain(anyhow!(wrong)),
                    None => self.hear(line),
                },
                Input::Block(text) => self.hear(text),
            };
            match done {
                Ok(Next::Go) => {}
                Ok(Next::Leave) => return Ok(()),
                // Whoever pipes would take the next answer for one to this message.
                Err(error) if !self.interactive => return Err(error),
                Err(error) => drop(self.complain(error)),
            }
        }
    }

    fn complain(&self, error: anyhow::Error) -> Result<Next> {
        self.screen.say(&format!("error: {}", advice::sentence(&error)));
        Ok(Next::Go)
    }

    fn hear(&mut self, message: String) -> Result<Next> {
        let before = self.conversation.clone();
        self.conversation.messages.push(Message::user(message));
        self.answer(before)
    }

    fn answer_again(&mut self) -> Result<Next> {
        let before = self.conversation.clone();
        if !self.conversation.take_back() {
            bail!("nothing was asked yet");
        }
        self.answer(before)
    }

    /// Answers what was said last, or goes back to what was `before` if there can be no answer.
    fn answer(&mut self, before: Conversation) -> Result<Next> {
        self.interrupt.arm();
        let answer = self.talk.answer(&mut self.conversation, &self.settings, self.screen, &self.interrupt);
        self.interrupt.disarm();
        let answer = match answer {
            Ok(Some(answer)) => answer,
            Ok(None) => {
                self.conversation = before;
                self.screen.note("stopped before the answer began");
                return Ok(Next::Go);
            }
            Err(error) => {
                self.conversation = before;
                return Err(error);
            }
        };
        self.conversation.messages.push(answer.message.clone());
        self.stats.add(&answer);
        if answer.broken {
            return Ok(Next::Leave);
        }
        self.explain(&answer);
        Ok(Next::Go)
    }

    /// What a person should know of how an answer came about.
    fn explain(&self, answer: &Answer) {
        let context = self.talk.context();
        if answer.dropped > 0 {
            self.screen.note(&format!(
                "the context of {context} tokens is full: the oldest {} forgotten",
                print::count(answer.dropped, "turn was", "turns were")
            ));
        }
        match answer.finish {
            Finish::Context => {
                self.screen.note(&format!("the context of {context} tokens is full, so the answer ends here"));
            }
            Finish::Length => self.screen.note("the answer ends here because of max-tokens"),
            Finish::Cancelled => self.screen.note("stopped"),
            Finish::EndOfText | Finish::StopString => {}
        }
        if self.settings.footer {
            self.screen.note(&stats::footer(answer, self.talk.session.experts().traffic().is_some()));
        }
    }

    fn obey(&mut self, command: Command) -> Result<Next> {
        match command {
            Command::Help => self.screen.say(HELP),
            Command::Reset => {
                self.conversation.messages.clear();
                self.screen.note("everything that was said is forgotten");
            }
            Command::System(None) => match &self.conversation.system {
                Some(system) => self.screen.say(system),
                None => self.screen.note("there is no system message"),
            },
            Command::System(text) => {
                self.conversation.system = text;
                self.screen.note("from the next answer on");
            }
            Command::Regen => return self.answer_again(),
            Command::Save(path) => {
                file::save(Path::new(&path), &self.conversation, &self.settings)?;
                self.screen.note(&format!("saved to {path}"));
            }
            Command::Load(path) => self.load(&path)?,
            Command::Stats => self.screen.say(&self.figures()),
            Command::Set(None) => self.screen.say(print::columns(&self.settings.table()).trim_end()),
            Command::Set(Some((name, value))) => {
                let new = self.settings.with(&name, &value)?;
                self.change(new)?;
            }
            Command::Quit => return Ok(Next::Leave),
        }
        Ok(Next::Go)
    }

    fn load(&mut self, path: &str) -> Result<()> {
        let (conversation, settings) = file::load(Path::new(path), &self.settings)?;
        self.change(settings)?;
        let said = print::count(conversation.messages.len(), "message", "messages");
        self.conversation = conversation;
        self.screen.note(&format!("loaded {said} from {path}"));
        Ok(())
    }

    /// Takes new settings, all or none.
    fn change(&mut self, new: Settings) -> Result<()> {
        let decoder = self.talk.session.decoder();
        let experts = self.talk.session.experts_mut();
        let reroutes = new.routing.to_string() != self.settings.routing.to_string();
        if reroutes {
            experts.route_by(&new.routing, decoder, self.model)?;
        }
        if new.eviction.to_string() != self.settings.eviction.to_string()
            && let Err(refused) = experts.evict_by(&new.eviction, self.model, self.evictor.as_deref())
        {
            if reroutes {
                experts.route_by(&self.settings.routing, decoder, self.model)?;
            }
            return Err(refused);
        }
        self.settings = new;
        Ok(())
    }

    fn figures(&self) -> String {
        let session = &self.talk.session;
        let mut rows = self.stats.rows();
        rows.push(vec![
            "context".into(),
            format!(
                "{} of {} tokens, {}",
                session.tokens().len(),
                self.talk.context(),
                print::bytes(session.state_bytes() as u64)
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
