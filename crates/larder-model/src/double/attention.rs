use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use larder_kernels::{AttentionArgs, KvTensor, ThreadPool, attend};

use crate::device::{DeviceAttention, DeviceKvShape, DeviceKvView};
use crate::error::{ModelError, Result};

/// What memory has before anything is written: floats that are no numbers.
const RUBBISH: u8 = 0xFF;

/// Remembers rows in vectors, and attends to them with this processor's kernels.
#[derive(Default)]
pub struct AttentionDouble {
    total_bytes: usize,
    /// Every look whose number is a multiple of this one fails; 0 for none.
    failing: u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    kept: BTreeMap<usize, (DeviceKvShape, Vec<u8>)>,
    numbers: usize,
    looks: u64,
    copies: u64,
}

impl State {
    fn taken(&self) -> usize {
        self.kept.values().map(|(_, data)| data.len()).sum()
    }

    fn table(&self, of: DeviceKvView) -> KvTensor<'_> {
        let (DeviceKvShape { kind, capacity: room, row_bytes: row, .. }, data) = &self.kept[&of.block];
        KvTensor { kind: *kind, data, head_stride: room * row, row_stride: *row, width: of.width }
    }
}

impl AttentionDouble {
    /// A device with so much memory, on which nothing fails.
    pub fn new(total_bytes: usize) -> Self {
        AttentionDouble { total_bytes, ..AttentionDouble::default() }
    }

    /// Every look whose number is a multiple of this one fails.
    pub fn failing(mut self, every: u64) -> Self {
        self.failing = every;
        self
    }

    /// Bytes that rows take.
    pub fn used_bytes(&self) -> usize {
        self.lock().taken()
    }

    /// How many looks there were.
    pub fn calls(&self) -> u64 {
        self.lock().looks
    }

    /// How often rows were copied.
    pub fn copies(&self) -> u64 {
        self.lock().copies
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DeviceAttention for AttentionDouble {
    fn allocate(&self, rows: DeviceKvShape) -> Result<usize> {
        let mut state = self.lock();
        let free = self.total_bytes - state.taken();
        if rows.bytes() > free {
            let what = format!("rows of {} bytes do not fit into the {free} bytes that are free", rows.bytes());
            return Err(ModelError::Device(what));
        }
        state.numbers += 1;
        let number = state.numbers;
        state.kept.insert(number, (rows, vec![RUBBISH; rows.bytes()]));
        Ok(number)
    }

    fn free(&self, rows: usize) {
        self.lock().kept.remove(&rows).expect("rows that were allocated");
    }

    fn append(&self, rows: usize, at: usize, bytes: &[u8]) -> Result<()> {
        let mut state = self.lock();
        let (DeviceKvShape { heads, capacity: room, row_bytes: row, .. }, data) =
            state.kept.get_mut(&rows).expect("rows that were allocated");
        for (at, token) in (at..).zip(bytes.chunks_exact(*heads * *row)) {
            for (head, new) in token.chunks_exact(*row).enumerate() {
                data[(head * *room + at) * *row..][..*row].copy_from_slice(new);
            }
        }
        Ok(())
    }

    fn copy(&self, from: usize, to: usize, len: usize) -> Result<()> {
        let mut state = self.lock();
        state.copies += 1;
        let (old, data) = state.kept[&from].clone();
        let (new, into) = state.kept.get_mut(&to).expect("rows that were allocated");
        for head in 0..old.heads {
            let used = &data[head * old.capacity * old.row_bytes..][..len * old.row_bytes];
            into[head * new.capacity * new.row_bytes..][..used.len()].copy_from_slice(used);
        }
        Ok(())
    }

    fn attend(&self, args: &AttentionArgs<DeviceKvView>, out: &mut [f32]) -> Result<()> {
        let mut state = self.lock();
        state.looks += 1;
        if self.failing > 0 && state.looks.is_multiple_of(self.failing) {
            out.fill(f32::NAN);
            return Err(ModelError::Device("attending on the device failed: it has gone away".into()));
        }
        attend(&ThreadPool::single_threaded(), &args.with_kv(state.table(args.keys), state.table(args.values)), out);
        Ok(())
    }
}
