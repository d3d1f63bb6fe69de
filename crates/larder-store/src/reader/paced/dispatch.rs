//! Which read starts next, and on which drive. It has no clock and does no I/O.
//!
//! A read of a shard with copies on several drives goes to the one that will have it first, by the bytes that it has in
//! flight and its rate. That is decided anew at each completion for all reads that have not started, so a drive that
//! becomes faster or slower gets more or fewer of them. With one drive, reads start in order.

use std::{collections::VecDeque, path::Path, time::Duration};

use super::{
    super::{Drives, ReadCompletion, ReadGoal, ReadRequest},
    drive::Drive,
};
use crate::error::{StoreError, StoreErrorKind};

/// Reads that wait, reads in flight, and the drives.
pub(super) struct Dispatcher {
    drives: Vec<Drive>,
    copies: Drives,
    /// Per shard, the drives whose copy could not be used; empty with one drive.
    bad: Vec<u8>,
    /// Per shard, the drive that it was last read from; empty with one drive.
    delivered: Vec<u8>,
    /// Per shard, the drive of the read that was started last, and where it ends; empty with one drive.
    begun: Vec<(u8, u64)>,
    /// Reads that were submitted and not started, in order.
    waiting: VecDeque<WaitingRead>,
    /// The reads in flight; the index is the tag of the reader.
    started: Vec<StartedRead>,
    /// Free places in `started`.
    free: Vec<usize>,
    /// The longest read that was started, in bytes.
    longest: u64,
    closed: bool,
}

/// A read that has not started.
struct WaitingRead {
    read: ReadRequest,
    goal: ReadGoal,
    attempts: Attempts,
}

/// What a read has been through.
#[derive(Default)]
struct Attempts {
    /// A bit for each drive from which it failed.
    failed: u8,
    /// The first failure.
    error: Option<StoreError>,
}

#[derive(Default)]
struct StartedRead {
    drive: usize,
    shard: usize,
    offset: u64,
    len: usize,
    goal: ReadGoal,
    /// Tag of the caller.
    tag: u64,
    attempts: Attempts,
}

/// The outcome of a read that the reader has completed.
pub(super) struct Completed {
    /// The completion for the caller; `None` if the read waits again, to be done from another copy.
    pub done: Option<ReadCompletion>,
    /// A note about the drive for the user.
    pub note: Option<String>,
}

impl Dispatcher {
    /// Of drives without reads, for a reader of this capacity.
    pub fn new(copies: Drives, capacity: usize, drive: impl Fn() -> Drive) -> Self {
        let several = if copies.count() > 1 { copies.shards() } else { 0 };
        Dispatcher {
            drives: (0..copies.count()).map(|_| drive()).collect(),
            copies,
            bad: vec![0; several],
            delivered: vec![0; several],
            begun: vec![(0, u64::MAX); several],
            waiting: VecDeque::with_capacity(capacity),
            started: (0..capacity).map(|_| StartedRead::default()).collect(),
            free: (0..capacity).rev().collect(),
            longest: 0,
            closed: false,
        }
    }

    pub fn drives(&self) -> &[Drive] {
        &self.drives
    }

    /// Whether reads wait.
    pub fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Adds reads to those that wait.
    pub fn extend(&mut self, reads: impl Iterator<Item = ReadRequest>, goal: ReadGoal) {
        self.waiting.extend(reads.map(|read| WaitingRead { read, goal, attempts: Attempts::default() }));
    }

    /// Drops the reads that wait; from now on, none that fails is done again.
    pub fn close(&mut self) {
        self.waiting.clear();
        self.closed = true;
    }

    /// Moves the reads that may start now to `next`, with the index of their file and a tag of its own.
    pub fn take_next(&mut self, now: Duration, next: &mut VecDeque<ReadRequest>) {
        self.drives.iter_mut().for_each(|drive| drive.begin_round(now));
        let mut at = 0;
        while at < self.waiting.len() && !self.free.is_empty() && !self.drives.iter().all(|drive| drive.held_back) {
            let waiting = &self.waiting[at];
            let (len, goal, drive) = (waiting.read.len as u64, waiting.goal, self.choose(waiting, now));
            // A planned read counts as one in flight, so that the next reads are compared with it.
            self.drives[drive].plan(len, goal);
            if self.drives[drive].held_back {
                at += 1;
                continue;
            }
            self.start(at, drive, now, next);
        }
    }

    fn start(&mut self, at: usize, drive: usize, now: Duration, next: &mut VecDeque<ReadRequest>) {
        let (Some(WaitingRead { read, goal, attempts }), Some(place)) = (self.waiting.remove(at), self.free.pop())
        else {
            return;
        };
        let ReadRequest { shard, offset, len, slot, tag } = read;
        self.started[place] = StartedRead { drive, shard, offset, len, goal, tag, attempts };
        self.longest = self.longest.max(len as u64);
        if let Some(begun) = self.begun.get_mut(shard) {
            *begun = (drive as u8, offset + len as u64);
        }
        for (other, of) in self.drives.iter_mut().enumerate() {
            if other == drive { of.started(len as u64, now) } else { of.passed_over += len as u64 }
        }
        let shard = self.copies.file(drive, shard);
        next.push_back(ReadRequest { shard, offset, len, slot, tag: place as u64 });
    }

    /// The drive that will have a read first, of those with a copy that is known to be good, else of those with any
    /// that the read has not failed from. A read that begins where the last of its shard ends has the same drive, so
    /// that wrong bytes are those of one copy.
    fn choose(&self, WaitingRead { read, attempts, .. }: &WaitingRead, now: Duration) -> usize {
        if self.drives.len() == 1 {
            return 0;
        }
        let untried = |drive: usize| self.copies.holds(drive, read.shard) && attempts.failed & (1 << drive) == 0;
        let bad = self.bad.get(read.shard).copied().unwrap_or_default();
        let good = |drive: usize| untried(drive) && bad & (1 << drive) == 0 && !self.drives[drive].is_set_aside(now);
        let fastest = self.drives.iter().filter_map(Drive::rate).fold(0.0, f64::max);
        let finish = |drive: &usize| self.drives[*drive].finish(read.len as u64, fastest);
        let (before, end) = self.begun.get(read.shard).copied().unwrap_or((0, u64::MAX));
        if end == read.offset && good(before.into()) {
            return before.into();
        }
        let best = |allowed: &dyn Fn(usize) -> bool| {
            let all = || (0..self.drives.len()).filter(|drive| allowed(*drive));
            let due = all().find(|drive| self.drives[*drive].is_due());
            due.or_else(|| all().min_by(|a, b| finish(a).total_cmp(&finish(b))))
        };
        best(&good).or_else(|| best(&untried)).unwrap_or_default()
    }

    /// Takes over what the reader has completed. A read that failed waits again if there is another copy.
    pub fn complete(&mut self, done: ReadCompletion, now: Duration) -> Completed {
        let place = done.tag as usize;
        let StartedRead { drive, shard, offset, len, goal, tag, mut attempts } =
            std::mem::take(&mut self.started[place]);
        self.free.push(place);
        let most = self.longest.saturating_mul(self.started.len() as u64);
        self.drives[drive].completed(len as u64, goal, now, done.result.is_ok(), most);
        if let Some(delivered) = self.delivered.get_mut(shard) {
            *delivered = drive as u8;
        }
        let Err(error) = done.result else {
            self.copies.log().count(drive, len as u64);
            return Completed { done: Some(ReadCompletion { tag, ..done }), note: None };
        };
        attempts.failed |= 1 << drive;
        // A request that no drive can carry out is no failure of this one.
        let has_others = self.others(drive, shard).next().is_some() && error.kind != StoreErrorKind::Unsupported;
        let note = if has_others { self.failed(drive, shard, &error, now) } else { None };
        let untried = self.others(drive, shard).any(|other| attempts.failed & (1 << other) == 0);
        if has_others && untried && !self.closed {
            attempts.error.get_or_insert(error);
            let read = ReadRequest { shard, offset, len, slot: done.slot, tag };
            self.waiting.push_front(WaitingRead { read, goal, attempts });
            return Completed { done: None, note };
        }
        let result = Err(attempts.with(error));
        Completed { done: Some(ReadCompletion { slot: done.slot, tag, result }), note }
    }

    /// Reads again, from another copy, what was read with wrong bytes. Gives the read back if there is no other.
    pub fn read_copy(
        &mut self,
        read: ReadRequest,
        goal: ReadGoal,
        wrong: &StoreError,
        now: Duration,
    ) -> Result<Option<String>, ReadRequest> {
        let drive = self.delivered.get(read.shard).copied().unwrap_or_default().into();
        if self.others(drive, read.shard).next().is_none() {
            return Err(read);
        }
        let bad = self.bad[read.shard];
        if bad != 0 && bad & (1 << drive) == 0 {
            // One half of an expert was read again from a good copy, and the other is of the bad one.
            let error = Some(StoreError::new(wrong.kind, &wrong.path, wrong.message.clone()));
            self.waiting.push_front(WaitingRead { read, goal, attempts: Attempts { failed: bad, error } });
            return Ok(None);
        }
        // The path is that of the copy in the store, whichever was read.
        let what = StoreError::new(wrong.kind, Path::new(""), wrong.message.clone());
        let note = self.failed(drive, read.shard, &what, now);
        let error = Some(StoreError::new(wrong.kind, &wrong.path, wrong.message.clone()));
        self.waiting.push_front(WaitingRead { read, goal, attempts: Attempts { failed: 1 << drive, error } });
        Ok(note)
    }

    /// The other drives that hold a shard.
    fn others(&self, drive: usize, shard: usize) -> impl Iterator<Item = usize> {
        (0..self.drives.len()).filter(move |other| *other != drive && self.copies.holds(*other, shard))
    }

    /// Takes note of a copy that could not be used, and of its drive.
    fn failed(&mut self, drive: usize, shard: usize, error: &StoreError, now: Duration) -> Option<String> {
        // The copy on a drive that is away is as good as before when the drive is back.
        if error.kind != StoreErrorKind::Removed {
            self.bad[shard] |= 1 << drive;
        }
        self.drives[drive].failed(now).map(|failure| failure.describe(self.copies.folder(drive), error))
    }
}

impl Attempts {
    /// The error of a read whose last attempt failed with `error`.
    fn with(self, error: StoreError) -> StoreError {
        match self.error {
            None => error,
            Some(first) => {
                StoreError { message: format!("{}; reading its copy failed, too: {error}", first.message), ..first }
            }
        }
    }
}
