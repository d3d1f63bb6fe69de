//! The `larder` command, for the tests to start. With `LARDER_COUNT_FROM` it counts allocations of at least that size
//! in bytes, and with `LARDER_COUNT_INSTRUCTIONS` the instructions of the whole process, and prints the counts at the
//! end.
#![allow(unsafe_code)]

mod instructions;

use std::alloc::{GlobalAlloc, Layout, System};
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};

use instructions::Instructions;

struct Counting;

static FROM: AtomicUsize = AtomicUsize::new(usize::MAX);
static COUNT: AtomicUsize = AtomicUsize::new(0);

// SAFETY: everything is left to the system's allocator; counting touches two atomics only.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's guarantees are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's guarantees are passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size);
        // SAFETY: the caller's guarantees are passed on.
        unsafe { System.realloc(at, layout, size) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's guarantees are passed on.
        unsafe { System.dealloc(at, layout) }
    }
}

fn count(bytes: usize) {
    if bytes >= FROM.load(Ordering::Relaxed) {
        COUNT.fetch_add(1, Ordering::Relaxed);
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn main() -> ExitCode {
    let from = std::env::var("LARDER_COUNT_FROM").ok().and_then(|n| n.parse().ok());
    let instructions = std::env::var_os("LARDER_COUNT_INSTRUCTIONS").and_then(|_| Instructions::start());
    if let Some(from) = from {
        FROM.store(from, Ordering::Relaxed);
    }
    let code = larder_command::main();
    if from.is_some() {
        eprintln!("allocations: {}", COUNT.load(Ordering::Relaxed));
    }
    if let Some(count) = instructions.and_then(Instructions::count) {
        eprintln!("instructions: {count}");
    }
    code
}
