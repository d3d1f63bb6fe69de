//! `larder chat --session`: a chat that another run continues.

use std::fs;
use std::path::Path;

use super::chat::{answers, chat, last_answer};
use crate::support::{fixture, larder_refuses};

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn the_next_run_continues_the_chat() {
    for name in ["golden/olmoe", "golden/qwen3_next", "golden/deepseek_v2"] {
        let (model, dir) = (fixture(name), tempfile::tempdir().unwrap());
        let file = dir.path().join("talk.session");
        let plain = ["-m", text(&model), "-n", "8"];
        let args = [&plain[..], &["--session", text(&file)]].concat();
        let (whole, said) = answers(&plain, "hi\nbye\n/stats\n");
        let at_once = last_answer(&said);
        let (first, _) = answers(&args, "hi\n");
        let (second, said) = answers(&args, "bye\n/stats\n");
        assert!(said.contains("continuing a conversation of 2 messages"), "{said}");
        assert_eq!(format!("{first}{second}"), whole, "{name}");
        assert_eq!(last_answer(&said), at_once, "{name}: only new tokens are prefilled");
        let (_, said) = answers(&args, "/stats\n");
        assert!(said.contains("continuing a conversation of 4 messages"), "{said}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}

#[test]
fn files_of_others_are_refused_and_stay() {
    let dir = tempfile::tempdir().unwrap();
    let [file, other, folder] = ["talk.session", "note.txt", "folder"].map(|name| dir.path().join(name));
    let model = fixture("golden/olmoe");
    let args = |model: &Path, file: &Path| ["-m", text(model), "-n", "3", "--session", text(file)].map(String::from);
    let args_of = |model: &Path, file: &Path| args(model, file).to_vec();
    let run = |args: &[String], typed: &str| {
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        chat(&args, typed)
    };
    assert!(run(&args_of(&model, &file), "hi\n").status.success());
    let sound = fs::read(&file).unwrap();
    fs::write(&other, "my note").unwrap();
    fs::create_dir(&folder).unwrap();
    let refused = |args: Vec<String>| larder_refuses(&[&["chat".to_owned()][..], &args].concat());
    let said = refused(args_of(&fixture("golden/mixtral"), &file));
    assert!(said.contains("was saved with another model") && said.contains("--session"), "{said}");
    let said = refused([args_of(&model, &file), vec!["-o".into(), "kv=f16".into()]].concat());
    assert!(said.contains("another kv"), "{said}");
    let said = refused(args_of(&model, &other));
    assert!(said.contains("is not a saved sequence of larder"), "{said}");
    refused(args_of(&model, &folder));
    refused(args_of(&model, &dir.path().join("none/talk.session")));
    refused(args_of(&fixture("golden/switch_transformers"), &dir.path().join("new.session")));
    let mut damaged = sound.clone();
    *damaged.last_mut().unwrap() ^= 1;
    fs::write(&file, &damaged).unwrap();
    let said = refused(args_of(&model, &file));
    assert!(said.contains("is damaged"), "{said}");
    assert_eq!((fs::read(&file).unwrap(), fs::read(&other).unwrap()), (damaged, b"my note".to_vec()));
    fs::write(&file, &sound).unwrap();
    // Without a message, nothing is lost.
    assert!(run(&args_of(&model, &file), "").status.success());
    assert_eq!(fs::read(&file).unwrap(), sound);
}

#[test]
fn a_session_can_be_saved_before_the_end() {
    let (model, dir) = (fixture("../models/demo"), tempfile::tempdir().unwrap());
    let file = dir.path().join("talk.session");
    let args = ["-m", text(&model), "-n", "3", "--cache", "4x", "--session", text(&file)];
    let (_, said) = answers(&args, "hi\n/save\n/set routing prior:lambda=0.0\nbye\n/stats\n");
    assert!(said.contains("saved to"), "{said}");
    assert_eq!(last_answer(&said)[0], 0, "another routing computes the chat again: {said}");
    let said = larder_refuses(&[&["chat"][..], &args].concat());
    assert!(said.contains("another kv, routing"), "{said}");
    let output = chat(&["-m", text(&model)], "/save\n");
    assert!(String::from_utf8_lossy(&output.stderr).contains("/save needs a file name"));
}
