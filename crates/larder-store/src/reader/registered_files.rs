//! Files registered with io_uring, so that the kernel need not look up a descriptor for every read.
//!
//! The index of a file is its place among the open files, which no other file gets while this one is held. So the entry
//! that a read in flight names is never replaced, and no further bookkeeping is needed.

use std::{
    io,
    os::fd::AsRawFd,
    sync::{Arc, Weak},
};

use io_uring::{IoUring, types::Fixed};

use super::files::OpenFile;

/// The registered files, by place.
pub(super) struct RegisteredFiles {
    /// Per place, the registered file. A weak pointer stays comparable after the file was closed.
    registered: Vec<Weak<OpenFile>>,
}

impl RegisteredFiles {
    /// Registers `count` empty entries.
    pub fn register(ring: &IoUring, count: usize) -> io::Result<Self> {
        let count = u32::try_from(count).map_err(io::Error::other)?;
        ring.submitter().register_files_sparse(count)?;
        Ok(RegisteredFiles { registered: (0..count).map(|_| Weak::new()).collect() })
    }

    /// The index of `file`, which is registered first if necessary. `None` beyond the last entry: more files than
    /// planned may be open while all of them are being read.
    pub fn number(&mut self, ring: &IoUring, file: &Arc<OpenFile>) -> io::Result<Option<Fixed>> {
        let Some(registered) = self.registered.get_mut(file.place) else { return Ok(None) };
        let number = file.place as u32;
        if registered.as_ptr() != Arc::as_ptr(file) {
            ring.submitter().register_files_update(number, &[file.file.as_raw_fd()])?;
            *registered = Arc::downgrade(file);
        }
        Ok(Some(Fixed(number)))
    }
}

impl RegisteredFiles {
    /// Releases the entries of files that were closed; no read names them. What the kernel refuses, stays until the
    /// entry is used again.
    pub fn release_closed(&mut self, ring: &IoUring) {
        for (number, registered) in self.registered.iter_mut().enumerate() {
            let was_registered = !registered.ptr_eq(&Weak::new());
            if was_registered && registered.strong_count() == 0 {
                let _ = ring.submitter().register_files_update(number as u32, &[-1]);
                *registered = Weak::new();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reader::ShardFiles;

    #[test]
    fn a_file_keeps_its_index_while_it_is_open() {
        let Ok(ring) = IoUring::new(1) else { return println!("this system has no io_uring") };
        let dir = tempfile::tempdir().unwrap();
        (0..3).for_each(|shard| std::fs::write(dir.path().join(shard.to_string()), [0; 4096]).unwrap());
        let folder = dir.path().to_owned();
        let files = ShardFiles::new(3, move |shard| (folder.join(shard.to_string()), 4096)).unwrap();
        let mut registered = RegisteredFiles::register(&ring, 2).unwrap();
        let number =
            |registered: &mut RegisteredFiles, file| registered.number(&ring, file).unwrap().map(|number| number.0);

        let [first, second, third] = [0, 1, 2].map(|shard| files.get(shard).unwrap());
        assert_eq!(number(&mut registered, &first), Some(0));
        assert_eq!(number(&mut registered, &second), Some(1));
        assert_eq!(number(&mut registered, &third), None);
        assert_eq!(registered.registered[0].as_ptr(), Arc::as_ptr(&first));

        let successor = Arc::new(OpenFile { file: first.file.try_clone().unwrap(), place: first.place });
        assert_eq!(number(&mut registered, &successor), Some(0));
        assert_eq!(registered.registered[0].as_ptr(), Arc::as_ptr(&successor));
        assert_eq!(registered.registered[1].as_ptr(), Arc::as_ptr(&second));
    }
}
