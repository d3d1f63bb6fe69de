//! The place of the files of a request's pictures in memory.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::error::FetchError;

/// Bytes of a permit.
const PERMIT_BYTES: usize = 1 << 10;
/// Bytes by which the buffer of a file grows.
const STEP_BYTES: usize = 64 << 10;

/// The permits of a request, of which there are as many as all requests may have together.
pub struct FileRoom {
    all: Arc<Semaphore>,
    taken: OwnedSemaphorePermit,
    most: usize,
}

impl FileRoom {
    /// Room for the files that came with the request, of at most `most` permits of `all`.
    pub fn new(all: Arc<Semaphore>, taken: OwnedSemaphorePermit, most: usize) -> Self {
        FileRoom { all, taken, most }
    }

    /// Makes the buffer of a file large enough for `more` bytes, if there is room. It waits for no other, which may be
    /// waiting for this one.
    pub fn extend(&mut self, file: &mut Vec<u8>, more: usize) -> Result<(), FetchError> {
        let spare = file.capacity() - file.len();
        if more <= spare {
            return Ok(());
        }
        let bytes = (more - spare).next_multiple_of(STEP_BYTES);
        let permits = bytes / PERMIT_BYTES;
        if self.taken.num_permits().saturating_add(permits) > self.most {
            return Err(FetchError::TooManyBytes((self.most * PERMIT_BYTES) >> 20));
        }
        let permits = u32::try_from(permits).map_err(|_| FetchError::NoRoom)?;
        let taken = self.all.clone().try_acquire_many_owned(permits).map_err(|_| FetchError::NoRoom)?;
        self.taken.merge(taken);
        file.reserve_exact(spare + bytes);
        Ok(())
    }

    /// The permits, to be held as long as the files.
    pub fn into_permits(self) -> OwnedSemaphorePermit {
        self.taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn room(all: &Arc<Semaphore>, most: usize) -> FileRoom {
        FileRoom::new(all.clone(), all.clone().try_acquire_owned().unwrap(), most)
    }

    #[test]
    fn files_grow_within_the_room_of_all() {
        let all = Arc::new(Semaphore::new(1024));
        let (mut one, mut file) = (room(&all, 1024), Vec::new());
        one.extend(&mut file, 1).unwrap();
        assert_eq!((all.available_permits(), file.capacity() >= STEP_BYTES), (1024 - 1 - 64, true));
        one.extend(&mut file, STEP_BYTES).unwrap();
        assert_eq!(all.available_permits(), 1024 - 1 - 64, "there is room for that");
        file.resize(STEP_BYTES, 7);
        one.extend(&mut file, 10 * STEP_BYTES).unwrap();
        assert_eq!(all.available_permits(), 1024 - 1 - 11 * 64);
        assert_eq!(room(&all, 1024).extend(&mut Vec::new(), 5 * STEP_BYTES), Err(FetchError::NoRoom));
        assert_eq!(one.extend(&mut file, 20 * STEP_BYTES), Err(FetchError::TooManyBytes(1)));
        drop(one.into_permits());
        assert_eq!(all.available_permits(), 1024);
        assert_eq!(room(&all, 1024).extend(&mut Vec::new(), 5 * STEP_BYTES), Ok(()));
    }
}
