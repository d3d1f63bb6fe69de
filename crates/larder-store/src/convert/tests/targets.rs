//! Folders that a store is written to.

use super::*;

#[test]
fn occupied_targets_are_not_touched() {
    let fixture = Fixture::new(ExpertForm::Separate);
    let refusal = |name: &str, kind| {
        let error = fixture.convert(name, kind, None).unwrap_err();
        (error.kind, error.message)
    };
    fixture.convert("store", None, None).unwrap();
    assert_eq!(refusal("store", None).0, StoreErrorKind::Taken);
    fs::write(fixture.path("file"), "x").unwrap();
    assert_eq!(refusal("file", None), (StoreErrorKind::Taken, "is a file, not a folder".into()));
    fs::create_dir(fixture.path("full")).unwrap();
    fs::write(fixture.path("full/notes"), "x").unwrap();
    assert!(refusal("full", None).1.contains("choose an empty or new folder"));
    fs::create_dir(fixture.path("other")).unwrap();
    fs::write(fixture.path("other").join(CONVERSION_STATE), br#"{"of":"another"}"#).unwrap();
    assert!(refusal("other", None).1.contains("unfinished conversion of another model"));
    assert_eq!(files(&fixture.path("other")).len(), 1);
    fs::create_dir(fixture.path("locked")).unwrap();
    let held = larder_os::FolderLock::take(&fixture.path("locked")).unwrap();
    assert_eq!(refusal("locked", None), (StoreErrorKind::Taken, "is being written by another conversion".into()));
    drop(held);
    fixture.convert("locked", None, None).unwrap();
}

#[test]
fn a_store_is_not_made_inside_its_source() {
    let fixture = Fixture::new(ExpertForm::Separate);
    let before = files(&fixture.path("source"));
    #[cfg_attr(windows, expect(unused_mut, reason = "no links are added"))]
    let mut inside = vec!["source", "source/store", "source/a/b", "source/../source/store"];
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink(fixture.path("source"), fixture.path("link")).unwrap();
        inside.extend(["link", "link/store"]);
    }
    for target in inside {
        let error = fixture.convert(target, None, None).unwrap_err();
        assert_eq!(error.kind, StoreErrorKind::Taken, "{target}");
        assert!(error.message.contains("lies inside its source"), "{target}: {error}");
    }
    assert!(files(&fixture.path("source")) == before && !fixture.path("source/a").exists());
    fixture.convert("source/../store", None, None).unwrap();
}

#[test]
fn a_conversion_that_finds_its_target_locked_removes_nothing() {
    let fixture = Fixture::new(ExpertForm::Separate);
    let (source, blueprint) = (&fixture.source, fixture.tiny.blueprint());
    // Both begin with a target that does not exist. Exactly one makes the store; the other is refused, whenever it
    // comes.
    for round in 0..40 {
        let target = fixture.path(&round.to_string());
        let together = std::sync::Barrier::new(2);
        let run = || {
            together.wait();
            convert(source, &blueprint, &target, &ConvertOptions::default(), &()).map(drop)
        };
        let (a, b) = std::thread::scope(|scope| {
            let other = scope.spawn(run);
            (run(), other.join().unwrap())
        });
        let refused = [&a, &b].into_iter().filter_map(|result| result.as_ref().err());
        assert!(refused.clone().count() == 1, "round {round}: {a:?}, {b:?}");
        refused.for_each(|error| assert_eq!(error.kind, StoreErrorKind::Taken, "round {round}: {error}"));
        assert!(verify(&target, &()).unwrap().is_good(), "round {round}");
    }
}

#[test]
fn a_folder_that_was_replaced_while_it_was_locked_is_not_used() {
    let dir = tempfile::tempdir().unwrap();
    let (path, moved) = (dir.path().join("store"), dir.path().join("moved"));
    let locked_elsewhere = || {
        // As another conversion does that removes its empty folder again: between opening and locking there is a new
        // one.
        fs::create_dir(&path).unwrap();
        let held = lock(&path).unwrap();
        fs::rename(&path, &moved).unwrap();
        fs::create_dir(&path).unwrap();
        held
    };
    let held = locked_elsewhere();
    assert!(!held.is_at(&path) && held.is_at(&moved));
}
