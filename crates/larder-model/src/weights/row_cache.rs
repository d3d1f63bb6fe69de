//! Rows of a matrix on the SSD: read when they are wanted, several at a time, behind a cache of those last used.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use larder_core::{TensorMeta, TensorRows};
use parking_lot::Mutex;

use crate::device::{DeviceProducts, MatrixShape};
use crate::error::Result;
use crate::ops::{Ops, Rows};
use crate::weights::{EmbeddingRows, RowTraffic};

/// Rows that are kept in memory, if they take less than [`CACHED_BYTES`] more of them.
const CACHED_ROWS: usize = 1024;
const CACHED_BYTES: usize = 4 << 20;
/// Bytes of the rows that are read at a time, and the fewest and the most of them: each may be read with a larger
/// block.
const BATCH_BYTES: usize = 1 << 20;
const BATCH_ROWS: (usize, usize) = (16, 256);
/// Bytes that the bookkeeping of a kept row takes.
const BOOKKEEPING: usize = 96;

/// Sizes of the cache of a matrix.
#[derive(Clone, Copy)]
struct CacheSizes {
    row_bytes: usize,
    /// Largest number of rows that are kept.
    kept: usize,
    /// Largest number of rows that are read at a time.
    batch: usize,
}

impl CacheSizes {
    fn of(meta: &TensorMeta) -> Self {
        let rows = meta.shape.first().copied().unwrap_or(1).max(1);
        let row_bytes = meta.bytes / rows;
        let fit = |bytes: usize| bytes / row_bytes.max(1);
        let batch = fit(BATCH_BYTES).clamp(BATCH_ROWS.0, BATCH_ROWS.1).min(rows);
        CacheSizes { row_bytes, kept: fit(CACHED_BYTES).max(CACHED_ROWS).min(rows), batch }
    }
}

/// Bytes of memory for a matrix that is read row by row.
pub fn row_cache_bytes(rows: &dyn TensorRows) -> usize {
    let CacheSizes { row_bytes, kept, batch } = CacheSizes::of(rows.meta());
    kept * (row_bytes + BOOKKEEPING) + batch * row_bytes + rows.kept_bytes()
}

/// Rows that are read when they are wanted; the least recently used makes room for a new one.
pub struct CachedRows {
    rows: Arc<dyn TensorRows>,
    cache: Mutex<RowCache>,
    /// The id of a copy of all rows on a device.
    uploaded: OnceLock<usize>,
}

impl CachedRows {
    /// An empty cache over `rows`.
    pub fn new(rows: Arc<dyn TensorRows>) -> Self {
        let sizes = CacheSizes::of(rows.meta());
        Self::with_sizes(rows, sizes)
    }

    fn with_sizes(rows: Arc<dyn TensorRows>, sizes: CacheSizes) -> Self {
        let bytes = Vec::with_capacity(sizes.kept * sizes.row_bytes);
        CachedRows { rows, cache: Mutex::new(RowCache { bytes, ..RowCache::new(sizes) }), uploaded: OnceLock::new() }
    }
}

impl EmbeddingRows for CachedRows {
    fn fill(&self, rows: &[u32], out: &mut [f32]) -> Result<()> {
        // A thread that panicked while it read rows has left no entries for them.
        let mut cache = self.cache.lock();
        let (width, batch) = (out.len() / rows.len().max(1), cache.sizes.batch);
        let mut parts = rows.chunks(batch).zip(out.chunks_mut((width * batch).max(1)));
        parts.try_for_each(|(rows, out)| cache.fill(rows, self.rows.as_ref(), out))
    }

    fn traffic(&self) -> Option<RowTraffic> {
        Some(self.cache.lock().traffic)
    }

    fn place_on(&self, device: &dyn DeviceProducts) -> Result<()> {
        let TensorMeta { kind, order, ref shape, bytes } = *self.rows.meta();
        let (rows, row_bytes) = (shape[0], bytes / shape[0].max(1));
        let shape = MatrixShape { kind, order, rows, cols: shape[1], scale: 1.0, bytes };
        let mut read = |first: usize, into: &mut [u8]| {
            let numbers: Vec<usize> = (first..first + into.len() / row_bytes.max(1)).collect();
            Ok(self.rows.read_rows(&numbers, into)?)
        };
        if self.uploaded.get().is_none() {
            let id = device.upload_rows(&shape, &mut read)?;
            self.uploaded.get_or_init(|| id);
        }
        Ok(())
    }

    fn is_on_device(&self) -> bool {
        self.uploaded.get().is_some()
    }

    fn begin_row(&self, number: Rows, ops: &dyn Ops) -> Result<Option<Rows>> {
        self.uploaded.get().map(|id| ops.row_of(*id, number)).transpose()
    }
}

/// Stored rows by their number.
struct RowCache {
    sizes: CacheSizes,
    /// `[places, row_bytes]`; grows with the first uses, inside the memory that was reserved for it.
    bytes: Vec<u8>,
    /// The place of each kept row.
    places: BTreeMap<u32, usize>,
    /// For each place, its row and the time of its last use.
    uses: Vec<(u32, u64)>,
    /// The places by the time of their last use.
    order: BTreeMap<u64, usize>,
    clock: u64,
    /// The rows that were read last.
    batch: Vec<u8>,
    traffic: RowTraffic,
}

impl RowCache {
    fn new(sizes: CacheSizes) -> Self {
        RowCache {
            sizes,
            bytes: vec![],
            places: BTreeMap::new(),
            uses: vec![],
            order: BTreeMap::new(),
            clock: 0,
            batch: vec![],
            traffic: RowTraffic::default(),
        }
    }

    /// Writes the values of at most a batch of rows, of which those that are not there are read at once.
    fn fill(&mut self, wanted: &[u32], rows: &dyn TensorRows, out: &mut [f32]) -> Result<()> {
        let (kind, row_bytes) = (rows.meta().kind, self.sizes.row_bytes);
        let mut missing: Vec<u32> = wanted.iter().copied().filter(|row| !self.places.contains_key(row)).collect();
        missing.sort_unstable();
        missing.dedup();
        self.batch.resize(missing.len() * row_bytes, 0);
        let numbers: Vec<usize> = missing.iter().map(|row| *row as usize).collect();
        if !numbers.is_empty() {
            rows.read_rows(&numbers, &mut self.batch)?;
        }
        for (row, out) in wanted.iter().zip(out.chunks_exact_mut(out.len() / wanted.len())) {
            let stored = match (self.places.get(row).copied(), missing.binary_search(row)) {
                (Some(place), _) => {
                    self.touch(place);
                    &self.bytes[place * row_bytes..][..row_bytes]
                }
                (None, Ok(at) | Err(at)) => &self.batch[at * row_bytes..][..row_bytes],
            };
            larder_kernels::widen(kind, stored, out);
        }
        missing.iter().enumerate().for_each(|(at, row)| self.keep(*row, at));
        let reads = missing.len() as u64;
        self.traffic += RowTraffic { hits: wanted.len() as u64 - reads, reads };
        Ok(())
    }

    /// Makes a place the one that was used last.
    fn touch(&mut self, place: usize) {
        self.clock += 1;
        self.order.remove(&self.uses[place].1);
        self.order.insert(self.clock, place);
        self.uses[place].1 = self.clock;
    }

    /// Keeps row `row`, which is row `at` of the batch.
    fn keep(&mut self, row: u32, at: usize) {
        let (row_bytes, new) = (self.sizes.row_bytes, self.uses.len());
        let place = match self.order.first_key_value() {
            Some((_, oldest)) if new == self.sizes.kept => {
                let oldest = *oldest;
                self.places.remove(&self.uses[oldest].0);
                oldest
            }
            _ => {
                self.bytes.resize((new + 1) * row_bytes, 0);
                self.uses.push((row, 0));
                new
            }
        };
        self.bytes[place * row_bytes..][..row_bytes].copy_from_slice(&self.batch[at * row_bytes..][..row_bytes]);
        self.uses[place].0 = row;
        self.places.insert(row, place);
        self.touch(place);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use larder_core::{NumberFormat, RowOrder, TensorsError, interleave};

    use super::*;
    use crate::compute::ComputeContext;
    use crate::weights::{Bytes, Matrix};

    const ROWS: usize = 40;
    const COLS: usize = 64;

    /// Rows in memory that counts reads, and fails on demand.
    struct CountedRows {
        meta: TensorMeta,
        bytes: Vec<u8>,
        reads: AtomicUsize,
        fails: AtomicBool,
    }

    impl TensorRows for CountedRows {
        fn meta(&self) -> &TensorMeta {
            &self.meta
        }

        fn read_rows(&self, rows: &[usize], into: &mut [u8]) -> Result<(), TensorsError> {
            self.reads.fetch_add(rows.len(), Ordering::Relaxed);
            if self.fails.load(Ordering::Relaxed) {
                into.fill(0xff);
                return Err(TensorsError("the disk is gone".into()));
            }
            let bytes = into.len() / rows.len();
            for (row, into) in rows.iter().zip(into.chunks_exact_mut(bytes)) {
                into.copy_from_slice(&self.bytes[row * bytes..][..bytes]);
            }
            Ok(())
        }
    }

    /// A cache of at most `kept` rows, which reads up to four at a time.
    fn cached(rows: &Arc<CountedRows>, kept: usize) -> CachedRows {
        CachedRows::with_sizes(rows.clone(), CacheSizes { kept, batch: 4, ..CacheSizes::of(&rows.meta) })
    }

    fn rows(kind: NumberFormat) -> Arc<CountedRows> {
        let values: Vec<f32> = (0..ROWS * COLS).map(|i| ((i * 37 + 11) % 101) as f32 * 0.03 - 1.5).collect();
        let meta = TensorMeta::new(kind, vec![ROWS, COLS]).unwrap();
        let mut bytes = vec![0; meta.bytes];
        match kind.is_float() {
            true => larder_kernels::narrow(kind, &values, &mut bytes),
            // Any bytes are valid blocks; scales must only be finite.
            false => bytes.iter_mut().enumerate().for_each(|(i, b)| *b = (i * 29 % 0x60) as u8),
        }
        Arc::new(CountedRows { meta, bytes, reads: AtomicUsize::new(0), fails: AtomicBool::new(false) })
    }

    #[test]
    fn cached_rows_have_the_bits_of_the_matrix_in_memory() {
        for kind in [NumberFormat::F32, NumberFormat::F16, NumberFormat::Bf16, NumberFormat::Q8_0, NumberFormat::Q4_0] {
            let rows = rows(kind);
            let mut bytes = rows.bytes.clone();
            let order = RowOrder::best(kind);
            if order != RowOrder::Plain {
                interleave(kind, ROWS, COLS, &mut bytes);
            }
            let mut held = Bytes::zeroed(bytes.len());
            held.copy_from_slice(&bytes);
            let compute = Arc::new(ComputeContext::single_threaded());
            let matrix = Matrix::new(kind, order, ROWS, COLS, Arc::new(held), compute);
            let cached = cached(&rows, 5);
            for round in 0..50u32 {
                let tokens: Vec<u32> = (0..1 + round % 9).map(|i| (round * 7 + i * i * 3) % ROWS as u32).collect();
                let (mut want, mut got) = (vec![0.0; tokens.len() * COLS], vec![1.0; tokens.len() * COLS]);
                matrix.fill(&tokens, &mut want).unwrap();
                cached.fill(&tokens, &mut got).unwrap();
                assert_eq!(want, got, "{kind} {tokens:?}");
            }
        }
    }

    #[test]
    fn reads_are_those_of_a_list_of_the_last_used() {
        let rows = rows(NumberFormat::F16);
        let cached = cached(&rows, 6);
        let (mut list, mut reads) = (Vec::<u32>::new(), 0);
        for step in 0..2000u32 {
            let token = (step * step / 7 + step % 5) % 17;
            match list.iter().position(|t| *t == token) {
                Some(at) => drop(list.remove(at)),
                None => reads += 1,
            }
            list.push(token);
            list.drain(..list.len().saturating_sub(6));
            cached.fill(&[token], &mut [0.0; COLS]).unwrap();
            assert_eq!(rows.reads.load(Ordering::Relaxed), reads, "step {step}");
        }
        assert!(reads > 100 && reads < 1900, "{reads}");
        let traffic = cached.traffic().unwrap();
        assert_eq!((traffic.hits + traffic.reads, traffic.reads), (2000, reads as u64));
    }

    #[test]
    fn rows_that_are_wanted_together_are_read_together_and_once() {
        let rows = rows(NumberFormat::F32);
        let cached = cached(&rows, 8);
        let want = |row: u32| rows.bytes[row as usize * 4 * COLS..][..4].try_into().map(f32::from_le_bytes).unwrap();
        for (wanted, reads) in [(&[7u32, 1, 7, 2, 1, 9][..], 4), (&[9, 7, 1, 2], 0), (&[3, 3, 3, 3, 3, 30, 31, 7], 3)] {
            let before = cached.traffic().unwrap();
            let mut out = vec![0.0; wanted.len() * COLS];
            cached.fill(wanted, &mut out).unwrap();
            assert!(wanted.iter().zip(out.chunks(COLS)).all(|(row, got)| got[0] == want(*row)));
            let passed = cached.traffic().unwrap() - before;
            assert_eq!((passed.reads, passed.hits), (reads, wanted.len() as u64 - reads), "{wanted:?}");
        }
    }

    #[test]
    fn the_cache_is_small_beside_a_large_matrix() {
        let meta = |rows, cols| TensorMeta::new(NumberFormat::Bf16, vec![rows, cols]).unwrap();
        let sizes = |rows, cols| {
            let CacheSizes { row_bytes, kept, batch } = CacheSizes::of(&meta(rows, cols));
            (row_bytes, kept, batch)
        };
        assert_eq!(sizes(250_000, 2048), (4096, 1024, 256));
        assert_eq!(sizes(320_001_536, 160), (320, 13107, 256));
        assert_eq!((sizes(9, 160), sizes(100_000, 65536)), ((320, 9, 9), (131_072, 1024, 16)));
    }

    #[test]
    fn a_failed_read_is_an_error_and_leaves_no_wrong_row() {
        let rows = rows(NumberFormat::F32);
        let cached = cached(&rows, 3);
        let row = |token: u32| {
            let mut out = [0.0; COLS];
            cached.fill(&[token], &mut out).map(|()| out.to_vec())
        };
        let want: Vec<_> = (0..6).map(|t| row(t).unwrap()).collect();
        for token in [1, 5, 0] {
            rows.fails.store(true, Ordering::Relaxed);
            let failed = row(token);
            rows.fails.store(false, Ordering::Relaxed);
            if let Err(error) = failed {
                assert_eq!(error.to_string(), "the disk is gone");
            }
            for token in [token, 2, 3, 4, token] {
                assert_eq!(row(token).unwrap(), want[token as usize]);
            }
        }
    }
}
