//! Reads distributed between simulated drives: the rate of both together, and failures of one.

use larder_core::SHARD_ALIGN;

use super::{dispatch::Dispatcher, drive::Drive, *};
use crate::{
    drives::DriveLog,
    error::StoreErrorKind,
    reader::{Arena, FaultTarget, MemoryReader, ReadFault, Slot},
};

/// Delay of a read beside the time of its bytes.
const LATENCY: f64 = 80e-6;

/// Bytes per second of two drives at a time in seconds.
type Rates = [fn(f64) -> f64; 2];

/// Two drives that read one byte after the other, at a rate that depends on the time.
struct Simulation {
    dispatcher: Dispatcher,
    rates: Rates,
    free_at: [f64; 2],
    /// Reads in flight with the time of their completion.
    in_flight: Vec<(f64, ReadRequest)>,
    shards: usize,
    now: f64,
    bytes: [u64; 2],
}

impl Simulation {
    fn new(held: Vec<u8>, rates: Rates) -> Self {
        let shards = held.len();
        let drives = Drives::new(vec!["a".into(), "b".into()], held, Arc::default());
        let dispatcher = Dispatcher::new(drives, 128, || Drive::new(ReadWindow::new));
        Simulation { dispatcher, rates, free_at: [0.0; 2], in_flight: vec![], shards, now: 0.0, bytes: [0; 2] }
    }

    /// Hands reads to the dispatcher, and those that it starts to their drives.
    fn submit(&mut self, reads: impl Iterator<Item = ReadRequest>) {
        self.dispatcher.extend(reads, ReadGoal::Throughput);
        let mut next = VecDeque::new();
        self.dispatcher.take_next(Duration::from_secs_f64(self.now), &mut next);
        for read in next {
            let drive = read.shard / self.shards;
            let start = self.free_at[drive].max(self.now);
            self.free_at[drive] = start + read.len as f64 / self.rates[drive](start);
            self.in_flight.push((self.free_at[drive] + LATENCY, read));
        }
    }

    /// The next slot to be filled.
    fn complete(&mut self) -> Option<Slot> {
        let next = self.in_flight.iter().enumerate().min_by(|a, b| a.1.0.total_cmp(&b.1.0))?.0;
        let (at, read) = self.in_flight.remove(next);
        self.now = self.now.max(at);
        self.bytes[read.shard / self.shards] += read.len as u64;
        let done = ReadCompletion { slot: read.slot, tag: read.tag, result: Ok(()) };
        let done = self.dispatcher.complete(done, Duration::from_secs_f64(self.now)).done;
        self.submit(std::iter::empty());
        done.map(|done| done.slot)
    }

    /// The share of what both drives could have read within `seconds`, in reads of `len` bytes of which `queued` are
    /// submitted and not completed.
    fn share(&mut self, len: usize, queued: usize, seconds: f64) -> f64 {
        let (shards, mut next) = (self.shards, 0);
        let mut read = |slot| {
            next += 1;
            ReadRequest { shard: next % shards, offset: 0, len, slot, tag: 0 }
        };
        self.submit(Arena::new(queued, 4096).unwrap().1.into_iter().map(&mut read));
        while self.now < seconds {
            let slot = self.complete().expect("reads are in flight");
            self.submit(std::iter::once(read(slot)));
        }
        let steps = 10_000;
        let possible = (0..steps).map(|i| self.now * f64::from(i) / f64::from(steps));
        let possible = possible.map(|at| (self.rates[0](at) + self.rates[1](at)) * self.now / f64::from(steps));
        self.bytes.iter().sum::<u64>() as f64 / possible.sum::<f64>()
    }
}

#[test]
fn drives_of_unequal_speed_reach_nine_tenths_of_both() {
    let slows_down = |at: f64| if at < 1.5 { 3e9 } else { 0.7e9 };
    let stops_for_a_while = |at: f64| if (1.0..1.5).contains(&at) { 0.05e9 } else { 1e9 };
    let cases: [(&str, Rates); 7] = [
        ("1 : 1", [|_| 2e9, |_| 2e9]),
        ("1 : 3", [|_| 1e9, |_| 3e9]),
        ("3 : 1", [|_| 3e9, |_| 1e9]),
        ("1 : 12", [|_| 0.25e9, |_| 3e9]),
        ("one hangs at first", [|at| if at < 0.3 { 0.02e9 } else { 2e9 }, |_| 2e9]),
        ("one slows down", [|_| 1e9, slows_down]),
        ("one nearly stops for a while", [|_| 2e9, stops_for_a_while]),
    ];
    for (name, rates) in cases {
        for (len, queued) in [(3_500_000, 64), (3_500_000, 16), (300_000, 128)] {
            let mut drives = Simulation::new(vec![3; 50], rates);
            let share = drives.share(len, queued, 3.0);
            println!("{name}, {queued} reads of {len}: {:.1} %, {:?} bytes", 100.0 * share, drives.bytes);
            assert!(share >= 0.9, "{name}, {queued} reads of {len}: {share}");
        }
    }
}

#[test]
fn striped_shards_are_read_from_the_drive_that_has_them() {
    let held = (0..50).map(|shard| 1 << (shard % 2)).collect();
    let mut drives = Simulation::new(held, [|_| 2e9, |_| 2e9]);
    let share = drives.share(3_500_000, 64, 2.0);
    assert!(share >= 0.9, "{share}");
}

#[test]
fn a_drive_that_was_not_read_from_for_long_is_tried_again() {
    let mut drives = Simulation::new(vec![3; 50], [|_| 3e9, |at| if at < 1.0 { 0.03e9 } else { 3e9 }]);
    // Few reads at a time: none is worth to be read by the slow drive.
    drives.share(3_500_000, 3, 1.0);
    let before = drives.bytes[1];
    drives.share(3_500_000, 3, 3.0);
    assert!(drives.bytes[1] > before + 1_000_000_000, "{:?}", drives.bytes);
}

const SHARDS: usize = 12;
const BYTES: usize = 8192;

/// The bytes of all shards, on one drive.
fn shards() -> Vec<Vec<u8>> {
    (0..SHARDS).map(|s| (0..BYTES).map(|b| (b * 7 + s * 31 + 1) as u8).collect()).collect()
}

/// Two drives in memory, with what is said about them.
struct Mirrored {
    reader: PacedReader,
    log: Arc<DriveLog>,
    said: Arc<Mutex<Vec<String>>>,
}

impl Mirrored {
    fn new(held: Vec<u8>, faults: impl Fn(MemoryReader) -> MemoryReader) -> Self {
        let memory = MemoryReader::new(Arc::new([shards(), shards()].concat()), 3).overtaken(3);
        let (log, said) = (Arc::new(DriveLog::default()), Arc::new(Mutex::new(vec![])));
        let theirs = said.clone();
        log.send_to(move |what| theirs.lock().push(what.to_owned()));
        let drives = Drives::new(vec!["a".into(), "b".into()], held, log.clone());
        let reader = PacedReader::on_drives(Box::new(faults(memory)), drives).unwrap();
        Mirrored { reader, log, said }
    }

    /// Reads every shard `rounds` times and returns the results, of which those of reads are compared with the bytes.
    fn read(&mut self, rounds: usize) -> Vec<Result<(), String>> {
        let mut slots = Arena::new(4, BYTES).unwrap().1;
        let mut next = (0..rounds * SHARDS).map(|i| i % SHARDS);
        let (mut waiting, mut results) = (VecDeque::new(), vec![]);
        let want = shards();
        while results.len() < rounds * SHARDS {
            while let Some(slot) = slots.pop() {
                let Some(shard) = next.next() else { break };
                waiting.push_back(ReadRequest { shard, offset: 0, len: BYTES, slot, tag: shard as u64 });
            }
            self.reader.submit(&mut waiting);
            let done = self.reader.wait().unwrap();
            assert!(done.result.is_err() || done.slot[..] == want[done.tag as usize][..]);
            results.push(done.result.map_err(|e| e.to_string()));
            slots.push(done.slot);
        }
        assert!(self.reader.wait().is_none() && self.reader.in_flight() == 0);
        results
    }

    fn said(&self) -> Vec<String> {
        self.said.lock().clone()
    }
}

/// Every shard of one drive has this fault.
fn all_of(drive: usize, fault: ReadFault) -> impl Fn(MemoryReader) -> MemoryReader {
    move |memory| {
        let all = drive * SHARDS..(drive + 1) * SHARDS;
        all.fold(memory, |memory, shard| memory.with_fault(FaultTarget::Shard(shard), fault, u64::MAX))
    }
}

#[test]
fn a_drive_that_fails_is_survived_said_once_and_set_aside() {
    for fault in [ReadFault::Disk, ReadFault::Gone, ReadFault::Short(100)] {
        for drive in 0..2 {
            let mut mirrored = Mirrored::new(vec![3; SHARDS], all_of(drive, fault));
            assert!(mirrored.read(5).iter().all(Result::is_ok), "{fault:?}");
            let (said, folder) = (mirrored.said(), ["a", "b"][drive]);
            assert_eq!(said.len(), 2, "{said:?}");
            assert!(said[0].starts_with(&format!("a read from {folder} failed")), "{said:?}");
            assert!(said[1].starts_with(&format!("reads from {folder} keep failing")), "{said:?}");
            assert_eq!(mirrored.log.bytes()[drive], 0);
            assert_eq!(mirrored.log.bytes()[1 - drive], (5 * SHARDS * BYTES) as u64);
        }
    }
}

#[test]
fn random_failures_of_both_drives_are_errors_only_where_both_fail() {
    let often = |memory: MemoryReader| memory.with_fault(FaultTarget::OneIn(5), ReadFault::Gone, u64::MAX);
    let mut mirrored = Mirrored::new(vec![3; SHARDS], often);
    let results = mirrored.read(200);
    let errors: Vec<_> = results.into_iter().filter_map(Result::err).collect();
    // One read in 25, if both drives are asked.
    assert!((1..200).contains(&errors.len()), "{}", errors.len());
    assert!(errors.iter().all(|e| e.contains("reading its copy failed, too")), "{errors:?}");
}

#[test]
fn without_a_copy_a_failure_is_an_error_as_ever() {
    let held = (0..SHARDS).map(|shard| 1 << (shard % 2)).collect();
    let mut striped = Mirrored::new(held, all_of(1, ReadFault::Gone));
    let results = striped.read(3);
    assert_eq!(results.iter().filter(|result| result.is_err()).count(), 3 * SHARDS / 2);
    assert!(results.iter().filter_map(|r| r.as_ref().err()).all(|e| !e.contains("copy")));
    assert!(striped.said().is_empty());
}

#[test]
fn what_was_read_with_wrong_bytes_is_read_from_the_other_copy() {
    let mut mirrored = Mirrored::new(vec![3; SHARDS], all_of(0, ReadFault::Flipped(9)));
    let want = shards();
    let mut slot = Arena::new(1, BYTES).unwrap().1.remove(0);
    let wrong = StoreError::new(StoreErrorKind::Mismatch, std::path::Path::new("p"), "have another checksum");
    let mut repeated = 0;
    for round in 0..4 {
        for (shard, want) in want.iter().enumerate() {
            let read = |slot| ReadRequest { shard, offset: 0, len: BYTES, slot, tag: 7 };
            mirrored.reader.submit(&mut VecDeque::from([read(slot)]));
            let mut done = mirrored.reader.wait().unwrap();
            done.result.unwrap();
            if done.slot[..] != want[..] {
                assert!(mirrored.reader.read_copy(read(done.slot), &wrong).is_ok());
                done = mirrored.reader.wait().unwrap();
                done.result.unwrap();
                repeated += 1;
            }
            assert!(done.tag == 7 && done.slot[..] == want[..], "shard {shard}, round {round}");
            slot = done.slot;
        }
    }
    // A bad copy is not read again, and then the drive is set aside. How often it is asked at all depends on time.
    assert!((1..=4).contains(&repeated), "{repeated}");
    assert!((1..=2).contains(&mirrored.said().len()), "{:?}", mirrored.said());
    let mut alone = Mirrored::new(vec![1; SHARDS], |memory| memory);
    let read = ReadRequest { shard: 0, offset: 0, len: BYTES, slot, tag: 7 };
    assert!(alone.reader.read_copy(read, &wrong).is_err());
}

/// Halves of experts, on two drives of which one flips a bit in every read: none is lost, whichever half came from
/// where.
#[test]
fn halves_are_of_one_copy_and_wrong_ones_are_read_from_the_other() {
    let mut mirrored = Mirrored::new(vec![3; SHARDS], all_of(0, ReadFault::Flipped(3)));
    let (_arena, mut slots) = Arena::new(1, BYTES).unwrap();
    let wrong = StoreError::new(StoreErrorKind::Mismatch, std::path::Path::new("p"), "have another checksum");
    let (all, mut repeated) = (shards(), 0);
    for (shard, want) in (0..4).flat_map(|_| all.iter().enumerate()) {
        let (front, back) = slots.remove(0).split_at(SHARD_ALIGN);
        let read = |offset: usize, slot: Slot| {
            let (len, tag) = (slot.len(), offset as u64);
            VecDeque::from([ReadRequest { shard, offset: offset as u64, len, slot, tag }])
        };
        mirrored.reader.submit(&mut read(0, front));
        mirrored.reader.submit(&mut read(SHARD_ALIGN, back));
        let mut halves: Vec<_> = (0..2).map(|_| mirrored.reader.wait().unwrap()).collect();
        halves.sort_by_key(|half| half.tag);
        let [front, back] = halves.try_into().ok().unwrap();
        let are_wrong = [front.slot[..] != want[..SHARD_ALIGN], back.slot[..] != want[SHARD_ALIGN..]];
        assert_eq!(are_wrong[0], are_wrong[1], "both halves are of one copy");
        let mut slot = front.slot.join(back.slot);
        if are_wrong[0] {
            let whole = ReadRequest { shard, offset: 0, len: BYTES, slot, tag: 0 };
            assert!(mirrored.reader.read_copy(whole, &wrong).is_ok());
            slot = mirrored.reader.wait().unwrap().slot;
            repeated += 1;
        }
        assert!(slot[..] == want[..], "shard {shard}");
        slots.push(slot);
    }
    assert!(repeated > 0);
}

#[test]
fn dropping_in_the_middle_of_failures_returns_all_slots() {
    for returned in 0..4 {
        let mut mirrored = Mirrored::new(vec![3; SHARDS], all_of(0, ReadFault::Disk));
        let (arena, slots) = Arena::new(8, BYTES).unwrap();
        let read = |slot: Slot| ReadRequest { shard: slot.index(), offset: 0, len: BYTES, slot, tag: 0 };
        mirrored.reader.submit(&mut slots.into_iter().map(read).collect());
        (0..returned).for_each(|_| drop(mirrored.reader.wait().unwrap()));
        drop(mirrored);
        assert!(arena.has_no_slots());
    }
}
