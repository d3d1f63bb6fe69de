//! `larder run --image` and `/image` in `larder chat`.

use std::io::Write;
use std::process::Stdio;

use serde_json::Value;

use super::{generated, picture, references, store};
use crate::support::{command, fixture, larder_ok, larder_refuses};

#[test]
fn a_picture_before_the_prompt_gives_the_text_of_transformers() {
    let dir = tempfile::tempdir().unwrap();
    for (at, folder) in references().iter().enumerate() {
        let store = store(folder, &dir.path().join(at.to_string()), true);
        let picture = picture("odd");
        for (path, vision) in [(folder, "auto"), (&store, "auto"), (&store, "preload")] {
            let line = ["run", "--ignore-eos", "--json", "-n", "12", "--temperature", "0", "--vision", vision, "-m"];
            let line = [&line[..], &[path.to_str().unwrap(), "--image", picture.to_str().unwrap(), "What is this?"]];
            let said: Value = serde_json::from_str(&larder_ok(&line.concat())).unwrap();
            let ids: Vec<u32> = serde_json::from_value(said["ids"].clone()).unwrap();
            assert_eq!(ids, generated(folder, "one"), "{}", path.display());
        }
    }
}

#[test]
fn what_cannot_be_seen_is_refused_in_a_sentence() {
    let folder = &references()[0];
    let (model, picture) = (folder.to_str().unwrap(), picture("odd"));
    let picture = picture.to_str().unwrap();
    let refused = |model: &str, picture: &str, more: &[&str]| {
        larder_refuses(&[&["run", "-m", model, "-n", "1", "--image", picture], more].concat())
    };
    let text_model = fixture("golden/olmoe");
    let blind = refused(text_model.to_str().unwrap(), picture, &["-p", "x"]);
    assert!(blind.contains("this model takes no images; models that see are those of type qwen3_vl_moe, "), "{blind}");
    let off = refused(model, picture, &["-p", "x", "--vision", "off"]);
    assert!(off.contains("images are refused with --vision off"), "{off}");
    let marked = refused(model, picture, &["-p", "look: <|image_pad|>"]);
    assert!(marked.contains("the text contains <|image_pad|>, the token that stands for an image"), "{marked}");
    let missing = refused(model, "nowhere.png", &["-p", "x"]);
    assert!(missing.contains("nowhere.png: there is no such file"), "{missing}");
    let no_picture = refused(model, folder.join("config.json").to_str().unwrap(), &["-p", "x"]);
    assert!(no_picture.contains("is not a PNG, JPEG, WebP or GIF file"), "{no_picture}");
    let long = refused(model, picture, &["-p", "x", "--context", "20"]);
    assert!(long.contains("20"), "{long}");
}

#[test]
fn a_chat_shows_pictures_over_several_turns() {
    let folder = &references()[0];
    let image = |name: &str| picture(name).to_str().unwrap().to_owned();
    let dir = tempfile::tempdir().unwrap();
    let saved = dir.path().join("talk.json");
    let typed = format!(
        "/image {}\nWhat is this?\n/image {}\n/image {}\nAnd these?\n/save {}\nAnd now?\n",
        image("odd"),
        image("dot"),
        image("odd"),
        saved.display()
    );
    let said = chat(folder.to_str().unwrap(), &typed);
    assert!(said.contains("odd.png is shown before the next message") && !said.contains("error"), "{said}");
    let json: Value = serde_json::from_slice(&std::fs::read(&saved).unwrap()).unwrap();
    assert_eq!(json["messages"][2]["images"], serde_json::json!([image("dot"), image("odd")]));
    let again = chat(folder.to_str().unwrap(), &format!("/load {}\nAnd now?\n", saved.display()));
    assert!(!again.contains("error") && !again.contains("left out"), "{again}");
    let answer = |said: &str| said.lines().filter_map(|line| line.strip_prefix("out: ")).next_back().map(str::to_owned);
    assert_eq!(answer(&said), answer(&again));
}

/// Types lines into a chat; returns what it said, answers behind `out: `.
fn chat(model: &str, typed: &str) -> String {
    let mut chat = command();
    chat.args(["chat", "-m", model, "-n", "6", "--temperature", "0", "--context", "512", "--no-history"]);
    let mut chat =
        chat.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the command starts");
    chat.stdin.take().unwrap().write_all(typed.as_bytes()).unwrap();
    let output = chat.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    let answers = String::from_utf8_lossy(&output.stdout).into_owned();
    answers.lines().map(|line| format!("out: {line}\n")).collect::<String>() + &said
}
