//! The memory of the rows of a step: buffers that are allocated once and taken again.

use std::mem;
use std::ops::{Deref, Range};
use std::sync::Arc;

use crate::ops::Rows;

/// Buffers of rows by the number of their operation, and those that no rows are in.
#[derive(Default)]
pub struct Workspace {
    /// Ascending by id.
    rows: Vec<Stored>,
    free: Vec<Arc<Vec<f32>>>,
    /// In the place of a buffer that was taken out.
    none: Arc<Vec<f32>>,
    next_id: usize,
    /// Values of all buffers that were taken so far.
    written: u64,
}

struct Stored {
    rows: Rows,
    at: usize,
    buffer: Arc<Vec<f32>>,
}

/// Rows in main memory, `[rows, width]`. While they are used their buffer is not taken for others.
#[derive(Clone)]
pub struct HostRows {
    /// Number of rows.
    pub rows: usize,
    /// Values of a row.
    pub width: usize,
    at: usize,
    buffer: Arc<Vec<f32>>,
}

impl HostRows {
    /// These values, in rows of `width`.
    pub fn new(values: Vec<f32>, width: usize) -> Self {
        HostRows { rows: values.len() / width, width, at: 0, buffer: Arc::new(values) }
    }
}

impl Deref for HostRows {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.buffer[self.at..][..self.rows * self.width]
    }
}

/// A buffer that nothing else uses, for rows that are still to be written.
pub struct HostBuffer {
    buffer: Arc<Vec<f32>>,
    rows: usize,
    width: usize,
}

impl HostBuffer {
    /// New memory, of zeros.
    pub fn new(rows: usize, width: usize) -> Self {
        HostBuffer { buffer: Arc::new(vec![0.0; rows * width]), rows, width }
    }

    /// Number of values.
    pub(crate) fn len(&self) -> usize {
        self.rows * self.width
    }

    /// The values, which are unspecified at first.
    pub fn values(&mut self) -> &mut [f32] {
        let len = self.len();
        &mut Arc::get_mut(&mut self.buffer).expect("nothing else uses the buffer")[..len]
    }

    /// Values of a row.
    pub fn width(&self) -> usize {
        self.width
    }
}

impl Workspace {
    /// A buffer for some rows: the smallest that has room; where none has, a new one in the place of the largest.
    pub fn take(&mut self, rows: usize, width: usize) -> HostBuffer {
        let len = rows * width;
        self.written += len as u64;
        let fitting = self.free.iter().enumerate().filter(|(_, buffer)| buffer.len() >= len);
        let buffer = match fitting.min_by_key(|(_, buffer)| buffer.len()) {
            Some((place, _)) => self.free.swap_remove(place),
            None => {
                let largest = self.free.iter().enumerate().max_by_key(|(_, buffer)| buffer.len());
                largest.map(|(place, _)| place).map(|place| self.free.swap_remove(place));
                Arc::new(vec![0.0; len])
            }
        };
        HostBuffer { buffer, rows, width }
    }

    /// The rows in a buffer.
    pub fn push(&mut self, HostBuffer { buffer, rows, width }: HostBuffer) -> Rows {
        self.push_at(rows, width, 0, buffer)
    }

    fn push_at(&mut self, rows: usize, width: usize, at: usize, buffer: Arc<Vec<f32>>) -> Rows {
        let rows = Rows { id: self.next_id, rows, width };
        self.next_id += 1;
        self.rows.push(Stored { rows, at, buffer });
        rows
    }

    fn find(&self, rows: Rows) -> usize {
        let place = self.rows.binary_search_by_key(&rows.id, |stored| stored.rows.id).expect("rows that are kept");
        debug_assert_eq!(self.rows[place].rows, rows);
        place
    }

    /// The values of rows.
    pub fn values(&self, rows: Rows) -> &[f32] {
        let Stored { at, buffer, .. } = &self.rows[self.find(rows)];
        &buffer[*at..][..rows.rows * rows.width]
    }

    /// The values of rows, to be changed; `None` if something else reads them.
    pub fn values_mut(&mut self, rows: Rows) -> Option<&mut [f32]> {
        let place = self.find(rows);
        let Stored { at, buffer, .. } = &mut self.rows[place];
        Some(&mut Arc::get_mut(buffer)?[*at..][..rows.rows * rows.width])
    }

    /// The buffer of rows, to be changed and [put back](Self::put_back); `None` if something else reads it.
    pub fn take_out(&mut self, rows: Rows) -> Option<HostBuffer> {
        let place = self.find(rows);
        let Stored { at, buffer, .. } = &mut self.rows[place];
        if *at > 0 || Arc::get_mut(buffer).is_none() {
            return None;
        }
        self.written += (rows.rows * rows.width) as u64;
        Some(HostBuffer { buffer: mem::replace(buffer, self.none.clone()), rows: rows.rows, width: rows.width })
    }

    /// Values of all buffers that were taken to be written so far.
    pub fn written(&self) -> u64 {
        self.written
    }

    /// The rows in a buffer that was [taken out](Self::take_out) of this place, or else is new.
    pub fn settle(&mut self, taken: HostBuffer, place: Option<Rows>) -> Rows {
        match place {
            Some(rows) => {
                self.put_back(rows, taken);
                rows
            }
            None => self.push(taken),
        }
    }

    /// Puts the buffer of rows back.
    pub fn put_back(&mut self, rows: Rows, taken: HostBuffer) {
        let place = self.find(rows);
        self.rows[place].buffer = taken.buffer;
    }

    /// Some of the rows, without a copy.
    pub fn slice(&mut self, rows: Rows, range: Range<usize>) -> Rows {
        let Stored { at, buffer, .. } = &self.rows[self.find(rows)];
        let (at, buffer) = (at + range.start * rows.width, buffer.clone());
        self.push_at(range.len(), rows.width, at, buffer)
    }

    /// The rows as others than this workspace read them, without a copy.
    pub fn shared(&self, rows: Rows) -> HostRows {
        let Stored { at, buffer, .. } = &self.rows[self.find(rows)];
        HostRows { rows: rows.rows, width: rows.width, at: *at, buffer: buffer.clone() }
    }

    /// Gives a buffer back that was not pushed.
    pub fn give_back(&mut self, taken: HostBuffer) {
        self.free.push(taken.buffer);
    }

    /// Keeps these rows alone.
    pub fn retain(&mut self, live: &[Rows]) {
        let Workspace { rows, free, none, .. } = self;
        rows.retain_mut(|stored| {
            let is_live = live.iter().any(|rows| rows.id == stored.rows.id);
            if !is_live && Arc::get_mut(&mut stored.buffer).is_some() {
                free.push(mem::replace(&mut stored.buffer, none.clone()));
            }
            is_live
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_taken_again_and_grow_in_place_of_others() {
        let mut workspace = Workspace::default();
        let push = |workspace: &mut Workspace, len: usize, value: f32| {
            let mut taken = workspace.take(len / 2, 2);
            taken.values().fill(value);
            workspace.push(taken)
        };
        let [a, b] = [(6, 1.0), (8, 2.0)].map(|(len, value)| push(&mut workspace, len, value));
        let part = workspace.slice(a, 1..3);
        assert_eq!((workspace.values(part), part.rows), (&[1.0; 4][..], 2));
        assert!(workspace.values_mut(a).is_none(), "the part reads them");
        let shared = workspace.shared(b);
        workspace.retain(&[part]);
        assert!(workspace.free.is_empty(), "both are read");
        drop(shared);
        let c = push(&mut workspace, 4, 3.0);
        workspace.retain(&[]);
        assert_eq!(workspace.free.iter().map(|buffer| buffer.len()).collect::<Vec<_>>(), [6, 4]);
        let d = push(&mut workspace, 6, 4.0);
        assert_eq!((workspace.values(d).len(), workspace.free.len()), (6, 1));
        let e = push(&mut workspace, 20, 5.0);
        assert!(workspace.free.is_empty() && e.rows == 10 && c.id < e.id);
        workspace.values_mut(e).unwrap()[0] = 6.0;
        assert_eq!(workspace.values(e)[..2], [6.0, 5.0]);
    }
}
