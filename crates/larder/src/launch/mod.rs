//! `larder launch`: starts a coding agent with a model that is served here.

use std::process::{Command, ExitStatus};

use anyhow::{Context, Result, bail};
use larder_core::format_count;

use crate::cli::launch::LaunchArgs;

mod clients;
mod program;
mod serve_line;
mod server;
mod setup;

pub use clients::{CLIENTS, Client};

use serve_line::RunningModel;
use serve_line::ServeLine;
use server::OwnServer;

/// Starts the program, and before it a server if none runs, which then ends with it.
pub fn run(args: &LaunchArgs) -> Result<()> {
    let client = args.client;
    let mut line = ServeLine::new(args)?;
    let running = server::running(&line)?;
    if running.is_none() {
        line.plan(client.context)?;
    }
    if args.print {
        print!("{}", printed(args, &line, running.as_ref())?);
        return Ok(());
    }
    let path = program::find(client.program)
        .with_context(|| format!("{} is not installed here; install it with `{}`", client.program, client.install))?;
    let (served, own) = match running {
        Some(served) => (served, None),
        None => OwnServer::start(&line).map(|(served, own)| (served, Some(own)))?,
    };
    tell_context(client, &served);
    let setup = (client.setup)(&line.endpoint(&served));
    let mut command = Command::new(path);
    command.args(&setup.args).args(&args.rest).envs(setup.env.iter().map(|(name, value)| (name, value)));
    setup.unset.iter().for_each(|name| _ = command.env_remove(name));
    let status = program::run(command, client.program)?;
    drop(own);
    end_like(status)
}

/// The environment and the command, as a shell takes them.
fn printed(args: &LaunchArgs, line: &ServeLine, running: Option<&RunningModel>) -> Result<String> {
    let served = running.cloned().map_or_else(|| line.expected(), Ok)?;
    let setup = (args.client.setup)(&line.endpoint(&served));
    let start = match running {
        Some(_) => String::new(),
        None => format!("# no server runs at {} yet; this starts one:\n# {}\n", line.address(), line.shown()),
    };
    let unset = setup.unset.iter().map(|name| format!("unset {name}\n"));
    let export = setup.env.iter().map(|(name, value)| format!("export {name}={}\n", setup::quoted(value)));
    let words = setup.args.iter().chain(&args.rest).map(|word| setup::quoted(word));
    let command: Vec<String> = [args.client.program.to_owned()].into_iter().chain(words).collect();
    Ok(format!("{start}{}{}{}\n", unset.collect::<String>(), export.collect::<String>(), command.join(" ")))
}

/// Tells if the first request of a program will hardly fit.
fn tell_context(client: &Client, served: &RunningModel) {
    if served.context < client.context {
        eprintln!(
            "note: {} needs a context of about {} tokens, and that of {} is {}",
            client.program,
            format_count(client.context),
            served.name,
            format_count(served.context)
        );
    }
}

/// Ends with the exit code of the program.
fn end_like(status: ExitStatus) -> Result<()> {
    match status.code() {
        Some(0) => Ok(()),
        Some(code) => std::process::exit(code),
        None => bail!("the program ended by a signal"),
    }
}
