//! What a person types and what comes back.

use std::path::Path;

use crate::support::reference::{Bars, Reference, with_config};
use crate::support::{command, fixture, golden_models, is_for_windows, larder, larder_ok, larder_refuses};

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn the_version_names_target_and_features() {
    let (short, long) = (larder_ok(&["-V"]), larder_ok(&["--version"]));
    assert_eq!(short, format!("larder {}\n", env!("CARGO_PKG_VERSION")));
    let details = long.strip_prefix(short.trim_end()).unwrap_or_else(|| panic!("{long}"));
    assert!(
        details.starts_with(" (") && details.contains(std::env::consts::ARCH) && details.contains("serve"),
        "{long}"
    );
}

#[test]
fn run_writes_the_text_that_transformers_writes() {
    for model in golden_models() {
        let facts = Reference::read(&model).json();
        let prompt = facts["prompt_text"].as_str().unwrap();
        let count = facts["generated_ids"].as_array().unwrap().len();
        let count = count.to_string();
        let args = ["run", "-m", text(&model), "-p", prompt, "-n", &count, "--ignore-eos"];
        let json: serde_json::Value =
            serde_json::from_str(&larder_ok(&[&args[..], &["--json"]].concat())).expect("one JSON object");
        assert_eq!(json["ids"], facts["generated_ids"], "{}", model.display());
        assert_eq!(larder_ok(&args), format!("{}\n", json["text"].as_str().unwrap()));
    }
}

#[test]
fn logits_are_those_of_transformers() {
    let dir = tempfile::tempdir().unwrap();
    let (tokens, out) = (dir.path().join("tokens.json"), dir.path().join("out.safetensors"));
    for model in golden_models() {
        let reference = Reference::read(&model);
        std::fs::write(&tokens, format!("{:?}", reference.tokens("full_ids"))).unwrap();
        larder_ok(&["logits", "-m", text(&model), "--tokens", text(&tokens), "--out", text(&out), "--force"]);
        let bytes = std::fs::read(&out).unwrap();
        let found = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let found = found.tensor("full_logits").unwrap().data().as_chunks::<4>().0;
        let wanted = reference.floats("full_logits");
        assert_eq!(found.len(), wanted.len(), "{}", model.display());
        let apart = found.iter().zip(wanted).map(|(f, w)| (f32::from_le_bytes(*f) - w).abs()).fold(0.0, f32::max);
        let bar = Bars::of(&model.file_name().unwrap().to_string_lossy()).logits;
        assert!(apart <= bar, "{}: {apart} apart", model.display());
    }
}

#[test]
fn tokens_and_chats_are_those_of_transformers() {
    for model in golden_models() {
        let facts = Reference::read(&model).json();
        for case in facts["tokenizer_tests"].as_array().unwrap() {
            let text_in = case["text"].as_str().unwrap();
            let out = larder_ok(&["tokenize", "-m", text(&model), "--", text_in]);
            let json: serde_json::Value = serde_json::from_str(&out).unwrap();
            assert_eq!(json["ids"], case["ids"], "{}: {text_in:?}", model.display());
        }
        for case in facts["chat_tests"].as_array().unwrap() {
            check_chat(&model, case);
        }
    }
}

fn check_chat(model: &std::path::Path, case: &serde_json::Value) {
    let dir = tempfile::tempdir().unwrap();
    let messages = dir.path().join("messages.json");
    std::fs::write(&messages, case["messages"].to_string()).unwrap();
    let mut args = vec!["tokenize", "-m", text(model), "--messages", text(&messages)];
    if case["add_generation_prompt"] == false {
        args.push("--no-generation-prompt");
    }
    if let Some(error) = case["error"].as_str() {
        assert!(larder_refuses(&args).contains(error), "{}", model.display());
        return;
    }
    let json: serde_json::Value = serde_json::from_str(&larder_ok(&args)).unwrap();
    assert_eq!((&json["text"], &json["ids"]), (&case["text"], &case["ids"]), "{}", model.display());
}

#[test]
fn a_chat_with_tools_is_rendered_with_a_template_from_a_file() {
    let (dir, model) = (tempfile::tempdir().unwrap(), fixture("golden/olmoe"));
    let (chat, template) = (dir.path().join("chat.json"), dir.path().join("short.jinja"));
    std::fs::write(&template, "{{ tools[0].name }} {{ documents[0].text }} {{ mood }} {{ messages | length }}")
        .unwrap();
    let args = ["tokenize", "-m", text(&model), "--messages", text(&chat), "--chat-template-file", text(&template)];
    let whole = serde_json::json!({
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"name": "add"}],
        "documents": [{"text": "Ducks."}],
        "chat_template_kwargs": {"mood": "calm"},
    });
    std::fs::write(&chat, whole.to_string()).unwrap();
    let json: serde_json::Value = serde_json::from_str(&larder_ok(&args)).unwrap();
    assert_eq!(json["text"], "add Ducks. calm 1");
    for wrong in [r#"{"tools": []}"#, r#"{"messages": [], "tool": []}"#, "7"] {
        std::fs::write(&chat, wrong).unwrap();
        assert!(larder_refuses(&args).contains("chat.json: must be a JSON array of messages"), "{wrong}");
    }
}

#[test]
fn drawing_repeats_with_its_seed() {
    let model = fixture("golden/olmoe");
    let draw = |seed| {
        let flags = ["--temperature", "1.5", "--top-k", "50", "--min-p", "0.001", "--seed", seed];
        larder_ok(&[&["run", "-m", text(&model), "-p", "the", "-n", "20", "--ignore-eos"][..], &flags].concat())
    };
    assert_eq!(draw("7"), draw("7"));
    assert_ne!(draw("7"), draw("8"));
}

#[test]
fn a_stop_string_ends_the_text_before_it() {
    let model = fixture("golden/olmoe");
    let args = ["run", "-m", text(&model), "-p", "the", "-n", "12", "--ignore-eos"];
    let whole = larder_ok(&args);
    let whole = whole.trim_end_matches('\n');
    let (at, stop) = whole.char_indices().filter(|(_, c)| c.is_ascii_alphanumeric()).nth(3).expect("some text");
    let before = &whole[..whole.find(stop).unwrap().min(at)];
    let cut = larder_ok(&[&args[..], &["--stop", &stop.to_string()]].concat());
    assert_eq!(cut, format!("{before}\n"));
}

#[test]
fn bad_requests_are_refused_in_one_sentence() {
    let dir = tempfile::tempdir().unwrap();
    let tokens = dir.path().join("tokens.json");
    let model = fixture("golden/olmoe");
    let out = dir.path().join("out.safetensors");
    let logits = ["logits", "-m", text(&model), "--tokens", text(&tokens), "--out", text(&out), "--force"];
    for (content, word) in [
        ("[1, 99999999]", "vocabulary"),
        ("[]", "no tokens"),
        ("[1, -2]", "token ids"),
        ("{}", "token ids"),
        ("[1, 99999999999999]", "token ids"),
    ] {
        std::fs::write(&tokens, content).unwrap();
        assert!(larder_refuses(&logits).contains(word), "{content}: {}", larder_refuses(&logits));
    }
    let run = |flags: &[&str]| larder_refuses(&[&["run", "-m", text(&model)][..], flags].concat());
    assert!(run(&["-p", "x", "--top-p", "7"]).contains("top"));
    assert!(run(&["-p", "x", "--temperature", "-1"]).contains("temperature"));
    assert!(larder_refuses(&["run", "-m", "/does/not/exist", "-p", "x"]).contains("/does/not/exist"));
    assert_eq!(larder(&["run"]).status.code(), Some(2));
    assert_eq!(larder(&["fly"]).status.code(), Some(2));
}

#[test]
fn a_prompt_beyond_the_context_is_refused() {
    let short = with_config(&fixture("golden/olmoe"), "config.json");
    let config = std::fs::read_to_string(short.path().join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
    config["max_position_embeddings"] = 16.into();
    std::fs::write(short.path().join("config.json"), config.to_string()).unwrap();
    let model = text(short.path());
    let said = larder_refuses(&["run", "-m", model, "-p", &"word and ".repeat(40)]);
    assert!(said.contains("context of 16"), "{said}");
    let json = larder_ok(&["run", "-m", model, "-p", "a", "-n", "100", "--ignore-eos", "--json"]);
    assert!(json.contains("\"finish\":\"context\""), "{json}");
}

#[test]
fn inspect_counts_what_is_there() {
    let model = fixture("golden/olmoe");
    let json: serde_json::Value = serde_json::from_str(&larder_ok(&["inspect", text(&model), "--json"])).unwrap();
    let config: serde_json::Value = serde_json::from_slice(&std::fs::read(model.join("config.json")).unwrap()).unwrap();
    assert_eq!(json["geometry"]["experts"], config["num_experts"]);
    let table = larder_ok(&["inspect", text(&model)]);
    assert!(table.contains("olmoe") && table.contains("everything"), "{table}");
}

/// A reader that is gone ends the program quietly, a full disk with one sentence; neither is a panic.
#[cfg(target_os = "linux")]
#[test]
fn standard_output_that_cannot_be_written_is_no_panic() {
    let demo = fixture("../models/demo");
    let write_to = |stdout: std::process::Stdio| {
        let mut command = command();
        command.args(["inspect", text(&demo), "--json"]).stdout(stdout).stderr(std::process::Stdio::piped());
        let output = command.spawn().unwrap().wait_with_output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let (code, said) = write_to(full.into());
    assert!(code == Some(1) && said.starts_with("error: cannot write to standard output: "), "{code:?} {said}");
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    assert_eq!(write_to(writer.into()), (Some(0), String::new()));
}

#[test]
fn output_files_are_replaced_only_with_force() {
    let dir = tempfile::tempdir().unwrap();
    let (trace, link) = (dir.path().join("trace.safetensors"), dir.path().join("link"));
    let run = |to: &Path, more: &[&str]| {
        let model = fixture("golden/olmoe");
        let args = ["run", "-m", text(&model), "-p", "x", "-n", "1", "--trace", text(to)];
        larder(&[&args[..], more].concat())
    };
    let refused = |to: &Path, more: &[&str]| {
        let output = run(to, more);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && output.stdout.is_empty(), "{said}");
        said
    };
    assert!(run(&trace, &[]).status.success());
    let before = std::fs::read(&trace).unwrap();
    std::fs::write(&trace, "mine").unwrap();
    assert!(refused(&trace, &[]).contains("add --force to replace it"));
    assert_eq!(std::fs::read(&trace).unwrap(), b"mine");
    if is_for_windows() {
        println!(
            "skipped: Wine shows a link of Linux as a file, so a program cannot follow it; only files are replaced"
        );
        assert!(run(&trace, &["--force"]).status.success());
        assert_eq!(std::fs::read(&trace).unwrap(), before);
    } else {
        std::os::unix::fs::symlink("trace.safetensors", &link).unwrap();
        assert!(run(&link, &["--force"]).status.success());
        assert_eq!(std::fs::read(&trace).unwrap(), before);
        assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
    }
    // A device, a named pipe and a folder stay what they are, and none is waited for.
    let pipe = dir.path().join("pipe");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR).unwrap();
    for place in [Path::new("/dev/null"), &pipe, dir.path()] {
        assert!(refused(place, &["--force"]).contains("not a file"), "{}", place.display());
    }
    assert!(refused(&dir.path().join("none/trace"), &[]).contains("create it first"));
}
