//! A store runs for the source that it was made of and for no other: swapped GGUF files, and what is remembered about
//! them.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::Duration;

use super::convert::{contents, limited, text};
use crate::support::{command, fixture, larder_ok, larder_refuses};

const GGUF: &str = "tiny-olmoe-q4_0.gguf";
const REFUSAL: &str = "is a store that was made of another GGUF file; remove it, or use -o no-store";

/// A GGUF file with its store, and a cache folder of its own.
struct Swapped {
    dir: tempfile::TempDir,
    gguf: PathBuf,
}

impl Swapped {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let gguf = dir.path().join(GGUF);
        fs::copy(fixture("fixtures/gguf").join(GGUF), &gguf).unwrap();
        Swapped { dir, gguf }
    }

    fn cache(&self) -> PathBuf {
        self.dir.path().join("cache")
    }

    /// The files that remember what was found.
    fn remembered(&self) -> Vec<PathBuf> {
        let folder = self.cache().join("larder/sources");
        let entries = fs::read_dir(folder).into_iter().flatten();
        entries.map(|entry| entry.unwrap().path()).collect()
    }

    fn run(&self) -> Output {
        let args = ["run", "-m", text(&self.gguf), "-p", "the", "-n", "5", "--ignore-eos"];
        command().env("XDG_CACHE_HOME", self.cache()).args(args).output().unwrap()
    }

    fn runs(&self) -> String {
        let output = self.run();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    fn is_refused(&self) {
        let output = self.run();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && said.contains(REFUSAL), "{said}");
    }

    /// Other weights of the same length.
    fn other(&self) -> Vec<u8> {
        let mut bytes = fs::read(&self.gguf).unwrap();
        let at = bytes.len() - 40;
        bytes[at..].iter_mut().for_each(|byte| *byte ^= 1);
        bytes
    }
}

fn modified(path: &Path) -> std::time::SystemTime {
    fs::metadata(path).unwrap().modified().unwrap()
}

#[test]
fn a_swapped_gguf_file_is_refused_also_with_the_old_time() {
    let model = Swapped::new();
    let want = model.runs();
    // Old enough that what is found is remembered.
    std::thread::sleep(Duration::from_millis(3100));
    assert_eq!(model.runs(), want);
    assert_eq!(model.remembered().len(), 1);
    assert_eq!(model.runs(), want);
    let (good, time) = (fs::read(&model.gguf).unwrap(), modified(&model.gguf));
    let set_back = |path: &Path| File::options().write(true).open(path).unwrap().set_modified(time).unwrap();
    // In place, with the old time: the same inode, length and time.
    fs::write(&model.gguf, model.other()).unwrap();
    set_back(&model.gguf);
    assert_eq!(modified(&model.gguf), time);
    model.is_refused();
    fs::write(&model.gguf, &good).unwrap();
    set_back(&model.gguf);
    assert_eq!(model.runs(), want);
    // Another file under the name, with the old time.
    let other = model.dir.path().join("other");
    fs::write(&other, model.other()).unwrap();
    set_back(&other);
    fs::rename(&other, &model.gguf).unwrap();
    model.is_refused();
}

#[test]
fn a_damaged_or_unwritable_cache_changes_nothing() {
    let model = Swapped::new();
    let want = model.runs();
    std::thread::sleep(Duration::from_millis(3100));
    model.runs();
    let [entry] = &model.remembered()[..] else { panic!("one file is remembered") };
    let good = fs::read(entry).unwrap();
    for damage in [&b""[..], b"\xff\x00", &good[..good.len() / 2], &vec![b'7'; 2 << 20]] {
        fs::write(entry, damage).unwrap();
        assert_eq!(model.runs(), want);
        assert_eq!(fs::read(entry).unwrap(), good, "it is found again and remembered");
    }
    // A cache entry for one content does not hold for another.
    let claimed = String::from_utf8(good.clone()).unwrap();
    let (_, files) = claimed.split_once('\n').unwrap();
    fs::write(entry, format!("00000000000000000000000000000000\n{files}")).unwrap();
    assert_eq!(model.runs(), want);
    // No folder can be made where a file is.
    fs::remove_dir_all(model.cache()).unwrap();
    fs::write(model.cache(), "a file").unwrap();
    assert_eq!(model.runs(), want);
    fs::write(&model.gguf, model.other()).unwrap();
    model.is_refused();
}

#[test]
fn a_file_that_was_renamed_with_its_store_is_the_same() {
    let mut model = Swapped::new();
    let want = model.runs();
    let renamed = model.dir.path().join("renamed.gguf");
    fs::rename(&model.gguf, &renamed).unwrap();
    fs::rename(model.gguf.with_extension("larder"), renamed.with_extension("larder")).unwrap();
    model.gguf = renamed;
    assert_eq!(model.runs(), want);
    fs::write(&model.gguf, model.other()).unwrap();
    model.is_refused();
}

#[test]
fn a_store_beside_a_file_says_nothing_of_paths_and_times() {
    let (one, two) = (Swapped::new(), Swapped::new());
    one.runs();
    std::thread::sleep(Duration::from_millis(1100));
    two.runs();
    let store = |model: &Swapped| contents(&model.gguf.with_extension("larder"));
    assert!(store(&one) == store(&two));
}

#[test]
fn a_conversion_is_not_resumed_with_other_weights_of_the_same_headers() {
    let dir = tempfile::tempdir().unwrap();
    let (source, store) = (dir.path().join("source"), dir.path().join("store"));
    fs::create_dir(&source).unwrap();
    for (name, bytes) in contents(&fixture("golden/olmoe")) {
        if name.parent() == Some(Path::new("")) {
            fs::write(source.join(name), bytes).unwrap();
        }
    }
    let args = ["convert", text(&source), text(&store)];
    larder_ok(&args);
    let whole = contents(&store);
    fs::remove_dir_all(&store).unwrap();
    assert!(limited(16, &args).contains("file too large"));
    assert!(store.join("convert.json").exists());
    let weights = source.join("model.safetensors");
    let (good, time) = (fs::read(&weights).unwrap(), modified(&weights));
    let mut other = good.clone();
    *other.last_mut().unwrap() ^= 1;
    fs::write(&weights, other).unwrap();
    File::options().write(true).open(&weights).unwrap().set_modified(time).unwrap();
    let said = larder_refuses(&args);
    assert!(said.contains("of a source that has changed since") && said.contains("remove the folder"), "{said}");
    fs::write(&weights, good).unwrap();
    larder_ok(&args);
    assert!(contents(&store) == whole);
}
