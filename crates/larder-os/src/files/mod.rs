//! Files and folders.

mod atomic;
mod regular;
mod system;

pub use atomic::{create_new, output_file, temp_path, write_atomically, write_privately};
pub use regular::{
    open_regular, open_regular_no_link, open_regular_with, open_regular_with_flags, read_regular, read_regular_text,
};
pub use system::{
    ChangeStamp, FileAt, FileId, FolderLock, LOCK_FILE, change_stamp, create_private_folder, disk_bytes, free_bytes,
    replace_file, sync_folder,
};
