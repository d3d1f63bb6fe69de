//! Copies of one slot keep their order and their bytes, whatever the streams do.

use std::sync::Arc;

use larder_cache::two_tiers::{Device, DeviceError, Direction, TransferDone};
use larder_core::{ExpertLayout, NumberFormat};
use larder_cuda::{Emulator, EmulatorFault, Gpu, GpuLink};
use larder_store::reader::{Arena, Slot};

use crate::common::{MEMORY, Random, ahead, emulator, gpu, slots, transfer, wait_for_all};

const SLOTS: usize = 3;
const IN_MEMORY: usize = 9;
const BYTES: usize = 8192;

/// A naive model of the device and of main memory.
struct Model {
    /// By slot of the device: the byte that was last copied in without an error; `None` if not known.
    there: Vec<Option<u8>>,
    /// By slot in main memory that is in flight: the byte that it held, or will hold if that is known.
    away: Vec<Option<(Direction, Option<u8>)>>,
    here: Vec<Slot>,
    number: u8,
    errors: usize,
}

impl Model {
    fn submit(&mut self, link: &mut GpuLink, random: &mut Random) {
        let Some(mut slot) = self.here.pop() else { return };
        let at = random.below(SLOTS);
        let (direction, holds) = match random.below(2) {
            0 => {
                self.number = self.number.wrapping_add(1);
                slot.fill(self.number);
                self.there[at] = Some(self.number);
                (Direction::ToDevice, Some(self.number))
            }
            _ => (Direction::FromDevice, self.there[at]),
        };
        self.away[slot.index()] = Some((direction, holds));
        let submitted = if random.below(3) == 0 { ahead } else { transfer };
        link.submit(submitted(direction, slot, at));
    }

    fn landed(&mut self, over: TransferDone) {
        let (direction, holds) = self.away[over.slot.index()].take().expect("the slot was in flight");
        assert_eq!((over.direction, over.tag, over.len), (direction, over.at as u64, BYTES));
        match over.result {
            Ok(_) => {
                if let Some(byte) = holds {
                    assert!(over.slot.iter().all(|b| *b == byte), "{direction:?} slot {}", over.at);
                }
            }
            Err(e) => {
                let DeviceError::Copy { len, direction, at, cause } = &e else { panic!("{e}") };
                assert_eq!((*len, *direction, *at), (BYTES, over.direction, over.at));
                assert!(cause.contains("injected fault"), "{cause}");
                self.errors += 1;
            }
        }
        self.here.push(over.slot);
    }
}

/// Copies at random; returns the number of failures.
pub fn play(gpu: &Gpu, seed: u64, faults: bool) -> usize {
    let (mut link, mut random) = (gpu.link(), Random::new(seed));
    link.allocate(SLOTS, BYTES).unwrap();
    let (_, here) = Arena::new(IN_MEMORY, BYTES).unwrap();
    let away = vec![None; IN_MEMORY];
    let mut model = Model { there: vec![None; SLOTS], away, here, number: 0, errors: 0 };
    for _ in 0..240 {
        match random.below(4) {
            0 if link.in_flight() > 0 => model.landed(link.wait().expect("some are in flight")),
            1 => std::iter::from_fn(|| link.poll()).for_each(|over| model.landed(over)),
            _ => model.submit(&mut link, &mut random),
        }
        if faults {
            // A failed copy leaves unspecified bytes.
            model.there.fill(None);
        }
        assert_eq!(link.in_flight() + model.here.len(), IN_MEMORY, "no slot is lost");
    }
    wait_for_all(&mut link).into_iter().for_each(|over| model.landed(over));
    assert_eq!(model.here.len(), IN_MEMORY);
    model.errors
}

#[test]
fn every_copy_has_the_bytes_of_the_time_of_its_submission() {
    for seed in 0..40 {
        let Some(emulator) = emulator(seed) else { return };
        assert_eq!(play(&gpu(emulator), seed, false), 0);
    }
}

#[test]
fn staged_copies_have_the_bytes_of_the_time_of_their_submission() {
    for seed in 0..40 {
        let Some(emulator) = emulator(seed) else { return };
        assert_eq!(play(&gpu(emulator.without_page_locking()), seed, false), 0);
    }
}

#[test]
fn copies_that_fail_come_back_with_their_slot() {
    let mut errors = 0;
    for seed in 0..40 {
        let Some(emulator) = emulator(seed) else { return };
        let mut emulator = emulator.with_fault(EmulatorFault::CopyIn, 5).with_fault(EmulatorFault::CopyOut, 5);
        if seed % 2 == 0 {
            emulator = emulator.without_page_locking();
        }
        errors += play(&gpu(emulator), seed, true);
    }
    assert!(errors > 100, "{errors} failed");
}

#[test]
fn slots_are_page_locked_before_they_are_used() {
    let Some(emulator) = emulator(1) else { return };
    let gpu = gpu(emulator.without_page_locking());
    let mut link = gpu.link();
    link.allocate(SLOTS, BYTES).unwrap();
    let (_, memory) = Arena::new(IN_MEMORY, BYTES).unwrap();
    link.expect_slots(&memory);
    link.prepare_slots();
    let start = std::time::Instant::now();
    while !gpu.copy_mode().to_string().contains("cannot be page-locked") {
        assert!(start.elapsed().as_secs() < 20, "no slot was locked in the background");
        std::thread::yield_now();
    }
}

#[test]
fn slots_are_used_while_others_are_page_locked() {
    for seed in 0..20 {
        let Some(emulator) = emulator(seed) else { return };
        let mut link = gpu(emulator).link();
        link.allocate(SLOTS, BYTES).unwrap();
        let (_, memory) = Arena::new(200, BYTES).unwrap();
        link.expect_slots(&memory);
        link.prepare_slots();
        let mut slots = memory.into_iter().rev();
        for at in 0..SLOTS {
            link.submit(transfer(Direction::ToDevice, slots.next().unwrap(), at));
        }
        assert!(wait_for_all(&mut link).iter().all(|over| over.result.is_ok()));
        // The arena is unmapped only when the link is dropped, which waits for the thread.
        drop(slots);
    }
}

/// An expert that is copied ahead is many pieces, between which a wanted one has its turn.
#[test]
fn a_wanted_expert_overtakes_those_that_are_copied_ahead() {
    let (mut overtook, bytes) = (0, MEMORY as usize / 4);
    for seed in 0..12 {
        let Some(emulator) = emulator(seed) else { return };
        let mut link = gpu(emulator).link();
        link.allocate(3, bytes).unwrap();
        let (_, memory) = Arena::new(3, bytes).unwrap();
        for (at, mut slot) in memory.into_iter().enumerate() {
            slot.fill(at as u8 + 1);
            let submitted = if at < 2 { ahead } else { transfer };
            link.submit(submitted(Direction::ToDevice, slot, at));
        }
        let done = wait_for_all(&mut link);
        assert!(done.iter().all(|over| over.result.is_ok()));
        // Behind the first, which may be there by the time that it is asked for.
        overtook += usize::from(done[2].at != 2);
        // All pieces are there.
        let (_, memory) = Arena::new(3, bytes).unwrap();
        memory.into_iter().enumerate().for_each(|(at, slot)| link.submit(transfer(Direction::FromDevice, slot, at)));
        let back = wait_for_all(&mut link);
        assert!(back.iter().all(|over| over.slot.iter().all(|byte| usize::from(*byte) == over.at + 1)));
    }
    assert!(overtook > 8, "the wanted expert was the last in {} of 12", 12 - overtook);
}

#[test]
fn completed_copies_are_found_without_waiting_for_the_rest() {
    for refusing in [false, true] {
        let Some(mut emulator) = emulator(3) else { return };
        if refusing {
            emulator = emulator.without_page_locking();
        }
        let mut link = gpu(emulator).link();
        link.allocate(SLOTS, BYTES).unwrap();
        assert!(link.poll().is_none());
        let (_, memory) = Arena::new(IN_MEMORY, BYTES).unwrap();
        for (i, slot) in memory.into_iter().enumerate() {
            link.submit(transfer(Direction::ToDevice, slot, i % SLOTS));
        }
        let (mut tags, mut in_vain) = (Vec::new(), 0);
        while link.in_flight() > 0 {
            match link.poll() {
                Some(over) => tags.push((over.tag, over.result.unwrap()).0),
                None => in_vain += 1,
            }
            assert!(in_vain < 10_000, "the device makes no progress by itself");
        }
        assert_eq!(tags, (0..IN_MEMORY).map(|i| (i % SLOTS) as u64).collect::<Vec<_>>());
        assert!(in_vain > 0, "no poll was in vain");
    }
}

#[test]
fn the_copy_mode_is_a_sentence() {
    let expect = |emulator: Emulator, sentence: &str| {
        let gpu = gpu(emulator);
        let mut link = gpu.link();
        link.allocate(1, BYTES).unwrap();
        let (_, mut slots) = Arena::new(1, BYTES).unwrap();
        link.submit(transfer(Direction::ToDevice, slots.remove(0), 0));
        wait_for_all(&mut link);
        assert_eq!(gpu.copy_mode().to_string(), sentence);
    };
    let Some(straight) = emulator(1) else { return };
    expect(straight, "slots in memory are page-locked and copied directly");
    let Some(refusing) = emulator(1) else { return };
    let sentence = "slots in memory cannot be page-locked (page-locking memory failed: injected fault), so copies go \
                    through 4 staging buffers";
    expect(refusing.without_page_locking(), sentence);
}

#[test]
fn an_arena_that_does_not_fit_is_an_error_with_the_numbers() {
    let Some(small) = emulator(1) else { return };
    let free = free_bytes(&small);
    let mut link = gpu(small).link();
    let slots = free as usize / 4096 + 1;
    let error = link.allocate(slots, 4096).unwrap_err();
    assert_eq!(error, DeviceError::OutOfMemory { slots, slot_bytes: 4096, free_bytes: free });
    assert!(link.allocate(usize::MAX, 4096).is_err());
    let Some(failing) = emulator(1) else { return };
    let error = gpu(failing.with_fault(EmulatorFault::Allocate, 1)).link().allocate(2, 4096).unwrap_err();
    assert_eq!(error, DeviceError::OutOfMemory { slots: 2, slot_bytes: 4096, free_bytes: free });
}

fn free_bytes(emulator: &Emulator) -> u64 {
    larder_cuda::Driver::info(emulator).unwrap().free_bytes
}

#[test]
fn a_copy_reports_its_time_on_the_link() {
    let Some(emulator) = emulator(1) else { return };
    let (latency, launch) = (std::time::Duration::from_micros(10), std::time::Duration::ZERO);
    let gpu = gpu(emulator.with_times(latency, 1e9, launch));
    let mut link = gpu.link();
    link.allocate(1, BYTES).unwrap();
    let layout = ExpertLayout::new(32, 32, [NumberFormat::F32; 3], false).unwrap();
    let two = [vec![0; layout.bytes], vec![1; layout.bytes]];
    for slot in slots(&layout, &two) {
        link.submit(larder_cache::two_tiers::Transfer { len: 4096, ..transfer(Direction::ToDevice, slot, 0) });
    }
    for over in wait_for_all(&mut link) {
        let took = over.result.unwrap().as_nanos();
        assert!((14_090..14_110).contains(&took), "{took} ns");
    }
}

/// The driver goes on copying from and to the old pages of an address, so nothing else may be mapped there.
#[test]
fn page_locked_memory_stays_mapped_after_its_slots_were_dropped() {
    let Some(emulator) = emulator(5) else { return };
    let gpu = gpu(emulator);
    let mut link = gpu.link();
    link.allocate(1, BYTES).unwrap();
    let mut addresses = Vec::new();
    for _ in 0..20 {
        let (arena, memory) = Arena::new(1, BYTES).unwrap();
        addresses.push(arena.range().start);
        for slot in memory {
            link.submit(transfer(Direction::ToDevice, slot, 0));
        }
        drop(wait_for_all(&mut link));
    }
    addresses.sort_unstable();
    addresses.dedup();
    assert_eq!(addresses.len(), 20, "an address was used again");
}

#[test]
fn everything_is_freed() {
    for seed in 0..8 {
        let Some(emulator) = emulator(seed) else { return };
        let emulator = Arc::new(emulator);
        let gpu = Gpu::with_driver(emulator.clone()).unwrap();
        let mut link = gpu.link();
        link.allocate(SLOTS, BYTES).unwrap();
        let (_, memory) = Arena::new(SLOTS, BYTES).unwrap();
        // Everything is dropped while copies are in flight.
        for (at, slot) in memory.into_iter().enumerate() {
            link.submit(transfer(Direction::ToDevice, slot, at));
        }
        assert_eq!(emulator.allocated_bytes(), ((SLOTS * BYTES) as u64, (SLOTS * BYTES) as u64));
        drop((link, gpu));
        assert_eq!(emulator.allocated_bytes(), (0, 0));
    }
}
