//! Tests of upgrading: the committed stores of format 1, interruptions at every step, damage.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use super::*;
use crate::{error::StoreErrorKind, expert_source::ExpertSource, store::Store, testing::files, verify::verify};

const STORES: [&str; 2] = ["v1-uniform", "v1-mixed"];

/// The files of a store that was written by larder when its format was 1.
fn old(name: &str) -> BTreeMap<PathBuf, Vec<u8>> {
    files(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/stores").join(name))
}

fn written(root: &Path, files: &BTreeMap<PathBuf, Vec<u8>>) {
    if root.exists() {
        fs::remove_dir_all(root).unwrap();
    }
    for (name, bytes) in files {
        let path = root.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
}

/// All experts of a store.
fn experts(store: &Store) -> Vec<Vec<u8>> {
    let shards =
        store.manifest().geometry.moe_layers.iter().flat_map(|layer| {
            (0..store.manifest().geometry.experts).map(|e| (*layer, larder_core::ExpertId(e as u16)))
        });
    let read = shards.map(|(layer, expert)| {
        let mut data = vec![1; store.layout(layer).bytes];
        store.read_expert(layer, expert, &mut data).unwrap();
        data
    });
    read.collect()
}

#[test]
fn a_store_of_format_1_opens_and_an_upgrade_keeps_every_expert() {
    for name in STORES {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store");
        written(&path, &old(name));
        assert!(verify(&path, &()).unwrap().is_good());
        let before = Store::open(&path).unwrap();
        assert_eq!(before.manifest().format, 1);
        let want = experts(&before);
        let layer = before.manifest().geometry.moe_layers[0];
        let segment = before.layout(layer).segments()[0].clone();
        let fresh = Store::open(&path).unwrap();
        let refused = fresh.check_segment(layer, larder_core::ExpertId(0), 0, &want[0][segment.clone()]).unwrap_err();
        assert_eq!(refused.kind, StoreErrorKind::Unsupported);
        let report = upgrade(&path, &()).unwrap();
        assert_eq!((report.from, report.to, report.shards), (1, 2, 12));
        let after = Store::open(&path).unwrap();
        assert_eq!(after.manifest().format, 2);
        assert_eq!(after.manifest().experts.classes.len(), if name == "v1-mixed" { 2 } else { 1 });
        assert!(experts(&after) == want, "{name}");
        Store::open(&path).unwrap().check_segment(layer, larder_core::ExpertId(0), 0, &want[0][segment]).unwrap();
        let verified = verify(&path, &()).unwrap();
        assert!(verified.is_good() && verified.unknown.is_empty(), "{verified:?}");
        assert_eq!(files(&path)[Path::new("resident.safetensors")], old(name)[Path::new("resident.safetensors")]);
        assert_eq!(upgrade(&path, &()).unwrap().shards, 0);
    }
}

#[test]
fn an_upgrade_that_was_interrupted_anywhere_ends_as_an_undisturbed_one() {
    for name in STORES {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store");
        written(&path, &old(name));
        upgrade(&path, &()).unwrap();
        let (old, new) = (old(name), files(&path));
        let shards: Vec<&PathBuf> = old.keys().filter(|name| name.starts_with("experts")).collect();
        for done in 0..=shards.len() {
            // What the next shard may look like: untouched, its length changed, its header partly written.
            for torn in 0..4 {
                let mut half = old.clone();
                half.insert(UPGRADE_STATE.into(), b"{}\n".to_vec());
                shards[..done].iter().for_each(|shard| drop(half.insert((*shard).clone(), new[*shard].clone())));
                if let Some(next) = shards.get(done) {
                    let shard = half.get_mut(*next).unwrap();
                    let (length, header) =
                        [(shard.len(), 0), (0, 0), (new[*next].len(), 0), (new[*next].len(), 700)][torn];
                    let data_end = DATA_START + data_bytes(&path, next);
                    shard.resize(length.max(data_end), 0);
                    shard[..header].copy_from_slice(&new[*next][..header]);
                }
                written(&path, &half);
                if done > 0 {
                    assert!(Store::open(&path).err().unwrap().message.contains("upgrade was not finished"));
                }
                upgrade(&path, &()).unwrap();
                assert!(files(&path) == new, "{name}: stopped after {done} shards, {torn}");
            }
        }
        // Stopped between the manifest and the removal of the mark.
        fs::write(path.join(UPGRADE_STATE), b"{}\n").unwrap();
        assert!(Store::open(&path).is_ok());
        upgrade(&path, &()).unwrap();
        assert!(files(&path) == new);
    }
}

/// Bytes of an expert's data, given the path of its shard in the store.
fn data_bytes(store: &Path, shard: &Path) -> usize {
    let (manifest, _) = Manifest::read_any(store).unwrap();
    let layer: u16 = shard.to_str().unwrap()["experts/L".len()..][..3].parse().unwrap();
    manifest.experts.layouts(&manifest.geometry).unwrap()[&larder_core::LayerIdx(layer)].bytes
}

#[test]
fn a_damaged_or_missing_shard_is_named_and_nothing_is_changed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store");
    let shard = PathBuf::from("experts/L001/E003.safetensors");
    let mut flipped = old("v1-mixed");
    flipped.get_mut(&shard).unwrap()[DATA_START + 5] ^= 1;
    let mut short = old("v1-mixed");
    short.get_mut(&shard).unwrap().truncate(DATA_START + 5);
    let mut missing = old("v1-mixed");
    missing.remove(&shard);
    for damaged in [flipped, short, missing] {
        written(&path, &damaged);
        let error = upgrade(&path, &()).unwrap_err();
        assert!(error.path == path.join(&shard) && error.to_string().contains("E003.safetensors"), "{error}");
        assert!(files(&path) == damaged);
    }
}

#[test]
fn a_folder_that_is_no_store_or_in_use_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(upgrade(dir.path(), &()).unwrap_err().kind, StoreErrorKind::Missing);
    let path = dir.path().join("store");
    written(&path, &old("v1-uniform"));
    let held = lock(&path).unwrap();
    assert_eq!(upgrade(&path, &()).unwrap_err().kind, StoreErrorKind::Taken);
    drop(held);
    upgrade(&path, &()).unwrap();
}
