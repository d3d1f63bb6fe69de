//! The affinity of threads: which logical processors they may run on, where the system lets a program choose.

use std::io;

/// The processors that this thread may use.
#[cfg(any(target_os = "linux", target_os = "android"))]
pub fn allowed() -> io::Result<Vec<usize>> {
    let set = rustix::thread::sched_getaffinity(None)?;
    Ok((0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect())
}

/// Binds this thread to a processor.
#[cfg(any(target_os = "linux", target_os = "android"))]
pub fn bind(processor: usize) -> io::Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    set.set(processor);
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}

/// Moves this thread to another of the `allowed` processors than `processor`, if there is one.
#[cfg(any(target_os = "linux", target_os = "android"))]
pub fn move_off(processor: usize, allowed: &[usize]) {
    let mut set = rustix::thread::CpuSet::new();
    allowed.iter().filter(|p| **p != processor).for_each(|p| set.set(*p));
    if set.count() > 0 {
        // A failure is ignored: the move only makes things faster.
        let _ = rustix::thread::sched_setaffinity(None, &set);
    }
}

/// The processor that this thread is on.
#[cfg(any(target_os = "linux", target_os = "android"))]
pub fn current() -> Option<usize> {
    Some(rustix::thread::sched_getcpu())
}

/// Moves this thread to another of the `allowed` processors than `processor`, if there is one.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
pub fn move_off(_: usize, _: &[usize]) {}

/// The processor that this thread is on.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
pub fn current() -> Option<usize> {
    None
}

/// The processors that this thread may use.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
pub fn allowed() -> io::Result<Vec<usize>> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "threads cannot be bound to processors on this system"))
}

/// Binds this thread to a processor.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
pub fn bind(_: usize) -> io::Result<()> {
    allowed().map(drop)
}
