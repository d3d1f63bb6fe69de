//! Stores: made, interrupted, damaged, read back.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::support::{command, fixture, golden_models, larder, larder_ok, larder_refuses};

pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

pub fn convert(source: &Path, store: &Path, flags: &[&str]) {
    let mut args = vec!["convert", text(source), text(store)];
    args.extend_from_slice(flags);
    larder_ok(&args);
}

/// Everything in a folder, by relative name.
pub fn contents(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut all = BTreeMap::new();
    let mut open = vec![folder.to_owned()];
    while let Some(dir) = open.pop() {
        for entry in std::fs::read_dir(&dir).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => open.push(path),
                false => drop(all.insert(path.strip_prefix(folder).unwrap().to_owned(), std::fs::read(&path).unwrap())),
            }
        }
    }
    all
}

fn logits(model: &Path, out: &Path) -> Vec<u8> {
    logits_with(model, out, &[])
}

pub fn logits_with(model: &Path, out: &Path, flags: &[&str]) -> Vec<u8> {
    let tokens = out.with_extension("json");
    std::fs::write(&tokens, "[5, 17, 3, 3, 60, 41, 8]").unwrap();
    let base =
        ["logits", "-m", text(model), "--tokens", text(&tokens), "--out", text(out), "--force", "--generate", "5"];
    larder_ok(&[&base[..], flags].concat());
    std::fs::read(out).unwrap()
}

#[test]
fn a_store_gives_the_bits_of_its_checkpoint() {
    for model in golden_models() {
        let dir = tempfile::tempdir().unwrap();
        let store = dir.path().join("store");
        convert(&model, &store, &[]);
        larder_ok(&["verify", text(&store)]);
        assert_eq!(logits(&model, &dir.path().join("a")), logits(&store, &dir.path().join("b")), "{}", model.display());
    }
}

#[test]
fn quantised_stores_stay_near_the_checkpoint() {
    for model in golden_models() {
        let dir = tempfile::tempdir().unwrap();
        let exact = full_logits(&logits(&model, &dir.path().join("exact")));
        let experts =
            [("f16", 0.02), ("bf16", 0.1), ("q8_0", 0.2), ("q4_0", 1.0)].map(|(k, most)| ("--experts", k, most));
        let resident = [("f32", 0.0), ("f16", 0.02), ("q8_0", 0.4)].map(|(k, most)| ("--resident", k, most));
        for (flag, kind, most) in experts.into_iter().chain(resident) {
            let store = dir.path().join(format!("{flag}{kind}"));
            convert(&model, &store, &[flag, kind]);
            larder_ok(&["verify", text(&store)]);
            let near = full_logits(&logits_with(&store, &dir.path().join("out"), &["-oexact"]));
            let off = relative_error(&near, &exact);
            assert!(off <= most, "{} with {flag} {kind}: {off} off", model.display());
            // Rounded activations may turn a close choice of experts, which in a model this small is much.
            let fast = relative_error(&full_logits(&logits(&store, &dir.path().join("fast"))), &near);
            assert!(fast <= 0.5, "{} with {flag} {kind}: rounded activations are {fast} off", model.display());
            let quantised = kind.starts_with('q');
            assert!(off > 0.0 || !quantised, "{} with {flag} {kind}: nothing was quantised", model.display());
        }
    }
}

pub fn full_logits(bytes: &[u8]) -> Vec<f32> {
    let file = safetensors::SafeTensors::deserialize(bytes).unwrap();
    let view = file.tensor("full_logits").unwrap();
    view.data().as_chunks::<4>().0.iter().map(|w| f32::from_le_bytes(*w)).collect()
}

pub fn relative_error(got: &[f32], want: &[f32]) -> f32 {
    let off: f32 = got.iter().zip(want).map(|(g, w)| (g - w) * (g - w)).sum();
    (off / want.iter().map(|w| w * w).sum::<f32>()).sqrt()
}

#[test]
fn a_killed_conversion_ends_as_an_undisturbed_one() {
    let model = fixture("golden/qwen2_moe"); // sharded
    let dir = tempfile::tempdir().unwrap();
    let undisturbed = dir.path().join("undisturbed");
    convert(&model, &undisturbed, &["--experts", "q8_0"]);
    let want = contents(&undisturbed);

    let (mut killed, store) = (0, dir.path().join("store"));
    for round in 0..30 {
        let args = ["convert", text(&model), text(&store), "--experts", "q8_0"];
        let mut child = command().args(args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        // From the moment at which it begins to write, however long starting takes on this machine.
        while !store.exists() && child.try_wait().unwrap().is_none() {
            std::hint::spin_loop();
        }
        std::thread::sleep(Duration::from_micros(150 * round));
        child.kill().unwrap();
        child.wait().unwrap();
        if store.exists() && !store.join("larder.json").exists() {
            killed += 1;
            let said = larder_refuses(&["inspect", text(&store)]);
            assert!(said.contains("not finished") || said.contains("config.json"), "{said}");
        }
        larder(&args); // fails only if the killed one had finished
        assert!(contents(&store) == want, "round {round}: the store differs");
        std::fs::remove_dir_all(&store).unwrap();
    }
    assert!(killed >= 3, "only {killed} conversions were stopped half way");
}

#[test]
fn damage_is_found_and_named() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    convert(&fixture("golden/olmoe"), &store, &[]);
    let shard = store.join("experts").join(first(&store.join("experts")));
    let shard = shard.join(first(&shard));
    let whole = std::fs::read(&shard).unwrap();
    let tokens = dir.path().join("tokens.json");
    std::fs::write(&tokens, "[5, 17, 3]").unwrap();
    let out = dir.path().join("out.safetensors");
    let run = ["logits", "-m", text(&store), "--tokens", text(&tokens), "--out", text(&out), "--force", "--cache=all"];

    let mut flipped = whole.clone();
    flipped[4096 + 77] ^= 4;
    for (damage, name) in [(flipped, "a flipped bit"), (whole[..whole.len() - 1].to_vec(), "a short file")] {
        std::fs::write(&shard, damage).unwrap();
        for said in [larder_refuses(&["verify", text(&store)]), larder_refuses(&run)] {
            assert!(said.starts_with("error: "), "{name}: {said}");
        }
        let said = larder_refuses(&run);
        assert!(said.contains(text(&shard)), "{name}: {said}");
    }
    std::fs::remove_file(&shard).unwrap();
    assert!(larder_refuses(&run).contains(text(&shard)));
    std::fs::write(&shard, &whole).unwrap();
    larder_ok(&run);

    let manifest = store.join("larder.json");
    let newer = std::fs::read_to_string(&manifest).unwrap().replacen("\"format\": 2", "\"format\": 3", 1);
    std::fs::write(&manifest, newer).unwrap();
    assert!(larder_refuses(&run).contains("has store format 3"), "{}", larder_refuses(&run));
}

fn first(dir: &Path) -> PathBuf {
    let mut names: Vec<_> = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    names[0].clone().into()
}

#[test]
fn bad_targets_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let model = fixture("golden/olmoe");
    let store = dir.path().join("store");
    convert(&model, &store, &[]);
    let said = larder_refuses(&["convert", text(&model), text(&store)]);
    assert!(said.contains(text(&store)), "{said}");
    let file = dir.path().join("file");
    std::fs::write(&file, "mine").unwrap();
    larder_refuses(&["convert", text(&model), text(&file)]);
    assert_eq!(std::fs::read(&file).unwrap(), b"mine");
    larder_refuses(&["convert", text(&model), "/proc/larder-store"]);
    assert_eq!(larder(&["convert", text(&model), text(&store), "--experts", "q9_k"]).status.code(), Some(2));
}

/// A file system of a few kilobytes, unmounted when dropped; `None` where mounting is not allowed.
pub struct SmallDisk(pub PathBuf);

impl SmallDisk {
    pub fn mount(at: &Path, options: &str) -> Option<Self> {
        std::fs::create_dir(at).unwrap();
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", options, "tmpfs", text(at)]).output();
        match mounted.is_ok_and(|o| o.status.success()) {
            true => Some(SmallDisk(at.to_owned())),
            false => {
                println!("skipped: a file system cannot be mounted here");
                None
            }
        }
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

#[test]
fn a_full_disk_is_said_and_nothing_is_lost() {
    let dir = tempfile::tempdir().unwrap();
    let Some(disk) = SmallDisk::mount(&dir.path().join("small"), "size=64k") else { return };
    let said = larder_refuses(&["convert", text(&fixture("golden/olmoe")), text(&disk.0.join("store"))]);
    assert!(said.contains("space") || said.contains("free"), "{said}");
    assert_eq!(std::fs::read_dir(&disk.0).unwrap().count(), 0, "something was left behind");
}

/// Runs the command, which must fail, where files may have so many blocks of 512 bytes; returns its error.
pub fn limited(blocks: u32, args: &[&str]) -> String {
    let command = command();
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let words = words.map(|word| word.to_str().unwrap()).chain(args.iter().copied());
    let line: Vec<_> = words.map(|word| format!("'{word}'")).collect();
    let line = format!("ulimit -f {blocks}; exec {}", line.join(" "));
    let output = Command::new("sh").args(["-c", &line]).output().unwrap();
    // A program that a signal ends has no exit code.
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn a_limit_of_file_sizes_is_an_error_and_the_conversion_is_resumed() {
    let dir = tempfile::tempdir().unwrap();
    let (model, store, whole) = (fixture("golden/olmoe"), dir.path().join("store"), dir.path().join("whole"));
    convert(&model, &whole, &[]);
    let args = ["convert", text(&model), text(&store)];
    for blocks in [16, 100, 130] {
        let said = limited(blocks, &args);
        assert!(said.starts_with("error: ") && said.lines().count() == 1, "{said}");
        assert!(said.contains("writing failed: file too large; raise the limit of file sizes"), "{said}");
        let left = contents(&store);
        assert!(left.keys().all(|name| name.extension().is_none_or(|e| e != "tmp")), "{:?}", left.keys());
        assert!(!left.contains_key(Path::new("larder.json")));
    }
    larder_ok(&args);
    assert!(contents(&store) == contents(&whole));
}

#[test]
fn two_conversions_at_once_make_one_store() {
    let dir = tempfile::tempdir().unwrap();
    let (model, whole) = (fixture("golden/qwen2_moe"), dir.path().join("whole"));
    convert(&model, &whole, &[]);
    let want = contents(&whole);
    for round in 0..10 {
        let store = dir.path().join(format!("store{round}"));
        let start = || {
            let args = ["convert", text(&model), text(&store)];
            command().args(args).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let ends = [start(), start()].map(|child| child.wait_with_output().unwrap());
        assert!(contents(&store) == want, "round {round}");
        let refused: Vec<_> = ends.iter().filter(|end| !end.status.success()).collect();
        assert_eq!(refused.len(), 1, "round {round}: {ends:?}");
        let said = String::from_utf8_lossy(&refused[0].stderr);
        let reasons = ["is being written by another conversion", "already holds a store", "was removed by another"];
        assert!(reasons.iter().any(|reason| said.contains(reason)), "{said}");
    }
}

#[test]
fn a_store_is_not_made_inside_its_source() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("source");
    super::formats::copied(&fixture("golden/olmoe"), &source);
    let before = contents(&source);
    for target in [source.clone(), source.join("store"), source.join("a/b")] {
        let said = larder_refuses(&["convert", text(&source), text(&target)]);
        assert!(said.contains("lies inside its source"), "{said}");
    }
    assert!(contents(&source) == before);
    let gguf = dir.path().join("m.gguf");
    std::fs::copy(fixture("fixtures/gguf/tiny-olmoe-q4_0.gguf"), &gguf).unwrap();
    larder_refuses(&["convert", text(&gguf), text(&gguf)]);
    larder_refuses(&["convert", text(&gguf), text(&gguf.join("store"))]);
    assert!(gguf.is_file());
}

#[test]
fn a_read_only_target_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let Some(disk) = SmallDisk::mount(&dir.path().join("fixed"), "ro") else { return };
    let said = larder_refuses(&["convert", text(&fixture("golden/olmoe")), text(&disk.0.join("store"))]);
    assert!(said.contains("read-only"), "{said}");
}

/// Python's own reader opens every shard, where it is installed; `LARDER_PYTHON` names an interpreter that has it.
#[test]
fn python_opens_every_shard() {
    let python = std::env::var("LARDER_PYTHON").unwrap_or_else(|_| "python3".into());
    let there = Command::new(&python).args(["-c", "import safetensors, numpy"]).output();
    if !there.is_ok_and(|o| o.status.success()) {
        println!("skipped: {python} has no safetensors package");
        return;
    }
    for (model, kind) in [("gpt_oss", "keep"), ("olmoe", "q4_0"), ("qwen3_moe", "q8_0"), ("mixtral", "bf16")] {
        let dir = tempfile::tempdir().unwrap();
        let store = dir.path().join("store");
        convert(&fixture("golden").join(model), &store, &["--experts", kind, "--resident", kind]);
        let script = fixture("../scripts/check/check_shards.py");
        let output = Command::new(&python).args([text(&script), text(&store)]).output().unwrap();
        assert!(output.status.success(), "{model}: {}", String::from_utf8_lossy(&output.stderr));
    }
}
