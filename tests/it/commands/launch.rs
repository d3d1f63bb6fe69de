//! `larder launch`, with programs that print what they are told.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Output;

use tempfile::TempDir;

use crate::serve::api::Server;
use crate::support::{command, fixture};

const PROGRAMS: [&str; 4] = ["claude", "codex", "opencode", "aider"];

/// A folder with a program for each name: it prints its environment, its arguments, and what a launch inside of it
/// would do.
fn programs() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let larder = env!("CARGO_BIN_EXE_larder-under-test");
    for name in PROGRAMS {
        let path = folder.path().join(name);
        let script = format!(
            "#!/bin/sh\nenv\nfor word in \"$@\"; do echo \"word $word\"; done\n\
             '{larder}' launch {name} --print --port \"$PORT\" | sed 's/^/inside /'\nexit 7\n"
        );
        fs::write(&path, script).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    folder
}

fn free_port() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string()
}

fn launch(programs: &Path, port: &str, args: &[&str]) -> Output {
    let path = format!("{}:/usr/bin:/bin", programs.display());
    let state = programs.join("state");
    let mut command = command();
    command.env("PATH", path).env("XDG_STATE_HOME", state).env("PORT", port).env("ANTHROPIC_API_KEY", "theirs");
    command.args(["launch", "--port", port]).args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn each_program_is_told_of_a_server_that_ends_with_it() {
    let (folder, model) = (programs(), fixture("golden/olmoe"));
    let model = model.to_str().unwrap();
    for name in PROGRAMS {
        let port = free_port();
        let ended = launch(folder.path(), &port, &[name, "-m", model, "--context", "2K"]);
        let (out, said) = (format!("\n{}", text(&ended.stdout)), text(&ended.stderr));
        assert_eq!(ended.status.code(), Some(7), "the program's own exit code: {said}");
        assert!(said.contains("starting `larder serve") && said.contains("launch.log"), "{said}");
        let url = format!("http://127.0.0.1:{port}");
        let wanted: &[String] = match name {
            "claude" => &[
                format!("\nANTHROPIC_BASE_URL={url}\n"),
                "\nANTHROPIC_AUTH_TOKEN=larder\n".into(),
                "\nANTHROPIC_MODEL=olmoe\n".into(),
                "\nANTHROPIC_DEFAULT_HAIKU_MODEL=olmoe\n".into(),
                "\nCLAUDE_CODE_AUTO_COMPACT_WINDOW=2048\n".into(),
                "\nCLAUDE_CODE_MAX_OUTPUT_TOKENS=512\n".into(),
            ],
            "codex" => &[
                "\nword model=\"olmoe\"\n".into(),
                format!("base_url=\"{url}/v1\",wire_api=\"responses\""),
                "\nword model_context_window=2048\n".into(),
            ],
            "opencode" => &[
                format!("\"baseURL\":\"{url}/v1\""),
                "\"model\":\"larder/olmoe\"".into(),
                "\"limit\":{\"context\":2048,\"output\":512}".into(),
            ],
            _ => &[format!("\nOPENAI_API_BASE={url}/v1\n"), "\nAIDER_MODEL=openai/olmoe\n".into()],
        };
        wanted.iter().for_each(|part| assert!(out.contains(part), "{name}: {part} is not in {out}"));
        assert_eq!(out.contains("\nANTHROPIC_API_KEY=theirs\n"), name != "claude", "{out}");
        assert!(out.contains("\ninside ") && !out.contains("no server runs"), "the server ran meanwhile: {out}");
        assert!(TcpStream::connect(format!("127.0.0.1:{port}")).is_err(), "{name}: the server runs still");
    }
}

#[test]
fn a_server_that_runs_is_used_and_stays() {
    let (folder, model) = (programs(), fixture("golden/olmoe"));
    let server = Server::start(&model, &["--context", "512"]);
    let port = server.address().rsplit(':').next().unwrap();
    let ended = launch(folder.path(), port, &["aider", "--", "--message", "two words"]);
    let (out, said) = (text(&ended.stdout), text(&ended.stderr));
    assert_eq!((ended.status.code(), said.contains("starting")), (Some(7), false), "{said}");
    assert!(said.contains("aider needs a context of about 8,192 tokens, and that of olmoe is 512"), "{said}");
    assert!(
        out.contains("\nword --message\nword two words\n") && out.contains("\nAIDER_MODEL=openai/olmoe\n"),
        "{out}"
    );
    assert_eq!(server.get("/health").status, 200);

    let other = launch(folder.path(), port, &["aider", fixture("golden/mixtral").to_str().unwrap()]);
    assert!(text(&other.stderr).contains(&format!("the server at 127.0.0.1:{port} has olmoe, not mixtral")));
}

#[test]
fn the_environment_is_printed_for_a_shell() {
    let (folder, model, port) = (programs(), fixture("golden/olmoe"), free_port());
    let printed = launch(folder.path(), &port, &["claude", "-m", model.to_str().unwrap(), "--print"]);
    let out = text(&printed.stdout);
    assert!(printed.status.success(), "{}", text(&printed.stderr));
    assert!(out.contains(&format!("\n# larder serve --model {} --port {port}\n", model.display())), "{out}");
    assert!(out.contains(&format!("\nexport ANTHROPIC_BASE_URL=http://127.0.0.1:{port}\n")), "{out}");
    // The model's own context is 4,096.
    assert!(out.contains("CLAUDE_CODE_AUTO_COMPACT_WINDOW=4096\n") && out.ends_with("\nclaude\n"), "{out}");
    assert!(TcpStream::connect(format!("127.0.0.1:{port}")).is_err(), "nothing was started");
}

#[test]
fn what_cannot_be_launched_is_one_sentence() {
    let (empty, model) = (tempfile::tempdir().unwrap(), fixture("golden/olmoe"));
    let model = model.to_str().unwrap();
    let refused = launch(empty.path(), &free_port(), &["claude", "-m", model]);
    let wanted = "error: claude is not installed here; install it with `npm install -g @anthropic-ai/claude-code`\n";
    assert!(text(&refused.stderr).ends_with(wanted), "{}", text(&refused.stderr));
    let unknown = launch(empty.path(), &free_port(), &["cursor", "-m", model]);
    assert!(unknown.status.code() == Some(2) && text(&unknown.stderr).contains("opencode"));
    // Something else listens there, and says nothing.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = silent.local_addr().unwrap().port().to_string();
    let refused = launch(programs().path(), &port, &["claude", "-m", model]);
    assert!(text(&refused.stderr).contains("does not answer"), "{}", text(&refused.stderr));
}
