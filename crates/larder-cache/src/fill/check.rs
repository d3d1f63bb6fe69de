//! The check of bytes that were read against their checksums, and reads of another copy of those that are wrong.

use std::time::Instant;

use larder_store::StoreError;
use larder_store::reader::ReadRequest;
use parking_lot::Mutex;

use super::halves::Half;
use super::tag::ReadTag;
use super::{CompletedRead, SlotFiller, shards_of};
use crate::one_tier::SlotIndex;

/// A part whose bytes are to be checked.
#[derive(Clone, Copy)]
pub(super) enum Check {
    /// A part of a completed read, by its index among these.
    Read(usize, usize),
    /// The first half in a slot.
    Front(SlotIndex),
}

impl SlotFiller {
    /// Checks the bytes of `reads` and of first halves, shared between all threads. Those that are wrong are read again
    /// if there is another copy, and leave `reads`.
    pub(super) fn check(&mut self, reads: &mut Vec<CompletedRead>) {
        if reads.is_empty() && self.unchecked_fronts.is_empty() {
            return;
        }
        let start = Instant::now();
        let parts = self.shards.check_parts();
        self.checks.clear();
        for (i, read) in reads.iter().enumerate().filter(|(_, read)| read.result.is_ok()) {
            self.checks.extend((read.unchecked_from..parts).map(|part| Check::Read(i, part)));
        }
        self.checks.extend(self.unchecked_fronts.iter().map(|at| Check::Front(*at)));
        let mut failures = self.failed_checks(reads);
        self.fronts.append(&mut self.unchecked_fronts);
        // Both parts of an expert may be wrong. The last reads come first, so that indices stay what they are.
        failures.sort_by_key(|(check, _)| match check {
            Check::Read(read, _) => (0, std::cmp::Reverse(*read)),
            Check::Front(at) => (1, std::cmp::Reverse(*at)),
        });
        let read_of = |check: &Check| if let Check::Read(read, _) = check { Some(*read) } else { None };
        failures.dedup_by(|(a, _), (b, _)| read_of(a).is_some() && read_of(a) == read_of(b));
        for (check, wrong) in failures {
            match check {
                Check::Front(at) => self.front_is_wrong(at, wrong),
                Check::Read(read, _) => {
                    if self.read_copy(&reads[read], &wrong) {
                        drop(reads.remove(read))
                    } else {
                        reads[read].result = Err(about_copies(wrong, reads[read].tag))
                    }
                }
            }
        }
        self.fronts.iter().for_each(|at| self.halved.front_is_right(*at));
        self.checked += start.elapsed();
    }

    /// Carries out the checks, and returns those that failed.
    fn failed_checks(&self, reads: &[CompletedRead]) -> Vec<(Check, StoreError)> {
        let failures = Mutex::new(Vec::new());
        // The reader stays with this thread.
        let SlotFiller { shards, layers, slots, threads, checks, halved, .. } = self;
        let shards = shards.as_ref();
        threads.run(checks.len(), &|task| {
            let (expert, part, data) = match checks[task] {
                Check::Read(read, part) => {
                    let CompletedRead { expert, at, .. } = reads[read];
                    let slot = slots[at].as_ref().expect("a completed read gave its slot back");
                    let (shards, layer) = shards_of(shards, layers, expert.row);
                    (expert, part, &slot[..shards.layout(layer).bytes])
                }
                Check::Front(at) => {
                    let (expert, data) = halved.front(at);
                    (expert, 0, data)
                }
            };
            let (shards, layer) = shards_of(shards, layers, expert.row);
            if let Err(e) = shards.check(layer, expert.expert, part, data) {
                failures.lock().push((checks[task], e));
            }
        });
        failures.into_inner()
    }

    /// Reads an expert whose bytes are wrong from another copy, if there is one that was not read for this.
    fn read_copy(&mut self, read: &CompletedRead, wrong: &StoreError) -> bool {
        let CompletedRead { at, tag, .. } = *read;
        if tag.is_copy {
            return false;
        }
        let request = self.request(ReadTag { is_copy: true, ..tag }, at);
        match self.reader.read_copy(request, wrong) {
            Ok(()) => {
                self.demand_reads += usize::from(!tag.is_prefetch);
                self.busy.set(true);
                true
            }
            Err(request) => {
                self.put_back(request.slot);
                false
            }
        }
    }

    /// Reads a first half whose bytes are wrong from another copy; if there is none, the expert fails when its second
    /// half has been read.
    fn front_is_wrong(&mut self, at: SlotIndex, wrong: StoreError) {
        self.fronts.retain(|front| *front != at);
        let number = self.number(self.halved.front(at).0);
        let tag = ReadTag { is_copy: true, half: Some(Half::Front), ..ReadTag::new(number) };
        let Some(slot) = self.halved.take_front(at) else {
            return self.halved.front_is_lost(at, None, about_copies(wrong, tag));
        };
        let (shard, offset, len) = (number as usize, self.shards.data_start(), slot.len());
        match self.reader.read_copy(ReadRequest { shard, offset, len, slot, tag: tag.to_bits() }, &wrong) {
            Ok(()) => {
                self.demand_reads += 1;
                self.busy.set(true);
            }
            Err(request) => self.halved.front_is_lost(at, Some(request.slot), wrong),
        }
    }
}

/// The error of wrong bytes, which says if those of the other copy are wrong as well.
fn about_copies(wrong: StoreError, tag: ReadTag) -> StoreError {
    if tag.is_copy {
        StoreError { message: format!("{}, and its other copy is wrong, too", wrong.message), ..wrong }
    } else {
        wrong
    }
}
