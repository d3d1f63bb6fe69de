//! Two drives of which one fails under a running model.

use std::collections::VecDeque;
use std::fs;
use std::sync::Arc;

use larder_core::CacheScope;
use larder_engine::{Session, TokenInput};
use larder_store::reader::{
    DriveLog, Drives, FaultTarget, MemoryReader, PacedReader, ReadCompletion, ReadFault, ReadRequest, Reader,
};
use larder_store::{Division, add_drive};
use parking_lot::Mutex;

use super::drives::{TwoFolders, shards_in};
use crate::support::rig::{Model, TOKENS, model, open, read_and_write};
use crate::support::{fixture, golden_models};

/// The shards of a model on two drives in memory.
fn mirrored(model: &Model, memory: MemoryReader, held: impl Fn(usize) -> u8) -> (PacedReader, Arc<DriveLog>) {
    on_drives(model, Box::new(memory), held)
}

fn on_drives(model: &Model, reader: Box<dyn Reader>, held: impl Fn(usize) -> u8) -> (PacedReader, Arc<DriveLog>) {
    let (shards, log) = (model.store.shard_paths().len(), Arc::new(DriveLog::default()));
    let held = (0..shards).map(held).collect();
    let drives = Drives::new(vec!["a".into(), "b".into()], held, log.clone());
    (PacedReader::on_drives(reader, drives).unwrap(), log)
}

#[test]
fn latency_and_a_full_queue_of_two_drives_change_no_bit() {
    for folder in golden_models() {
        let model = model(&folder);
        let mut resident = model.resident();
        let want = read_and_write(&mut Session::new(&model.decoder, &mut resident, 100));
        let divisions: [fn(usize) -> u8; 2] = [|_| 3, |shard| 1 << (shard % 2)];
        for held in divisions {
            for (queue, slots, scope, prefetch) in
                [(1, 1, CacheScope::Layer, 0), (2, 2, CacheScope::Layer, 2), (8, 5, CacheScope::Global, 2)]
            {
                let memory = model.memory_of(2).capacity(queue).overtaken(3);
                let (reader, _) = mirrored(&model, memory, held);
                let mut streaming = model.streaming_through(Box::new(reader), slots, scope, prefetch);
                let got = read_and_write(&mut Session::new(&model.decoder, &mut streaming, 100));
                assert!(got == want, "{}: {slots} slots, {scope:?}", folder.display());
            }
        }
    }
}

#[test]
fn faults_of_one_drive_are_survived_bit_for_bit() {
    let model = model(&fixture("golden/olmoe"));
    let shards = model.store.shard_paths().len();
    let mut resident = model.resident();
    let want = read_and_write(&mut Session::new(&model.decoder, &mut resident, 100));
    let faults =
        [ReadFault::Disk, ReadFault::Gone, ReadFault::Short(3000), ReadFault::Flipped(4321), ReadFault::Flipped(77)];
    for fault in faults {
        for drive in 0..2 {
            for prefetch in [0, 2] {
                let bad = drive * shards..(drive + 1) * shards;
                let memory = bad.fold(model.memory_of(2).overtaken(2), |memory, shard| {
                    memory.with_fault(FaultTarget::Shard(shard), fault, u64::MAX)
                });
                let (reader, log) = mirrored(&model, memory, |_| 3);
                let said = Arc::new(Mutex::new(Vec::new()));
                let theirs = said.clone();
                log.send_to(move |what| theirs.lock().push(what.to_owned()));
                let mut streaming = model.streaming_through(Box::new(reader), 1, CacheScope::Layer, prefetch);
                let got = read_and_write(&mut Session::new(&model.decoder, &mut streaming, 100));
                assert!(got == want, "{fault:?} of drive {drive}: the logits differ");
                let said = said.lock();
                assert!((1..=2).contains(&said.len()), "{fault:?} of drive {drive}: {said:?}");
            }
        }
    }
}

/// Where both copies of an expert fail, and where there is no copy, it is as with one drive: the pass ends, and the
/// next goes on.
#[test]
fn without_a_good_copy_a_failure_ends_the_pass_and_the_session_goes_on() {
    let model = model(&fixture("golden/olmoe"));
    let shards = model.store.shard_paths().len();
    let mut resident = model.resident();
    let input = || TokenInput::prompt(&TOKENS).in_chunks(4);
    let want = Session::new(&model.decoder, &mut resident, 100).forward(&input(), &mut ()).unwrap();
    let mut happened = 0;
    for fault in [ReadFault::Gone, ReadFault::Short(3000), ReadFault::Flipped(4321)] {
        let divisions: [fn(usize) -> u8; 2] = [|_| 3, |shard| 1 << (shard % 2)];
        for held in divisions {
            for shard in 0..12 {
                let memory = model.memory_of(2).overtaken(2);
                let memory = memory.with_fault(FaultTarget::Shard(shard), fault, 1);
                let memory = memory.with_fault(FaultTarget::Shard(shards + shard), fault, 1);
                let (reader, _) = mirrored(&model, memory, held);
                let mut streaming = model.streaming_through(Box::new(reader), 2, CacheScope::Layer, 0);
                let mut session = Session::new(&model.decoder, &mut streaming, 100);
                let mut failures = 0;
                let got = loop {
                    match session.forward(&input(), &mut ()) {
                        Ok(logits) => break logits,
                        Err(error) => {
                            let said = error.to_string();
                            assert!(said.contains("layer ") && said.contains("expert "), "{said}");
                            failures += 1;
                            assert!(failures < 4, "{fault:?} never passes");
                        }
                    }
                };
                happened += failures;
                assert!(got == want, "{fault:?}: the logits are wrong after a failure");
            }
        }
    }
    assert!(happened >= 10, "only {happened} failures happened");
}

/// A drive that is unplugged after some reads: from then on, all of its reads fail.
struct Unplugged {
    memory: MemoryReader,
    first: usize,
    shards: usize,
    reads: usize,
}

impl Reader for Unplugged {
    fn name(&self) -> &'static str {
        "unplugged"
    }

    fn capacity(&self) -> usize {
        Reader::capacity(&self.memory)
    }

    fn submit(&mut self, reads: &mut VecDeque<ReadRequest>) {
        for read in reads.iter_mut().filter(|read| (self.first..self.first + self.shards).contains(&read.shard)) {
            self.reads = self.reads.saturating_sub(1);
            if self.reads == 0 {
                // There is no such file any more.
                read.shard += 10 * self.shards;
            }
        }
        self.memory.submit(reads);
    }

    fn poll(&mut self) -> Option<ReadCompletion> {
        self.memory.poll()
    }

    fn wait(&mut self) -> Option<ReadCompletion> {
        self.memory.wait()
    }

    fn in_flight(&self) -> usize {
        self.memory.in_flight()
    }
}

#[test]
fn a_drive_that_is_unplugged_in_the_middle_changes_no_bit() {
    for folder in ["olmoe", "qwen2_moe", "gpt_oss"] {
        let model = model(&fixture("golden").join(folder));
        let shards = model.store.shard_paths().len();
        let mut resident = model.resident();
        let want = read_and_write(&mut Session::new(&model.decoder, &mut resident, 100));
        for drive in 0..2 {
            for reads in [1, 5, 20] {
                let memory = model.memory_of(2).overtaken(2);
                let reader = Unplugged { memory, first: drive * shards, shards, reads };
                let (reader, log) = on_drives(&model, Box::new(reader), |_| 3);
                let mut streaming = model.streaming_through(Box::new(reader), 1, CacheScope::Layer, 2);
                let got = read_and_write(&mut Session::new(&model.decoder, &mut streaming, 100));
                assert!(got == want, "{folder}, drive {drive} after {reads} reads");
                assert!(log.bytes()[1 - drive] > log.bytes()[drive], "{:?}", log.bytes());
            }
        }
    }
}

/// The real readers over two real folders, one of which loses its files while it is read.
#[test]
fn folders_that_lose_their_files_are_survived_with_a_mirror() {
    for reader in ["uring", "pread"] {
        let two = TwoFolders::new("olmoe", "--also");
        let model = open(&two.store());
        let mut resident = model.resident();
        let want = read_and_write(&mut Session::new(&model.decoder, &mut resident, 100));
        for broken in [two.second(), two.store()] {
            let Some(mut streaming) = model.streaming_with(reader, 1, CacheScope::Layer, 0) else { continue };
            let mut session = Session::new(&model.decoder, &mut streaming, 100);
            let first = session.forward(&TokenInput::prompt(&TOKENS).in_chunks(5).all_logits(), &mut ()).unwrap();
            assert!(first[..] == want[..first.len()]);
            // Open files end early, and others are gone.
            for name in shards_in(&broken) {
                let path = broken.join(name);
                fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(4096).unwrap();
                fs::remove_file(&path).unwrap();
            }
            let mut rest = first;
            for token in TOKENS {
                rest.extend(session.forward(&TokenInput::decode(&[token]), &mut ()).unwrap());
            }
            assert!(rest == want, "{reader}: {}", broken.display());
            drop(session);
            add_drive(&two.store(), Division::Mirror, &two.second(), &()).unwrap();
        }
    }
}
