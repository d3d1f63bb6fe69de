//! The files that a ring knows by number, so that it need not look each up again with every read.
//!
//! A file's number is its place in the pool, which no other file gets while somebody holds this one. So what a read in
//! flight names is never replaced, and the table needs no bookkeeping of its own.

use std::{
    io,
    os::fd::AsRawFd,
    sync::{Arc, Weak},
};

use io_uring::{IoUring, types::Fixed};

use super::files::OpenFile;

/// What the kernel was told about the places of a pool.
pub(super) struct RegisteredFiles {
    /// Per place, the file that is registered there. It stays comparable after the pool has closed it.
    registered: Vec<Weak<OpenFile>>,
}

impl RegisteredFiles {
    /// Registers `count` places in which there are no files yet.
    pub fn register(ring: &IoUring, count: usize) -> io::Result<Self> {
        let count = u32::try_from(count).map_err(io::Error::other)?;
        ring.submitter().register_files_sparse(count)?;
        Ok(RegisteredFiles { registered: (0..count).map(|_| Weak::new()).collect() })
    }

    /// The number by which the kernel knows `file`, which it is told first if it does not. `None` beyond the table: a
    /// pool may exceed its size while all of its files are being read.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reader::ShardFiles;

    #[test]
    fn a_file_has_its_number_as_long_as_it_is_open() {
        let Ok(ring) = IoUring::new(1) else { return println!("this system has no io_uring") };
        let dir = tempfile::tempdir().unwrap();
        (0..3).for_each(|shard| std::fs::write(dir.path().join(shard.to_string()), [0; 4096]).unwrap());
        let folder = dir.path().to_owned();
        let files = ShardFiles::new(3, 4096, move |shard| folder.join(shard.to_string())).unwrap();
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
