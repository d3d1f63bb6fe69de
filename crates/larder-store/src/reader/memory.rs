//! Fake of a reader for tests: shards in memory, with seeded latency and faults.

use std::{
    collections::{BTreeSet, VecDeque},
    io,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use larder_core::Rng;

use super::retry::Failures;
use super::{ReadCompletion, ReadRequest, Reader, Slot};
use crate::{
    error::{Result, StoreError},
    files::io_failure::{disk_error, interruption},
};

/// The error code of a missing file, on every system.
const NOT_FOUND: i32 = 2;

/// A fault of one attempt to read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReadFault {
    /// A disk error (EIO); retried a few times.
    Disk,
    /// An interruption (EINTR); retried many times.
    Interrupted,
    /// The read ends after this number of bytes; retried as a disk error is.
    Short(usize),
    /// The file does not exist (ENOENT).
    Gone,
    /// The read succeeds, but the lowest bit of this byte is flipped; the index is taken modulo the length of the read.
    Flipped(usize),
}

/// Which attempts a fault hits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FaultTarget {
    /// Attempts to read this shard.
    Shard(usize),
    /// Attempts to read bytes of this shard after the first at their offset.
    Again(usize),
    /// One in this number of attempts, at random.
    OneIn(u32),
}

/// A fault to inject.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FaultPlan {
    /// The attempts it hits.
    pub target: FaultTarget,
    /// The fault.
    pub fault: ReadFault,
    /// How many attempts it hits at most; `u64::MAX` for a permanent fault.
    pub times: u64,
}

/// A reader of shards in memory. The same seed and the same calls give the same completions in the same order.
pub struct MemoryReader {
    shards: Arc<Vec<Vec<u8>>>,
    capacity: usize,
    overtaken_max: u64,
    faults: Vec<FaultPlan>,
    faults_injected: Arc<AtomicU64>,
    /// Releases of slots that are refused yet.
    refused_releases: usize,
    /// Shards and offsets of the reads that were attempted.
    attempted: BTreeSet<(usize, u64)>,
    random: Rng,
    submitted: u64,
    /// The reads in flight, each with the time of its completion as a count of submitted reads.
    pending: Vec<(u64, ReadRequest)>,
}

impl MemoryReader {
    /// A reader of `shards` without faults, with at most 8 reads in flight that complete in order.
    pub fn new(shards: Arc<Vec<Vec<u8>>>, seed: u64) -> Self {
        MemoryReader {
            shards,
            capacity: 8,
            overtaken_max: 0,
            faults: vec![],
            faults_injected: Arc::default(),
            refused_releases: 0,
            attempted: BTreeSet::new(),
            random: Rng::new(seed),
            submitted: 0,
            pending: vec![],
        }
    }

    /// Sets the largest number of reads in flight, at least 1. With 1 the queue is nearly always full.
    pub fn capacity(mut self, reads: usize) -> Self {
        self.capacity = reads.max(1);
        self
    }

    /// Sets the latency: up to `reads_max` reads that were submitted later may overtake a read.
    pub fn overtaken(mut self, reads_max: u64) -> Self {
        self.overtaken_max = reads_max;
        self
    }

    /// Adds a fault. If several hit one attempt, the first that was added is injected.
    pub fn with_fault(mut self, target: FaultTarget, fault: ReadFault, times: u64) -> Self {
        self.faults.push(FaultPlan { target, fault, times });
        self
    }

    /// Has the first `count` releases of slots refused.
    pub fn refusing_releases(mut self, count: usize) -> Self {
        self.refused_releases = count;
        self
    }

    /// Counter of the injected faults; it keeps counting after the reader has been moved.
    pub fn faults_injected(&self) -> Arc<AtomicU64> {
        self.faults_injected.clone()
    }

    fn perform(&mut self, read: &mut ReadRequest) -> Result<()> {
        let path = || PathBuf::from(format!("shard {} in memory", read.shard));
        read.check(path)?;
        let mut failures = Failures::default();
        loop {
            let fault = self.fault(read.shard, read.offset);
            let (bytes, slot) = (self.shards.get(read.shard), &mut read.slot[..read.len]);
            let Some(bytes) = bytes.filter(|_| fault != Some(ReadFault::Gone)) else {
                return Err(StoreError::io(&path(), "opening", io::Error::from_raw_os_error(NOT_FOUND)));
            };
            let got = attempt(bytes, read.offset, slot, fault);
            if let Some(result) = read.outcome(path, got, &mut failures) {
                return result;
            }
        }
    }

    fn fault(&mut self, shard: usize, offset: u64) -> Option<ReadFault> {
        let again = !self.attempted.insert((shard, offset));
        for at in 0..self.faults.len() {
            let FaultPlan { target, fault, times } = self.faults[at];
            let hits = match target {
                FaultTarget::Shard(of) => of == shard,
                FaultTarget::Again(of) => of == shard && again,
                FaultTarget::OneIn(count) => self.below(count.into()) == 0,
            };
            if hits && times > 0 {
                self.faults[at].times = if times == u64::MAX { times } else { times - 1 };
                self.faults_injected.fetch_add(1, Ordering::Relaxed);
                return Some(fault);
            }
        }
        None
    }

    /// The next random number below `limit`, which is at least 1.
    fn below(&mut self, limit: u64) -> u64 {
        self.random.bits() % limit.max(1)
    }
}

impl Reader for MemoryReader {
    fn name(&self) -> &'static str {
        "memory"
    }

    fn capacity(&self) -> usize {
        self.capacity
    }

    fn submit(&mut self, reads: &mut VecDeque<ReadRequest>) {
        let taken = reads.len().min(self.capacity - self.pending.len());
        for read in reads.drain(..taken) {
            let over = self.submitted + self.below(self.overtaken_max + 1);
            self.submitted += 1;
            self.pending.push((over, read));
        }
    }

    fn poll(&mut self) -> Option<ReadCompletion> {
        // Some have completed, others not, as with a device.
        if self.below(2) == 0 { None } else { self.wait() }
    }

    fn wait(&mut self) -> Option<ReadCompletion> {
        // Of reads that complete at the same time, `min_by_key` takes the first submitted.
        let next = self.pending.iter().enumerate().min_by_key(|(_, (over, _))| *over)?.0;
        let (_, mut read) = self.pending.remove(next);
        let result = self.perform(&mut read);
        if result.is_err() {
            // The bytes of a failed read are unspecified; callers must not rely on them.
            read.slot.fill(0xA5);
        }
        Some(ReadCompletion { slot: read.slot, tag: read.tag, result })
    }

    fn in_flight(&self) -> usize {
        self.pending.len()
    }

    fn release(&mut self, _: &Slot) -> bool {
        let refused = self.refused_releases > 0;
        self.refused_releases = self.refused_releases.saturating_sub(1);
        !refused
    }
}

fn attempt(bytes: &[u8], offset: u64, into: &mut [u8], fault: Option<ReadFault>) -> io::Result<usize> {
    let rest = usize::try_from(offset).ok().and_then(|offset| bytes.get(offset..)).unwrap_or_default();
    let mut len = rest.len().min(into.len());
    match fault {
        Some(ReadFault::Disk) => return Err(disk_error()),
        Some(ReadFault::Interrupted) => return Err(interruption()),
        Some(ReadFault::Short(short)) => len = len.min(short),
        _ => {}
    }
    into[..len].copy_from_slice(&rest[..len]);
    if let (Some(ReadFault::Flipped(at)), 1..) = (fault, len) {
        into[at % len] ^= 1;
    }
    Ok(len)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::reader::{Arena, Slot};

    const BYTES: usize = 8192;

    fn memory(seed: u64) -> MemoryReader {
        let shard = |i: usize| (0..BYTES).map(|b| (b * 7 + i * 31) as u8).collect();
        MemoryReader::new(Arc::new((0..16).map(shard).collect()), seed)
    }

    fn read(shard: usize, slot: Slot) -> ReadRequest {
        ReadRequest { shard, offset: 4096, len: 4000, slot, tag: shard as u64 }
    }

    /// Reads all shards at once; returns tags and results in the order of completion.
    fn all(mut memory: MemoryReader) -> Vec<(u64, Result<bool, String>)> {
        let shards = memory.shards.clone();
        let slots = Arena::new(shards.len(), 4096).unwrap().1;
        let mut reads: VecDeque<_> = slots.into_iter().enumerate().map(|(i, slot)| read(i, slot)).collect();
        let mut done = vec![];
        while done.len() < shards.len() {
            memory.submit(&mut reads);
            assert!(memory.in_flight() <= memory.capacity);
            let ReadCompletion { slot, tag, result } = memory.wait().unwrap();
            let right = slot[..4000] == shards[tag as usize][4096..][..4000];
            done.push((tag, result.map(|()| right).map_err(|e| e.to_string())));
        }
        assert!(memory.wait().is_none());
        done
    }

    fn one(memory: MemoryReader, shard: usize) -> Result<bool, String> {
        all(memory).into_iter().find(|(tag, _)| *tag == shard as u64).unwrap().1
    }

    #[test]
    fn latency_reorders_by_seed() {
        let order = |memory| all(memory).into_iter().map(|(tag, _)| tag).collect::<Vec<_>>();
        assert_eq!(order(memory(1)), (0..16).collect::<Vec<_>>());
        let late = |seed| order(memory(seed).overtaken(5));
        assert_eq!(late(1), late(1));
        assert_ne!(late(1), late(2));
        assert_eq!(order(memory(1).overtaken(5).capacity(1)), (0..16).collect::<Vec<_>>());
    }

    #[test]
    fn transient_disk_errors_are_retried_and_permanent_ones_reported() {
        assert_eq!(one(memory(1).with_fault(FaultTarget::Shard(3), ReadFault::Disk, 2), 3), Ok(true));
        let failed = StoreError::io(Path::new("shard 3 in memory"), "reading 4000 bytes at 4096", disk_error());
        let error = format!("{failed}, 3 times");
        assert_eq!(one(memory(1).with_fault(FaultTarget::Shard(3), ReadFault::Disk, 3), 3), Err(error.clone()));
        assert_eq!(one(memory(1).with_fault(FaultTarget::Shard(3), ReadFault::Disk, u64::MAX), 3), Err(error));
        assert_eq!(one(memory(1).with_fault(FaultTarget::Shard(3), ReadFault::Disk, u64::MAX), 4), Ok(true));
        assert_eq!(one(memory(1).with_fault(FaultTarget::Shard(3), ReadFault::Interrupted, 9), 3), Ok(true));
    }

    #[test]
    fn short_missing_and_flipped_reads_behave_as_described() {
        let short = |times| one(memory(1).with_fault(FaultTarget::Shard(5), ReadFault::Short(99), times), 5);
        assert_eq!((short(1), short(2)), (Ok(true), Ok(true)), "a short read is not yet the end of the file");
        assert!(short(u64::MAX).unwrap_err().contains("reading 4000 bytes at 4096 returned only 99"));
        let error = |fault| one(memory(1).with_fault(FaultTarget::Shard(5), fault, 1), 5).unwrap_err();
        let gone = StoreError::io(Path::new(""), "opening", io::Error::from_raw_os_error(NOT_FOUND));
        assert!(error(ReadFault::Gone).ends_with(&gone.message));
        assert_eq!(one(memory(1).with_fault(FaultTarget::Shard(5), ReadFault::Flipped(77), 1), 5), Ok(false));
    }

    #[test]
    fn random_faults_are_seeded_and_counted() {
        let faulty = |seed| memory(seed).with_fault(FaultTarget::OneIn(4), ReadFault::Gone, u64::MAX);
        let memory = faulty(7);
        let count = memory.faults_injected();
        let failed = all(memory).iter().filter(|(_, result)| result.is_err()).count() as u64;
        assert_eq!(count.load(Ordering::Relaxed), failed);
        assert!((1..16).contains(&failed), "{failed}");
        assert_eq!(all(faulty(7)), all(faulty(7)));
        assert_ne!(all(faulty(7)), all(faulty(8)));
    }
}
