//! Growing rows of keys or values, in main memory or in a block of a device.

use std::sync::Arc;

use larder_core::NumberFormat;
use larder_kernels::{KvTensor, narrow};

use super::KvFormat;
use crate::device::{DeviceAttention, DeviceKvShape, DeviceKvView};
use crate::error::Result;

/// Keys or values `[heads, positions, width]`, which grow by positions. The rows of a head are contiguous.
#[derive(Clone)]
pub struct KvRows {
    kind: NumberFormat,
    storage: Storage,
    heads: usize,
    /// Bytes of one row.
    row_bytes: usize,
    /// Positions that fit.
    capacity: usize,
    len: usize,
}

#[derive(Clone)]
enum Storage {
    Host(Vec<u8>),
    /// Clones share the block until one of them appends.
    Device(Arc<dyn DeviceAttention>, Option<Arc<DeviceBlock>>),
}

/// A block of device memory, freed when its last owner is dropped.
struct DeviceBlock {
    device: Arc<dyn DeviceAttention>,
    id: usize,
}

impl Drop for DeviceBlock {
    fn drop(&mut self) {
        self.device.free(self.id);
    }
}

/// All rows, or the first `width` numbers of each row.
#[derive(Clone, Copy)]
pub struct KvView<'a> {
    rows: &'a KvRows,
    width: usize,
}

/// The memory in which the rows of a view are stored.
pub enum KvLocation<'a> {
    /// In main memory.
    Host(KvTensor<'a>),
    /// On a device.
    Device(&'a dyn DeviceAttention, DeviceKvView),
}

impl KvRows {
    /// No rows yet; later rows are stored on `device` if there is one. The first append allocates `capacity` positions.
    pub fn new(capacity: usize, format: KvFormat, device: Option<&Arc<dyn DeviceAttention>>) -> Self {
        let storage = match device {
            Some(device) => Storage::Device(device.clone(), None),
            None => Storage::Host(Vec::new()),
        };
        KvRows { kind: format.kind(), storage, heads: 0, row_bytes: 0, capacity, len: 0 }
    }

    /// Positions stored.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Keeps the first `len` positions and drops the others; the memory stays allocated.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Bytes allocated.
    pub fn bytes(&self) -> usize {
        match &self.storage {
            Storage::Host(data) => data.len(),
            Storage::Device(_, None) => 0,
            Storage::Device(_, Some(_)) => self.heads * self.capacity * self.row_bytes,
        }
    }

    /// Appends `new [n, heads, width]`. Memory is allocated at the first call, for `capacity` positions, and again only
    /// if there are more.
    pub fn append(&mut self, new: &[f32], heads: usize, width: usize) -> Result<()> {
        let (need, row) = (self.len + new.len() / (heads * width), width * self.kind.block_bytes());
        if self.bytes() == 0 {
            (self.heads, self.row_bytes) = (heads, row);
            self.grow(self.capacity.max(need))?;
        } else if need > self.capacity {
            self.grow(need.next_power_of_two())?;
        }
        debug_assert_eq!((self.heads, self.row_bytes), (heads, row));
        match &mut self.storage {
            Storage::Host(data) => {
                for (at, token) in (self.len..).zip(new.chunks_exact(heads * width)) {
                    for (head, values) in token.chunks_exact(width).enumerate() {
                        narrow(self.kind, values, &mut data[(head * self.capacity + at) * row..][..row]);
                    }
                }
            }
            Storage::Device(..) => self.append_on_device(new)?,
        }
        self.len = need;
        Ok(())
    }

    fn append_on_device(&mut self, new: &[f32]) -> Result<()> {
        if let Storage::Device(_, Some(block)) = &self.storage
            && Arc::strong_count(block) > 1
        {
            self.grow(self.capacity)?;
        }
        let mut bytes = vec![0; new.len() * self.kind.block_bytes()]; // [n, heads, row]
        narrow(self.kind, new, &mut bytes);
        match &self.storage {
            Storage::Device(device, Some(block)) => device.append(block.id, self.len, &bytes),
            _ => unreachable!("a block was allocated on the device"),
        }
    }

    /// All rows, or the first `width` numbers of each row.
    pub fn view(&self, width: usize) -> KvView<'_> {
        KvView { rows: self, width }
    }

    /// Allocates memory for `capacity` positions, and copies the stored rows there.
    fn grow(&mut self, capacity: usize) -> Result<()> {
        let KvRows { kind, heads, row_bytes: row, len, .. } = *self;
        match &mut self.storage {
            Storage::Host(data) => {
                let mut new = vec![0; heads * capacity * row];
                if len > 0 {
                    for (old, new) in data.chunks_exact(self.capacity * row).zip(new.chunks_exact_mut(capacity * row)) {
                        new[..len * row].copy_from_slice(&old[..len * row]);
                    }
                }
                *data = new;
            }
            Storage::Device(device, block) => {
                let id = device.allocate(DeviceKvShape { kind, heads, capacity, row_bytes: row })?;
                let new = DeviceBlock { device: device.clone(), id };
                if let Some(old) = block.as_ref().filter(|_| len > 0) {
                    device.copy(old.id, id, len)?;
                }
                *block = Some(Arc::new(new));
            }
        }
        self.capacity = capacity;
        Ok(())
    }
}

impl<'a> KvView<'a> {
    /// The memory of the rows. The caller guarantees that at least one row has been appended.
    pub fn location(self) -> KvLocation<'a> {
        let KvView { rows, width } = self;
        match &rows.storage {
            Storage::Host(data) => KvLocation::Host(KvTensor {
                kind: rows.kind,
                data,
                head_stride: rows.capacity * rows.row_bytes,
                row_stride: rows.row_bytes,
                width,
            }),
            Storage::Device(device, block) => {
                let block = block.as_ref().expect("rows were appended").id;
                KvLocation::Device(device.as_ref(), DeviceKvView { block, width })
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
        let mut first = KvRows::new(4, KvFormat::F32, Some(&device));
        assert_eq!((first.bytes(), double.used_bytes()), (0, 0));
        first.append(&[1.0, 2.0, 3.0], 1, 3).unwrap();
        let mut second = first.clone();
        assert_eq!((first.bytes(), double.used_bytes(), double.copies()), (48, 48, 0));
        second.append(&[4.0, 5.0, 6.0], 1, 3).unwrap();
        assert_eq!((double.used_bytes(), double.copies()), (96, 1));
        first.append(&[7.0, 8.0, 9.0], 1, 3).unwrap();
        assert_eq!(double.copies(), 1, "the block has a single owner again");
        let third = first.clone();
        assert!(first.append(&[0.0; 3], 1, 3).is_err(), "a third block does not fit");
        drop((second, third));
        first.append(&[0.0; 3], 1, 3).unwrap();
        assert_eq!((first.len(), double.used_bytes()), (3, 48));
        drop(first);
        assert_eq!(double.used_bytes(), 0);
    }

    #[test]
    fn rows_survive_growth() {
        for (capacity, format) in [0, 1, 7, 100].into_iter().flat_map(|r| [(r, KvFormat::F32), (r, KvFormat::F16)]) {
            let mut rows = KvRows::new(capacity, format, None);
            for i in 0..100 {
                let value = |head: usize| [i as f32, head as f32, 0.5];
                rows.append(&[value(0), value(1)].concat(), 2, 3).unwrap();
                let KvLocation::Host(table) = rows.view(2).location() else { panic!("the rows are in main memory") };
                for (head, at) in (0..2).flat_map(|head| (0..=i).map(move |at| (head, at))) {
                    let from = head * table.head_stride + at * table.row_stride;
                    let mut kept = [0.0; 2];
                    let bytes = 2 * table.kind.block_bytes();
                    larder_kernels::widen(table.kind, &table.data[from..][..bytes], &mut kept);
                    assert_eq!(kept, [at as f32, head as f32]);
                }
            }
        }
    }
}
