//! Double of a device that stores the KV cache and computes attention.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use larder_kernels::{AttentionArgs, KvTensor, ThreadPool, attend};

use crate::device::{DeviceAttention, DeviceKvShape, DeviceKvView};
use crate::error::{ModelError, Result};

/// Fills fresh memory: as floats these bytes are NaN, so a read of unwritten rows shows.
const UNWRITTEN: u8 = 0xFF;

/// Double of [`DeviceAttention`]: stores blocks in vectors, and computes attention with the CPU kernels.
#[derive(Default)]
pub struct AttentionDouble {
    total_bytes: usize,
    /// Every n-th attention call fails; 0 for none.
    failing: u64,
    state: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    blocks: BTreeMap<usize, (DeviceKvShape, Vec<u8>)>,
    next_id: usize,
    calls: u64,
    copies: u64,
}

impl Inner {
    fn used_bytes(&self) -> usize {
        self.blocks.values().map(|(_, data)| data.len()).sum()
    }

    fn table(&self, of: DeviceKvView) -> KvTensor<'_> {
        let (DeviceKvShape { kind, capacity, row_bytes, .. }, data) = &self.blocks[&of.block];
        KvTensor { kind: *kind, data, head_stride: capacity * row_bytes, row_stride: *row_bytes, width: of.width }
    }
}

impl AttentionDouble {
    /// A device with `total_bytes` of memory that does not fail.
    pub fn new(total_bytes: usize) -> Self {
        AttentionDouble { total_bytes, ..AttentionDouble::default() }
    }

    /// Every n-th attention call fails.
    pub fn failing(mut self, every: u64) -> Self {
        self.failing = every;
        self
    }

    /// Bytes of all allocated blocks.
    pub fn used_bytes(&self) -> usize {
        self.lock().used_bytes()
    }

    /// Number of attention calls so far.
    pub fn calls(&self) -> u64 {
        self.lock().calls
    }

    /// Number of copies between blocks so far.
    pub fn copies(&self) -> u64 {
        self.lock().copies
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DeviceAttention for AttentionDouble {
    fn allocate(&self, shape: DeviceKvShape) -> Result<usize> {
        let mut state = self.lock();
        let free = self.total_bytes - state.used_bytes();
        if shape.bytes() > free {
            let size = shape.bytes();
            let message = format!("a KV block of {size} bytes does not fit into the {free} free bytes of the device");
            return Err(ModelError::Device(message.into()));
        }
        state.next_id += 1;
        let id = state.next_id;
        state.blocks.insert(id, (shape, vec![UNWRITTEN; shape.bytes()]));
        Ok(id)
    }

    fn free(&self, block: usize) {
        self.lock().blocks.remove(&block).expect("the block is allocated");
    }

    fn append(&self, block: usize, at: usize, bytes: &[u8]) -> Result<()> {
        let mut state = self.lock();
        let (DeviceKvShape { heads, capacity, row_bytes, .. }, data) =
            state.blocks.get_mut(&block).expect("the block is allocated");
        for (at, token) in (at..).zip(bytes.chunks_exact(*heads * *row_bytes)) {
            for (head, new) in token.chunks_exact(*row_bytes).enumerate() {
                data[(head * *capacity + at) * *row_bytes..][..*row_bytes].copy_from_slice(new);
            }
        }
        Ok(())
    }

    fn copy(&self, from: usize, to: usize, len: usize) -> Result<()> {
        let mut state = self.lock();
        state.copies += 1;
        let (old, data) = state.blocks[&from].clone();
        let (new, into) = state.blocks.get_mut(&to).expect("the block is allocated");
        for head in 0..old.heads {
            let used = &data[head * old.capacity * old.row_bytes..][..len * old.row_bytes];
            into[head * new.capacity * new.row_bytes..][..used.len()].copy_from_slice(used);
        }
        Ok(())
    }

    fn attend(&self, args: &AttentionArgs<DeviceKvView>, out: &mut [f32]) -> Result<()> {
        let mut state = self.lock();
        state.calls += 1;
        if self.failing > 0 && state.calls.is_multiple_of(self.failing) {
            out.fill(f32::NAN);
            return Err(ModelError::Device("attention on the device failed: device lost".into()));
        }
        attend(&ThreadPool::single_threaded(), &args.with_kv(state.table(args.keys), state.table(args.values)), out);
        Ok(())
    }
}
