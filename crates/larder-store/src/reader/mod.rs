//! Readers: fill slots with experts from the SSD, many reads at a time.
//!
//! A slot moves into the request and comes back with the completion, so nothing else can access its bytes while the
//! kernel writes to them.

use std::{collections::VecDeque, fmt, path::Path, str::FromStr, sync::Arc};

use crate::error::{Result, StoreError, StoreErrorKind};

mod arena;
mod files;
mod memory;
#[cfg(windows)]
mod overlapped;
mod paced;
mod pread;
#[cfg(target_os = "linux")]
mod registered_buffers;
#[cfg(target_os = "linux")]
mod registered_files;
mod retry;
mod touch;
#[cfg(target_os = "linux")]
mod uring;
mod window;

pub use crate::drives::{DRIVES_MAX, DriveLog, Drives};
pub use arena::{Arena, KeptMapping, Slot};
pub use files::{ShardFiles, open_files_limit};
pub use memory::{FaultPlan, FaultTarget, MemoryReader, ReadFault};
pub use paced::PacedReader;
pub use touch::{TouchPace, Touched};

/// A request to read bytes of one shard to the beginning of a slot. Two requests can fill one slot if each has a part
/// of it, see [`Slot::split_at`].
pub struct ReadRequest {
    /// Index of the shard in [`ShardFiles`], whatever the drive.
    pub shard: usize,
    /// Offset of the first byte; a multiple of [`larder_core::SHARD_ALIGN`], as direct I/O requires.
    pub offset: u64,
    /// Number of bytes; at most the length of the slot.
    pub len: usize,
    /// The slot to fill. Its bytes after `len`, up to the next page, may change too.
    pub slot: Slot,
    /// The caller's id of the request.
    pub tag: u64,
}

/// The completion of a request.
pub struct ReadCompletion {
    /// The slot of the request. If the read succeeded, its first `len` bytes are those of the shard; the others, and
    /// all after an error, are unspecified.
    pub slot: Slot,
    /// The tag of the request.
    pub tag: u64,
    /// Whether all bytes were read. An error names file, offset and length.
    pub result: Result<()>,
}

/// The goal of the reads that are submitted.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum ReadGoal {
    /// That all have been read soon.
    #[default]
    Throughput,
    /// That the first have been read soon, because the caller computes with them meanwhile.
    Arrival,
}

/// Reads shards into slots, many at a time, in any order.
///
/// Each submitted read completes exactly once. A read that fails for a transient reason, or ends early, is retried a
/// bounded number of times; one that stays short is an error. Dropping a reader returns no slots, but waits until
/// nothing writes to any slot any more.
pub trait Reader: Send {
    /// The name in [`READERS`].
    fn name(&self) -> &'static str;

    /// Largest number of reads that were submitted and not returned; at least 1. How many of them the SSD works on at a
    /// time is for the reader to decide.
    fn capacity(&self) -> usize;

    /// Takes reads from the front of `reads`, up to the capacity, and starts them at once, or each as soon as the
    /// reader thinks right. The others stay. A read that cannot be started is taken too, and completes with its error.
    fn submit(&mut self, reads: &mut VecDeque<ReadRequest>);

    /// Sets the goal of the reads that are submitted from now on; at first it is [`ReadGoal::Throughput`].
    fn set_goal(&mut self, goal: ReadGoal) {
        let _ = goal;
    }

    /// The next completed read, without waiting: `None` if none has completed yet, or none is in flight.
    fn poll(&mut self) -> Option<ReadCompletion>;

    /// Blocks until a read completes and returns it; `None` if nothing is in flight.
    fn wait(&mut self) -> Option<ReadCompletion>;

    /// Number of submitted reads whose completion was not returned yet.
    fn in_flight(&self) -> usize;

    /// Lets go of the memory of a slot, as far as the reader keeps hold of it between reads. False if it cannot: then
    /// the memory must not be given back, since reads would go to where it was. The caller guarantees that no read into
    /// the slot is in flight.
    fn release(&mut self, slot: &Slot) -> bool {
        let _ = slot;
        true
    }

    /// Takes a read whose bytes were found to be `wrong` after its completion, to do it again from another copy of the
    /// shard. Gives it back if there is none. It may exceed the capacity.
    fn read_copy(&mut self, read: ReadRequest, wrong: &StoreError) -> Result<(), ReadRequest> {
        let _ = wrong;
        Err(read)
    }
}

/// A reader that can be chosen by name. A setting is parsed into one of these once, and opened wherever slots are.
#[derive(Clone, Copy, Debug)]
pub struct ReaderSpec {
    /// Name of the reader.
    pub name: &'static str,
    /// What it does, as part of a sentence.
    pub about: &'static str,
    open: fn(&Arc<ShardFiles>, &Arena) -> Result<Opened>,
}

/// An open reader, and one line that says which it is, how it reads, and why it was chosen.
pub type Opened = (Box<dyn Reader>, String);

/// All readers that can be chosen by name.
pub const READERS: &[ReaderSpec] = &[ReaderSpec::AUTO, ReaderSpec::URING, ReaderSpec::OVERLAPPED, ReaderSpec::PREAD];

impl ReaderSpec {
    /// The best reader that works here.
    pub const AUTO: ReaderSpec =
        ReaderSpec { name: "auto", about: "uring or overlapped where available, else pread", open: open_auto };
    /// io_uring, or an error where it is not available.
    pub const URING: ReaderSpec = ReaderSpec { name: "uring", about: "io_uring (Linux)", open: open_uring };
    /// Overlapped reads with a handle each, or an error on other systems than Windows.
    pub const OVERLAPPED: ReaderSpec = ReaderSpec {
        name: "overlapped",
        about: "unbuffered overlapped reads on a few threads (Windows)",
        open: open_overlapped,
    };
    /// Blocking reads.
    pub const PREAD: ReaderSpec =
        ReaderSpec { name: "pread", about: "blocking reads on a few threads", open: open_pread };

    /// Opens it for reads of `files` into slots of `arena`. The bytes in flight are bounded by a window that follows
    /// the rate of the SSD, one for each drive.
    pub fn open(&self, files: &Arc<ShardFiles>, arena: &Arena) -> Result<Opened> {
        let (reader, how) = self.open_paced(files, arena)?;
        Ok((Box::new(reader), how))
    }

    /// As [`open`](Self::open), with access to the window.
    pub fn open_paced(&self, files: &Arc<ShardFiles>, arena: &Arena) -> Result<(PacedReader, String)> {
        let (reader, how) = self.open_unpaced(files, arena)?;
        let failed = |e| StoreError::io(Path::new(""), "starting a reader thread", e);
        Ok((PacedReader::on_drives(reader, files.drives().clone()).map_err(failed)?, how))
    }

    /// Opens it without a window: all submitted reads are in flight, up to the capacity, and each is of the
    /// [file](Drives::file) that it names. For measurements.
    pub fn open_unpaced(&self, files: &Arc<ShardFiles>, arena: &Arena) -> Result<Opened> {
        (self.open)(files, arena)
    }
}

impl Default for ReaderSpec {
    fn default() -> Self {
        ReaderSpec::AUTO
    }
}

/// Prints the name, which parses to the same reader.
impl fmt::Display for ReaderSpec {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl FromStr for ReaderSpec {
    type Err = UnknownReader;

    fn from_str(name: &str) -> std::result::Result<Self, UnknownReader> {
        READERS.iter().find(|row| row.name == name).copied().ok_or_else(|| UnknownReader(name.to_owned()))
    }
}

/// There is no reader of this name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UnknownReader(pub String);

impl fmt::Display for UnknownReader {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let names: Vec<_> = READERS.iter().map(|row| row.name).collect();
        write!(f, "unknown reader {:?}; available: {}", self.0, names.join(", "))
    }
}

impl std::error::Error for UnknownReader {}

fn open_auto(files: &Arc<ShardFiles>, arena: &Arena) -> Result<Opened> {
    if cfg!(windows) {
        return open_overlapped(files, arena).or_else(|_| open_pread(files, arena));
    }
    if cfg!(target_vendor = "apple") {
        return open_pread(files, arena);
    }
    open_uring(files, arena).or_else(|refused| {
        let (reader, how) = open_pread(files, arena)?;
        Ok((reader, format!("{how}; uring is not available: {}", refused.message)))
    })
}

/// Whether this is Android, whatever target the program was built for. Android forbids io_uring to apps.
pub fn is_android() -> bool {
    cfg!(target_os = "android") || kernel_release().contains("android") || std::env::var_os("ANDROID_ROOT").is_some()
}

#[cfg(unix)]
fn kernel_release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

#[cfg(not(unix))]
fn kernel_release() -> String {
    String::new()
}

#[cfg(target_os = "linux")]
fn open_uring(files: &Arc<ShardFiles>, arena: &Arena) -> Result<Opened> {
    let reader = uring::Uring::open(files, arena)?;
    let how =
        format!("uring: up to {} reads in flight, {}, {}", reader.capacity(), reader.registered(), files.read_mode());
    Ok((Box::new(reader), how))
}

#[cfg(not(target_os = "linux"))]
fn open_uring(_: &Arc<ShardFiles>, _: &Arena) -> Result<Opened> {
    let what = "this system has no io_uring".into();
    Err(StoreError { kind: StoreErrorKind::Unsupported, path: Default::default(), message: what })
}

/// Overlapped reads are unbuffered; where those are refused, other reads are as good.
#[cfg(windows)]
fn open_overlapped(files: &Arc<ShardFiles>, _: &Arena) -> Result<Opened> {
    if !files.is_direct() {
        let what = format!("overlapped reads are for unbuffered files: {}", files.read_mode());
        return Err(StoreError { kind: StoreErrorKind::Unsupported, path: Default::default(), message: what });
    }
    let reader = pread::Pread::open_overlapped(files)?;
    let how = format!("overlapped: {} threads, a handle for each read, {}", reader.threads(), files.read_mode());
    Ok((Box::new(reader), how))
}

#[cfg(not(windows))]
fn open_overlapped(_: &Arc<ShardFiles>, _: &Arena) -> Result<Opened> {
    let what = "overlapped reads are a part of Windows".into();
    Err(StoreError { kind: StoreErrorKind::Unsupported, path: Default::default(), message: what })
}

fn open_pread(files: &Arc<ShardFiles>, _: &Arena) -> Result<Opened> {
    let reader = pread::Pread::open(files)?;
    let how = format!("pread: {} threads, {}", reader.threads(), files.read_mode());
    Ok((Box::new(reader), how))
}

#[cfg(all(test, target_os = "linux"))]
mod descriptor_tests;
#[cfg(test)]
mod tests;
