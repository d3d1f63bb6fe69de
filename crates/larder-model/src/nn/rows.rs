use std::sync::Arc;

use larder_core::NumberFormat;
use larder_kernels::{Table, narrow};

use super::Memory;
use crate::device::{DeviceAttention, DeviceRows, DeviceTable};
use crate::error::Result;

/// Vectors `[heads, positions, width]` that grow along their positions, each head's in one piece.
#[derive(Clone)]
pub struct Rows {
    kind: NumberFormat,
    place: Place,
    heads: usize,
    /// Bytes of one vector.
    row: usize,
    /// Positions that fit.
    room: usize,
    len: usize,
}

#[derive(Clone)]
enum Place {
    Memory(Vec<u8>),
    /// Clones share what is there until one of them appends.
    Device(Arc<dyn DeviceAttention>, Option<Arc<Lent>>),
}

/// Memory of a device, given back when nobody needs it any more.
struct Lent {
    device: Arc<dyn DeviceAttention>,
    number: usize,
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.device.free(self.number);
    }
}

/// All rows, or the first `width` values of each.
#[derive(Clone, Copy)]
pub struct View<'a> {
    rows: &'a Rows,
    width: usize,
}

/// Where the rows of a view are.
pub enum Where<'a> {
    /// In memory.
    Here(Table<'a>),
    /// On a device.
    There(&'a dyn DeviceAttention, DeviceTable),
}

impl Rows {
    /// None yet, with room for `room` positions; on the device if there is one.
    pub fn new(room: usize, memory: Memory, device: Option<&Arc<dyn DeviceAttention>>) -> Self {
        let place = match device {
            Some(device) => Place::Device(device.clone(), None),
            None => Place::Memory(Vec::new()),
        };
        Rows { kind: memory.kind(), place, heads: 0, row: 0, room, len: 0 }
    }

    /// Positions that are remembered.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Forgets what is behind the first `len` positions.
    pub fn cut(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Bytes taken.
    pub fn bytes(&self) -> usize {
        match &self.place {
            Place::Memory(data) => data.len(),
            Place::Device(_, None) => 0,
            Place::Device(_, Some(_)) => self.heads * self.room * self.row,
        }
    }

    /// Appends `new [n, heads, width]`. Memory is taken at the first call, for as many positions as there is to be room
    /// for, and again only if there are more.
    pub fn append(&mut self, new: &[f32], heads: usize, width: usize) -> Result<()> {
        let (need, row) = (self.len + new.len() / (heads * width), width * self.kind.block_bytes());
        if self.bytes() == 0 {
            (self.heads, self.row) = (heads, row);
            self.take(self.room.max(need))?;
        } else if need > self.room {
            self.take(need.next_power_of_two())?;
        }
        debug_assert_eq!((self.heads, self.row), (heads, row));
        match &mut self.place {
            Place::Memory(data) => {
                for (at, token) in (self.len..).zip(new.chunks_exact(heads * width)) {
                    for (head, values) in token.chunks_exact(width).enumerate() {
                        narrow(self.kind, values, &mut data[(head * self.room + at) * row..][..row]);
                    }
                }
            }
            Place::Device(..) => self.append_there(new)?,
        }
        self.len = need;
        Ok(())
    }

    fn append_there(&mut self, new: &[f32]) -> Result<()> {
        if let Place::Device(_, Some(lent)) = &self.place
            && Arc::strong_count(lent) > 1
        {
            self.take(self.room)?;
        }
        let mut bytes = vec![0; new.len() * self.kind.block_bytes()]; // [n, heads, row]
        narrow(self.kind, new, &mut bytes);
        match &self.place {
            Place::Device(device, Some(lent)) => device.append(lent.number, self.len, &bytes),
            _ => unreachable!("memory was taken there"),
        }
    }

    /// All rows, or the first `width` values of each.
    pub fn view(&self, width: usize) -> View<'_> {
        View { rows: self, width }
    }

    /// Takes memory for so many positions, and brings there what is remembered.
    fn take(&mut self, room: usize) -> Result<()> {
        let Rows { kind, heads, row, len, .. } = *self;
        match &mut self.place {
            Place::Memory(data) => {
                let mut new = vec![0; heads * room * row];
                if len > 0 {
                    for (old, new) in data.chunks_exact(self.room * row).zip(new.chunks_exact_mut(room * row)) {
                        new[..len * row].copy_from_slice(&old[..len * row]);
                    }
                }
                *data = new;
            }
            Place::Device(device, lent) => {
                let number = device.allocate(DeviceRows { kind, heads, room, row })?;
                let new = Lent { device: device.clone(), number };
                if let Some(old) = lent.as_ref().filter(|_| len > 0) {
                    device.copy(old.number, number, len)?;
                }
                *lent = Some(Arc::new(new));
            }
        }
        self.room = room;
        Ok(())
    }
}

impl<'a> View<'a> {
    /// Where its rows are, some of which have been appended.
    pub fn place(self) -> Where<'a> {
        let View { rows, width } = self;
        match &rows.place {
            Place::Memory(data) => {
                Where::Here(Table { kind: rows.kind, data, head: rows.room * rows.row, row: rows.row, width })
            }
            Place::Device(device, lent) => {
                let rows = lent.as_ref().expect("rows were appended").number;
                Where::There(device.as_ref(), DeviceTable { rows, width })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::double::AttentionDouble;

    #[test]
    fn clones_on_a_device_share_memory_until_one_appends() {
        let double = Arc::new(AttentionDouble::new(120));
        let device: Arc<dyn DeviceAttention> = double.clone();
        let mut first = Rows::new(4, Memory::F32, Some(&device));
        assert_eq!((first.bytes(), double.taken()), (0, 0));
        first.append(&[1.0, 2.0, 3.0], 1, 3).unwrap();
        let mut second = first.clone();
        assert_eq!((first.bytes(), double.taken(), double.copies()), (48, 48, 0));
        second.append(&[4.0, 5.0, 6.0], 1, 3).unwrap();
        assert_eq!((double.taken(), double.copies()), (96, 1));
        first.append(&[7.0, 8.0, 9.0], 1, 3).unwrap();
        assert_eq!(double.copies(), 1, "nobody shares it any more");
        let third = first.clone();
        assert!(first.append(&[0.0; 3], 1, 3).is_err(), "there is no room for a third");
        drop((second, third));
        first.append(&[0.0; 3], 1, 3).unwrap();
        assert_eq!((first.len(), double.taken()), (3, 48));
        drop(first);
        assert_eq!(double.taken(), 0);
    }

    #[test]
    fn rows_survive_growth() {
        for (room, memory) in [0, 1, 7, 100].into_iter().flat_map(|r| [(r, Memory::F32), (r, Memory::F16)]) {
            let mut rows = Rows::new(room, memory, None);
            for i in 0..100 {
                let value = |head: usize| [i as f32, head as f32, 0.5];
                rows.append(&[value(0), value(1)].concat(), 2, 3).unwrap();
                let Where::Here(table) = rows.view(2).place() else { panic!("it is in memory") };
                for (head, at) in (0..2).flat_map(|head| (0..=i).map(move |at| (head, at))) {
                    let from = head * table.head + at * table.row;
                    let mut kept = [0.0; 2];
                    let bytes = 2 * table.kind.block_bytes();
                    larder_kernels::widen(table.kind, &table.data[from..][..bytes], &mut kept);
                    assert_eq!(kept, [at as f32, head as f32]);
                }
            }
        }
    }
}
