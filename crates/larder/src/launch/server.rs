//! The server of a launched program: one that runs already, or one of its own.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use larder_os::read_regular_text;
use serde_json::Value;

use super::serve_line::{RunningModel, ServeLine};
use crate::user_folders;

/// Time for an answer of a server that runs.
const ANSWER: Duration = Duration::from_secs(5);
/// Time between looks at a server that starts.
const PAUSE: Duration = Duration::from_millis(50);
/// Time in which a server completes its requests at the end.
const END: Duration = Duration::from_secs(10);
/// The most bytes of a log that are read.
const LOG_BYTES: u64 = 1 << 20;
/// The most bytes of a list of models.
const LIST_BYTES: u64 = 1 << 20;

/// The model of the server that runs at the line's address, if one does. Refuses another program there, and a server
/// without the model that the line names.
pub fn running(line: &ServeLine) -> Result<Option<RunningModel>> {
    let address = line.address();
    let list = match ask(line, ANSWER) {
        Ok(list) => list,
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => return Ok(None),
        Err(error) => bail!("the server at {address} does not answer ({error}); choose another --port, or end it"),
    };
    let served = served(&list).with_context(|| {
        format!(
            "what runs at {address} is not larder, or wants an API key; choose another --port, or set LARDER_API_KEY"
        )
    })?;
    let named = line.named_models()?;
    match (named.first(), served.iter().find(|served| named.contains(&served.name))) {
        (None, _) => Ok(served.first().cloned()),
        (Some(_), Some(served)) => Ok(Some(served.clone())),
        (Some(named), None) => bail!(
            "the server at {address} has {}, not {named}; choose another --port for {named}, or end that server",
            served.iter().map(|served| served.name.as_str()).collect::<Vec<_>>().join(", ")
        ),
    }
}

/// The models in a list of larder's; none of another server.
fn served(list: &Value) -> Option<Vec<RunningModel>> {
    let of = |model: &Value| {
        let own = model["owned_by"] == "larder";
        let context = model["context_length"].as_u64().unwrap_or_default();
        own.then_some(RunningModel { name: model["id"].as_str()?.to_owned(), context: usize::try_from(context).ok()? })
    };
    let all: Vec<RunningModel> = list["data"].as_array()?.iter().map(of).collect::<Option<_>>()?;
    (!all.is_empty()).then_some(all)
}

/// The list of models of the server at the line's address.
fn ask(line: &ServeLine, timeout: Duration) -> std::io::Result<Value> {
    let address = line.address();
    let found = address.to_socket_addrs()?.next().ok_or(ErrorKind::NotFound)?;
    let mut stream = TcpStream::connect_timeout(&found, timeout)?;
    stream.set_read_timeout(Some(timeout))?;
    let key = line.api_key().map(|key| format!("Authorization: Bearer {key}\r\n")).unwrap_or_default();
    // Answers of HTTP/1.0 come in one piece.
    write!(stream, "GET /v1/models HTTP/1.0\r\nHost: {address}\r\n{key}\r\n")?;
    let mut answer = String::new();
    stream.take(LIST_BYTES).read_to_string(&mut answer)?;
    let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    Ok(serde_json::from_str(body).unwrap_or_default())
}

/// A server that ends when this is dropped.
pub struct OwnServer(Child);

impl OwnServer {
    /// Starts a server with its output in a log file, and waits until it has loaded its model.
    pub fn start(line: &ServeLine) -> Result<(RunningModel, Self)> {
        let path = log_path()?;
        let log = File::create(&path).with_context(|| format!("{}: writing failed", path.display()))?;
        let mut command = Command::new(std::env::current_exe()?);
        command.args(line.words()).args(["--log-level", "info"]);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        // Ctrl-C is for the program alone.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        eprintln!("starting `{}`; its log is {}", line.shown(), path.display());
        let mut own = OwnServer(command.spawn().context("the server cannot be started")?);
        loop {
            if own.0.try_wait()?.is_some() {
                let log = read_regular_text(&path, LOG_BYTES).unwrap_or_default();
                let last = log.lines().last().unwrap_or_default();
                bail!("the server ended: {}", last.trim_start_matches("error: "));
            }
            match ask(line, ANSWER).ok().as_ref().and_then(served) {
                Some(mut all) => return Ok((all.swap_remove(0), own)),
                None => std::thread::sleep(PAUSE),
            }
        }
    }
}

impl Drop for OwnServer {
    fn drop(&mut self) {
        terminate(&mut self.0);
        let start = Instant::now();
        while start.elapsed() < END && matches!(self.0.try_wait(), Ok(None)) {
            std::thread::sleep(PAUSE);
        }
        let _ = self.0.kill(); // it may have ended
        let _ = self.0.wait();
    }
}

/// Asks a process to end.
pub fn terminate(child: &mut Child) {
    #[cfg(unix)]
    let _ = rustix::process::kill_process(rustix::process::Pid::from_child(child), rustix::process::Signal::TERM);
    #[cfg(not(unix))]
    let _ = child.kill();
}

/// The file of the output of servers that were launched.
fn log_path() -> Result<PathBuf> {
    let folder = user_folders::state().unwrap_or_else(std::env::temp_dir);
    std::fs::create_dir_all(&folder).with_context(|| format!("{}: cannot be made", folder.display()))?;
    Ok(folder.join("launch.log"))
}
