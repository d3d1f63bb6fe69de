//! Tests of reads in halves: order, wrong bytes, other copies.

use larder_core::ExpertId;
use larder_store::reader::{Arena, FaultTarget, MemoryReader, ReadFault};

use super::*;
use crate::testing::{fill_byte, geometry, layout, numbered_reader, supply};

/// A reader with another copy of each shard; the faults of both are those of the reader.
struct WithCopies(MemoryReader);

impl Reader for WithCopies {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn capacity(&self) -> usize {
        Reader::capacity(&self.0)
    }

    fn submit(&mut self, reads: &mut VecDeque<ReadRequest>) {
        self.0.submit(reads);
    }

    fn poll(&mut self) -> Option<ReadCompletion> {
        self.0.poll()
    }

    fn wait(&mut self) -> Option<ReadCompletion> {
        self.0.wait()
    }

    fn in_flight(&self) -> usize {
        self.0.in_flight()
    }

    fn read_copy(&mut self, read: ReadRequest, _: &StoreError) -> Result<(), ReadRequest> {
        self.0.submit(&mut VecDeque::from([read]));
        Ok(())
    }
}

const SLOTS: usize = 4;

fn filler(reader: MemoryReader, has_copies: bool) -> SlotFiller {
    let (_arena, memory) = Arena::new(SLOTS, layout().bytes).unwrap();
    let mut supply = supply(memory, numbered_reader());
    supply.reader = if has_copies { Box::new(WithCopies(reader)) } else { Box::new(reader) };
    SlotFiller::new(&geometry(), supply)
}

fn expert(number: u16) -> ExpertKey {
    MoeRow(0).key(ExpertId(number))
}

fn is_right(expert: ExpertKey, data: &[u8]) -> bool {
    data.iter().all(|b| *b == fill_byte(LayerIdx(0), expert.expert))
}

/// Reads experts 0, 1, … into as many slots, and returns how many fronts were seen and the result of each expert.
fn read_all(filler: &mut SlotFiller) -> (usize, Vec<Result<(), StoreError>>) {
    (0..SLOTS).for_each(|at| filler.read_in_halves(expert(at as u16), at));
    let (mut seen, mut results): (usize, Vec<_>) = (0, (0..SLOTS).map(|_| None).collect());
    let (mut waited, mut reads, mut fronts) = (Duration::ZERO, Vec::new(), Vec::new());
    while results.iter().any(Option::is_none) {
        filler.complete(&mut waited, &mut reads);
        filler.take_fronts(&mut fronts);
        assert!(!reads.is_empty() || !fronts.is_empty(), "something is in flight");
        seen += fronts.len();
        for at in fronts.drain(..) {
            let (key, front) = filler.front(at);
            assert!(key == expert(at as u16) && front.len() == layout().cut().unwrap() && is_right(key, front));
        }
        for read in reads.drain(..) {
            assert!(read.result.is_err() || is_right(read.expert, filler.data(MoeRow(0), read.at)));
            assert!(results[read.at].replace(read.result).is_none(), "an expert completes once");
        }
    }
    assert!(filler.is_whole(0) && filler.reads_in_flight() == 0);
    (seen, results.into_iter().flatten().collect())
}

#[test]
fn first_halves_are_read_before_all_second_ones() {
    let mut filler = filler(numbered_reader().overtaken(0).capacity(1), false);
    let (fronts, results) = read_all(&mut filler);
    assert_eq!((fronts, results.len()), (SLOTS, SLOTS));
    assert!(results.iter().all(Result::is_ok));
    assert_eq!(filler.demand_bytes, (SLOTS * layout().bytes) as u64);
}

#[test]
fn halves_that_overtake_each_other_are_one_expert() {
    for capacity in 1..9 {
        let mut filler = filler(numbered_reader().overtaken(5).capacity(capacity), false);
        for _ in 0..20 {
            assert!(read_all(&mut filler).1.iter().all(Result::is_ok));
        }
    }
}

#[test]
fn a_half_with_wrong_bytes_is_read_from_another_copy_once() {
    const SHARD: usize = 2;
    for overtaken in 0..4 {
        for (target, times, succeeds) in [
            (FaultTarget::Shard(SHARD), 1, true),
            (FaultTarget::Again(SHARD), 1, true),
            (FaultTarget::Shard(SHARD), u64::MAX, false),
        ] {
            for has_copies in [true, false] {
                let reader = numbered_reader().overtaken(overtaken).with_fault(target, ReadFault::Flipped(9), times);
                let faults = reader.faults_injected();
                let mut filler = filler(reader, has_copies);
                if let FaultTarget::Again(_) = target {
                    assert!(read_all(&mut filler).1.iter().all(Result::is_ok));
                }
                let (_, results) = read_all(&mut filler);
                assert!(faults.load(std::sync::atomic::Ordering::Relaxed) > 0);
                let failed: Vec<_> = (0..SLOTS).filter(|at| results[*at].is_err()).collect();
                let expected: &[usize] = if succeeds && has_copies { &[] } else { &[SHARD] };
                assert_eq!(failed, expected, "{target:?}, {times} times, copies: {has_copies}");
                if let Err(e) = &results[SHARD] {
                    assert_eq!(e.message.contains("its other copy is wrong, too"), has_copies, "{e}");
                }
            }
        }
    }
}

#[test]
fn a_half_that_cannot_be_read_fails_its_expert_when_both_have_ended() {
    for fault in [ReadFault::Gone, ReadFault::Short(100)] {
        for target in [FaultTarget::Shard(1), FaultTarget::Again(1)] {
            let mut filler = filler(numbered_reader().overtaken(2).with_fault(target, fault, u64::MAX), true);
            if let FaultTarget::Again(_) = target {
                assert!(read_all(&mut filler).1.iter().all(Result::is_ok));
            }
            let (_, results) = read_all(&mut filler);
            assert!((0..SLOTS).all(|at| results[at].is_err() == (at == 1)), "{fault:?} {target:?}");
        }
    }
}
