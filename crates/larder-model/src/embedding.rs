//! The rows of the embedding: from a matrix in memory, or read one by one and cached.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use larder_core::{TensorMeta, TensorRows};

use crate::error::Result;
use crate::matrix::Matrix;

/// Rows that are kept in memory of an embedding that is read row by row.
const CACHED_ROWS: usize = 1024;

/// The embedding: one row for each token of the vocabulary.
pub trait EmbeddingRows: Send + Sync {
    /// Writes the rows of `tokens` to `out [tokens, hidden]`.
    ///
    /// The caller guarantees tokens of the vocabulary. What is written depends only on the token and the stored weights.
    fn fill(&self, tokens: &[u32], out: &mut [f32]) -> Result<()>;
}

impl EmbeddingRows for Matrix {
    fn fill(&self, tokens: &[u32], out: &mut [f32]) -> Result<()> {
        let hidden = out.len() / tokens.len().max(1);
        for (token, out) in tokens.iter().zip(out.chunks_exact_mut(hidden)) {
            self.row(*token as usize, out);
        }
        Ok(())
    }
}

/// Bytes of memory for an embedding that is read row by row.
pub fn embedding_cache_bytes(meta: &TensorMeta) -> usize {
    let rows = meta.shape.first().copied().unwrap_or(1).max(1);
    meta.bytes / rows * rows.min(CACHED_ROWS)
}

/// Rows that are read when they are wanted; the least recently used of [`CACHED_ROWS`] makes room for a new one.
pub struct CachedRows {
    rows: Arc<dyn TensorRows>,
    cache: Mutex<RowCache>,
}

impl CachedRows {
    /// An empty cache over `rows`.
    pub fn new(rows: Arc<dyn TensorRows>) -> Self {
        Self::with_capacity(rows, CACHED_ROWS)
    }

    fn with_capacity(rows: Arc<dyn TensorRows>, capacity: usize) -> Self {
        let meta = rows.meta();
        let all = meta.shape.first().copied().unwrap_or(1).max(1);
        let (row_bytes, capacity) = (meta.bytes / all, capacity.min(all));
        let bytes = Vec::with_capacity(capacity * row_bytes);
        let cache = RowCache { row_bytes, capacity, bytes, places: BTreeMap::new(), uses: vec![], clock: 0 };
        CachedRows { rows, cache: Mutex::new(cache) }
    }
}

impl EmbeddingRows for CachedRows {
    fn fill(&self, tokens: &[u32], out: &mut [f32]) -> Result<()> {
        // A thread that panicked while it read a row has left no entry for it.
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let (kind, hidden) = (self.rows.meta().kind, out.len() / tokens.len().max(1));
        for (token, out) in tokens.iter().zip(out.chunks_exact_mut(hidden)) {
            larder_kernels::widen(kind, cache.row(*token, self.rows.as_ref())?, out);
        }
        Ok(())
    }
}

/// Stored rows by token.
struct RowCache {
    row_bytes: usize,
    /// Largest number of rows.
    capacity: usize,
    /// `[places, row_bytes]`; grows with the first uses, inside the memory that was reserved for it.
    bytes: Vec<u8>,
    /// The place of each cached token.
    places: BTreeMap<u32, usize>,
    /// For each place, its token and the time of its last use.
    uses: Vec<(u32, u64)>,
    clock: u64,
}

impl RowCache {
    /// The stored bytes of a row, which is read if it is not there.
    fn row(&mut self, token: u32, rows: &dyn TensorRows) -> Result<&[u8]> {
        self.clock += 1;
        let place = match self.places.get(&token) {
            Some(place) => *place,
            None => {
                let place = self.free_place();
                rows.read_row(token as usize, &mut self.bytes[place * self.row_bytes..][..self.row_bytes])?;
                self.places.insert(token, place);
                place
            }
        };
        self.uses[place] = (token, self.clock);
        Ok(&self.bytes[place * self.row_bytes..][..self.row_bytes])
    }

    /// A place without a token: a new one, or that of the least recently used token.
    fn free_place(&mut self) -> usize {
        if self.uses.len() < self.capacity {
            self.uses.push((u32::MAX, 0));
            self.bytes.resize(self.uses.len() * self.row_bytes, 0);
            return self.uses.len() - 1;
        }
        let (place, (token, _)) =
            self.uses.iter().enumerate().min_by_key(|(_, (_, used))| *used).expect("the capacity is not 0");
        // After a failed read the place has the old token's entry no more, and is the first to be used again.
        self.places.remove(token);
        self.uses[place] = (u32::MAX, 0);
        place
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use larder_core::{NumberFormat, RowOrder, TensorsError, interleave};

    use super::*;
    use crate::bytes::Bytes;
    use crate::compute::ComputeContext;

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

        fn read_row(&self, row: usize, into: &mut [u8]) -> Result<(), TensorsError> {
            self.reads.fetch_add(1, Ordering::Relaxed);
            if self.fails.load(Ordering::Relaxed) {
                into.fill(0xff);
                return Err(TensorsError("the disk is gone".into()));
            }
            into.copy_from_slice(&self.bytes[row * into.len()..][..into.len()]);
            Ok(())
        }
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
            let cached = CachedRows::with_capacity(rows.clone(), 5);
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
        let cached = CachedRows::with_capacity(rows.clone(), 6);
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
        assert_eq!(embedding_cache_bytes(&rows.meta), rows.meta.bytes);
    }

    #[test]
    fn a_failed_read_is_an_error_and_leaves_no_wrong_row() {
        let rows = rows(NumberFormat::F32);
        let cached = CachedRows::with_capacity(rows.clone(), 3);
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
