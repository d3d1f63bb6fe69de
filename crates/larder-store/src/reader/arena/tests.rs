//! Tests of the arena: slots are disjoint, their memory is touched and given back.

use super::*;

#[test]
fn slots_are_aligned_zeroed_disjoint_and_have_fixed_addresses() {
    let (arena, mut slots) = Arena::new(5, 12 << 10).unwrap();
    assert_eq!(slots[0].as_ptr().align_offset(HUGE_PAGE_BYTES), 0);
    assert!(slots.iter().all(|s| s.len() == 12 << 10 && s.iter().all(|b| *b == 0) && s.belongs_to(&arena)));
    let addresses: Vec<_> = slots.iter().map(|s| s.as_ptr()).collect();
    slots.iter_mut().enumerate().for_each(|(i, slot)| slot.fill(i as u8 + 1));
    slots.reverse();
    drop(arena);
    for slot in &slots {
        assert_eq!(slot.as_ptr(), addresses[slot.index()]);
        assert!(slot.iter().all(|b| *b == slot.index() as u8 + 1));
    }
}

#[test]
fn slots_of_different_sizes_are_disjoint_and_in_order() {
    let sizes = [8192, 4096, 4096, 12 << 10];
    let (arena, mut slots) = Arena::with_sizes(&sizes).unwrap();
    assert_eq!((arena.slots(), arena.bytes()), (4, 28 << 10));
    slots.iter_mut().enumerate().for_each(|(i, slot)| slot.fill(i as u8 + 1));
    let mut end = arena.range().start;
    for (i, (slot, bytes)) in slots.iter().zip(sizes).enumerate() {
        assert_eq!((slot.as_ptr() as usize, slot.len(), slot.index()), (end, bytes, i));
        assert!(slot.iter().all(|b| *b == i as u8 + 1));
        end += bytes;
    }
    assert_eq!(end, arena.range().end);
    let offsets = |wanted: &[usize]| {
        let ranges = arena.ranges_of(|slot| wanted.contains(&slot)).into_iter();
        ranges.map(|range| (range.start - arena.range().start, range.len())).collect::<Vec<_>>()
    };
    assert_eq!(offsets(&[0, 2, 3]), [(0, 8192), (12 << 10, 16 << 10)]);
    assert_eq!((offsets(&[]), offsets(&[0, 1, 2, 3])), (vec![], vec![(0, 28 << 10)]));
    for sizes in [&[4096, 0][..], &[4096, 100], &[SLOT_BYTES_MAX + SHARD_ALIGN]] {
        assert!(Arena::with_sizes(sizes).is_err(), "{sizes:?}");
    }
}

#[test]
fn the_mapping_lives_as_long_as_any_slot() {
    let (arena, mut slots) = Arena::new(2, SHARD_ALIGN).unwrap();
    assert!(!arena.has_no_slots());
    slots.pop();
    assert!(!arena.has_no_slots());
    slots.pop();
    assert!(arena.has_no_slots());
}

#[test]
fn touching_ahead_changes_no_byte_and_ends_with_the_arena() {
    for pace in [TouchPace::Background, TouchPace::AheadOfReads] {
        let (arena, mut slots) = Arena::new(64, 1 << 20).unwrap();
        arena.touch_ahead(pace);
        arena.touch_ahead(pace);
        // While the thread touches the same memory.
        slots.iter_mut().enumerate().for_each(|(i, slot)| slot.fill(i as u8 + 1));
        arena.reads_reached(63);
        arena.reads_reached(usize::MAX - 1);
        while arena.touched().bytes < 64 << 20 && arena.touch().is_ok() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert!(slots.iter().all(|slot| slot.iter().all(|b| *b == slot.index() as u8 + 1)));
        drop(slots);
        assert!(arena.has_no_slots(), "the thread holds no slot");
    }
    let (arena, slots) = Arena::new(0, 4096).unwrap();
    arena.touch_ahead(TouchPace::Background);
    assert_eq!((arena.touched(), slots.len()), (Touched::default(), 0));
}

#[test]
fn memory_that_is_given_back_is_zero_and_can_be_used_again() {
    let (arena, mut slots) = Arena::new(3, 1 << 20).unwrap();
    slots.iter_mut().for_each(|slot| slot.fill(7));
    for locked in [false, true] {
        if locked && slots[1].lock().is_err() {
            println!("skipped: memory cannot be locked here");
            continue;
        }
        slots[1].give_back().unwrap();
        assert!(slots[1].iter().all(|byte| *byte == 0));
        assert!([0, 2].iter().all(|slot| slots[*slot].iter().all(|byte| *byte == 7)));
        slots[1].fill(7);
    }
    drop((arena, slots));
}

#[cfg(target_os = "linux")]
#[test]
fn only_wanted_slots_are_touched() {
    const MEGA: usize = 1 << 20;
    let (arena, mut slots) = Arena::with_sizes(&[2 * MEGA, 4 * MEGA, 2 * MEGA, 6 * MEGA, 4 * MEGA]).unwrap();
    if Arena::new(1, SHARD_ALIGN).unwrap().0.touch().is_err() {
        return println!("skipped: this system does not touch memory on request");
    }
    arena.touch_ahead_if(TouchPace::Background, |slot| slot % 2 == 1);
    while arena.touched().bytes < arena.bytes() as u64 {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    for slot in &mut slots {
        let pages = if slot.index() % 2 == 1 { slot.len() / SHARD_ALIGN } else { 0 };
        assert_eq!(resident_pages(slot), pages, "slot {}", slot.index());
    }
    slots[3].give_back().unwrap();
    assert_eq!(resident_pages(&mut slots[3]), 0);
}

#[cfg(target_os = "linux")]
#[test]
fn touching_goes_on_with_other_slots() {
    let (arena, mut slots) = Arena::new(8, 2 << 20).unwrap();
    if Arena::new(1, SHARD_ALIGN).unwrap().0.touch().is_err() {
        return println!("skipped: this system does not touch memory on request");
    }
    for most in [3, 6] {
        arena.touch_ahead_if(TouchPace::Background, |slot| slot < most);
        while arena.touched().bytes < arena.bytes() as u64 {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let touched = slots.iter_mut().map(|slot| usize::from(resident_pages(slot) > 0)).sum::<usize>();
        assert_eq!(touched, most);
    }
}

#[test]
fn touching_can_be_ended() {
    let Ok((arena, slots)) = Arena::new(1 << 10, 64 << 20) else { return println!("no address space") };
    arena.touch_ahead(TouchPace::AheadOfReads);
    arena.stop_touching();
    let touched = || (arena.touched(), std::thread::sleep(std::time::Duration::from_millis(20))).0;
    touched();
    arena.reads_reached(1 << 9);
    assert_eq!(touched(), touched());
    drop(slots);
}

#[test]
fn an_arena_that_is_dropped_is_not_touched_to_its_end() {
    // Far more than any machine has.
    let Ok((arena, slots)) = Arena::new(1 << 16, SLOT_BYTES_MAX) else { return println!("no address space") };
    arena.touch_ahead(TouchPace::AheadOfReads);
    drop((arena, slots));
}

#[test]
fn parts_of_a_slot_are_disjoint_and_can_be_joined() {
    let (arena, mut slots) = Arena::new(2, 12 << 10).unwrap();
    let slot = slots.remove(0);
    let whole = slot.as_ptr_range();
    let (mut front, back) = slot.split_at(SHARD_ALIGN);
    let (mut middle, mut back) = back.split_at(SHARD_ALIGN);
    front.fill(1);
    middle.fill(2);
    back.fill(3);
    assert!([&front, &middle, &back].iter().all(|s| s.len() == SHARD_ALIGN && s.index() == 0 && s.belongs_to(&arena)));
    let slot = front.join(middle).join(back);
    assert_eq!(slot.as_ptr_range(), whole);
    assert!((0..slot.len()).all(|at| slot[at] == (at / SHARD_ALIGN) as u8 + 1));
    assert!(slots[0].iter().all(|b| *b == 0));
    let (front, back) = slot.split_at(12 << 10);
    assert!(back.is_empty() && front.join(back).len() == 12 << 10);
    drop(slots);
    assert!(arena.has_no_slots());
}

#[test]
#[should_panic(expected = "split at 512, within a page")]
fn a_part_must_be_whole_pages() {
    Arena::new(1, 8192).unwrap().1.remove(0).split_at(512);
}

#[test]
#[should_panic(expected = "a slot of 8192 bytes cannot be split at 12288")]
fn a_part_must_be_within_the_slot() {
    Arena::new(2, 8192).unwrap().1.remove(0).split_at(12288);
}

#[test]
#[should_panic(expected = "parts of one slot")]
fn adjacent_slots_cannot_be_joined() {
    let mut slots = Arena::new(2, SHARD_ALIGN).unwrap().1;
    let second = slots.remove(1);
    slots.remove(0).join(second);
}

#[test]
#[should_panic(expected = "parts of one slot")]
fn parts_of_different_arenas_cannot_be_joined() {
    let [a, b] = [(); 2].map(|()| Arena::new(1, 8192).unwrap().1.remove(0).split_at(SHARD_ALIGN));
    a.0.join(b.1);
}

#[test]
#[should_panic(expected = "begin where the other ends")]
fn parts_must_be_joined_in_order() {
    let (front, back) = Arena::new(1, 8192).unwrap().1.remove(0).split_at(SHARD_ALIGN);
    back.join(front);
}

#[test]
fn invalid_sizes_are_refused() {
    assert!(Arena::new(1, 0).is_err());
    assert!(Arena::new(1, 4095).is_err());
    assert!(Arena::new(1, SLOT_BYTES_MAX + SHARD_ALIGN).is_err());
    assert!(Arena::new(usize::MAX / 4096, 8192).is_err());
    assert!(Arena::new(usize::MAX / 4096, 4096).is_err());
    assert_eq!(Arena::new(0, 4096).unwrap().1.len(), 0);
}

/// A huge page that reaches beyond the slots in use would take memory that is in no account.
#[cfg(target_os = "linux")]
#[test]
fn slots_that_are_not_wanted_take_no_memory_for_huge_pages() {
    const SLOT: usize = 64 << 10;
    let touched = |wanted: fn(usize) -> bool| {
        let (arena, mut slots) = Arena::new(128, SLOT).unwrap();
        arena.use_huge_pages_if(wanted);
        slots[0].fill(1);
        slots[32].fill(1);
        slots.iter_mut().map(resident_pages).sum::<usize>()
    };
    let two = 2 * SLOT / SHARD_ALIGN;
    assert_eq!(touched(|slot| slot % 32 < 31), two);
    assert_eq!(touched(|_| false), two);
    match touched(|slot| slot < 63) {
        both if both == two => println!("skipped: no huge pages here"),
        both => assert_eq!(
            both,
            (HUGE_PAGE_BYTES + SLOT) / SHARD_ALIGN,
            "the second huge page has a slot that is not wanted"
        ),
    }
}
