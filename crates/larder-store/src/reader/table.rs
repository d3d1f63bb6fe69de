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
pub(super) struct Table {
    /// Per place, the file that is registered there. It stays comparable after the pool has closed it.
    known: Vec<Weak<OpenFile>>,
}

impl Table {
    /// Registers `places` places in which there are no files yet.
    pub fn register(ring: &IoUring, places: usize) -> io::Result<Self> {
        let count = u32::try_from(places).map_err(io::Error::other)?;
        ring.submitter().register_files_sparse(count)?;
        Ok(Table { known: (0..places).map(|_| Weak::new()).collect() })
    }

    /// The number by which the kernel knows `file`, which it is told first if it does not. `None` beyond the table: a
    /// pool may exceed its size while all of its files are being read.
    pub fn number(&mut self, ring: &IoUring, file: &Arc<OpenFile>) -> io::Result<Option<Fixed>> {
        let Some(known) = self.known.get_mut(file.place) else { return Ok(None) };
        let number = file.place as u32;
        if known.as_ptr() != Arc::as_ptr(file) {
            ring.submitter().register_files_update(number, &[file.file.as_raw_fd()])?;
            *known = Arc::downgrade(file);
        }
        Ok(Some(Fixed(number)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reader::Files;

    #[test]
    fn a_file_has_its_number_as_long_as_it_is_open() {
        let Ok(ring) = IoUring::new(1) else { return println!("this system has no io_uring") };
        let dir = tempfile::tempdir().unwrap();
        (0..3).for_each(|shard| std::fs::write(dir.path().join(shard.to_string()), [0; 4096]).unwrap());
        let folder = dir.path().to_owned();
        let files = Files::new(3, 4096, move |shard| folder.join(shard.to_string())).unwrap();
        let mut table = Table::register(&ring, 2).unwrap();
        let number = |table: &mut Table, file| table.number(&ring, file).unwrap().map(|number| number.0);

        let [first, second, third] = [0, 1, 2].map(|shard| files.get(shard).unwrap());
        assert_eq!(number(&mut table, &first), Some(0));
        assert_eq!(number(&mut table, &second), Some(1));
        assert_eq!(number(&mut table, &third), None);
        assert_eq!(table.known[0].as_ptr(), Arc::as_ptr(&first));

        let successor = Arc::new(OpenFile { file: first.file.try_clone().unwrap(), place: first.place });
        assert_eq!(number(&mut table, &successor), Some(0));
        assert_eq!(table.known[0].as_ptr(), Arc::as_ptr(&successor));
        assert_eq!(table.known[1].as_ptr(), Arc::as_ptr(&second));
    }
}
