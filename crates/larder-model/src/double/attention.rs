//! Double of a device that stores the KV cache and computes attention.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use larder_kernels::{AttentionTask, KvPages, KvTensor, ThreadPool, attend};

use crate::device::{DeviceAttention, DeviceKvView, KvPageShape};
use crate::error::{ModelError, Result};

/// Fills fresh memory: as floats these bytes are NaN, so a read of unwritten rows shows.
const UNWRITTEN: u8 = 0xFF;

/// Double of [`DeviceAttention`]: stores pages in vectors, and computes attention with the CPU kernels.
#[derive(Default)]
pub struct AttentionDouble {
    total_bytes: usize,
    /// Every n-th attention call fails; 0 for none.
    failing: u64,
    /// Every n-th allocation fails; 0 for none.
    refusing: u64,
    state: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    pages: BTreeMap<usize, (KvPageShape, Vec<u8>)>,
    next_id: usize,
    calls: u64,
    copies: u64,
    allocations: u64,
}

impl Inner {
    fn used_bytes(&self) -> usize {
        self.pages.values().map(|(_, data)| data.len()).sum()
    }

    /// The pages of a view.
    fn stored<'a>(&'a self, view: &DeviceKvView) -> StoredPages<'a> {
        let pages: Vec<_> = view.pages.iter().map(|id| &self.pages[id]).collect();
        let shape = pages.first().expect("a view has pages").0;
        assert!(pages.iter().all(|page| page.0 == shape), "pages of a view have one shape");
        StoredPages { shape, first: view.first_page, bytes: pages.into_iter().map(|page| &page.1[..]).collect() }
    }
}

/// The pages of one view.
pub(super) struct StoredPages<'a> {
    shape: KvPageShape,
    first: usize,
    bytes: Vec<&'a [u8]>,
}

impl<'a> StoredPages<'a> {
    /// These pages, from number 0 on.
    pub(super) fn of(shape: KvPageShape, pages: &'a [Vec<u8>]) -> Self {
        StoredPages { shape, first: 0, bytes: pages.iter().map(|page| &page[..]).collect() }
    }

    pub(super) fn tensor(&self, width: usize) -> KvTensor<'_> {
        let KvPageShape { kind, positions, row_bytes, .. } = self.shape;
        KvTensor { kind, pages: self, page_len: positions, row_bytes, width }
    }
}

impl KvPages for StoredPages<'_> {
    fn stored(&self) -> Range<usize> {
        self.first..self.first + self.bytes.len()
    }

    fn page(&self, index: usize) -> &[u8] {
        self.bytes[index - self.first]
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

    /// Every n-th allocation fails.
    pub fn refusing(mut self, every: u64) -> Self {
        self.refusing = every;
        self
    }

    /// Bytes of all allocated pages.
    pub fn used_bytes(&self) -> usize {
        self.lock().used_bytes()
    }

    /// Number of attention calls so far.
    pub fn calls(&self) -> u64 {
        self.lock().calls
    }

    /// Number of copies between pages so far.
    pub fn copies(&self) -> u64 {
        self.lock().copies
    }

    /// The shape of a page.
    pub(super) fn shape(&self, page: usize) -> KvPageShape {
        self.lock().pages[&page].0
    }

    /// The bytes of a page.
    pub(super) fn bytes(&self, page: usize) -> Vec<u8> {
        self.lock().pages[&page].1.clone()
    }

    /// The bytes of a page as f32.
    pub(crate) fn floats(&self, page: usize) -> Vec<f32> {
        self.lock().pages[&page].1.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect()
    }

    /// Replaces values of a page, from value `at` on.
    pub(crate) fn set_floats(&self, page: usize, at: usize, values: &[f32]) {
        let mut state = self.lock();
        let bytes = &mut state.pages.get_mut(&page).expect("the page is allocated").1;
        let places = bytes.as_chunks_mut().0[at..].iter_mut().zip(values);
        places.for_each(|(place, value)| *place = value.to_ne_bytes());
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DeviceAttention for AttentionDouble {
    fn allocate(&self, shape: KvPageShape) -> Result<usize> {
        let mut state = self.lock();
        state.allocations += 1;
        if self.refusing > 0 && state.allocations.is_multiple_of(self.refusing) {
            return Err(ModelError::Device("the device has no memory for a page now".into()));
        }
        let free = self.total_bytes - state.used_bytes();
        if shape.bytes() > free {
            let size = shape.bytes();
            let message = format!("a KV page of {size} bytes does not fit into the {free} free bytes of the device");
            return Err(ModelError::Device(message.into()));
        }
        state.next_id += 1;
        let id = state.next_id;
        state.pages.insert(id, (shape, vec![UNWRITTEN; shape.bytes()]));
        Ok(id)
    }

    fn free(&self, page: usize) {
        self.lock().pages.remove(&page).expect("the page is allocated");
    }

    fn append(&self, page: usize, at: usize, bytes: &[u8]) -> Result<()> {
        let mut state = self.lock();
        let (shape, data) = state.pages.get_mut(&page).expect("the page is allocated");
        let KvPageShape { heads, positions, row_bytes, .. } = *shape;
        for (at, token) in (at..).zip(bytes.chunks_exact(heads * row_bytes)) {
            for (head, new) in token.chunks_exact(row_bytes).enumerate() {
                data[(head * positions + at) * row_bytes..][..row_bytes].copy_from_slice(new);
            }
        }
        Ok(())
    }

    fn copy(&self, from: usize, to: usize, len: usize) -> Result<()> {
        let mut state = self.lock();
        state.copies += 1;
        let (shape, data) = state.pages[&from].clone();
        let (other, into) = state.pages.get_mut(&to).expect("the page is allocated");
        assert_eq!(*other, shape);
        shape.copy_rows(&data, into, len);
        Ok(())
    }

    fn read(&self, page: usize, out: &mut [u8]) -> Result<()> {
        out.copy_from_slice(&self.lock().pages[&page].1);
        Ok(())
    }

    fn attend(&self, tasks: &mut [AttentionTask<DeviceKvView>]) -> Result<()> {
        let mut state = self.lock();
        state.calls += 1;
        if self.failing > 0 && state.calls.is_multiple_of(self.failing) {
            tasks.iter_mut().for_each(|task| task.out.fill(f32::NAN));
            return Err(ModelError::Device("attention on the device failed: device lost".into()));
        }
        for AttentionTask { args, out } in tasks {
            let (keys, values) = (state.stored(&args.keys), state.stored(&args.values));
            let args = args.with_kv(keys.tensor(args.keys.width), values.tensor(args.values.width));
            attend(&ThreadPool::single_threaded(), &mut [AttentionTask { args, out }]);
        }
        Ok(())
    }
}
