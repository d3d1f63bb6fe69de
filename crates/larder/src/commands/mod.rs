//! The commands, one file each.

use std::io::Read;
#[cfg(any(feature = "serve", feature = "edge"))]
use std::net::{SocketAddr, TcpListener};

use anyhow::{Context, Result, bail};

use crate::cli::Command;
#[cfg(feature = "serve")]
use crate::launch;
use crate::{chat, config, doctor, print};

mod bench;
mod completions;
mod convert;
mod edge;
mod eval;
mod imatrix;
mod inspect;
mod lab;
mod logits;
mod models;
mod plan;
mod prove;
mod report;
mod run;
#[cfg(feature = "serve")]
pub mod serve;
mod store;
mod tokenize;
mod tune;
mod verify;

/// Runs a command.
pub fn run(command: Command) -> Result<()> {
    match command {
        Command::Convert(args) => convert::run(&args),
        Command::Imatrix(args) => imatrix::run(&args),
        Command::Verify(args) => verify::run(&args),
        Command::Store(args) => store::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Run(args) => run::run(*args),
        Command::Chat(args) => chat::run(*args),
        #[cfg(feature = "serve")]
        Command::Serve(args) => serve::run(*args),
        #[cfg(feature = "serve")]
        Command::Launch(args) => launch::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Prove(args) => prove::run(&args),
        Command::Report(args) => report::run(&args),
        Command::Logits(args) => logits::run(&args),
        Command::Tokenize(args) => tokenize::run(&args),
        Command::Eval(args) => eval::run(*args),
        Command::Tune(args) => tune::run(&args),
        Command::Lab(args) => lab::run(&args),
        Command::Edge(args) => edge::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Pull(args) => models::pull(&args),
        Command::List(args) => models::list(&args),
        Command::Rm(args) => models::remove(&args),
        Command::Models(args) => models::run(&args),
        Command::Config(args) => config::run(&args),
        Command::Completions(args) => completions::run(&args),
        Command::Man(args) => completions::man(&args),
    }
}

/// `text`, or for `-` the text on standard input, which is read up to `limit` bytes.
fn text_or_stdin(text: &str, limit: usize) -> Result<String> {
    if text != "-" {
        return Ok(text.to_owned());
    }
    let mut all = Vec::new();
    let read = std::io::stdin().lock().take((limit as u64).saturating_add(1)).read_to_end(&mut all);
    read.context("reading standard input failed")?;
    if all.len() > limit {
        bail!("standard input is longer than {}, the most that is read here; shorten it", print::bytes(limit as u64));
    }
    String::from_utf8(all).ok().context("standard input is not UTF-8 text")
}

/// Binds a port; `flag` is the flag to change if it is in use.
#[cfg(any(feature = "serve", feature = "edge"))]
fn listen(address: SocketAddr, flag: &str) -> Result<TcpListener> {
    TcpListener::bind(address).map_err(|error| match error.kind() {
        std::io::ErrorKind::AddrInUse => {
            anyhow::anyhow!("cannot listen on {address}: address already in use; try another {flag}")
        }
        _ => anyhow::anyhow!("cannot listen on {address}: {error}"),
    })
}

/// The next interrupt or termination signal, which from now on does not end the process by itself.
#[cfg(all(unix, any(feature = "serve", feature = "edge")))]
fn signal() -> std::io::Result<impl Future<Output = ()> + Send + 'static> {
    use tokio::signal::unix::{SignalKind, signal};
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    })
}

/// The next Ctrl-C, Ctrl-Break, or closing of the console, which from now on does not end the process by itself.
#[cfg(all(windows, any(feature = "serve", feature = "edge")))]
fn signal() -> std::io::Result<impl Future<Output = ()> + Send + 'static> {
    use tokio::signal::windows::{ctrl_break, ctrl_c, ctrl_close};
    let (mut interrupt, mut stop, mut close) = (ctrl_c()?, ctrl_break()?, ctrl_close()?);
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = stop.recv() => {}
            _ = close.recv() => {}
        }
    })
}
