//! The operating system: files, memory, processors and power, with the same functions on every system, and profiles of
//! the process.
//!
//! - Files: [`open_regular`] refuses what is no regular file, [`write_atomically`] writes a file whole or not at all,
//!   [`FileAt`] reads and writes at offsets, [`FolderLock`] keeps a second process out.
//! - Memory: what is available to this process ([`memory`]) within the limits of its [`group`], pages that may not be
//!   swapped out ([`lock`]), and machines with several [`nodes`].
//! - Processors: [`performance_cores`], and on which of them a thread runs ([`affinity`]).
//! - [`power`]: mains or battery. [`timeline`]: a profile of the process.
//!
//! The crate knows nothing of models, depends on no other crate of larder, and prints nothing.

pub mod affinity;
mod files;
mod freed_memory;
pub mod group;
pub mod lock;
pub mod memory;
pub mod nodes;
pub mod power;
mod processors;
#[cfg(target_vendor = "apple")]
mod sysctl;
pub mod timeline;

pub use files::{
    ChangeStamp, FileAt, FileId, FolderLock, LOCK_FILE, change_stamp, create_new, create_private_folder, disk_bytes,
    free_bytes, open_regular, open_regular_no_link, open_regular_with, open_regular_with_flags, output_file,
    read_regular, read_regular_text, replace_file, sync_folder, temp_path, write_atomically, write_privately,
};
pub use freed_memory::give_back_freed_memory;
pub use processors::{performance_cores, strongest_first};
#[cfg(target_vendor = "apple")]
pub use sysctl::sysctl_number;
