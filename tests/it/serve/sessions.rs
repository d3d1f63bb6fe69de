//! Sequences on disk: found again after a restart, bounded, saved and restored by clients, and none but sound ones
//! used.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::api::Server;
use crate::support::{encoder_decoders, fixture, larder_refuses};

fn demo() -> PathBuf {
    fixture("../models/demo")
}

/// A prompt of which the demo model makes more tokens than a sequence must have to be saved.
fn prompt(subject: &str) -> String {
    format!(
        "{subject} looked at the door of the house, and then at the sea behind it, where the ships lay in the evening."
    )
}

fn start(model: &Path, folder: &Path, flags: &[&str]) -> Server {
    let common = ["--context", "256", "--parallel", "1", "--session-dir", folder.to_str().unwrap()];
    Server::start(model, &[&common[..], flags].concat())
}

/// The text of a greedy answer, and how many tokens of the prompt were cached.
fn ask(server: &Server, prompt: &str) -> (String, u64) {
    let body = json!({"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": true});
    let answer = server.post("/v1/completions", body).json();
    let cached = &answer["usage"]["prompt_tokens_details"]["cached_tokens"];
    (answer["choices"][0]["text"].as_str().unwrap().to_owned(), cached.as_u64().unwrap())
}

fn prefixes(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.extension().is_some_and(|ending| ending == "prefix")).collect()
}

#[test]
fn a_restarted_server_continues_its_sequences() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("sessions");
    let [first, second] = ["The old man", "A girl"].map(prompt);
    let server = start(&demo(), &folder, &[]);
    let (text, cached) = ask(&server, &first);
    assert_eq!(cached, 0);
    // With one slot, this displaces the first.
    let other = ask(&server, &second).0;
    server.stop();
    assert_eq!(prefixes(&folder).len(), 2);

    let server = start(&demo(), &folder, &[]);
    let (again, cached) = ask(&server, &first);
    assert!(again == text && cached > 16, "{again:?} after {text:?}, {cached} cached");
    let longer = format!("{first}{text} And so");
    let (continued, cached_more) = ask(&server, &longer);
    assert!(cached_more > cached, "{cached_more}");
    let (again, cached) = ask(&server, &second);
    assert!(again == other && cached > 16, "{cached} cached");
    server.stop();

    let fresh = Server::start(&demo(), &["--context", "256"]);
    assert_eq!(ask(&fresh, &longer), (continued, 0));
    // The longer sequence has taken the place of its beginning.
    assert_eq!(prefixes(&folder).len(), 2);

    // Another routing strategy or number format makes other states.
    for flags in [["--routing", "prior:lambda=0.2"], ["-o", "kv=f32"]] {
        assert_eq!(ask(&start(&demo(), &folder, &flags), &first).1, 0, "{flags:?}");
    }
}

#[test]
fn recurrent_models_continue_too() {
    for name in ["qwen3_next", "lfm2_moe", "deepseek_v2"] {
        let (model, dir) = (fixture("golden").join(name), tempfile::tempdir().unwrap());
        let ids: Vec<u32> = (0..40).map(|i| 3 + i * 7 % 90).collect();
        let ask = |server: &Server, ids: &[u32], count: u32| {
            let body = json!({"prompt": ids, "max_tokens": count, "temperature": 0, "ignore_eos": true});
            let answer = server.post("/v1/completions", body).json();
            let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
            (answer["choices"][0]["text"].clone(), cached)
        };
        let server = start(&model, dir.path(), &[]);
        ask(&server, &ids, 1);
        server.stop();
        let longer = [&ids[..], &[8, 9, 10]].concat();
        let (text, cached) = ask(&start(&model, dir.path(), &[]), &longer, 8);
        assert_eq!(cached, 40, "{name}");
        let fresh = Server::start(&model, &["--context", "256"]);
        assert_eq!(ask(&fresh, &longer, 8), (text, 0), "{name}");
    }
}

#[test]
fn the_folder_stays_within_its_limit() {
    let dir = tempfile::tempdir().unwrap();
    let server = start(&demo(), dir.path(), &[]);
    ask(&server, &prompt("The old man"));
    server.stop();
    let one = fs::metadata(&prefixes(dir.path())[0]).unwrap().len();
    let limit = 3 * one;
    let server = start(&demo(), dir.path(), &["--session-disk", &limit.to_string()]);
    for subject in ["A girl", "The captain", "My brother", "The doctor", "Her son", "The king"] {
        ask(&server, &prompt(subject));
        let used: u64 = prefixes(dir.path()).iter().map(|path| fs::metadata(path).unwrap().len()).sum();
        assert!(used <= limit, "{used} of {limit} bytes");
    }
    // Used last, and so still there.
    server.stop();
    let server = start(&demo(), dir.path(), &[]);
    assert!(ask(&server, &prompt("The king")).1 > 16);
    // Both begin with the same word.
    assert!(ask(&server, &prompt("The old man")).1 <= 1);
}

#[test]
fn damaged_and_foreign_files_are_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let first = prompt("The old man");
    let server = start(&demo(), dir.path(), &[]);
    let text = ask(&server, &first).0;
    server.stop();
    let file = prefixes(dir.path()).remove(0);
    let sound = fs::read(&file).unwrap();
    let mut wrong = sound.clone();
    *wrong.last_mut().unwrap() ^= 1;
    let mut head = sound.clone();
    head[60] ^= 1;
    for bytes in [wrong, head, sound[..sound.len() / 2].to_vec(), b"something else".to_vec(), vec![]] {
        fs::write(&file, &bytes).unwrap();
        let server = start(&demo(), dir.path(), &[]);
        assert_eq!(ask(&server, &first), (text.clone(), 0));
        drop(server);
        assert_eq!(fs::read(&file).unwrap(), bytes);
    }
    fs::write(&file, &sound).unwrap();
    let unfinished = [file.with_extension("prefix.tmp"), dir.path().join("chat.bin.tmp")];
    fs::write(&unfinished[0], "").unwrap();
    fs::write(&unfinished[1], &sound[..sound.len() / 2]).unwrap();
    let foreign = dir.path().join("notes.tmp");
    fs::write(&foreign, "mine").unwrap();
    // The server of another model does not touch it.
    let other = start(&fixture("golden/olmoe"), dir.path(), &[]);
    ask(&other, "x");
    other.stop();
    assert_eq!(fs::read(&file).unwrap(), sound);
    assert!(ask(&start(&demo(), dir.path(), &[]), &first).1 > 16);
    assert!(unfinished.iter().all(|path| !path.exists()) && foreign.exists());
    // Files that are no sequences do not count towards the limit; those that clients named do, and leave no room here.
    fs::write(&foreign, vec![0; 4 * sound.len()]).unwrap();
    let limit = (2 * sound.len()).to_string();
    assert!(ask(&start(&demo(), dir.path(), &["--session-disk", &limit]), &first).1 > 16);
    for name in ["a.bin", "b.bin", "c.bin"] {
        fs::write(dir.path().join(name), &sound).unwrap();
    }
    start(&demo(), dir.path(), &["--session-disk", &limit]).stop();
    assert!(prefixes(dir.path()).is_empty() && dir.path().join("c.bin").exists());
}

#[test]
fn a_folder_that_cannot_be_written_to_stops_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("sessions");
    let server = start(&demo(), &folder, &[]);
    fs::remove_dir(&folder).unwrap();
    for subject in ["A girl", "The captain", "My brother"] {
        ask(&server, &prompt(subject));
    }
    let saved = server.post("/slots/0?action=save", json!({"filename": "a.bin"}));
    assert_eq!((saved.status, saved.json()["error"]["code"].as_str()), (507, Some("not_written")));
    server.stop();
    fs::write(&folder, "a file").unwrap();
    let refused = larder_refuses(&["serve", "--port", "0", "--session-dir", folder.to_str().unwrap()]);
    assert!(refused.contains("--session-dir"), "{refused}");
    for model in encoder_decoders() {
        let [model, folder] = [&model, &dir.path().join("other")].map(|path| path.to_str().unwrap().to_owned());
        let refused = larder_refuses(&["serve", "-m", &model, "--port", "0", "--session-dir", &folder]);
        assert!(refused.contains("encoder"), "{refused}");
    }
}

#[test]
fn slots_are_listed_saved_restored_and_erased() {
    let dir = tempfile::tempdir().unwrap();
    let first = prompt("The old man");
    let server = start(&demo(), dir.path(), &["--sessions", "2"]);
    let act = |server: &Server, id: &str, action: &str, body: Value| {
        let answer = server.post(&format!("/slots/{id}?action={action}"), body);
        (answer.status, answer.json())
    };
    let file = json!({"filename": "chat.bin"});
    let (status, empty) = act(&server, "0", "save", file.clone());
    assert_eq!((status, empty["error"]["code"].as_str()), (400, Some("slot_empty")));
    let text = ask(&server, &first).0;
    let slots = server.get("/slots").json();
    assert_eq!((slots.as_array().unwrap().len(), &slots[0]["n_ctx"]), (2, &json!(256)));
    assert_eq!((&slots[0]["is_processing"], &slots[1]["n_tokens"]), (&json!(false), &json!(0)));
    let tokens = slots[0]["n_tokens"].as_u64().unwrap();
    let (status, saved) = act(&server, "0", "save", file.clone());
    let bytes = fs::metadata(dir.path().join("chat.bin")).unwrap().len();
    assert_eq!(status, 200, "{saved}");
    assert_eq!((&saved["id_slot"], &saved["filename"]), (&json!(0), &json!("chat.bin")));
    assert_eq!((saved["n_saved"].as_u64(), saved["n_written"].as_u64()), (Some(tokens), Some(bytes)));
    assert!(saved["timings"]["save_ms"].as_f64().is_some());
    assert_eq!(act(&server, "0", "erase", json!({})), (200, json!({"id_slot": 0, "n_erased": tokens})));
    assert_eq!(ask(&server, &first).1, 0);
    drop(server);

    let server = start(&demo(), dir.path(), &["--sessions", "2"]);
    let (status, restored) = act(&server, "1", "restore", file.clone());
    assert_eq!((status, restored["n_restored"].as_u64()), (200, Some(tokens)), "{restored}");
    // A file that cannot be read leaves the slot as it is.
    fs::write(dir.path().join("bad.bin"), "nothing of the kind").unwrap();
    assert_eq!(act(&server, "1", "restore", json!({"filename": "bad.bin"})).0, 400);
    assert_eq!(server.get("/slots").json()[1]["n_tokens"], tokens);
    assert_eq!((restored["n_read"].as_u64(), &restored["id_slot"]), (Some(bytes), &json!(1)));
    let (again, cached) = ask(&server, &first);
    assert!(again == text && cached > 16, "{cached} cached");
    for (id, action, body, code) in [
        ("2", "save", file.clone(), 400),
        ("x", "save", file.clone(), 400),
        ("0", "load", file.clone(), 400),
        ("0", "save", json!({}), 400),
        ("0", "restore", json!({"filename": "../chat.bin"}), 400),
        ("0", "restore", json!({"filename": ".hidden"}), 400),
        ("0", "restore", json!({"filename": "none.bin"}), 404),
    ] {
        assert_eq!(act(&server, id, action, body).0, code, "{id} {action}");
    }
    fs::write(dir.path().join("wrong.bin"), "wrong").unwrap();
    let (status, wrong) = act(&server, "0", "restore", json!({"filename": "wrong.bin"}));
    assert_eq!((status, wrong["error"]["code"].as_str()), (400, Some("invalid_file")));
    assert_eq!(act(&Server::start(&demo(), &["--context", "64"]), "0", "save", file).0, 501);
}

#[cfg(unix)]
#[test]
fn saved_sequences_are_private_and_no_link_is_followed() {
    use std::os::unix::fs::{PermissionsExt, symlink};

    let dir = tempfile::tempdir().unwrap();
    let [folder, victim] = ["sessions", "victim"].map(|name| dir.path().join(name));
    let server = start(&demo(), &folder, &[]);
    ask(&server, &prompt("The old man"));
    let act = |action: &str, name: &str| {
        let answer = server.post(&format!("/slots/0?action={action}"), json!({"filename": name}));
        (answer.status, answer.json())
    };
    fs::write(&victim, "untouched").unwrap();
    symlink(&victim, folder.join("link.bin")).unwrap();
    let (status, refused) = act("restore", "link.bin");
    assert!(status == 400 && refused.to_string().contains("symbolic link"), "{refused}");
    assert_eq!(act("save", "link.bin").0, 200);
    assert_eq!(fs::read(&victim).unwrap(), b"untouched");
    fs::write(folder.join("open.bin"), "readable for all").unwrap();
    fs::set_permissions(folder.join("open.bin"), fs::Permissions::from_mode(0o666)).unwrap();
    assert_eq!(act("save", "open.bin").0, 200);
    server.stop();

    let saved = prefixes(&folder).remove(0);
    let modes = [&saved, &folder.join("link.bin"), &folder.join("open.bin")].map(|path| {
        let found = fs::symlink_metadata(path).unwrap();
        (found.is_file(), found.permissions().mode() & 0o777)
    });
    assert_eq!(modes, [(true, 0o600); 3]);
    // Nor is a link read that has the name of a sequence of the prefix cache.
    let moved = dir.path().join("moved");
    fs::rename(&saved, &moved).unwrap();
    symlink(&moved, &saved).unwrap();
    for name in ["link.bin", "open.bin"] {
        fs::remove_file(folder.join(name)).unwrap();
    }
    assert_eq!(ask(&start(&demo(), &folder, &[]), &prompt("The old man")).1, 0);
}
