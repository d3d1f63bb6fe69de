//! Tests of verification: damage is found in every file.

use std::path::PathBuf;

use super::*;
use crate::shard::shard_path;
use crate::testing::{ExpertForm, LAYERS, small_store};

fn store() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = small_store(dir.path(), ExpertForm::TransposedTurns);
    (dir, path)
}

#[test]
fn a_complete_store_is_good() {
    let (_dir, path) = store();
    let report = verify(&path, &()).unwrap();
    assert!(report.is_good() && report.unknown.is_empty(), "{report:?}");
    assert_eq!(report.files, 6 + 1 + 1 + 1);
}

#[test]
fn a_changed_byte_in_any_file_is_found() {
    let (_dir, path) = store();
    let table = PathBuf::from("tables/embed.safetensors");
    for name in [PathBuf::from(RESIDENT_FILE), table, shard_path(LAYERS[1], ExpertId(2)), "tokenizer.json".into()] {
        let good = fs::read(path.join(&name)).unwrap();
        for at in (0..good.len()).step_by(1 + good.len() / 40).chain([good.len() - 1]) {
            let mut bad = good.clone();
            bad[at] ^= 32;
            fs::write(path.join(&name), bad).unwrap();
            let report = verify(&path, &()).unwrap();
            assert_eq!(report.problem_count, 1, "{} at {at}: {report:?}", name.display());
            assert_eq!(report.problems[0].path, path.join(&name));
        }
        fs::write(path.join(&name), good).unwrap();
    }
    assert!(verify(&path, &()).unwrap().is_good());
}

#[test]
fn all_problems_are_found_and_unknown_files_are_named() {
    let (_dir, path) = store();
    fs::remove_file(path.join(shard_path(LAYERS[0], ExpertId(0)))).unwrap();
    fs::write(path.join(shard_path(LAYERS[1], ExpertId(1))), "short").unwrap();
    fs::remove_file(path.join(RESIDENT_FILE)).unwrap();
    fs::remove_file(path.join("tokenizer.json")).unwrap();
    fs::write(path.join("notes.txt"), "x").unwrap();
    fs::write(path.join("experts/L001/E007.safetensors"), "x").unwrap();
    fs::write(path.join(SETTINGS), "x").unwrap();
    ADDED_SIDECARS.iter().for_each(|name| fs::write(path.join(name), "x").unwrap());
    crate::store::sidecars::seal_sidecars(&path).unwrap();
    let report = verify(&path, &()).unwrap();
    // One of them is that `vision.json` says nothing of a tower.
    assert_eq!((report.problem_count, report.problems.len()), (5, 5), "{report:?}");
    assert_eq!(report.unknown, [PathBuf::from("experts/L001/E007.safetensors"), PathBuf::from("notes.txt")]);
}

#[test]
fn a_sidecar_of_another_store_is_a_problem() {
    let (_dir, path) = store();
    let sidecar = path.join(ADDED_SIDECARS[1]);
    fs::write(&sidecar, "x").unwrap();
    let report = verify(&path, &()).unwrap();
    assert!(report.problem_count == 1 && report.problems[0].path == sidecar, "{report:?}");
    crate::store::sidecars::seal_sidecars(&path).unwrap();
    assert!(verify(&path, &()).unwrap().is_good());
    crate::testing::edit_manifest(&path, "\"b\": 1", "\"b\": 2");
    let report = verify(&path, &()).unwrap();
    assert!(report.problems[0].message.contains("was made for another store"), "{report:?}");
}

#[test]
fn a_missing_manifest_is_an_error() {
    let (_dir, path) = store();
    fs::remove_file(path.join(MANIFEST_FILE)).unwrap();
    assert_eq!(verify(&path, &()).unwrap_err().kind, StoreErrorKind::Missing);
}
