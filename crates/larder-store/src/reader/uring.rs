//! The reader `uring`: reads by io_uring, all misses of a layer with one system call and without blocked threads.
//!
//! The kernel writes to slots on its own. What makes that sound: a slot and its file are kept in `operations` from
//! before the entry is queued until after its completion has been seen, and `drop` waits for all completions before it
//! frees any.
#![allow(unsafe_code)]

use std::{collections::VecDeque, io, os::fd::AsRawFd, path::Path, sync::Arc, thread, time::Duration};

use io_uring::{
    IoUring, opcode,
    squeue::Entry,
    types::{Fd, Fixed},
};
use larder_core::SHARD_ALIGN;
use rustix::{
    io::Errno,
    process::{Resource, getrlimit},
};

use super::{Arena, ReadCompletion, ReadRequest, Reader, ShardFiles, Slot};
use super::{
    files::OpenFile, registered_buffers::RegisteredBuffers, registered_files::RegisteredFiles, retry::Failures,
};
use crate::error::{Result, StoreError, StoreErrorKind};

/// Reads in flight per drive; the kernel splits large ones, so the queue of the SSD is deeper.
const CAPACITY: usize = 64;
/// Failed calls of `io_uring_enter` in a row, a millisecond apart, after which the ring is given up.
const ENTER_FAILURES_MAX: u32 = 1000;

/// Submits what is queued, and waits for a number of completions: `io_uring_enter`.
type Enter = fn(&IoUring, usize) -> io::Result<usize>;

/// A ring, and the reads in flight.
pub(super) struct Uring {
    ring: IoUring,
    files: Arc<ShardFiles>,
    registered_buffers: Result<RegisteredBuffers, String>,
    registered_files: Result<RegisteredFiles, String>,
    operations: Vec<Option<Operation>>,
    /// Free places in `operations`.
    free: Vec<usize>,
    /// Completed reads that were not returned yet.
    completed: VecDeque<ReadCompletion>,
    enter: Enter,
    /// Calls of `enter` that failed since the last that did not.
    enter_failures: u32,
    /// Why the ring was given up. Then nothing is queued or submitted any more.
    broken: Option<String>,
    /// Number of entries that were ever queued.
    queued: u64,
}

struct Operation {
    read: ReadRequest,
    /// Position among all entries that were queued.
    queued: u64,
    file: Arc<OpenFile>,
    failures: Failures,
}

impl Uring {
    /// Sets up a ring with registered slots and files, and performs a trial read; the error says why io_uring is not
    /// available.
    pub fn open(files: &Arc<ShardFiles>, arena: &Arena) -> Result<Self> {
        // On Android the setup call would not fail but kill the process.
        if super::is_android() {
            return Err(unsupported("Android does not allow io_uring".into()));
        }
        let capacity = (CAPACITY * files.drives().count()).min(files.open_max());
        let ring = IoUring::new(capacity as u32).map_err(|e| unsupported(system_error("io_uring_setup", e)))?;
        // The ring is still empty, so nothing is left in flight if this call is what is forbidden.
        ring.submit().map_err(|e| unsupported(system_error("io_uring_enter", e)))?;
        let registered_buffers = RegisteredBuffers::register(&ring, arena).map_err(registration_error);
        let file_places = files.count().min(files.open_max());
        let registered_files =
            RegisteredFiles::register(&ring, file_places).map_err(|e| system_error("io_uring_register", e));
        let free = (0..capacity).rev().collect();
        let operations = (0..capacity).map(|_| None).collect();
        let mut reader = Uring {
            ring,
            files: files.clone(),
            registered_buffers,
            registered_files,
            operations,
            free,
            completed: VecDeque::new(),
            enter: |ring, wanted| ring.submit_and_wait(wanted),
            enter_failures: 0,
            broken: None,
            queued: 0,
        };
        reader.probe().map_err(|e| unsupported(format!("the first read by io_uring failed: {e}")))?;
        Ok(reader)
    }

    /// Whether buffers and files are registered, as part of a sentence.
    pub fn registered(&self) -> String {
        let say = |what, refused: Option<&String>| match refused {
            None => format!("registered {what}"),
            Some(why) => format!("{what} not registered ({why})"),
        };
        let (registered_buffers, files) =
            (self.registered_buffers.as_ref().err(), self.registered_files.as_ref().err());
        format!("{}, {}", say("buffers", registered_buffers), say("files", files))
    }

    /// Performs a read: a seccomp filter may allow the setup of a ring and make its reads fail.
    fn probe(&mut self) -> Result<()> {
        let (_, slots) =
            Arena::new(1, SHARD_ALIGN).map_err(|e| StoreError::io(Path::new(""), "allocating memory", e))?;
        let shard = self.files.first();
        let read = |slot| ReadRequest { shard, offset: 0, len: 1, slot, tag: 0 };
        self.submit(&mut slots.into_iter().map(read).collect());
        self.wait().expect("one read is in flight").result
    }

    fn start(&mut self, read: ReadRequest) {
        match read.open(&self.files) {
            Err(error) => {
                self.completed.push_back(ReadCompletion { slot: read.slot, tag: read.tag, result: Err(error) })
            }
            Ok(_) if self.broken.is_some() => self.fail(read),
            Ok(file) => {
                let place = self.free.pop().expect("fewer reads are in flight than there are places");
                self.operations[place] = Some(Operation { read, queued: 0, file, failures: Failures::default() });
                self.queue(place);
            }
        }
    }

    fn queue(&mut self, place: usize) {
        let operation = self.operations[place].as_mut().expect("the place holds an operation");
        self.queued += 1;
        operation.queued = self.queued;
        let registered = self.registered_buffers.as_mut().ok();
        let buffer = registered.and_then(|buffers| buffers.number(&self.ring, &operation.read.slot));
        let new = buffer.is_some_and(|(_, new)| new);
        let buffer = buffer.map(|(number, _)| number);
        let number = number(&mut self.registered_files, &self.ring, &operation.file);
        let entry = operation.entry(number, buffer).user_data(place as u64);
        // SAFETY: the file and the slot that the entry names stay in `operations` until its completion has been seen,
        // see the top of this file, and the index of the file is its own meanwhile; the length is within the slot,
        // which `ReadRequest::open` has checked.
        let queued = unsafe { self.ring.submission().push(&entry) };
        queued.expect("the ring has an entry per place");
        if new {
            // Registering a slot takes as long as reading it: this read must not wait for the next registration.
            let _ = (self.enter)(&self.ring, 0);
        }
    }

    fn reap(&mut self) {
        loop {
            let next = self.ring.completion().next();
            let Some(entry) = next else { return };
            self.complete(entry.user_data() as usize, entry.result());
        }
    }

    fn complete(&mut self, place: usize, result: i32) {
        let operation = self.operations[place].as_mut().expect("an entry completes only once");
        let got = usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
        let path = || self.files.path(operation.read.shard);
        match operation.read.outcome(path, got, &mut operation.failures) {
            None if self.broken.is_none() => self.queue(place),
            None => {
                let read = self.take(place);
                self.fail(read);
            }
            Some(result) => {
                let read = self.take(place);
                let result = result.map_err(|error| self.files.failed(read.shard, error));
                if let (Err(_), Ok(registered)) = (&result, &mut self.registered_files) {
                    // The kernel would keep the files of a drive that is gone open.
                    registered.release_closed(&self.ring);
                }
                self.completed.push_back(ReadCompletion { slot: read.slot, tag: read.tag, result });
            }
        }
    }

    /// The read at `place`, which is free then.
    fn take(&mut self, place: usize) -> ReadRequest {
        let Operation { read, .. } = self.operations[place].take().expect("the place holds an operation");
        self.free.push(place);
        read
    }

    /// Completes a read that the broken ring cannot do.
    fn fail(&mut self, read: ReadRequest) {
        let why = self.broken.as_deref().unwrap_or_default();
        let what =
            format!("reading {} bytes at {} failed: {why}; the reader pread does without it", read.len, read.offset);
        let result = Err(StoreError::new(StoreErrorKind::Io, &self.files.path(read.shard), what));
        self.completed.push_back(ReadCompletion { slot: read.slot, tag: read.tag, result });
    }

    fn has_operations(&self) -> bool {
        self.free.len() < self.operations.len()
    }

    /// Waits in the kernel for a completion. The call may fail for lack of memory or by an interruption; entries that
    /// it did not take are still queued, and the next call submits them again. If it keeps failing, the ring is given
    /// up.
    fn wait_in_kernel(&mut self) {
        // The completions of a broken ring's reads arrive without a call.
        let entered = if self.broken.is_some() { Err(None) } else { (self.enter)(&self.ring, 1).map_err(Some) };
        match entered {
            Ok(_) => self.enter_failures = 0,
            Err(Some(error)) if self.enter_failures == ENTER_FAILURES_MAX => self.give_up(error),
            Err(_) => {
                self.enter_failures = (self.enter_failures + 1).min(ENTER_FAILURES_MAX);
                thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// Fails the reads that the kernel did not take, which are the last that were queued. The others are in flight: the
    /// kernel still writes to their slots, and completes them.
    fn give_up(&mut self, error: io::Error) {
        self.broken = Some(format!("{}, again and again", system_error("io_uring_enter", error)));
        let mut submission = self.ring.submission();
        submission.sync();
        let not_taken = submission.len() as u64;
        drop(submission);
        for place in 0..self.operations.len() {
            let is_queued = |operation: &Operation| operation.queued + not_taken > self.queued;
            if self.operations[place].as_ref().is_some_and(is_queued) {
                let read = self.take(place);
                self.fail(read);
            }
        }
    }
}

impl Reader for Uring {
    fn name(&self) -> &'static str {
        "uring"
    }

    fn capacity(&self) -> usize {
        self.operations.len()
    }

    fn submit(&mut self, reads: &mut VecDeque<ReadRequest>) {
        while self.in_flight() < self.capacity()
            && let Some(read) = reads.pop_front()
        {
            self.start(read);
        }
        // Entries that the kernel does not take now stay queued and are submitted by the next wait.
        if self.broken.is_none() {
            let _ = (self.enter)(&self.ring, 0);
        }
    }

    fn poll(&mut self) -> Option<ReadCompletion> {
        if self.completed.is_empty() {
            self.reap();
        }
        self.completed.pop_front()
    }

    fn wait(&mut self) -> Option<ReadCompletion> {
        loop {
            if let Some(done) = self.poll() {
                return Some(done);
            }
            if !self.has_operations() {
                return None;
            }
            self.wait_in_kernel();
        }
    }

    fn in_flight(&self) -> usize {
        self.operations.len() - self.free.len() + self.completed.len()
    }

    fn release(&mut self, slot: &Slot) -> bool {
        match &mut self.registered_buffers {
            Ok(registered) => registered.release(&self.ring, slot).is_ok(),
            // None is registered.
            Err(_) => true,
        }
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        while self.wait().is_some() {}
        // Closing the ring would unregister them too, but asynchronously; memory and files must be free now.
        let _ = self.ring.submitter().unregister_buffers();
        let _ = self.ring.submitter().unregister_files();
    }
}

impl Operation {
    fn entry(&mut self, number: Option<Fixed>, buffer: Option<u16>) -> Entry {
        let (fd, offset, wanted) = (Fd(self.file.file.as_raw_fd()), self.read.offset, self.read.aligned_len() as u32);
        let start = self.read.slot.as_mut_ptr();
        match (number, buffer) {
            (Some(file), Some(buffer)) => opcode::ReadFixed::new(file, start, wanted, buffer).offset(offset).build(),
            (Some(file), None) => opcode::Read::new(file, start, wanted).offset(offset).build(),
            (None, Some(buffer)) => opcode::ReadFixed::new(fd, start, wanted, buffer).offset(offset).build(),
            (None, None) => opcode::Read::new(fd, start, wanted).offset(offset).build(),
        }
    }
}

/// The registered index of the file, if it has one. After the kernel has refused a file, no more are registered.
fn number(
    registered_files: &mut Result<RegisteredFiles, String>,
    ring: &IoUring,
    file: &Arc<OpenFile>,
) -> Option<Fixed> {
    match registered_files.as_mut().ok()?.number(ring, file) {
        Ok(number) => number,
        Err(e) => {
            *registered_files = Err(system_error("io_uring_register", e));
            None
        }
    }
}

fn registration_error(error: io::Error) -> String {
    let memlock = getrlimit(Resource::Memlock).current;
    match (Errno::from_io_error(&error), memlock) {
        (Some(Errno::NOMEM), Some(bytes)) => format!("RLIMIT_MEMLOCK allows {bytes} bytes"),
        _ => system_error("io_uring_register", error),
    }
}

fn system_error(call: &str, error: io::Error) -> String {
    StoreError::io(Path::new(""), call, error).message
}

fn unsupported(what: String) -> StoreError {
    StoreError::new(StoreErrorKind::Unsupported, Path::new(""), what)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    /// A shard of two pages, the first of ones and the second of twos, and a ring that reads it; `None` without
    /// io_uring.
    fn uring() -> Option<(tempfile::TempDir, Vec<Slot>, Uring)> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("shard");
        std::fs::write(&path, [[1; SHARD_ALIGN], [2; SHARD_ALIGN]].concat()).unwrap();
        let files = Arc::new(ShardFiles::new(1, move |_| (path.clone(), 2 * SHARD_ALIGN as u64)).unwrap());
        let (arena, slots) = Arena::new(3, 2 * SHARD_ALIGN).unwrap();
        match Uring::open(&files, &arena) {
            Ok(uring) => Some((dir, slots, uring)),
            Err(e) => {
                println!("uring is not tested: {e}");
                None
            }
        }
    }

    fn read(uring: &mut Uring, offset: usize, slot: Slot) -> Slot {
        let read = ReadRequest { shard: 0, offset: offset as u64, len: SHARD_ALIGN, slot, tag: 0 };
        uring.submit(&mut VecDeque::from([read]));
        let done = uring.wait().unwrap();
        done.result.unwrap();
        done.slot
    }

    #[test]
    fn both_parts_of_a_slot_lie_in_its_registered_buffer() {
        let Some((_dir, mut slots, mut uring)) = uring() else { return };
        let (front, back) = slots.remove(1).split_at(SHARD_ALIGN);
        let Ok(registered_buffers) = &mut uring.registered_buffers else { return println!("{}", uring.registered()) };
        let [first, second] = [&back, &front].map(|part| registered_buffers.number(&uring.ring, part));
        assert_eq!((first, second), (Some((1, true)), Some((1, false))));
        // The kernel refuses a read to an address outside the named buffer.
        let back = read(&mut uring, SHARD_ALIGN, back);
        let slot = read(&mut uring, 0, front).join(back);
        assert!(slot[..SHARD_ALIGN].iter().all(|b| *b == 1) && slot[SHARD_ALIGN..].iter().all(|b| *b == 2));
        assert!(slots.iter().all(|slot| slot.iter().all(|b| *b == 0)));
    }

    #[test]
    fn a_call_that_keeps_failing_ends_the_reads() {
        let Some((_dir, mut slots, mut uring)) = uring() else { return };
        uring.enter = |_, _| Err(Errno::PERM.into());
        let request = |slot| ReadRequest { shard: 0, offset: 0, len: SHARD_ALIGN, slot, tag: 7 };
        let started = Instant::now();
        uring.submit(&mut slots.drain(..2).map(request).collect());
        for _ in 0..2 {
            let done = uring.wait().unwrap();
            let error = done.result.unwrap_err().to_string();
            assert!(error.contains("io_uring_enter failed") && error.contains("pread") && done.tag == 7, "{error}");
            assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
        }
        assert!(uring.wait().is_none() && uring.in_flight() == 0);
        // From now on reads fail at once.
        uring.submit(&mut slots.drain(..).map(request).collect());
        let done = uring.wait().unwrap();
        assert!(done.result.is_err() && done.slot.iter().all(|byte| *byte == 0));
    }

    #[test]
    fn reads_in_flight_complete_although_calls_fail() {
        let Some((_dir, mut slots, mut uring)) = uring() else { return };
        uring.enter = |ring, wanted| if wanted == 0 { ring.submit() } else { Err(Errno::PERM.into()) };
        assert!(read(&mut uring, 0, slots.remove(0))[..SHARD_ALIGN].iter().all(|b| *b == 1));
    }

    #[test]
    fn dropping_ends_although_calls_fail() {
        let Some((_dir, mut slots, mut uring)) = uring() else { return };
        uring.enter = |_, _| Err(Errno::PERM.into());
        let read = ReadRequest { shard: 0, offset: 0, len: SHARD_ALIGN, slot: slots.remove(0), tag: 0 };
        uring.submit(&mut VecDeque::from([read]));
        let started = Instant::now();
        drop(uring);
        assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
    }

    #[test]
    fn reads_work_without_registration() {
        let Some((_dir, mut slots, mut uring)) = uring() else { return };
        // A ring has only one file table, so the second registration fails.
        uring.registered_files =
            RegisteredFiles::register(&uring.ring, 1).map_err(|e| system_error("io_uring_register", e));
        uring.registered_buffers = Err("no memory".into());
        assert_eq!(
            uring.registered(),
            "buffers not registered (no memory), files not registered (io_uring_register failed: device or resource busy)"
        );
        assert!(read(&mut uring, 0, slots.remove(0))[..SHARD_ALIGN].iter().all(|b| *b == 1));
    }
}
