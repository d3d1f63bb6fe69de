//! Disks that are full while something is written to them: it is said in one sentence, and what was there stays.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::json;

use super::convert::{contents, text};
use crate::serve::api::Server;
use crate::support::loop_drive::LoopDrive;
use crate::support::{fixture, larder_ok, larder_refuses};

/// Leaves `free` bytes on a drive, those included that only an administrator gets. Removing the file gives all back.
fn fill(drive: &LoopDrive, free: u64) -> PathBuf {
    let path = drive.folder().join("filler");
    let mut file = fs::File::create(&path).unwrap();
    while file.write_all(&[1; 4096]).is_ok() {}
    file.set_len(file.metadata().unwrap().len().saturating_sub(free)).unwrap();
    file.sync_all().unwrap();
    path
}

fn is_of_space(said: &str) -> bool {
    said.contains("space") || said.contains("free")
}

#[test]
fn conversion_goes_on_when_there_is_room_again() {
    let Some(drive) = LoopDrive::new() else { return };
    let (model, store) = (fixture("golden/olmoe"), drive.folder().join("store"));
    let filler = fill(&drive, 100 << 10);
    let said = larder_refuses(&["convert", text(&model), text(&store)]);
    assert!(is_of_space(&said), "{said}");
    assert!(!store.join("larder.json").exists());
    fs::remove_file(filler).unwrap();
    larder_ok(&["convert", text(&model), text(&store)]);
    let whole = tempfile::tempdir().unwrap();
    larder_ok(&["convert", text(&model), text(&whole.path().join("store"))]);
    assert!(contents(&store) == contents(&whole.path().join("store")));
}

#[test]
fn a_sequence_that_finds_no_room_is_not_saved_and_serving_goes_on() {
    let Some(drive) = LoopDrive::new() else { return };
    let folder = drive.folder().join("sessions");
    let flags = ["--context", "256", "--parallel", "1", "--session-dir", text(&folder)];
    let server = Server::start(&fixture("../models/demo"), &flags);
    let ask = |prompt: &str| {
        let body = json!({"prompt": prompt.repeat(12), "max_tokens": 8, "temperature": 0, "ignore_eos": true});
        server.post("/v1/completions", body).json()["choices"][0]["text"].to_string()
    };
    let save = || server.post("/slots/0?action=save", json!({"filename": "chat.bin"}));
    let first = ask("The old man looked at the sea. ");
    assert_eq!(save().status, 200);
    let saved = contents(&folder);
    let filler = fill(&drive, 100 << 10);
    let second = ask("A girl went home. ");
    let refused = save();
    assert_eq!((refused.status, refused.json()["error"]["code"].as_str()), (507, Some("not_written")));
    assert!(is_of_space(&refused.error()), "{}", refused.body);
    // The file of before is whole, and nothing is left beside it.
    assert!(contents(&folder) == saved);
    assert_eq!((ask("The old man looked at the sea. "), ask("A girl went home. ")), (first, second));
    fs::remove_file(filler).unwrap();
    assert_eq!(save().status, 200);
    server.stop();
}

#[test]
fn a_calibration_that_finds_no_room_leaves_the_store_as_it_is() {
    let Some(drive) = LoopDrive::new() else { return };
    let (store, words) = (drive.folder().join("store"), fixture("../models/demo/held-out.txt"));
    copy(&fixture("../models/demo"), &store);
    fs::remove_file(store.join("quality.json")).unwrap();
    let before = contents(&store);
    fill(&drive, 0);
    let tune = ["tune", text(&words), "-m", text(&store), "--tokens", "60", "--chunk", "30", "--cache", "8x"];
    let said = larder_refuses(&tune);
    assert!(is_of_space(&said) && said.contains("quality.json"), "{said}");
    assert!(contents(&store) == before);
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(|entry| entry.unwrap()) {
        let (path, to) = (entry.path(), to.join(entry.file_name()));
        match path.is_dir() {
            true => copy(&path, &to),
            false => fs::copy(path, to).map(drop).unwrap(),
        }
    }
}
