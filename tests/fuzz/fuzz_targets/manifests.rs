//! Files `larder.json` beside the files of a small store, any JSON: the store is refused in one sentence, or can be
//! opened and checked. Manifests of format 2 get the checksum that a stranger can compute as well.

#![no_main]

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use larder_fuzz::{in_time, mutate_json};
use larder_runtime::{ModelOptions, OpenModel};
use libfuzzer_sys::{fuzz_mutator, fuzz_target};

/// A store whose manifest is replaced.
static STORE: LazyLock<PathBuf> = LazyLock::new(|| {
    let store = tempfile::tempdir().unwrap().keep().join("store");
    copy(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../stores/uniform"), &store);
    store
});

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let (source, target) = { let e = entry.unwrap(); (e.path(), to.join(e.file_name())) };
        if source.is_dir() { copy(&source, &target) } else { std::fs::copy(&source, &target).map(drop).unwrap() }
    }
}

fuzz_mutator!(|data: &mut [u8], size: usize, _max: usize, seed: u32| { mutate_json(data, size, seed) });

fuzz_target!(|bytes: &[u8]| {
    let sealed = serde_json::from_slice::<serde_json::Value>(bytes).ok().filter(|v| v["format"] == 2).map(|mut v| {
        v.as_object_mut().expect("it has a key").remove("checksum");
        let text = serde_json::to_string_pretty(&v).unwrap();
        let body = text.strip_suffix("\n}").unwrap().to_owned();
        let checksum = larder_store::checksum_of(body.as_bytes());
        format!("{body},\n  \"checksum\": \"{checksum}\"\n}}\n").into_bytes()
    });
    let store = STORE.as_path();
    std::fs::write(store.join("larder.json"), sealed.as_deref().unwrap_or(bytes)).unwrap();
    let opened = in_time(|| OpenModel::open(store, &ModelOptions::default()));
    match opened {
        Ok(model) => drop(in_time(|| model.bytes())),
        Err(error) => assert!(!format!("{error:#}").contains('\n'), "{error:#}"),
    }
    let _ = in_time(|| larder_store::verify(store, &()));
});
