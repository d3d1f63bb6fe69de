//! How experts get from the SSD into slots, without the thread that computes ever waiting for a single one of them.
//!
//! A reader is given the slot together with the request and gives it back with the completion, so while the kernel
//! writes nobody else can reach the bytes.

use std::{collections::VecDeque, sync::Arc};

use crate::error::{Result, StoreError, StoreErrorKind};

mod arena;
mod files;
mod memory;
mod pread;
#[cfg(target_os = "linux")]
mod registered_buffers;
#[cfg(target_os = "linux")]
mod registered_files;
mod retry;
#[cfg(target_os = "linux")]
mod uring;

pub use arena::{Arena, Slot};
pub use files::ShardFiles;
pub use memory::{FaultPlan, FaultTarget, MemoryReader, ReadFault};

/// A request: bytes of one shard, to be put at the beginning of a slot. Two requests fill one slot if each has a part
/// of it, see [`Slot::split_at`].
pub struct ReadRequest {
    /// Which shard, as its [`ShardFiles`] count them.
    pub shard: usize,
    /// The first byte; a multiple of [`larder_core::SHARD_ALIGN`], as direct I/O wants it.
    pub offset: u64,
    /// How many bytes; at most the slot's length.
    pub len: usize,
    /// Where they go. Behind `len`, up to the next page, the slot's bytes may change too.
    pub slot: Slot,
    /// Whatever tells the caller which request this was.
    pub tag: u64,
}

/// A request that is over.
pub struct ReadCompletion {
    /// The slot. Its bytes are only specified if the read went well, and then `len` of them.
    pub slot: Slot,
    /// The request's tag.
    pub tag: u64,
    /// Whether all bytes are there. An error names file, offset and length.
    pub result: Result<()>,
}

/// Reads shards into slots, many at a time, in any order.
///
/// Each read that is taken comes back exactly once. A read that the system breaks off for a reason that passes is tried
/// again, a bounded number of times; a read that ends early is an error. Dropping a reader gives nothing back, but
/// returns only when nothing writes to any slot any more.
pub trait Reader: Send {
    /// Its name in [`READERS`].
    fn name(&self) -> &'static str;

    /// The most reads that are in flight at a time; at least one.
    fn capacity(&self) -> usize;

    /// Takes reads from the front of `reads`, as many as there is room for, and starts all of them at once. What does
    /// not fit stays. A read that cannot be started is taken as well, and comes back with its error.
    fn submit(&mut self, reads: &mut VecDeque<ReadRequest>);

    /// The next read that is over; blocks until there is one. `None` if nothing is in flight.
    fn wait(&mut self) -> Option<ReadCompletion>;

    /// How many reads were taken and have not come back.
    fn in_flight(&self) -> usize;
}

/// A reader that can be chosen by name.
pub struct ReaderChoice {
    /// The name.
    pub name: &'static str,
    /// What it does, in half a sentence.
    pub about: &'static str,
    open: fn(&Arc<ShardFiles>, &Arena) -> Result<Opened>,
}

/// A reader, and one line that says which it is, how it reads, and why it was picked.
pub type Opened = (Box<dyn Reader>, String);

/// All readers.
pub const READERS: &[ReaderChoice] = &[
    ReaderChoice { name: "auto", about: "uring where it works, else pread", open: open_auto },
    ReaderChoice { name: "uring", about: "io_uring (Linux)", open: open_uring },
    ReaderChoice { name: "pread", about: "a few threads that each wait for a read", open: open_pread },
];

/// Opens the reader of that name, for reads of `files` into slots of `arena`.
pub fn open_reader(choice: &str, files: &Arc<ShardFiles>, arena: &Arena) -> Result<Opened> {
    (find(choice)?.open)(files, arena)
}

/// Checks that there is a reader of that name.
pub fn check_reader(choice: &str) -> Result<()> {
    find(choice).map(drop)
}

fn find(choice: &str) -> Result<&'static ReaderChoice> {
    READERS.iter().find(|row| row.name == choice).ok_or_else(|| {
        let names: Vec<_> = READERS.iter().map(|row| row.name).collect();
        let what = format!("there is no reader {choice:?}; there are {}", names.join(", "));
        StoreError { kind: StoreErrorKind::Unsupported, path: Default::default(), message: what }
    })
}

fn open_auto(files: &Arc<ShardFiles>, arena: &Arena) -> Result<Opened> {
    open_uring(files, arena).or_else(|refused| {
        let (reader, how) = open_pread(files, arena)?;
        Ok((reader, format!("{how}; not uring: {}", refused.message)))
    })
}

/// Whether this is Android, whatever the program was built for: there nobody may use io_uring.
pub fn is_android() -> bool {
    let release = rustix::system::uname();
    let named = release.release().to_string_lossy().contains("android");
    cfg!(target_os = "android") || named || std::env::var_os("ANDROID_ROOT").is_some()
}

#[cfg(target_os = "linux")]
fn open_uring(files: &Arc<ShardFiles>, arena: &Arena) -> Result<Opened> {
    let reader = uring::Uring::open(files, arena)?;
    let how = format!("uring: {} reads in flight, {}, {}", reader.capacity(), reader.registered(), files.read_mode());
    Ok((Box::new(reader), how))
}

#[cfg(not(target_os = "linux"))]
fn open_uring(_: &Arc<ShardFiles>, _: &Arena) -> Result<Opened> {
    let what = "this system has no io_uring".into();
    Err(StoreError { kind: StoreErrorKind::Unsupported, path: Default::default(), message: what })
}

fn open_pread(files: &Arc<ShardFiles>, _: &Arena) -> Result<Opened> {
    let reader = pread::Pread::open(files)?;
    let how = format!("pread: {} threads, {}", reader.threads(), files.read_mode());
    Ok((Box::new(reader), how))
}

#[cfg(test)]
mod tests;
