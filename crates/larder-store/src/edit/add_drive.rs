//! Gives a finished store a second folder on another drive: copies shards there, and with a stripe removes them here.
//!
//! `drive.json` comes first and claims the folder, `drives.json` last, so that an interrupted run leaves the store as
//! it was. Shards that are there are recognised by the checksums of the manifest and kept.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use larder_os::{FileId, LOCK_FILE, open_regular_with};

use crate::{
    convert::{check_space, lock},
    drives::second_folder::{DRIVE_FILE, Division, SecondFolder, are_on_one_drive, check_second_folder, is_of, mark},
    error::{Result, StoreError, StoreErrorKind},
    files::{
        atomic_file::{AtomicFile, sync_folder, temp_path},
        direct::AlignedBuffer,
        safetensors::DATA_START,
    },
    manifest::{ExpertChecksums, Manifest},
    parallel::parallel,
    progress::Progress,
    shard::{Shard, layer_folder, set::ShardSet, shard_path_in},
    verify::expert_files,
};

/// Threads that each copy one shard at a time.
const THREADS: usize = 2;

/// What a second folder has got.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AddedDrive {
    /// Shards that were written.
    pub written: usize,
    /// Shards that the folder holds.
    pub shards: usize,
    /// Bytes of these.
    pub bytes: u64,
    /// Whether the folder is on the same file system as the store.
    pub same_drive: bool,
}

/// Makes `folder` the second folder of the finished store at `store`, or continues where this was interrupted. With a
/// mirror, shards that the store itself lacks are copied back.
pub fn add_drive(store: &Path, division: Division, folder: &Path, progress: &dyn Progress) -> Result<AddedDrive> {
    check_second_folder(store, folder)?;
    let _store_lock = lock(store)?;
    let (manifest, _) = Manifest::read(store)?;
    check_form(store, &manifest, division, folder)?;
    fs::create_dir_all(folder).map_err(|e| StoreError::io(folder, "creating the folder", e))?;
    let _folder_lock = lock(folder)?;
    claim(folder, &manifest)?;
    let sets = expert_files(&manifest).map(|(name, files)| ShardSet::listed(store, name, files, &manifest.geometry));
    let sets = sets.collect::<Result<Vec<_>>>()?;
    let copying = Copying { store, folder, division, sets: &sets };
    let shards = copying.shards();
    let files: Vec<_> = shards.iter().map(|(set, shard, _)| (path_in(set, shard), shard.file_bytes as u64)).collect();
    check_space(folder, &files)?;
    mark(folder, &manifest)?;
    copying.create_folders(folder)?;
    if division == Division::Mirror {
        copying.create_folders(store)?;
    }
    let bytes = files.iter().map(|(_, bytes)| bytes).sum();
    progress.begin(bytes);
    let largest = shards.iter().map(|(_, shard, _)| shard.file_bytes).max().unwrap_or_default();
    let written = parallel(
        THREADS,
        shards.len(),
        || AlignedBuffer::new(largest),
        |file, i| {
            let (set, shard, checksums) = &shards[i];
            let written = copying.copy(set, shard, checksums, &mut file[..shard.file_bytes])?;
            progress.advance(shard.file_bytes as u64);
            Ok(written)
        },
    )?;
    copying.sync(folder)?;
    folder.parent().filter(|parent| !parent.as_os_str().is_empty()).map_or(Ok(()), sync_folder)?;
    SecondFolder::record(store, folder, division)?;
    if division == Division::Stripe {
        copying.remove_moved()?;
    }
    copying.sync(store)?;
    let written = written.into_iter().filter(|written| *written).count();
    Ok(AddedDrive { written, shards: shards.len(), bytes, same_drive: are_on_one_drive(store, folder) })
}

/// Refuses a store whose shards are divided in another way.
fn check_form(store: &Path, manifest: &Manifest, division: Division, folder: &Path) -> Result<()> {
    let taken = |what: String| Err(StoreError::new(StoreErrorKind::Taken, store, what));
    match SecondFolder::of(store, manifest)? {
        Some(known) if known.division != division => {
            taken(format!("has its second folder already: {}, a {}", known.folder.display(), known.division.name()))
        }
        // Half of the experts are in the folder that is known, so no other can be filled.
        Some(known) if division == Division::Stripe && is_of(folder, manifest)? != Some(true) => taken(format!(
            "has half of its experts in {}; name that folder, or where it is now",
            known.folder.display()
        )),
        _ => Ok(()),
    }
}

/// Refuses a folder that holds something else.
fn claim(folder: &Path, manifest: &Manifest) -> Result<()> {
    let taken = |what: String| Err(StoreError::new(StoreErrorKind::Taken, folder, what));
    match is_of(folder, manifest)? {
        Some(true) => return Ok(()),
        Some(false) => return taken("holds the experts of another store; remove it or choose another folder".into()),
        None => {}
    }
    let first = temp_path(Path::new(DRIVE_FILE));
    let mut entries = fs::read_dir(folder).map_err(|e| StoreError::io(folder, "listing", e))?.flatten();
    match entries.find(|entry| entry.file_name() != first.as_os_str() && entry.file_name() != LOCK_FILE) {
        Some(entry) => {
            let name = entry.file_name();
            taken(format!("is not empty (it holds '{}'); choose an empty or new folder", name.to_string_lossy()))
        }
        None => Ok(()),
    }
}

/// The path of a shard, relative to either folder.
fn path_in(set: &ShardSet, shard: &Shard) -> PathBuf {
    shard_path_in(set.name(), shard.layer, shard.expert)
}

struct Copying<'a> {
    store: &'a Path,
    folder: &'a Path,
    division: Division,
    sets: &'a [ShardSet],
}

impl<'a> Copying<'a> {
    /// The shards that the second folder has in the end.
    fn shards(&self) -> Vec<(&'a ShardSet, Shard<'a>, &'a ExpertChecksums)> {
        let all =
            self.sets.iter().flat_map(|set| set.shards_with_checksums().map(move |(shard, sums)| (set, shard, sums)));
        all.filter(|(_, shard, _)| self.division.second_has(shard.expert)).collect()
    }

    /// The folders of shards, parents after their children.
    fn folders(&self) -> Vec<PathBuf> {
        let of_set = |set: &ShardSet| {
            let layers = set.layers().map(|layer| layer_folder(set.name(), layer)).collect::<Vec<_>>();
            layers.into_iter().chain([PathBuf::from(set.name())])
        };
        self.sets.iter().flat_map(of_set).collect()
    }

    fn create_folders(&self, root: &Path) -> Result<()> {
        self.folders().iter().try_for_each(|name| {
            let path = root.join(name);
            fs::create_dir_all(&path).map_err(|e| StoreError::io(&path, "creating the folder", e))
        })
    }

    /// Makes the names of all shards in `root` durable.
    fn sync(&self, root: &Path) -> Result<()> {
        self.folders().iter().try_for_each(|name| sync_folder(&root.join(name)))?;
        sync_folder(root)
    }

    /// Sees to a good copy of a shard in the second folder, and with a mirror in the store too; returns whether one had
    /// to be written. `file` has the length of the shard.
    fn copy(&self, set: &ShardSet, shard: &Shard, checksums: &ExpertChecksums, file: &mut [u8]) -> Result<bool> {
        let name = path_in(set, shard);
        let (here, there) = (self.store.join(&name), self.folder.join(&name));
        let (header, data) = file.split_at_mut(DATA_START);
        header.copy_from_slice(&shard.header(checksums));
        if shard.check_file(&there, checksums, data).is_ok() {
            check_apart(&here, &there)?;
            // Another program may have copied it, and the one in the store may be removed.
            sync_file(&there)?;
            let lacks = self.division == Division::Mirror && shard.open(&here).is_err();
            if lacks {
                write(&here, file)?;
            }
            return Ok(lacks);
        }
        shard.check_file(&here, checksums, data)?;
        write(&there, file)?;
        Ok(true)
    }

    /// Removes from the store the shards that are in the second folder.
    fn remove_moved(&self) -> Result<()> {
        self.shards().iter().map(|(set, shard, _)| self.store.join(path_in(set, shard))).try_for_each(|path| {
            match fs::remove_file(&path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => Err(StoreError::io(&path, "removing", e)),
                _ => Ok(()),
            }
        })
    }
}

/// Refuses a shard that links or mounts lead to from both folders: it is one copy, and removing it here would remove it
/// there.
fn check_apart(here: &Path, there: &Path) -> Result<()> {
    let id = |path: &Path| FileId::of(path).ok();
    if id(here).is_some() && id(here) == id(there) {
        let what = format!("is the same file as {}; choose an empty folder on another drive", here.display());
        return Err(StoreError::new(StoreErrorKind::Taken, there, what));
    }
    Ok(())
}

/// Makes the content of a file durable that is there already.
fn sync_file(path: &Path) -> Result<()> {
    // Windows makes only files durable that are open for writing.
    let opened = open_regular_with(fs::OpenOptions::new().read(true).write(cfg!(windows)), path);
    opened.and_then(|file| file.sync_all()).map_err(|e| StoreError::io(path, "syncing", e))
}

fn write(path: &Path, file: &[u8]) -> Result<()> {
    let atomic_file = AtomicFile::create(path)?;
    atomic_file.write_direct(file)?;
    atomic_file.publish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        expert_source::ExpertSource,
        store::Store,
        testing::{EXPERTS, ExpertForm, LAYERS, edit_manifest, files, small_store},
        verify::verify,
    };
    use larder_core::ExpertId;

    /// The bytes of all experts of a store.
    fn experts(store: &Path) -> Vec<Vec<u8>> {
        let store = Store::open(store).unwrap();
        let each = LAYERS.into_iter().flat_map(|layer| (0..EXPERTS).map(move |e| (layer, ExpertId(e as u16))));
        let read = |(layer, expert)| {
            let mut data = vec![0; store.layout(layer).bytes];
            store.read_expert(layer, expert, &mut data).unwrap();
            data
        };
        each.map(read).collect()
    }

    #[test]
    fn experts_are_the_same_from_one_folder_and_from_two() {
        for division in [Division::Mirror, Division::Stripe] {
            let dir = tempfile::tempdir().unwrap();
            let (store, folder) = (small_store(dir.path(), ExpertForm::Separate), dir.path().join("second"));
            let want = experts(&store);
            let added = add_drive(&store, division, &folder, &()).unwrap();
            let shards = if division == Division::Mirror { 6 } else { 2 };
            assert_eq!((added.shards, added.written, added.same_drive), (shards, shards, true));
            assert!(experts(&store) == want);
            assert!(verify(&store, &()).unwrap().is_good());
            let before = (files(&store), files(&folder));
            assert_eq!(add_drive(&store, division, &folder, &()).unwrap().written, 0);
            assert!((files(&store), files(&folder)) == before);
            // The config is no part of the shards.
            edit_manifest(&store, "\"b\": 1", "\"b\": 2");
            assert!(experts(&store) == want);
        }
    }

    #[test]
    fn folders_that_the_store_lacks_are_made_again() {
        let dir = tempfile::tempdir().unwrap();
        let (store, folder) = (small_store(dir.path(), ExpertForm::Separate), dir.path().join("second"));
        let (want, before) = (experts(&store), files(&store));
        add_drive(&store, Division::Mirror, &folder, &()).unwrap();
        fs::remove_dir_all(store.join("experts")).unwrap();
        assert!(experts(&store) == want);
        assert_eq!(add_drive(&store, Division::Mirror, &folder, &()).unwrap().written, 6);
        assert!(before.iter().all(|(name, bytes)| files(&store).get(name) == Some(bytes)));
    }

    #[cfg(unix)]
    #[test]
    fn a_folder_that_leads_back_to_the_store_loses_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let store = small_store(dir.path(), ExpertForm::Separate);
        let (want, before) = (experts(&store), files(&store));
        for division in [Division::Mirror, Division::Stripe] {
            let folder = dir.path().join(division.name());
            fs::create_dir(&folder).unwrap();
            mark(&folder, &Manifest::read(&store).unwrap().0).unwrap();
            std::os::unix::fs::symlink(store.join("experts"), folder.join("experts")).unwrap();
            let refused = add_drive(&store, division, &folder, &()).unwrap_err().to_string();
            assert!(refused.contains("is the same file as"), "{refused}");
            assert!(files(&store) == before && experts(&store) == want);
        }
    }

    #[test]
    fn a_folder_inside_the_store_is_refused_and_not_made() {
        let dir = tempfile::tempdir().unwrap();
        let store = small_store(dir.path(), ExpertForm::Separate);
        let before = files(&store);
        let inside = dir.path().join("new/../").join(store.file_name().unwrap()).join("second");
        let refused = add_drive(&store, Division::Stripe, &inside, &()).unwrap_err().to_string();
        assert!(refused.contains("one inside the other"), "{refused}");
        assert!(!dir.path().join("new").exists() && files(&store) == before);
    }

    #[test]
    fn wrong_bytes_and_missing_shards_of_one_folder_are_read_from_the_other() {
        let dir = tempfile::tempdir().unwrap();
        let (store, folder) = (small_store(dir.path(), ExpertForm::Separate), dir.path().join("second"));
        let want = experts(&store);
        add_drive(&store, Division::Mirror, &folder, &()).unwrap();
        for root in [&store, &folder] {
            let path = root.join(crate::shard::shard_path(LAYERS[1], ExpertId(1)));
            let good = fs::read(&path).unwrap();
            let mut bad = good.clone();
            bad[DATA_START + 5] ^= 1;
            for damage in [&bad[..], &good[..DATA_START], &[]] {
                fs::write(&path, damage).unwrap();
                assert!(experts(&store) == want, "{}", path.display());
            }
            fs::remove_file(&path).unwrap();
            assert!(experts(&store) == want, "{}", path.display());
            assert_eq!(Store::open(&store).unwrap().drive_notes().len(), 1);
            assert_eq!(add_drive(&store, Division::Mirror, &folder, &()).unwrap().written, 1);
            assert!(fs::read(&path).unwrap() == good);
        }
        // Where both are damaged, nothing is copied over the other.
        for root in [&store, &folder] {
            fs::write(root.join(crate::shard::shard_path(LAYERS[0], ExpertId(0))), "x").unwrap();
        }
        assert!(Store::open(&store).is_err() && add_drive(&store, Division::Mirror, &folder, &()).is_err());
    }
}
