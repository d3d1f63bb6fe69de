//! Stores on two drives: made, interrupted, divided, damaged.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;

use super::convert::{SmallDisk, contents, convert, logits_with, text};
use crate::support::{command, fixture, larder, larder_ok, larder_refuses};

/// A store of a golden model on two drives, which are folders here.
pub struct TwoFolders {
    dir: tempfile::TempDir,
    source: PathBuf,
}

impl TwoFolders {
    /// Converted with this flag for the second folder.
    pub fn new(model: &str, flag: &str) -> Self {
        let two = TwoFolders { dir: tempfile::tempdir().unwrap(), source: fixture("golden").join(model) };
        larder_ok(&["convert", text(&two.source), text(&two.store()), flag, text(&two.second())]);
        two
    }

    pub fn store(&self) -> PathBuf {
        self.dir.path().join("store")
    }

    pub fn second(&self) -> PathBuf {
        self.dir.path().join("second")
    }

    /// The logits of a run that reads nearly every expert that it uses.
    fn logits(&self) -> Vec<u8> {
        logits_with(&self.store(), &self.dir.path().join("out"), &["--cache", "2x"])
    }

    /// What is said on standard error when the store is opened, which succeeds.
    fn said_when_opened(&self) -> String {
        let out = larder(&["inspect", text(&self.store())]);
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stderr).unwrap()
    }
}

pub fn shards_in(folder: &Path) -> Vec<PathBuf> {
    contents(folder).into_keys().filter(|path| text(path).starts_with("experts")).collect()
}

/// Everything of a store but where its second folder is.
fn without_drives(mut files: BTreeMap<PathBuf, Vec<u8>>) -> BTreeMap<PathBuf, Vec<u8>> {
    files.remove(Path::new("drives.json"));
    files
}

#[test]
fn a_mirror_and_a_stripe_hold_the_store_of_one_drive() {
    for model in ["olmoe", "qwen2_moe"] {
        let plain = tempfile::tempdir().unwrap();
        let store = plain.path().join("store");
        convert(&fixture("golden").join(model), &store, &[]);
        let whole = contents(&store);
        let want = logits_with(&store, &plain.path().join("out"), &["--cache", "2x"]);

        let mirror = TwoFolders::new(model, "--also");
        assert!(without_drives(contents(&mirror.store())) == whole);
        let second = contents(&mirror.second());
        assert_eq!(second.len(), 1 + shards_in(&store).len());
        assert!(second.iter().all(|(name, bytes)| name == Path::new("drive.json") || whole[name] == *bytes));
        assert!(mirror.logits() == want);

        let stripe = TwoFolders::new(model, "--stripe");
        let mut both = without_drives(contents(&stripe.store()));
        let half = shards_in(&stripe.second());
        assert!(half.iter().all(|name| !both.contains_key(name)) && 2 * half.len() == shards_in(&store).len());
        both.extend(contents(&stripe.second()).into_iter().filter(|(name, _)| name != Path::new("drive.json")));
        assert!(both == whole, "{model}: the manifest or a shard differs");
        assert!(stripe.logits() == want);
        for two in [mirror, stripe] {
            larder_ok(&["verify", text(&two.store())]);
            let said = larder_ok(&["inspect", text(&two.store())]);
            assert!(said.contains(text(&two.second())), "{said}");
        }
    }
}

#[test]
fn a_finished_store_gets_its_second_folder_later() {
    for flag in ["--also", "--stripe"] {
        let dir = tempfile::tempdir().unwrap();
        let (store, second) = (dir.path().join("store"), dir.path().join("second"));
        convert(&fixture("golden/olmoe"), &store, &["--small-copy", "q4_0"]);
        let want = logits_with(&store, &dir.path().join("out"), &["--cache", "2x"]);
        let shards = shards_in(&store);
        // The store itself stands for its source.
        let args = ["convert", text(&store), text(&store), flag, text(&second)];
        larder_ok(&args);
        let there = shards_in(&second);
        assert_eq!(there.len(), if flag == "--also" { shards.len() } else { shards.len() / 2 });
        assert!(there.iter().any(|name| name.starts_with("experts-small")));
        larder_ok(&["verify", text(&store)]);
        assert!(logits_with(&store, &dir.path().join("out"), &["--cache", "2x"]) == want);
        // Again: nothing is missing. A copy that was lost is made anew, also by the command that made the store.
        let json =
            |args: &[&str]| -> Value { serde_json::from_str(&larder_ok(&[args, &["--json"]].concat())).unwrap() };
        assert_eq!(json(&args)["second"]["files_written"], 0);
        if flag == "--also" {
            fs::remove_file(second.join(&there[1])).unwrap();
            fs::remove_file(store.join(&there[2])).unwrap();
            let source = fixture("golden/olmoe");
            assert_eq!(
                json(&["convert", text(&source), text(&store), flag, text(&second)])["second"]["files_written"],
                2
            );
        }
        larder_ok(&["verify", text(&store)]);
        // The folder is named where it is now.
        let moved = dir.path().join("moved");
        fs::rename(&second, &moved).unwrap();
        larder_ok(&["convert", text(&store), text(&store), flag, text(&moved)]);
        larder_ok(&["verify", text(&store)]);
        // Another source, or other formats, are not what the store was made of.
        let other = fixture("golden/qwen2_moe");
        assert!(
            larder_refuses(&["convert", text(&other), text(&store), flag, text(&moved)]).contains("was not made of")
        );
        let said = larder_refuses(&["convert", text(&store), text(&store), flag, text(&moved), "--experts", "q8_0"]);
        assert!(said.contains("other number formats"), "{said}");
    }
}

#[test]
fn a_killed_conversion_onto_two_drives_ends_as_an_undisturbed_one() {
    for flag in ["--also", "--stripe"] {
        let undisturbed = TwoFolders::new("qwen2_moe", flag);
        let want = (without_drives(contents(&undisturbed.store())), contents(&undisturbed.second()));
        let dir = tempfile::tempdir().unwrap();
        let (store, second) = (dir.path().join("store"), dir.path().join("second"));
        let args = ["convert", text(&undisturbed.source), text(&store), flag, text(&second)];
        let mut killed = 0;
        for round in 0..24 {
            let mut child = command().args(args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            while !store.exists() && child.try_wait().unwrap().is_none() {
                std::hint::spin_loop();
            }
            std::thread::sleep(Duration::from_micros(500 * round));
            child.kill().unwrap();
            killed += usize::from(child.wait().unwrap().code().is_none());
            larder_ok(&args);
            let got = (without_drives(contents(&store)), contents(&second));
            assert!(got == want, "{flag}, round {round}: the folders differ");
            larder_ok(&["verify", text(&store)]);
            fs::remove_dir_all(&store).unwrap();
            fs::remove_dir_all(&second).unwrap();
        }
        assert!(killed >= 3, "only {killed} conversions were stopped half way");
    }
}

#[test]
fn folders_that_cannot_be_a_second_one_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (store, source) = (dir.path().join("store"), fixture("golden/olmoe"));
    convert(&source, &store, &[]);
    let before = contents(&store);
    let other = TwoFolders::new("qwen2_moe", "--also");
    let full = dir.path().join("full");
    fs::create_dir(&full).unwrap();
    fs::write(full.join("mine"), "mine").unwrap();
    let cases = [
        (other.second(), "holds the experts of another store"),
        (full.clone(), "is not empty (it holds 'mine')"),
        (full.join("mine"), "is a file"),
        (store.join("experts/second"), "lie one inside the other"),
        (store.clone(), "lie one inside the other"),
        (dir.path().to_owned(), "lie one inside the other"),
    ];
    for (folder, reason) in &cases {
        for flag in ["--also", "--stripe"] {
            let said = larder_refuses(&["convert", text(&source), text(&store), flag, text(folder)]);
            assert!(said.contains(reason) && said.lines().count() == 1, "{said}");
            assert!(contents(&store) == before, "{reason}");
        }
    }
    assert_eq!(fs::read(full.join("mine")).unwrap(), b"mine");
    let both = ["convert", text(&source), text(&store), "--also", "a", "--stripe", "b"];
    assert_eq!(larder(&both).status.code(), Some(2));
    let said =
        larder_refuses(&["convert", text(&source), text(&other.store()), "--stripe", text(&dir.path().join("s"))]);
    assert!(said.contains("was not made of"), "{said}");
    let said = larder_refuses(&[
        "convert",
        text(&other.source),
        text(&other.store()),
        "--stripe",
        text(&dir.path().join("s")),
    ]);
    assert!(said.contains("has its second folder already"), "{said}");
}

#[test]
fn a_full_second_drive_is_said_and_nothing_is_lost() {
    let dir = tempfile::tempdir().unwrap();
    let Some(disk) = SmallDisk::mount(&dir.path().join("small"), "size=64k") else { return };
    let (store, source) = (dir.path().join("store"), fixture("golden/olmoe"));
    convert(&source, &store, &[]);
    let before = contents(&store);
    for flag in ["--also", "--stripe"] {
        let said = larder_refuses(&["convert", text(&source), text(&store), flag, text(&disk.0.join("second"))]);
        assert!(said.contains("needs") && said.contains("free"), "{said}");
        assert!(contents(&store) == before);
    }
    larder_ok(&["verify", text(&store)]);
}

#[test]
fn a_mirror_that_is_missing_or_foreign_is_said_and_a_stripe_is_an_error() {
    let mirror = TwoFolders::new("olmoe", "--also");
    let want = mirror.logits();
    let away = mirror.dir.path().join("away");
    assert!(!mirror.said_when_opened().contains("note"));
    fs::rename(mirror.second(), &away).unwrap();
    let said = mirror.said_when_opened();
    assert!(said.contains("the second copy of the experts is not used") && said.contains("is missing"), "{said}");
    assert!(mirror.logits() == want);
    let said = larder_refuses(&["verify", text(&mirror.store())]);
    assert!(said.contains("is not usable: connect its drive") && !said.contains("delete"), "{said}");
    let other = TwoFolders::new("qwen2_moe", "--also");
    fs::rename(other.second(), mirror.second()).unwrap();
    assert!(mirror.said_when_opened().contains("holds the experts of another store"));
    assert!(mirror.logits() == want);
    fs::remove_dir_all(mirror.second()).unwrap();
    fs::rename(&away, mirror.second()).unwrap();
    // A change of the config changes no shard.
    larder_ok(&["store", "set", text(&mirror.store()), "rope_theta=20000.0"]);
    assert!(!mirror.said_when_opened().contains("note"));
    // A shard that is missing in one folder is in the other.
    for folder in [mirror.second(), mirror.store()] {
        let name = shards_in(&folder).remove(3);
        let bytes = fs::read(folder.join(&name)).unwrap();
        for damage in [None, Some(&bytes[..100])] {
            match damage {
                None => fs::remove_file(folder.join(&name)).unwrap(),
                Some(bytes) => fs::write(folder.join(&name), bytes).unwrap(),
            }
            assert!(mirror.said_when_opened().contains("lacks 1 of"), "{}", mirror.said_when_opened());
            mirror.logits();
        }
        fs::write(folder.join(&name), bytes).unwrap();
    }

    let stripe = TwoFolders::new("olmoe", "--stripe");
    fs::rename(stripe.second(), stripe.dir.path().join("away")).unwrap();
    for command in ["inspect", "verify"] {
        let said = larder_refuses(&[command, text(&stripe.store())]);
        assert!(said.lines().count() <= 2, "{said}");
    }
    let said = larder_refuses(&["inspect", text(&stripe.store())]);
    assert!(said.contains("half of the experts are there: connect its drive"), "{said}");
}

#[test]
fn damage_in_either_folder_is_found() {
    for flag in ["--also", "--stripe"] {
        let two = TwoFolders::new("olmoe", flag);
        for folder in [two.store(), two.second()] {
            let name = shards_in(&folder).remove(2);
            let good = fs::read(folder.join(&name)).unwrap();
            let mut bad = good.clone();
            bad[4096 + 77] ^= 4;
            fs::write(folder.join(&name), bad).unwrap();
            let out = larder(&["verify", text(&two.store())]);
            let said = String::from_utf8(out.stdout).unwrap();
            assert!(!out.status.success() && said.contains(text(&folder.join(&name))), "{said}");
            let advice = String::from_utf8(out.stderr).unwrap();
            assert_eq!(advice.contains("delete the damaged files") && advice.contains("--also"), flag == "--also");
            fs::write(folder.join(&name), good).unwrap();
        }
        fs::write(two.second().join("notes.txt"), "x").unwrap();
        let out = larder(&["verify", text(&two.store())]);
        assert!(out.status.success() && String::from_utf8(out.stderr).unwrap().contains("notes.txt"));
    }
}

/// What a stranger may have written where a store says what its second folder is.
#[test]
fn hostile_files_of_drives_are_refused_in_a_sentence() {
    let two = TwoFolders::new("olmoe", "--also");
    let path = two.store().join("drives.json");
    for bad in ["", "{", "[]", r#"{"division":"mirror"}"#, r#"{"division":"other","folder":"/"}"#, &"x".repeat(1 << 20)]
    {
        fs::write(&path, bad).unwrap();
        let said = larder_refuses(&["inspect", text(&two.store())]);
        assert!(said.contains("drives.json") && said.lines().count() == 1, "{said}");
    }
    // Folders of other things are not read from.
    for folder in ["/", "/proc", "/dev/null", "../..", "\u{1b}[31m", "/proc/self/fd/0"] {
        fs::write(&path, serde_json::json!({"division": "mirror", "folder": folder}).to_string()).unwrap();
        let said = two.said_when_opened();
        assert!(said.contains("is not used") && !said.contains('\u{1b}'), "{said}");
    }
    // A folder may be named relative to the store.
    fs::write(&path, r#"{"division":"mirror","folder":"../second"}"#).unwrap();
    assert!(!two.said_when_opened().contains("note"));
    fs::write(two.second().join("drive.json"), "x".repeat(1 << 20)).unwrap();
    assert!(two.said_when_opened().contains("is not used"));
}
