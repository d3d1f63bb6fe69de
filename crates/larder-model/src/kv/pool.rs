//! The memory of KV caches and recurrent states: one pool for all sequences of a decoder.

use std::collections::HashMap;
use std::mem;
use std::sync::Arc;

use larder_core::{CheckpointPolicy, KV_PAGE_TOKENS};
use parking_lot::Mutex;

use super::{KvFormat, LayerShape};
use crate::device::{DeviceAttention, KvPageShape, Place};
use crate::error::{ModelError, Result};
use crate::ops::CpuPages;

/// Hands out pages of [`KV_PAGE_TOKENS`] positions of one layer's keys or values, and counts the bytes of recurrent
/// states. Pages that are given back are used again.
pub struct KvPool {
    format: KvFormat,
    checkpoints: CheckpointPolicy,
    limit_bytes: usize,
    /// Pages in main memory.
    host: Arc<CpuPages>,
    /// The device that has pages; `None` if all are in main memory.
    device: Option<Arc<dyn DeviceAttention>>,
    /// The number of layers with keys and values on the device, the first ones in [their
    /// order](LayerShape::device_order).
    device_layers: usize,
    state: Mutex<PoolState>,
}

#[derive(Default)]
struct PoolState {
    usage: KvUsage,
    /// Memory of pages that no sequence has, by shape and place.
    free: HashMap<(KvPageShape, Place), Vec<usize>>,
    free_bytes: usize,
}

/// What the sequences of a pool use.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct KvUsage {
    /// Pages of keys and values; a page that several sequences share counts once.
    pub pages: usize,
    /// Bytes of these pages.
    pub page_bytes: usize,
    /// Bytes of recurrent states and their checkpoints.
    pub state_bytes: usize,
}

impl KvUsage {
    /// Bytes of pages and states.
    pub fn bytes(&self) -> usize {
        self.page_bytes + self.state_bytes
    }
}

impl KvPool {
    /// A pool of up to `limit_bytes` bytes, `None` for no limit, with pages in main memory, and on a device if there is
    /// one.
    pub fn new(
        format: KvFormat,
        checkpoints: CheckpointPolicy,
        limit_bytes: Option<usize>,
        memory: (Arc<CpuPages>, Option<Arc<dyn DeviceAttention>>),
    ) -> Arc<Self> {
        KvPool::split(format, checkpoints, limit_bytes, memory, usize::MAX)
    }

    /// As [`new`](Self::new), with the keys and values of only the first `device_layers` layers on the device.
    pub fn split(
        format: KvFormat,
        checkpoints: CheckpointPolicy,
        limit_bytes: Option<usize>,
        (host, device): (Arc<CpuPages>, Option<Arc<dyn DeviceAttention>>),
        device_layers: usize,
    ) -> Arc<Self> {
        let limit_bytes = limit_bytes.unwrap_or(usize::MAX);
        Arc::new(KvPool { format, checkpoints, limit_bytes, host, device, device_layers, state: Mutex::default() })
    }

    /// What the sequences use now.
    pub fn usage(&self) -> KvUsage {
        self.state.lock().usage
    }

    /// The most bytes that sequences can use, with the memory of pages that were given back; `None` for no limit.
    pub fn limit_bytes(&self) -> Option<usize> {
        Some(self.limit_bytes).filter(|limit| *limit < usize::MAX)
    }

    /// When checkpoints of recurrent states are taken.
    pub fn checkpoints(&self) -> CheckpointPolicy {
        self.checkpoints
    }

    /// Where keys and values are of each of these layers, after `before` whose keys and values can be on the device.
    pub(super) fn places(&self, layers: &[LayerShape], before: usize) -> Vec<Place> {
        let mut places = vec![Place::Host; layers.len()];
        let count = if self.device.is_some() { self.device_layers.saturating_sub(before) } else { 0 };
        for layer in LayerShape::device_order(layers).into_iter().take(count) {
            places[layer] = Place::Device;
        }
        places
    }

    /// Whether a device has pages.
    pub fn has_device(&self) -> bool {
        self.device.is_some()
    }

    /// Number format of keys and values.
    pub fn format(&self) -> KvFormat {
        self.format
    }

    /// What has the pages in a place.
    pub(super) fn pages(&self, place: Place) -> &dyn DeviceAttention {
        match place {
            Place::Host => self.host.as_ref(),
            Place::Device => self.device.as_deref().expect("only pools with a device have pages there"),
        }
    }

    /// Where the states of recurrences are: where operations are.
    pub(super) fn state_place(&self) -> Place {
        if self.device.is_some() { Place::Device } else { Place::Host }
    }

    /// A page, whose contents are unspecified.
    pub(super) fn page(self: &Arc<Self>, shape: KvPageShape, place: Place) -> Result<KvPage> {
        let mut state = self.state.lock();
        let id = match state.free.get_mut(&(shape, place)).and_then(Vec::pop) {
            Some(id) => {
                state.free_bytes -= shape.bytes();
                id
            }
            None => self.allocate(&mut state, shape, place)?,
        };
        state.usage.count(shape, |all, own| *all += own);
        Ok(KvPage { shape, place, id, pool: self.clone() })
    }

    fn allocate(&self, state: &mut PoolState, shape: KvPageShape, place: Place) -> Result<usize> {
        self.make_room(state, shape.bytes())?;
        match self.pages(place).allocate(shape) {
            Err(_) if state.free_bytes > 0 => {
                self.free_unused(state);
                self.pages(place).allocate(shape)
            }
            result => result,
        }
    }

    /// Checks that `bytes` more fit below the limit, if need be without the pages that nothing uses.
    fn make_room(&self, state: &mut PoolState, bytes: usize) -> Result<()> {
        let used = state.usage.bytes();
        if used.saturating_add(bytes) > self.limit_bytes {
            let limit = self.limit_bytes;
            return Err(ModelError::KvCacheFull(format!(
                "the KV cache is full: {used} of {limit} bytes are in use, and {bytes} more are needed; end another sequence, \
                 or allow for more or longer ones"
            )));
        }
        if used + state.free_bytes + bytes > self.limit_bytes {
            self.free_unused(state);
        }
        Ok(())
    }

    fn free_unused(&self, state: &mut PoolState) {
        state.free_bytes = 0;
        for ((_, place), pages) in mem::take(&mut state.free) {
            pages.into_iter().for_each(|page| self.pages(place).free(page));
        }
    }
}

impl Drop for KvPool {
    fn drop(&mut self) {
        let mut state = mem::take(&mut *self.state.lock());
        self.free_unused(&mut state);
    }
}

/// A page of keys or values, or of a recurrent state. The last owner gives it back.
pub(super) struct KvPage {
    shape: KvPageShape,
    place: Place,
    id: usize,
    pool: Arc<KvPool>,
}

impl KvPage {
    /// Bytes of the page.
    pub fn bytes(&self) -> usize {
        self.shape.bytes()
    }

    /// Its id in its place.
    pub fn id(&self) -> usize {
        self.id
    }

    /// Copies its bytes. Waits for a device that has it.
    pub fn read(&self, out: &mut [u8]) -> Result<()> {
        self.pool.pages(self.place).read(self.id, out)
    }

    /// Copies each head's first `len` rows from another page of the same shape and place.
    pub fn copy_from(&self, other: &KvPage, len: usize) -> Result<()> {
        self.pool.pages(self.place).copy(other.id, self.id, len)
    }

    /// Writes `bytes [n, heads, row]`, from row `at` of each head on.
    pub fn write(&self, at: usize, bytes: &[u8]) -> Result<()> {
        self.pool.pages(self.place).append(self.id, at, bytes)
    }
}

impl KvUsage {
    /// What it counts a page of this shape as.
    fn count(&mut self, shape: KvPageShape, change: impl Fn(&mut usize, usize)) {
        match shape.positions {
            1 => change(&mut self.state_bytes, shape.bytes()),
            _ => {
                change(&mut self.pages, 1);
                change(&mut self.page_bytes, shape.bytes());
            }
        }
    }
}

impl Drop for KvPage {
    fn drop(&mut self) {
        let (mut state, bytes) = (self.pool.state.lock(), self.shape.bytes());
        state.usage.count(self.shape, |all, own| *all -= own);
        state.free_bytes += bytes;
        state.free.entry((self.shape, self.place)).or_default().push(self.id);
    }
}

/// The shape of the pages of rows of `width` values for each of `heads` heads.
pub(super) fn page_shape(format: KvFormat, heads: usize, width: usize) -> KvPageShape {
    KvPageShape { kind: format.kind(), heads, positions: KV_PAGE_TOKENS, row_bytes: format.row_bytes(width) }
}

#[cfg(test)]
mod tests {
    use larder_core::NumberFormat;

    use super::*;
    use crate::fake::FakeAttention;

    fn pool(limit: usize, device: Option<Arc<dyn DeviceAttention>>) -> Arc<KvPool> {
        KvPool::new(KvFormat::F16, CheckpointPolicy::default(), Some(limit), (Arc::default(), device))
    }

    #[test]
    fn pages_are_used_again_and_refused_beyond_the_limit() {
        let [small, large] = [1, 2].map(|heads| page_shape(KvFormat::F16, heads, 8));
        assert_eq!((small.bytes(), large.bytes()), (1024, 2048));
        let fake = Arc::new(FakeAttention::new(4096));
        for device in [None, Some(fake.clone() as Arc<dyn DeviceAttention>)] {
            let place = if device.is_some() { Place::Device } else { Place::Host };
            let pool = pool(3 * 1024 + 100, device);
            let mut pages: Vec<KvPage> = (0..3).map(|_| pool.page(small, place).unwrap()).collect();
            let error = pool.page(small, place).err().expect("the pool is full").to_string();
            assert!(error.starts_with("the KV cache is full: 3072 of 3172 bytes are in use, and 1024 more"), "{error}");
            let state_of =
                |values: usize| KvPageShape { kind: NumberFormat::F32, heads: 1, positions: 1, row_bytes: 4 * values };
            assert!(pool.page(state_of(26), place).is_err());
            let state = pool.page(state_of(25), place).unwrap();
            assert_eq!(pool.usage(), KvUsage { pages: 3, page_bytes: 3072, state_bytes: 100 });
            pages.pop();
            pages.push(pool.page(small, place).unwrap());
            drop((state, pages));
            // The free pages make room for one of another shape.
            let large = pool.page(large, place).unwrap();
            assert_eq!(pool.usage(), KvUsage { pages: 1, page_bytes: 2048, state_bytes: 0 });
            drop((large, pool));
            assert_eq!(fake.used_bytes(), 0);
        }
    }

    #[test]
    fn a_device_without_room_gets_unused_pages_back_first() {
        let fake = Arc::new(FakeAttention::new(2048));
        let pool = pool(usize::MAX, Some(fake.clone()));
        drop(pool.page(page_shape(KvFormat::F16, 1, 8), Place::Device).unwrap());
        assert_eq!(fake.used_bytes(), 1024);
        let large = pool.page(page_shape(KvFormat::F16, 2, 8), Place::Device).unwrap();
        assert_eq!(fake.used_bytes(), 2048);
        assert!(matches!(pool.page(page_shape(KvFormat::F16, 1, 8), Place::Device), Err(ModelError::Device(_))));
        drop(large);
    }
}
