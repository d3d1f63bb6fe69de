//! A slice that several threads write to, each in ranges of its own.
#![allow(unsafe_code)]

use std::marker::PhantomData;

/// A borrowed slice of which non-overlapping ranges can be written at the same time.
pub struct Disjoint<'a, T> {
    start: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: it gives access to values of T from other threads, one thread per value at a time, so T being Send is enough.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    /// Borrows the slice for as long as ranges of it are in use.
    pub fn new(slice: &'a mut [T]) -> Self {
        Disjoint { start: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }

    /// As [`new`](Disjoint::new), from a raw slice.
    ///
    /// # Safety
    /// The slice is valid for reads and writes during `'a`, and is used through this value only.
    pub unsafe fn from_raw(slice: *mut [T]) -> Self {
        Disjoint { start: slice.cast(), len: slice.len(), slice: PhantomData }
    }

    /// The `len` values from `at`.
    ///
    /// # Safety
    /// No two ranges that are in use at the same time overlap.
    pub unsafe fn slice(&self, at: usize, len: usize) -> &'a mut [T] {
        assert!(at <= self.len && len <= self.len - at, "a range beyond the slice");
        // SAFETY: inside the borrowed slice, as just checked; no other range in use overlaps, as the caller guarantees.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(at), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_written_from_several_threads() {
        let mut values = [0; 64];
        let shared = Disjoint::new(&mut values);
        std::thread::scope(|scope| {
            for i in 0..4 {
                let shared = &shared;
                // SAFETY: each thread has sixteen values of its own.
                scope.spawn(move || unsafe { shared.slice(16 * i, 16) }.fill(i));
            }
        });
        assert!(values.iter().enumerate().all(|(at, v)| *v == at / 16));
    }

    #[test]
    #[should_panic(expected = "beyond the slice")]
    fn a_range_beyond_the_slice_panics() {
        let mut values = [0; 4];
        let shared = Disjoint::new(&mut values);
        // SAFETY: the only range in use.
        unsafe { shared.slice(3, 2) };
    }
}
