//! Settings from files, the environment and the command line.

use std::path::Path;

use serde_json::Value;

use crate::support::{command, fixture, larder_ok, larder_refuses};

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A folder for a user's files, and a store.
struct Home {
    dir: tempfile::TempDir,
}

impl Home {
    fn new(user: &str, store: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let home = Home { dir };
        larder_ok(&["convert", text(&fixture("golden/olmoe")), text(&home.store())]);
        std::fs::create_dir_all(home.user().parent().unwrap()).unwrap();
        std::fs::write(home.user(), user).unwrap();
        std::fs::write(home.store().join("larder.toml"), store).unwrap();
        home
    }

    fn user(&self) -> std::path::PathBuf {
        self.dir.path().join("config/larder/larder.toml")
    }

    fn store(&self) -> std::path::PathBuf {
        self.dir.path().join("store")
    }

    fn output(&self, args: &[&str], variables: &[(&str, &str)]) -> (Option<i32>, String, String) {
        let mut command = command();
        command.env("XDG_CONFIG_HOME", self.dir.path().join("config")).envs(variables.iter().copied()).args(args);
        let output = command.output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    }

    fn shown(&self, variables: &[(&str, &str)]) -> Vec<Value> {
        let store = self.store();
        let args = ["config", "show", "--json", "-m", text(&store)];
        let (code, out, err) = self.output(&args, variables);
        assert_eq!(code, Some(0), "{err}");
        serde_json::from_str::<Value>(&out).unwrap()["values"].as_array().unwrap().clone()
    }

    fn value(&self, command: Option<&str>, key: &str, variables: &[(&str, &str)]) -> (Value, Value) {
        let all = self.shown(variables);
        let row = all.iter().find(|row| row["command"].as_str() == command && row["key"] == key);
        let row = row.unwrap_or_else(|| panic!("{key}: {all:?}"));
        (row["value"].clone(), row["from"].clone())
    }
}

#[test]
fn the_nearest_setting_counts_and_says_where_it_is_from() {
    let home = Home::new("seed = 1\ntop-k = 5\n[run]\nseed = 2\n", "top-k = 6\ntop-p = 0.5\n");
    let is = |command, key, value: &str, from: &str| {
        assert_eq!(home.value(command, key, &[("LARDER_TOP_P", "0.25")]), (value.into(), from.into()), "{key}");
    };
    is(None, "seed", "1", "user");
    is(Some("run"), "seed", "2", "user");
    is(None, "top-k", "6", "store");
    is(None, "top-p", "0.25", "environment");
    assert_eq!(home.value(None, "min-p", &[]), (Value::Null, "default".into()), "the model's");
    let (_, table, _) = home.output(&["config", "show"], &[]);
    assert!(table.contains("[run] seed") && table.contains("larder.toml") && table.contains("default"), "{table}");
    let (_, path, _) = home.output(&["config", "path"], &[]);
    assert_eq!(path.trim_end(), text(&home.user()));
}

/// How many slots a run has by its plan.
fn slots(home: &Home, flags: &[&str], variables: &[(&str, &str)]) -> Value {
    let store = home.store();
    let args = [&["run", "-m", text(&store), "-p", "a", "-n", "1", "--json"][..], flags].concat();
    let (code, out, err) = home.output(&args, variables);
    assert_eq!(code, Some(0), "{err}");
    serde_json::from_str::<Value>(&out).unwrap()["plan"]["slots"].clone()
}

#[test]
fn settings_work_as_if_they_were_typed() {
    let home = Home::new("cache = \"1M\"\n[bench]\ncache = \"2x\"\n", "cache = \"3x\"\n");
    assert_eq!(slots(&home, &[], &[]), 3);
    assert_eq!(slots(&home, &[], &[("LARDER_CACHE", "5x")]), 5);
    assert_eq!(slots(&home, &["--cache", "4x"], &[("LARDER_CACHE", "5x")]), 4);
    assert_eq!(slots(&home, &["--cache=all"], &[]), Value::Null);
}

#[test]
fn mistakes_are_told_by_file_and_key() {
    let refused = |user: &str, store: &str, parts: &[&str]| {
        let home = Home::new(user, store);
        let (code, _, err) = home.output(&["run", "-m", text(&home.store()), "-p", "a", "-n", "1"], &[]);
        assert_eq!((code, err.lines().count()), (Some(1), 1), "{err}");
        assert!(parts.iter().all(|part| err.contains(part)) && err.contains("larder.toml"), "{err}");
    };
    refused("sead = 1\n", "", &["config/larder", "sead is not a known setting", "seed"]);
    refused("[run]\nmax-tokens = \"many\"\n", "", &["[run] max-tokens", "invalid value"]);
    refused("", "[run]\ntrace = \"/tmp/x\"\n", &["store/larder.toml", "trace cannot be set by a store"]);
    refused("", "seed = 3\n", &["seed cannot be set by a store"]);
    refused("quality = \"fast\"\nrouting = \"original\"\n", "", &["quality", "routing", "conflict"]);
}

#[test]
fn an_earlier_key_or_flag_is_wrong_usage() {
    let home = Home::new("cache-experts = 3\n", "");
    let run = |more: &[&str]| {
        let (code, _, err) =
            home.output(&[&["run", "-m", text(&home.store()), "-p", "a", "-n", "1"], more].concat(), &[]);
        assert_eq!((code, err.lines().count()), (Some(2), 1), "{err}");
        err
    };
    assert!(run(&[]).ends_with("larder.toml: cache-experts = 3 is now cache = \"3x\"\n"), "{}", run(&[]));
    assert_eq!(run(&["--cache-mem", "4G"]), "error: --cache-mem 4G is now --cache 4G\n");
}

#[test]
fn the_environment_is_checked_too() {
    let home = Home::new("", "");
    let (code, _, err) = home.output(&["config", "show"], &[("LARDER_TOP_K", "some")]);
    assert_eq!(code, Some(1));
    assert!(err.contains("LARDER_TOP_K") && err.contains("invalid value"), "{err}");
}

#[test]
fn shells_and_manuals_are_served() {
    for shell in ["bash", "zsh", "fish"] {
        let script = larder_ok(&["completions", shell]);
        assert!(script.contains("cache") && script.contains("chat"), "{shell}");
    }
    assert!(larder_ok(&["man"]).starts_with(".ie"));
    let dir = tempfile::tempdir().unwrap();
    larder_ok(&["man", "--out", text(&dir.path().join("man"))]);
    let page = std::fs::read_to_string(dir.path().join("man/larder-chat.1")).unwrap();
    assert!(page.contains("cache"), "{page}");
    assert!(larder_refuses(&["man", "--out", "/dev/null/x"]).contains("/dev/null/x"));
}
