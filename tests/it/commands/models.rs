//! Models that are kept: stores beside GGUF files, and the folder of those that were fetched.

use std::path::Path;
use std::process::Output;

use crate::support::{command, fixture, larder, larder_ok, larder_refuses};

const GGUF: &str = "tiny-olmoe-q4_0.gguf";

fn text(path: &Path) -> &str {
    path.to_str().expect("a path that is text")
}

fn run<'a>(model: &'a str, flags: &[&'a str]) -> Vec<&'a str> {
    [&["run", "-m", model, "-p", "the", "-n", "5", "--ignore-eos"][..], flags].concat()
}

/// `larder models` over the folder `models`.
fn models(models: &Path, args: &[&str]) -> Output {
    command().env("LARDER_MODELS", models).arg("models").args(args).output().expect("the command starts")
}

#[test]
fn a_gguf_file_gets_a_store_once() {
    let dir = tempfile::tempdir().unwrap();
    let gguf = dir.path().join(GGUF);
    std::fs::copy(fixture("fixtures/gguf").join(GGUF), &gguf).unwrap();
    let store = gguf.with_extension("larder");
    let direct = larder_ok(&run(text(&gguf), &["-ono-store"]));
    assert!(!store.exists());
    for said in ["making", "made of"] {
        let output = command().args(run(text(&gguf), &[])).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), direct);
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(told.contains(said) && told.contains(text(&store)), "{told}");
    }
    larder_ok(&["verify", text(&store)]);
    // Other weights under the same name, of the same length.
    let good = std::fs::read(&gguf).unwrap();
    let mut other = good.clone();
    *other.last_mut().unwrap() ^= 1;
    std::fs::write(&gguf, other).unwrap();
    assert!(larder_refuses(&run(text(&gguf), &[])).contains("made of another GGUF file"));
    std::fs::write(&gguf, good).unwrap();
    larder_ok(&run(text(&gguf), &[]));
    let mut longer = std::fs::read(&gguf).unwrap();
    longer.extend([0; 32]);
    std::fs::write(&gguf, longer).unwrap();
    assert!(larder_refuses(&run(text(&gguf), &[])).contains("made of another GGUF file"));
}

#[test]
fn kept_models_are_listed_found_and_removed() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("org/name@v1");
    larder_ok(&["convert", text(&fixture("golden/mixtral")), text(&store)]);
    std::fs::create_dir_all(dir.path().join("org/other.download")).unwrap();
    std::fs::write(dir.path().join("org/other.download/model.safetensors.part"), [1; 9000]).unwrap();
    let list: serde_json::Value = serde_json::from_slice(&models(dir.path(), &["list", "--json"]).stdout).unwrap();
    let of = |i: usize| (list[i]["name"].as_str().unwrap(), list[i]["complete"].as_bool().unwrap());
    assert_eq!((of(0), of(1)), (("org/name@v1", true), ("org/other", false)));
    assert!(list[1]["bytes"].as_u64().unwrap() >= 9000);
    let top = |args: &[&str]| command().env("LARDER_MODELS", dir.path()).args(args).output().unwrap();
    for listed in [top(&["list", "--json"]), top(&["ls", "--json"])] {
        assert_eq!(serde_json::from_slice::<serde_json::Value>(&listed.stdout).unwrap(), list);
    }
    assert!(String::from_utf8_lossy(&top(&["pull", "org/name@v1"]).stdout).contains("`larder chat org/name@v1`"));
    let path = models(dir.path(), &["path", "org/name@v1"]);
    assert_eq!(String::from_utf8_lossy(&path.stdout).trim(), text(&store));
    let named = command().env("LARDER_MODELS", dir.path()).args(run("org/name@v1", &[])).output().unwrap();
    assert!(named.status.success(), "{}", String::from_utf8_lossy(&named.stderr));

    std::fs::write(store.join("larder.toml"), "top-k = 41\n").unwrap();
    let shown =
        command().env("LARDER_MODELS", dir.path()).args(["config", "show", "-m", "org/name@v1"]).output().unwrap();
    assert!(String::from_utf8_lossy(&shown.stdout).contains("41"), "{}", String::from_utf8_lossy(&shown.stderr));
    let unasked = models(dir.path(), &["rm", "org/other"]);
    assert!(String::from_utf8_lossy(&unasked.stderr).contains("--yes") && !unasked.status.success());
    for bad in ["../org", "/etc/x", "org/../x", "org", "org/.x"] {
        assert_eq!(models(dir.path(), &["rm", "--yes", bad]).status.code(), Some(2), "{bad}");
    }
    assert!(top(&["rm", "--yes", "org/other"]).status.success());
    assert!(!dir.path().join("org/other.download").exists() && store.exists());
    assert!(models(dir.path(), &["rm", "--yes", "org/name@v1"]).status.success());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    assert!(!models(dir.path(), &["rm", "--yes", "org/name@v1"]).status.success());
}

#[test]
fn words_say_what_flags_say() {
    let model = fixture("golden/olmoe");
    let model = text(&model);
    let said = larder_ok(&["run", "-m", model, "-p", "the ducks", "-n", "4"]);
    assert_eq!(larder_ok(&["run", model, "the ducks", "-n", "4"]), said);
    assert_eq!(larder_ok(&["run", "-n", "4", "-m", model, "the ducks"]), said);
    assert_eq!(larder_ok(&["run", model, "-n", "4", "-p", "the ducks"]), said);
    let alone = larder(&["run", model]);
    let wanted = format!("there is no prompt: `larder run {model} \"Once upon a time\"` continues a text");
    assert!(alone.status.code() == Some(2) && String::from_utf8_lossy(&alone.stderr).contains(&wanted), "{alone:?}");
}

#[test]
fn a_model_that_is_not_here_is_told_with_the_command_that_fetches_it() {
    let (dir, closed) = (tempfile::tempdir().unwrap(), std::net::TcpListener::bind("127.0.0.1:0").unwrap());
    let hub = format!("http://{}", closed.local_addr().unwrap());
    drop(closed);
    for args in [&["run", "org/name", "the ducks"][..], &["chat", "-m", "org/name"], &["pull", "org/name"]] {
        let refused = command().env("LARDER_MODELS", dir.path()).env("HF_ENDPOINT", &hub).args(args).output().unwrap();
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        let wanted = format!(
            "error: org/name is not here yet, and `larder pull org/name` can try again: {hub} cannot be reached"
        );
        assert!(refused.status.code() == Some(1) && said.contains(&wanted), "{args:?}: {said}");
        let listed = models(dir.path(), &["list"]);
        assert!(String::from_utf8_lossy(&listed.stderr).contains("`larder pull org/name` downloads one"), "{listed:?}");
    }
    assert!(
        larder_refuses(&["run", "-m", "qwen3", "-p", "the ducks"]).contains("qwen3: there is no such file, folder or")
    );
}
