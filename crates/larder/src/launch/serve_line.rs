//! The command line of the server that is started, with the settings that hold for `larder serve`.

use std::ffi::OsString;

use anyhow::{Result, bail};
use clap::{CommandFactory, FromArgMatches};
use larder_runtime::ContextSize;

use super::setup::{LocalEndpoint, quoted};
use crate::cli::launch::LaunchArgs;
use crate::cli::serve::ServeArgs;
use crate::cli::{Cli, Command};
use crate::commands::serve::{contexts, models_of};
use crate::config;

/// A model that a server has.
#[derive(Clone, Debug)]
pub struct RunningModel {
    /// Its name in the API.
    pub name: String,
    /// Tokens of its context.
    pub context: usize,
}

/// A command line of `larder serve`.
pub struct ServeLine {
    /// Its words, the program's name included.
    words: Vec<OsString>,
    args: Box<ServeArgs>,
    /// Whether the user named a model.
    names_model: bool,
    /// The context that the memory plan gives it, once that is made.
    context: usize,
}

impl ServeLine {
    /// The line for these flags. The server takes settings from files and environment itself.
    pub fn new(args: &LaunchArgs) -> Result<Self> {
        let flag = |name: &str, value: Option<OsString>| {
            value.map(|value| [OsString::from(name), value]).into_iter().flatten().collect::<Vec<_>>()
        };
        let model = args.model.clone().or(args.named.clone());
        let names_model = model.is_some();
        let words = [
            vec!["larder".into(), "serve".into()],
            flag("--model", model.map(Into::into)),
            flag("--host", args.host.clone().map(Into::into)),
            flag("--port", args.port.map(|port| port.to_string().into())),
            flag("--context", args.context.map(|context| context.to_string().into())),
        ]
        .concat();
        let args = parsed(&words)?;
        if args.address.tls_cert.is_some() || args.address.has_socket() {
            bail!("launched programs talk to a server on a port without TLS; leave tls-cert and unix-socket out");
        }
        Ok(ServeLine { words, args, names_model, context: 0 })
    }

    /// The words behind the program's name.
    pub fn words(&self) -> &[OsString] {
        &self.words[1..]
    }

    /// The line as it would be typed.
    pub fn shown(&self) -> String {
        let words = self.words.iter().map(|word| quoted(&word.to_string_lossy()));
        words.collect::<Vec<_>>().join(" ")
    }

    /// Host and port of the server, as a client sees it.
    pub fn address(&self) -> String {
        let host = match self.args.address.host.as_str() {
            "0.0.0.0" | "::" => "127.0.0.1",
            host => host,
        };
        let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
        format!("{host}:{}", self.args.address.port)
    }

    /// The key that the server asks for.
    pub fn api_key(&self) -> Option<&str> {
        self.args.api_key.as_deref()
    }

    /// What a program is told of the server.
    pub fn endpoint(&self, served: &RunningModel) -> LocalEndpoint {
        let key = self.api_key().unwrap_or("larder").to_owned();
        let url = format!("http://{}", self.address());
        LocalEndpoint { url, model: served.name.clone(), context: served.context, key }
    }

    /// The names of the models that were named; none if none was.
    pub fn named_models(&self) -> Result<Vec<String>> {
        let all = if self.names_model { models_of(&self.args.model)? } else { vec![] };
        Ok(all.into_iter().map(|(name, _)| name).collect())
    }

    /// Plans the memory of the model, which is downloaded if it is not here: where no context is asked for, the server
    /// gets at least `context` tokens.
    pub fn plan(&mut self, context: usize) -> Result<()> {
        let all = models_of(&self.args.model)?;
        let [(_, path)] = &all[..] else { return Ok(()) };
        let [planned, own] = contexts(*parsed(&self.words)?, path)?;
        self.context = planned;
        if self.args.engine.settings.options.context == ContextSize::Auto && planned < context.min(own) {
            self.context = context.min(own);
            self.words.extend(["--context".into(), self.context.to_string().into()]);
        }
        Ok(())
    }

    /// The model as a server of this line would have it.
    pub fn expected(&self) -> Result<RunningModel> {
        let name = models_of(&self.args.model)?.swap_remove(0).0;
        let name = self.args.alias.first().cloned().unwrap_or(name);
        Ok(RunningModel { name, context: self.context })
    }
}

/// The flags of a line, with settings from files and environment.
fn parsed(words: &[OsString]) -> Result<Box<ServeArgs>> {
    let line = config::apply(words.to_owned(), &Cli::command().try_get_matches_from(words)?)?;
    match Cli::from_arg_matches(&Cli::command().try_get_matches_from(line)?)?.command {
        Command::Serve(args) => Ok(args),
        _ => bail!("the command line of the server is another"),
    }
}
