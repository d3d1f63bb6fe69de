//! Conformance tests of the [`Reader`] contract, run on every reader.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use larder_core::SHARD_ALIGN;
use tempfile::TempDir;

use super::*;

const SHARDS: usize = 12;
/// Shards end within a page, unlike real ones, to show that readers do not depend on whole pages.
const SHARD_BYTES: usize = 300 * 1024 + 100;
const SLOT_BYTES: usize = 300 * 1024 + SHARD_ALIGN;
const NAMES: [&str; 18] = [
    "auto",
    "uring",
    "overlapped",
    "pread",
    "memory",
    "unpaced uring",
    "unpaced pread",
    "unpaced overlapped",
    "narrow uring",
    "narrow memory",
    "mirrored uring",
    "mirrored pread",
    "mirrored overlapped",
    "mirrored memory",
    "striped uring",
    "striped pread",
    "striped overlapped",
    "narrow mirrored memory",
];
/// A window of a few reads.
const NARROW_BYTES: u64 = 1 << 20;

/// Shards on disk in two folders, and the same bytes in memory.
struct Shards {
    dir: TempDir,
    bytes: Arc<Vec<Vec<u8>>>,
}

/// The folders of shards: with one drive, the first has all.
const FOLDERS: [&str; 2] = ["a", "b"];

/// The drives that a reader of this name has.
fn drives(name: &str, dir: &Path) -> Drives {
    let both = FOLDERS.map(|folder| dir.join(folder)).to_vec();
    match name {
        _ if name.contains("mirrored") => Drives::new(both, vec![3; SHARDS], Arc::default()),
        _ if name.contains("striped") => {
            Drives::new(both, (0..SHARDS).map(|shard| 1 << (shard % 2)).collect(), Arc::default())
        }
        _ => Drives::one(SHARDS),
    }
}

impl Shards {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let byte = |shard: usize, at: usize| (at * 7 + at / 251 + shard * 31 + 1) as u8;
        let bytes: Vec<Vec<u8>> = (0..SHARDS).map(|s| (0..SHARD_BYTES).map(|at| byte(s, at)).collect()).collect();
        for folder in FOLDERS.map(|folder| dir.path().join(folder)) {
            std::fs::create_dir(&folder).unwrap();
            bytes.iter().enumerate().for_each(|(s, bytes)| std::fs::write(folder.join(s.to_string()), bytes).unwrap());
        }
        Shards { dir, bytes: Arc::new(bytes) }
    }

    /// Where a reader of this name finds the only copy of a shard.
    fn path(&self, name: &str, shard: usize) -> PathBuf {
        let folder = if name.contains("striped") { FOLDERS[shard % 2] } else { FOLDERS[0] };
        self.dir.path().join(folder).join(shard.to_string())
    }

    fn files(&self, name: &str) -> Arc<ShardFiles> {
        let folders = FOLDERS.map(|folder| self.dir.path().join(folder));
        let file = move |file: usize| (folders[file / SHARDS].join((file % SHARDS).to_string()), SHARD_BYTES as u64);
        Arc::new(ShardFiles::on_drives(drives(name, self.dir.path()), file).unwrap())
    }

    /// Opens a reader by name: without a window, or with a narrow one that holds most reads back, if the name says so.
    /// Prints why and returns `None` where the system has no such reads.
    fn reader(&self, name: &str, arena: &Arena) -> Option<Box<dyn Reader>> {
        if let Some(name) = name.strip_prefix("narrow ") {
            let raw = self.raw(name, arena)?;
            let drives = drives(name, self.dir.path());
            return Some(Box::new(PacedReader::with_window(raw, drives, NARROW_BYTES)));
        }
        if name.ends_with("memory") {
            let raw = self.raw(name, arena)?;
            let drives = drives(name, self.dir.path());
            return Some(if drives.count() == 1 {
                raw
            } else {
                Box::new(PacedReader::on_drives(raw, drives).unwrap())
            });
        }
        let kind = name.rsplit(' ').next().unwrap();
        let opened = if name.starts_with("unpaced ") {
            named(kind).open_unpaced(&self.files(name), arena)
        } else {
            named(kind).open(&self.files(name), arena)
        };
        match opened {
            Ok((reader, _)) => Some(reader),
            Err(e) if name.ends_with("uring") || name.ends_with("overlapped") => {
                println!("{name} is not tested: {e}");
                None
            }
            Err(e) => panic!("{name}: {e}"),
        }
    }

    /// The reader without a window that a paced one of this name has.
    fn raw(&self, name: &str, arena: &Arena) -> Option<Box<dyn Reader>> {
        if !name.ends_with("memory") {
            return self.reader(&format!("unpaced {name}"), arena);
        }
        let files = self.bytes.iter().cycle().take(SHARDS * drives(name, self.dir.path()).count());
        Some(Box::new(MemoryReader::new(Arc::new(files.cloned().collect()), 5).overtaken(6).capacity(5)))
    }
}

fn named(name: &str) -> ReaderSpec {
    name.parse().unwrap()
}

/// Pseudorandom reads: tag, shard, offset and length.
fn requests(count: usize) -> impl Iterator<Item = (u64, usize, u64, usize)> {
    let mut random = 12345u64;
    let mut below = move |limit: usize| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as usize % limit
    };
    (0..count as u64).map(move |tag| {
        let offset = below(SHARD_BYTES / SHARD_ALIGN) * SHARD_ALIGN;
        (tag, below(SHARDS), offset as u64, below(SHARD_BYTES - offset + 1))
    })
}

#[test]
fn every_reader_of_the_table_is_tested() {
    assert!(READERS.iter().all(|row| NAMES.contains(&row.name) && !row.about.is_empty()));
    let (shards, (arena, _)) = (Shards::new(), Arena::new(1, SHARD_ALIGN).unwrap());
    let error = "mmap".parse::<ReaderSpec>().unwrap_err();
    assert_eq!(error.to_string(), r#"unknown reader "mmap"; available: auto, uring, overlapped, pread"#);
    for row in READERS {
        assert_eq!(named(&row.to_string()).name, row.name);
    }
    let (reader, how) = ReaderSpec::default().open(&shards.files("auto"), &arena).unwrap();
    println!("{how}");
    assert!(how.starts_with(reader.name()));
}

#[test]
fn each_read_completes_once_with_the_bytes_of_the_file() {
    const READS: usize = 600;
    let shards = Shards::new();
    for name in NAMES {
        let (arena, mut slots) = Arena::new(150, SLOT_BYTES).unwrap();
        let Some(mut reader) = shards.reader(name, &arena) else { continue };
        let requests: Vec<_> = requests(READS).collect();
        let (mut left, mut reads, mut seen, mut full) = (requests.iter(), VecDeque::new(), [false; READS], false);
        for _ in 0..READS {
            while let Some(slot) = slots.pop() {
                let Some(&(tag, shard, offset, len)) = left.next() else { break };
                reads.push_back(ReadRequest { shard, offset, len, slot, tag });
            }
            reader.submit(&mut reads);
            assert!(reader.in_flight() <= reader.capacity(), "{name}");
            full |= !reads.is_empty();
            let done = reader.poll().or_else(|| reader.wait()).unwrap();
            done.result.unwrap();
            let (tag, shard, offset, len) = requests[done.tag as usize];
            assert_eq!((done.tag, std::mem::replace(&mut seen[tag as usize], true)), (tag, false), "{name}");
            assert!(done.slot[..len] == shards.bytes[shard][offset as usize..][..len], "{name}: read {tag}");
            slots.push(done.slot);
        }
        assert!(full && reads.is_empty() && seen.iter().all(|s| *s), "{name}");
        assert!(reader.poll().is_none() && reader.wait().is_none() && reader.in_flight() == 0, "{name}");
    }
}

#[test]
fn slots_whose_memory_was_given_back_are_read_into_again() {
    const ROUNDS: usize = 40;
    let shards = Shards::new();
    for name in NAMES {
        let (arena, mut slots) = Arena::new(6, SLOT_BYTES).unwrap();
        let Some(mut reader) = shards.reader(name, &arena) else { continue };
        for round in 0..ROUNDS {
            // Some slots keep their memory.
            for slot in slots.iter_mut().filter(|slot| (slot.index() + round).is_multiple_of(2)) {
                assert!(reader.release(slot), "{name}");
                slot.give_back().unwrap();
                assert!(slot.iter().all(|byte| *byte == 0), "{name}");
            }
            let shard = |slot: &Slot| (slot.index() + round) % SHARDS;
            let read = |slot: Slot| ReadRequest { shard: shard(&slot), offset: 0, len: SHARD_BYTES, slot, tag: 0 };
            let mut reads: VecDeque<_> = slots.drain(..).map(read).collect();
            while slots.len() < arena.slots() {
                reader.submit(&mut reads);
                let done = reader.wait().unwrap();
                done.result.unwrap();
                assert!(done.slot[..SHARD_BYTES] == shards.bytes[shard(&done.slot)], "{name}, round {round}");
                slots.push(done.slot);
            }
        }
    }
}

#[test]
fn reads_complete_without_a_wait_for_them() {
    let shards = Shards::new();
    for name in NAMES {
        let (arena, slots) = Arena::new(12, SLOT_BYTES).unwrap();
        let Some(mut reader) = shards.reader(name, &arena) else { continue };
        let read = |slot: Slot| ReadRequest { shard: slot.index(), offset: 0, len: SHARD_BYTES, slot, tag: 0 };
        let mut reads: VecDeque<_> = slots.into_iter().map(read).collect();
        let start = std::time::Instant::now();
        let mut done = 0;
        while done < 12 {
            reader.submit(&mut reads);
            while let Some(read) = reader.poll() {
                read.result.unwrap();
                assert!(read.slot[..SHARD_BYTES] == shards.bytes[read.slot.index()], "{name}");
                done += 1;
            }
            assert!(start.elapsed() < Duration::from_secs(60), "{name}: {done} of 12");
        }
        assert_eq!(reader.in_flight(), 0, "{name}");
    }
}

#[test]
fn a_slot_of_another_arena_works() {
    let shards = Shards::new();
    for name in NAMES {
        let (arena, _slots) = Arena::new(4, SLOT_BYTES).unwrap();
        let Some(mut reader) = shards.reader(name, &arena) else { continue };
        let slot = Arena::new(1, SLOT_BYTES).unwrap().1.remove(0);
        reader.submit(&mut VecDeque::from([ReadRequest { shard: 3, offset: 0, len: SHARD_BYTES, slot, tag: 0 }]));
        let done = reader.wait().unwrap();
        assert!(done.result.is_ok() && done.slot[..SHARD_BYTES] == shards.bytes[3], "{name}");
    }
}

#[test]
fn two_reads_fill_the_parts_of_one_slot() {
    const CUT: usize = 25 * SHARD_ALIGN;
    const TAIL: u64 = 1 << 32;
    let shards = Shards::new();
    for name in NAMES {
        let (arena, slots) = Arena::new(SHARDS, SLOT_BYTES).unwrap();
        let Some(mut reader) = shards.reader(name, &arena) else { continue };
        let (mut fronts, mut tails) = (VecDeque::new(), VecDeque::new());
        for (shard, slot) in slots.into_iter().enumerate() {
            let (front, back) = slot.split_at(CUT);
            let tag = shard as u64;
            fronts.push_back(ReadRequest { shard, offset: 0, len: CUT, slot: front, tag });
            let len = SHARD_BYTES - CUT;
            tails.push_back(ReadRequest { shard, offset: CUT as u64, len, slot: back, tag: tag | TAIL });
        }
        let mut reads = fronts;
        reads.append(&mut tails);
        let (mut front_of, mut tail_of) = ([(); SHARDS].map(|()| None), [(); SHARDS].map(|()| None));
        for _ in 0..2 * SHARDS {
            reader.submit(&mut reads);
            let ReadCompletion { slot, tag, result } = reader.wait().unwrap();
            result.unwrap();
            let shard = (tag & !TAIL) as usize;
            // A part is usable as soon as its own read completes.
            let from = if tag < TAIL { 0 } else { CUT };
            let want = &shards.bytes[shard][from..];
            let len = want.len().min(slot.len());
            assert!(slot[..len] == want[..len], "{name}: shard {shard} from {from} on");
            let part = if tag < TAIL { &mut front_of[shard] } else { &mut tail_of[shard] };
            assert!(part.replace(slot).is_none(), "{name}");
        }
        for (shard, (front, tail)) in front_of.into_iter().zip(tail_of).enumerate() {
            let slot = front.unwrap().join(tail.unwrap());
            assert!(slot.len() == SLOT_BYTES && slot[..SHARD_BYTES] == shards.bytes[shard], "{name}: shard {shard}");
        }
    }
}

/// The error of one read of the last shard.
fn error_of(reader: &mut dyn Reader, slot: &mut Vec<Slot>, offset: u64, len: usize) -> String {
    let read = ReadRequest { shard: SHARDS - 1, offset, len, slot: slot.pop().unwrap(), tag: 9 };
    reader.submit(&mut VecDeque::from([read]));
    let done = reader.wait().unwrap();
    assert_eq!((done.tag, reader.in_flight()), (9, 0));
    slot.push(done.slot);
    done.result.unwrap_err().to_string()
}

#[test]
fn errors_name_the_file_offset_and_length() {
    for name in ["uring", "pread", "unpaced uring", "narrow uring", "striped uring", "striped pread"] {
        let shards = Shards::new();
        let (arena, mut slot) = Arena::new(1, SLOT_BYTES).unwrap();
        let Some(mut reader) = shards.reader(name, &arena) else { continue };
        let path = shards.path(name, SHARDS - 1);
        let cut = |bytes| std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(bytes).unwrap();
        let mut error = |offset, len| {
            let error = error_of(&mut *reader, &mut slot, offset, len);
            error.strip_prefix(&format!("{}: ", path.display())).unwrap_or(&error).to_owned()
        };

        cut(SHARD_BYTES as u64 - 1);
        assert_eq!(error(0, 10), "reading 10 bytes at 0: is 307299 bytes long, expected 307300", "{name}");
        cut(SHARD_BYTES as u64);
        assert_eq!(error(4096, SHARD_BYTES), "reading 307300 bytes at 4096 returned only 303204: the file ends there");
        assert!(error(100, 10).contains("reading 10 bytes at 100 into a slot"), "{name}");
        assert!(error(0, SLOT_BYTES + 1).contains("is not possible"), "{name}");
        // The file is open by now.
        cut(8192);
        assert_eq!(
            error(4096, 10_000),
            "reading 10000 bytes at 4096 returned only 4096: the file ends there",
            "{name}"
        );

        // Windows may keep the name of a removed file until it is closed.
        drop(reader);
        let mut slot = slot;
        std::fs::remove_file(&path).unwrap();
        let missing = StoreError::io(&path, "opening", std::fs::File::open(&path).unwrap_err()).message;
        let mut reader = shards.reader(name, &arena).unwrap();
        let error = error_of(&mut *reader, &mut slot, 4096, 10);
        assert!(error.ends_with(&format!("reading 10 bytes at 4096: {missing}")), "{error}");
        // The reader can continue with other shards.
        reader.submit(&mut VecDeque::from([ReadRequest {
            shard: 0,
            offset: 0,
            len: 10,
            slot: slot.remove(0),
            tag: 1,
        }]));
        reader.wait().unwrap().result.unwrap();
    }
}

/// In each slot of an arena whose slots were dropped, the byte that a read writes last.
fn last_bytes(arena: &Arena) -> Vec<u8> {
    arena.total_slots().chunks(SLOT_BYTES).map(|slot| slot[SHARD_BYTES - 1]).collect()
}

/// Drops each reader a thousand times with reads in flight. Run under AddressSanitizer, it also finds leaks:
///
/// ```text
/// RUSTFLAGS=-Zsanitizer=address cargo +nightly test --release --target x86_64-unknown-linux-gnu \
///     -p larder-store --lib after_a_reader_is_dropped
/// ```
///
/// The sanitizer does not see what the kernel writes. So in some rounds the device gets more reads than it can complete
/// during a drop, and the test checks that no byte changes afterwards.
#[test]
fn after_a_reader_is_dropped_nothing_writes_to_its_slots_and_nothing_leaks() {
    let shards = Shards::new();
    for name in NAMES {
        let mut arrived = 0;
        for round in 0..1000 {
            let observe = round % 50 == 1;
            let (arena, slots) = Arena::new(if observe { 64 } else { 8 }, SLOT_BYTES).unwrap();
            let Some(mut reader) = shards.reader(name, &arena) else { break };
            let read =
                |slot: Slot| ReadRequest { shard: slot.index() % SHARDS, offset: 0, len: SHARD_BYTES, slot, tag: 0 };
            let mut reads: VecDeque<_> = slots.into_iter().map(read).collect();
            reader.submit(&mut reads);
            for _ in 0..round % 4 {
                reader.wait().unwrap();
            }
            drop((reader, reads));
            assert!(arena.has_no_slots(), "{name}: a slot is left");
            if observe {
                let before = last_bytes(&arena);
                std::thread::sleep(Duration::from_millis(20));
                assert!(before == last_bytes(&arena), "{name}: a read arrived after the drop");
                arrived += before.iter().filter(|byte| **byte != 0).count();
            }
        }
        println!("{name}: {arrived} reads arrived before the drop");
    }
}
