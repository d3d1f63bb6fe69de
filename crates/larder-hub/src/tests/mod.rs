//! Downloads from a fake of the hub, with and without faults.

mod fake_hub;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_store::{ConvertOptions, ReadAt, Result, SafetensorsHeader, Source, StoreErrorKind, convert, open_source};
use parking_lot::Mutex;
use serde_json::json;

use self::fake_hub::{FakeHub, RecordedRequest, ScriptedReply};
use crate::{DownloadProgress, Hub, Repo, RetryPolicy};

const SHARDS: usize = 4;

/// A real model's files, with the weights split over several.
fn files() -> BTreeMap<String, Vec<u8>> {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/mixtral");
    let mut files = BTreeMap::new();
    for name in ["config.json", "tokenizer.json", "generation_config.json"] {
        files.insert(name.to_owned(), fs::read(golden.join(name)).unwrap());
    }
    files.insert("README.md".into(), b"not needed".to_vec());
    files.insert("q/small.gguf".into(), vec![7; 3_000_000]);
    let weights = ReadAt::open(&golden.join("model.safetensors")).unwrap();
    let tensors: Vec<_> = SafetensorsHeader::read(&weights).unwrap().tensors.into_iter().collect();
    let mut map = serde_json::Map::new();
    for (i, part) in tensors.chunks(tensors.len().div_ceil(SHARDS)).enumerate() {
        let name = format!("model-{:05}-of-{SHARDS:05}.safetensors", i + 1);
        let (mut header, mut data) = (serde_json::Map::new(), vec![]);
        for (tensor, entry) in part {
            let begin = data.len();
            data.extend(weights.read_vec(entry.start, entry.bytes as u64).unwrap());
            let offsets = [begin, data.len()];
            let dtype = format!("{:?}", entry.dtype);
            header.insert(tensor.clone(), json!({"dtype": dtype, "shape": entry.shape, "data_offsets": offsets}));
            map.insert(tensor.clone(), name.clone().into());
        }
        let header = serde_json::Value::from(header).to_string();
        files.insert(name, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat());
    }
    let index = json!({"metadata": {}, "weight_map": map}).to_string();
    files.insert("model.safetensors.index.json".into(), index.into_bytes());
    files
}

fn shard(n: usize) -> String {
    format!("model-{n:05}-of-{SHARDS:05}.safetensors")
}

fn retry_policy() -> RetryPolicy {
    let ms = Duration::from_millis;
    RetryPolicy { attempts: 4, first_pause: ms(10), response_timeout: ms(3000), transfer_timeout: ms(1500) }
}

fn make(source: &dyn Source, store: &Path) -> Result<()> {
    let blueprint = larder_model::blueprint(source.config()).unwrap();
    convert(source, &blueprint, store, &ConvertOptions::default(), &()).map(drop)
}

/// Downloads and converts.
fn fetch(endpoint: &str, token: Option<&str>, dir: &Path) -> Result<()> {
    let hub = Hub::new(endpoint, token.map(str::to_owned), retry_policy())?;
    let repo = Repo::open(hub, "o/n", "main", &dir.join("download"), Arc::new(()))?;
    make(&repo.checkpoint()?, &dir.join("store"))
}

/// Every file of the store at `root` with its content.
fn tree(root: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for path in fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()) {
            if path.is_dir() {
                folders.push(path)
            } else {
                drop(found.insert(path.strip_prefix(root).unwrap().to_owned(), fs::read(&path).unwrap()))
            }
        }
    }
    found
}

/// The store converted from the same files without a hub.
fn expected() -> BTreeMap<PathBuf, Vec<u8>> {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("source");
    fs::create_dir(&source).unwrap();
    for (name, bytes) in files().into_iter().filter(|(name, _)| !name.contains('/')) {
        fs::write(source.join(name), bytes).unwrap();
    }
    let store = dir.path().join("store");
    make(open_source(&source).unwrap().as_ref(), &store).unwrap();
    tree(&store)
}

/// The store must have exactly the expected files.
fn assert_expected(store: &Path) {
    let (got, want) = (tree(store), expected());
    let differ: Vec<_> = got.keys().chain(want.keys()).filter(|path| got.get(*path) != want.get(*path)).collect();
    assert!(differ.is_empty(), "{differ:?} differ");
}

/// Downloads from a hub with these replies; the store must be the expected one.
fn survives(script: impl Fn(&RecordedRequest, usize) -> ScriptedReply + Send + Sync + 'static) -> FakeHub {
    let server = FakeHub::start(files(), None, Box::new(script));
    let dir = tempfile::tempdir().unwrap();
    fetch(&server.endpoint(), None, dir.path()).unwrap();
    assert_expected(&dir.path().join("store"));
    server
}

/// Downloads from a hub with these replies, which must fail; returns the error.
fn fails(script: impl Fn(&RecordedRequest, usize) -> ScriptedReply + Send + Sync + 'static) -> String {
    let server = FakeHub::start(files(), None, Box::new(script));
    let dir = tempfile::tempdir().unwrap();
    let error = fetch(&server.endpoint(), None, dir.path()).unwrap_err();
    assert!(!dir.path().join("store/larder.json").exists());
    error.to_string()
}

#[test]
fn a_model_is_converted_while_it_downloads() {
    let server = survives(|_, _| ScriptedReply::Normal);
    let requests = server.log();
    assert!(requests.iter().all(|a| !a.path.contains("README") && !a.path.contains("gguf")), "{requests:?}");
    for n in 1..=SHARDS {
        assert_eq!(server.ranges(&shard(n)).iter().filter(|range| range.is_none()).count(), 1, "shard {n}, once");
    }
}

#[test]
fn the_token_is_sent_to_the_hub_only() {
    let server = FakeHub::start(files(), Some("secret"), Box::new(|_, _| ScriptedReply::Normal));
    let dir = tempfile::tempdir().unwrap();
    let without = fetch(&server.endpoint(), None, dir.path()).unwrap_err().to_string();
    assert!(without.contains("401") && without.contains("set HF_TOKEN"), "{without}");
    let wrong = fetch(&server.endpoint(), Some("other"), dir.path()).unwrap_err().to_string();
    assert!(wrong.contains("does not accept the token") && !wrong.contains("other"), "{wrong}");
    fetch(&server.endpoint(), Some("secret"), dir.path()).unwrap();
    let (cdn, hub): (Vec<_>, Vec<_>) = server.log().into_iter().partition(|a| a.host == server.cdn.to_string());
    assert!(cdn.len() >= SHARDS && cdn.iter().all(|a| a.token.is_none()));
    assert!(hub.iter().any(|a| a.token.as_deref() == Some("Bearer secret")));
}

#[test]
fn transient_errors_are_retried() {
    survives(|request, before| match request.path.as_str() {
        path if path.starts_with("/api/") && before < 2 => ScriptedReply::Status(503, ""),
        path if path.ends_with("config.json") && before == 0 => ScriptedReply::Status(429, "Retry-After: 0\r\n"),
        path if path.starts_with("/cdn/") && before == 0 => ScriptedReply::Status(500, ""),
        path if path.starts_with("/cdn/") && before == 1 => ScriptedReply::Truncate(100),
        _ => ScriptedReply::Normal,
    });
}

#[test]
fn retry_after_is_obeyed() {
    #[derive(Default)]
    struct Pauses(Mutex<Vec<Duration>>);
    impl DownloadProgress for Pauses {
        fn begin(&self, _: &str, _: u64, _: u64) {}
        fn advance(&self, _: u64) {}
        fn end(&self) {}
        fn pause(&self, _: &str, pause: Duration) {
            self.0.lock().push(pause);
        }
    }
    let script = |_: &RecordedRequest, before: usize| {
        if before == 0 { ScriptedReply::Status(429, "Retry-After: 1\r\n") } else { ScriptedReply::Normal }
    };
    let server = FakeHub::start(files(), None, Box::new(script));
    let dir = tempfile::tempdir().unwrap();
    let pauses = Arc::new(Pauses::default());
    let hub = Hub::new(&server.endpoint(), None, retry_policy()).unwrap();
    Repo::open(hub, "o/n", "main", dir.path(), pauses.clone()).unwrap();
    assert_eq!(*pauses.0.lock(), [Duration::from_secs(1)]);
}

#[test]
fn interrupted_transfers_are_resumed() {
    let name = shard(2);
    let server = survives(move |request, _| match (request.path.ends_with(&name), &request.range) {
        (true, None) if request.path.starts_with("/cdn/") => ScriptedReply::Truncate(5000),
        _ => ScriptedReply::Normal,
    });
    assert!(server.ranges(&shard(2)).contains(&Some("bytes=5000-".into())), "{:?}", server.ranges(&shard(2)));
}

#[test]
fn a_stalled_transfer_is_resumed() {
    let name = format!("/cdn/{}", shard(1));
    let server = survives(move |request, _| {
        if request.path == name && request.range.is_none() { ScriptedReply::Stall(4000) } else { ScriptedReply::Normal }
    });
    assert!(server.ranges(&shard(1)).iter().flatten().any(|range| range.starts_with("bytes=4000")));
}

#[test]
fn without_range_support_the_whole_file_is_sent_again() {
    survives(|request, _| match &request.range {
        None if request.path.starts_with("/cdn/") => ScriptedReply::Truncate(3000),
        Some(_) => ScriptedReply::IgnoreRange,
        None => ScriptedReply::Normal,
    });
}

#[test]
fn wrong_files_are_downloaded_once_more_and_then_refused() {
    let path = format!("/cdn/{}", shard(3));
    let at = path.clone();
    // The early header is one request, the data another.
    survives(move |request, _| match request.path == at && request.range.is_none() {
        true if WRONG_ONCE.lock().replace(()).is_none() => ScriptedReply::Corrupt,
        _ => ScriptedReply::Normal,
    });
    let error = fails(move |request, _| {
        if request.path == path && request.range.is_none() { ScriptedReply::Corrupt } else { ScriptedReply::Normal }
    });
    assert!(error.contains("was wrong twice") && error.contains(&shard(3)), "{error}");
    let small =
        fails(
            |request, _| {
                if request.path.ends_with("/config.json") { ScriptedReply::Corrupt } else { ScriptedReply::Normal }
            },
        );
    assert!(small.contains("was wrong twice") && small.contains("config.json"), "{small}");
}

static WRONG_ONCE: Mutex<Option<()>> = Mutex::new(None);

/// A file system of this many bytes, unmounted when dropped; `None` where mounting is not allowed.
#[cfg(target_os = "linux")]
struct SmallDisk(PathBuf);

#[cfg(target_os = "linux")]
impl SmallDisk {
    fn mount(at: PathBuf, bytes: u32) -> Option<Self> {
        fs::create_dir(&at).unwrap();
        let disk = SmallDisk(at);
        let mounted = disk.mounted(&format!("size={bytes}"));
        mounted.then_some(disk).or_else(|| {
            println!("skipped: a file system cannot be mounted here");
            None
        })
    }

    fn mounted(&self, options: &str) -> bool {
        let output = Command::new("mount").args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(&self.0).output();
        output.is_ok_and(|output| output.status.success())
    }
}

#[cfg(target_os = "linux")]
impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).output();
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_said_and_the_download_is_resumed_with_more_room() {
    let dir = tempfile::tempdir().unwrap();
    let Some(disk) = SmallDisk::mount(dir.path().join("small"), 40 << 10) else { return };
    let server = FakeHub::start(files(), None, Box::new(|_, _| ScriptedReply::Normal));
    let error = fetch(&server.endpoint(), None, &disk.0).unwrap_err();
    assert_eq!(error.kind, StoreErrorKind::NoSpace, "{error}");
    assert!(!disk.0.join("store/larder.json").exists());
    assert!(disk.mounted("remount,size=16m"));
    fetch(&server.endpoint(), None, &disk.0).unwrap();
    assert_expected(&disk.0.join("store"));
}

#[test]
fn permanent_errors_are_reported() {
    let at_weights = |reply: ScriptedReply| {
        move |request: &RecordedRequest, _: usize| {
            if request.path.starts_with("/cdn/") { reply.clone() } else { ScriptedReply::Normal }
        }
    };
    assert!(fails(|_, _| ScriptedReply::Status(404, "")).contains("no such model, revision or file"));
    assert!(fails(|_, _| ScriptedReply::Status(403, "")).contains("accept the model's terms"));
    assert!(fails(|_, _| ScriptedReply::Status(302, "Location: file:///etc/passwd\r\n")).contains("is not allowed"));
    assert!(fails(|_, _| ScriptedReply::Status(302, "Location: /api\r\n")).contains("more than 5 redirects"));
    assert!(fails(|_, _| ScriptedReply::Status(418, "")).contains("418"));
    assert!(fails(at_weights(ScriptedReply::Status(503, ""))).contains("503"));
    assert!(fails(at_weights(ScriptedReply::Truncate(0))).contains("model-0000"));
    let wrong_length = |request: &RecordedRequest, _: usize| {
        if request.path.starts_with("/cdn/") && request.range.is_none() {
            ScriptedReply::WrongLength
        } else {
            ScriptedReply::Normal
        }
    };
    assert!(fails(wrong_length).contains("expected was"));
}

#[test]
fn a_gguf_file_is_downloaded_alone() {
    let server = FakeHub::start(files(), None, Box::new(|_, _| ScriptedReply::Normal));
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::new(&server.endpoint(), None, retry_policy()).unwrap();
    let repo = Repo::open(hub, "o/n", "main", dir.path(), Arc::new(())).unwrap();
    let path = repo.gguf("q/small.gguf").unwrap();
    assert_eq!((path.parent(), fs::read(&path).unwrap()), (Some(dir.path()), vec![7; 3_000_000]));
    let missing = repo.gguf("q/other.gguf").unwrap_err().to_string();
    assert!(missing.contains("has no file 'q/other.gguf'") && missing.contains("q/small.gguf"), "{missing}");
}

#[test]
fn a_hub_that_is_not_there_is_asked_once_and_leaves_nothing() {
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let refused = fetch(&format!("http://{closed}"), None, dir.path()).unwrap_err().to_string();
    assert!(
        refused.contains(&format!("http://{closed} cannot be reached")) && refused.contains("HF_ENDPOINT"),
        "{refused}"
    );
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn two_downloads_into_one_folder_are_refused() {
    let server = FakeHub::start(files(), None, Box::new(|_, _| ScriptedReply::Normal));
    let dir = tempfile::tempdir().unwrap();
    let open = || {
        let hub = Hub::new(&server.endpoint(), None, retry_policy())?;
        Repo::open(hub, "o/n", "main", dir.path(), Arc::new(()))
    };
    let first = open().unwrap();
    assert_eq!(open().err().unwrap().kind, StoreErrorKind::Taken);
    drop(first);
    open().unwrap();
}

#[test]
fn a_lost_shard_makes_its_file_download_again() {
    let server = FakeHub::start(files(), None, Box::new(|_, _| ScriptedReply::Normal));
    let dir = tempfile::tempdir().unwrap();
    fetch(&server.endpoint(), None, dir.path()).unwrap();
    let store = dir.path().join("store");
    let whole = tree(&store);
    // As if the conversion had been stopped near its end, and a finished shard had been damaged since.
    let state = fs::read(dir.path().join("download/commit")).unwrap();
    assert_eq!(state, fake_hub::COMMIT.as_bytes());
    let dir2 = tempfile::tempdir().unwrap();
    let stop = FakeHub::start(
        files(),
        None,
        Box::new(|request, _| match request.path.ends_with(&shard(SHARDS)) {
            true if request.range.is_none() => ScriptedReply::Status(403, ""),
            _ => ScriptedReply::Normal,
        }),
    );
    fetch(&stop.endpoint(), None, dir2.path()).unwrap_err();
    let store = dir2.path().join("store");
    let lost = tree(&store).into_keys().find(|p| p.to_str().unwrap().contains("E000")).unwrap();
    fs::remove_file(store.join(&lost)).unwrap();
    fetch(&server.endpoint(), None, dir2.path()).unwrap();
    assert!(tree(&store) == whole);
}

/// Stops a download with a conversion at its last file.
fn stopped(dir: &Path) {
    let last = format!("/cdn/{}", shard(SHARDS));
    let refuse = move |request: &RecordedRequest, _: usize| {
        if request.path == last && request.range.is_none() {
            ScriptedReply::Status(403, "")
        } else {
            ScriptedReply::Normal
        }
    };
    let server = FakeHub::start(files(), None, Box::new(refuse));
    fetch(&server.endpoint(), None, dir).unwrap_err();
    assert!(dir.join("store/convert.json").exists() && !dir.join("store/larder.json").exists());
}

#[test]
fn a_conversion_is_not_resumed_with_other_weights_of_the_same_headers() {
    let mut retrained = files();
    let weights = retrained.get_mut(&shard(1)).unwrap();
    let end = weights.len();
    weights[end - 100..].iter_mut().for_each(|byte| *byte ^= 1);
    let server = FakeHub::start(retrained, None, Box::new(|_, _| ScriptedReply::Normal));
    let dir = tempfile::tempdir().unwrap();
    stopped(dir.path());
    // The download was removed, and the branch has moved since.
    fs::remove_dir_all(dir.path().join("download")).unwrap();
    let error = fetch(&server.endpoint(), None, dir.path()).unwrap_err().to_string();
    assert!(error.contains("of a source that has changed since"), "{error}");
    // The same weights again.
    let server = FakeHub::start(files(), None, Box::new(|_, _| ScriptedReply::Normal));
    fs::remove_dir_all(dir.path().join("download")).unwrap();
    fetch(&server.endpoint(), None, dir.path()).unwrap();
    assert_expected(&dir.path().join("store"));
}

#[test]
fn files_of_an_unknown_commit_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    stopped(dir.path());
    let server = FakeHub::start(files(), None, Box::new(|_, _| ScriptedReply::Normal));
    let commit = dir.path().join("download/commit");
    for lost in [None, Some("")] {
        fs::remove_file(&commit).unwrap();
        lost.into_iter().for_each(|text| fs::write(&commit, text).unwrap());
        let error = fetch(&server.endpoint(), None, dir.path()).unwrap_err().to_string();
        assert!(error.contains("no record of the commit"), "{error}");
        fs::write(&commit, fake_hub::COMMIT).unwrap();
    }
    fetch(&server.endpoint(), None, dir.path()).unwrap();
    assert_expected(&dir.path().join("store"));
}

#[test]
fn lost_or_damaged_samples_do_not_change_the_store() {
    for damage in ["", "0123456789abcdef\n{}", "\u{fffd}"] {
        let dir = tempfile::tempdir().unwrap();
        stopped(dir.path());
        let samples = dir.path().join("download").join(format!("{}.samples", shard(1)));
        assert!(samples.exists());
        match damage {
            "" => fs::remove_file(&samples).unwrap(),
            damage => fs::write(&samples, damage).unwrap(),
        }
        let server = FakeHub::start(files(), None, Box::new(|_, _| ScriptedReply::Normal));
        fetch(&server.endpoint(), None, dir.path()).unwrap();
        assert_expected(&dir.path().join("store"));
    }
}

/// The process that the test below kills; does nothing without its environment variables.
#[test]
fn child() {
    if let (Ok(endpoint), Ok(dir)) = (std::env::var("HUB_TEST_ENDPOINT"), std::env::var("HUB_TEST_DIR")) {
        fetch(&endpoint, None, Path::new(&dir)).unwrap();
    }
}

#[test]
fn a_killed_process_is_resumed() {
    let name = format!("/cdn/{}", shard(3));
    let at = name.clone();
    let server = FakeHub::start(
        files(),
        None,
        Box::new(move |request, before| {
            if request.path == at && request.range.is_none() && before < 2 {
                ScriptedReply::Stall(6000)
            } else {
                ScriptedReply::Normal
            }
        }),
    );
    let dir = tempfile::tempdir().unwrap();
    let part = dir.path().join("download").join(format!("{}.part", shard(3)));
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "tests::child"])
        .env("HUB_TEST_ENDPOINT", server.endpoint())
        .env("HUB_TEST_DIR", dir.path())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let started = Instant::now();
    while fs::metadata(&part).map_or(0, |m| m.len()) < 6000 {
        assert!(started.elapsed() < Duration::from_secs(10), "{:?}", server.log());
        std::thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let before = server.log().len();
    fetch(&server.endpoint(), None, dir.path()).unwrap();
    assert_expected(&dir.path().join("store"));
    let after = &server.log()[before..];
    let first = format!("/cdn/{}", shard(1));
    assert!(after.iter().all(|a| a.path != first), "the first file was downloaded again: {after:?}");
    assert!(after.iter().any(|a| a.path == name && a.range.as_deref() == Some("bytes=6000-")), "{after:?}");
}
