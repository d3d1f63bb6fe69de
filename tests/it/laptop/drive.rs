//! A drive that is pulled out while a model runs from it, and comes back.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::serve::api::Server;
use crate::support::loop_drive::LoopDrive;
use crate::support::{fixture, larder_ok, larder_refuses};

/// A copy of a folder, which has no links.
fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        match path.is_dir() {
            true => copy(&path, &target),
            false => drop(fs::copy(&path, &target).unwrap()),
        }
    }
}

/// The demo model on a drive.
fn demo_on(drive: &LoopDrive) -> PathBuf {
    let store = drive.folder().join("demo");
    copy(&fixture("../models/demo"), &store);
    store
}

fn asked(prompt: &str) -> Value {
    json!({"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": true})
}

/// Asks the server, which must answer that the drive is away.
fn refused(server: &Server, store: &Path, prompt: &str) {
    let answer = server.post("/v1/completions", asked(prompt));
    let error = answer.json()["error"].clone();
    assert_eq!((answer.status, error["code"].as_str()), (503, Some("drive_removed")), "{}", answer.body);
    assert!(answer.head.contains("retry-after: "), "{}", answer.head);
    let said = error["message"].as_str().unwrap();
    let begins = format!("The drive with {} was removed (larder.json: ", store.display());
    assert!(said.starts_with(&begins) && said.ends_with("; connect it and try again."), "{said}");
}

#[test]
fn a_server_answers_that_its_drive_is_away_and_goes_on_when_it_is_back() {
    for reader in ["uring", "pread"] {
        let Some(mut drive) = LoopDrive::new() else { return };
        let store = demo_on(&drive);
        let flags = ["--cache", "4x", "--context", "256", "-o", &format!("reader={reader}")];
        let expected = |prompt: &str| {
            let server = Server::start(&fixture("../models/demo"), &flags);
            server.post("/v1/completions", asked(prompt)).json()["choices"][0]["text"].clone()
        };
        let prompts = ["The old man looked at the door, and", "She opened the window, and"];
        let [first, second] = prompts.map(expected);
        let (server, log) = Server::start_logged(&store, &flags);
        let text = |prompt| server.post("/v1/completions", asked(prompt)).json()["choices"][0]["text"].clone();
        assert_eq!(text(prompts[0]), first);

        drive.fail();
        refused(&server, &store, prompts[1]);
        // Also a stream gets the status, not an event.
        let mut streamed = asked(prompts[1]);
        streamed["stream"] = true.into();
        assert_eq!(server.post("/v1/completions", streamed).status, 503);
        drive.vanish();
        refused(&server, &store, prompts[1]);
        assert_eq!(server.get("/health").status, 200);

        drive.plug();
        assert_eq!(text(prompts[1]), second, "{reader}");
        assert_eq!(text(prompts[0]), first, "{reader}");
        server.stop();
        let log = log.join().unwrap();
        assert_eq!(log.matches(&format!("the drive with {} is back", store.display())).count(), 1, "{log}");
    }
}

#[test]
fn another_store_in_the_place_of_the_first_is_refused() {
    let Some(mut drive) = LoopDrive::new() else { return };
    let store = demo_on(&drive);
    let flags = ["--cache", "4x", "--context", "256"];
    let server = Server::start(&store, &flags);
    let prompt = "The old man looked at the door, and";
    let first = server.post("/v1/completions", asked(prompt)).json()["choices"][0]["text"].clone();
    drive.fail();
    refused(&server, &store, "She opened the window, and");
    drive.vanish();
    // A store of another model on what is mounted there meanwhile.
    larder_ok(&["convert", fixture("golden/olmoe").to_str().unwrap(), store.to_str().unwrap()]);
    let answer = server.post("/v1/completions", asked(prompt));
    assert_eq!(answer.status, 503, "{}", answer.body);
    assert!(answer.body.contains("now holds another store than the one that was loaded"), "{}", answer.body);
    fs::remove_dir_all(&store).unwrap();
    drive.plug();
    assert_eq!(server.post("/v1/completions", asked(prompt)).json()["choices"][0]["text"], first);
}

#[test]
fn run_ends_with_one_sentence() {
    let Some(mut drive) = LoopDrive::new() else { return };
    let store = demo_on(&drive);
    let store = store.to_str().unwrap();
    // The drive fails when the first words are there.
    let mut child = Command::new(env!("CARGO_BIN_EXE_larder-under-test"))
        .args(["run", "-m", store, "-p", "The old man", "-n", "400", "--ignore-eos", "--cache", "4x"])
        .args(["--speculate", "off"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut text = [0; 8];
    std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut text).unwrap();
    drive.fail();
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    let errors: Vec<&str> = said.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!((output.status.code(), errors.len()), (Some(1), 1), "{said}");
    assert!(errors[0].starts_with(&format!("error: the drive with {store} was removed (larder.json: ")), "{said}");
    drive.vanish();
    assert!(larder_refuses(&["run", "-m", store, "-p", "a"]).contains(store));
}

/// A chat whose input is a terminal goes on after the sentence. The terminal is one of `script`.
#[test]
fn a_chat_goes_on_after_the_sentence() {
    let Some(mut drive) = LoopDrive::new() else { return };
    let store = demo_on(&drive);
    let program = env!("CARGO_BIN_EXE_larder-under-test");
    let line = format!("{program} chat -m {} -n 24 --cache 4x --no-history", store.display());
    let mut chat = Command::new("script");
    chat.args(["-qefc", &line, "/dev/null"]).env("LARDER_HOT_SET", "off").env("TERM", "dumb");
    let chat = chat.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped()).spawn();
    let Ok(mut chat) = chat else { return println!("skipped: there is no `script`, which has a terminal") };
    let (mut input, mut output) = (chat.stdin.take().unwrap(), Terminal::of(chat.stdout.take().unwrap()));
    let mut type_line = |line: &str| std::io::Write::write_all(&mut input, format!("{line}\n").as_bytes()).unwrap();
    output.wait_for("/help lists the commands");
    type_line("The sea was calm.");
    output.wait_for("decode 24 tokens");
    drive.fail();
    type_line("She opened the window.");
    output.wait_for("was removed (larder.json: ");
    drive.vanish();
    type_line("She opened the window.");
    output.wait_for("no such file or directory); connect it and try again");
    drive.plug();
    type_line("She opened the window.");
    output.wait_for("decode 24 tokens");
    type_line("/quit");
    assert!(chat.wait().unwrap().success());
}

/// What a terminal shows.
struct Terminal {
    lines: std::sync::mpsc::Receiver<Vec<u8>>,
    text: String,
}

impl Terminal {
    fn of(mut output: std::process::ChildStdout) -> Self {
        let (send, lines) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut bytes = vec![0; 4096];
            while let Ok(read @ 1..) = std::io::Read::read(&mut output, &mut bytes) {
                let _ = send.send(bytes[..read].to_vec());
            }
        });
        Terminal { lines, text: String::new() }
    }

    /// Waits until it shows `part`, and forgets what it has shown up to there.
    fn wait_for(&mut self, part: &str) {
        loop {
            if let Some(at) = self.text.find(part) {
                self.text.drain(..at + part.len());
                return;
            }
            let more = self.lines.recv_timeout(std::time::Duration::from_secs(60));
            let more = more.unwrap_or_else(|_| panic!("no {part:?} in {:?}", self.text));
            self.text += &String::from_utf8_lossy(&more);
        }
    }
}
