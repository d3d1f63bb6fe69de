//! Tests of readers with more shards than files may be open.

use std::{path::Path, process::Command};

use larder_core::SHARD_ALIGN;
use rustix::process::{Resource, getrlimit};

use super::*;

/// Runs the named test again in a process with `limit` file descriptors. Returns `false` in that process.
fn is_repeated_with_descriptors(limit: u64, test: &str) -> bool {
    if getrlimit(Resource::Nofile).maximum == Some(limit) {
        return false;
    }
    let script = format!(r#"ulimit -n {limit} && exec "$0" --exact --nocapture "$1""#);
    let test = format!("reader::descriptor_tests::{test}");
    let child = Command::new("sh").args(["-c", &script]).arg(std::env::current_exe().unwrap()).arg(test).output();
    let child = child.unwrap();
    let output = String::from_utf8_lossy(&child.stdout);
    assert!(
        child.status.success() && output.contains("1 passed"),
        "{output}{}",
        String::from_utf8_lossy(&child.stderr)
    );
    print!("{output}");
    true
}

/// Reads each of `count` tiny shards, then each again in another order. There are 251 contents, and shards of the same
/// content are hard links to one file: they are created quickly, and each name is opened separately.
fn read_many(count: usize, open_max: usize) {
    const CONTENTS: usize = 251;
    let dir = tempfile::tempdir().unwrap();
    let path = |folder: &Path, shard: usize| folder.join(shard.to_string());
    let byte = |shard: usize| (shard % CONTENTS) as u8;
    for shard in 0..count {
        let path = |shard| path(dir.path(), shard);
        match shard.checked_sub(CONTENTS) {
            None => std::fs::write(path(shard), [byte(shard); SHARD_ALIGN]).unwrap(),
            Some(same) => std::fs::hard_link(path(same), path(shard)).unwrap(),
        }
    }
    // Direct reads of dirty pages would write them back, file by file.
    rustix::fs::syncfs(std::fs::File::open(dir.path()).unwrap()).unwrap();
    for name in ["uring", "pread"] {
        let folder = dir.path().to_owned();
        let files = Arc::new(ShardFiles::new(count, move |s| (path(&folder, s), SHARD_ALIGN as u64)).unwrap());
        assert_eq!(files.open_max(), open_max);
        let (arena, slots) = Arena::new(200, SHARD_ALIGN).unwrap();
        let Ok((mut reader, how)) = name.parse::<ReaderSpec>().unwrap().open(&files, &arena) else { continue };
        println!("{how}");
        let read = |shard: usize, slot| ReadRequest { shard, offset: 0, len: SHARD_ALIGN, slot, tag: shard as u64 };
        let mut reads: VecDeque<_> = slots.into_iter().enumerate().map(|(s, slot)| read(s, slot)).collect();
        let (mut next, mut seen) = (reads.len(), vec![0; count]);
        for _ in 0..2 * count {
            reader.submit(&mut reads);
            let ReadCompletion { slot, tag, result } = reader.wait().unwrap();
            result.unwrap();
            let shard = tag as usize;
            assert!(slot.iter().all(|b| *b == byte(shard)), "{name}: shard {shard}");
            seen[shard] += 1;
            if next < 2 * count {
                let shard = if next < count { next } else { next * 7 % count };
                reads.push_back(read(shard, slot));
                next += 1;
            }
        }
        assert!(reader.wait().is_none() && seen.iter().all(|times| *times == 2), "{name}");
    }
}

#[test]
fn fifteen_thousand_shards_are_read_under_a_limit_of_1024_descriptors() {
    if !is_repeated_with_descriptors(1024, "fifteen_thousand_shards_are_read_under_a_limit_of_1024_descriptors") {
        read_many(15_000, 768);
    }
}

#[test]
fn two_thousand_shards_are_read_under_a_limit_of_64_descriptors() {
    if !is_repeated_with_descriptors(64, "two_thousand_shards_are_read_under_a_limit_of_64_descriptors") {
        read_many(2000, 32);
    }
}
