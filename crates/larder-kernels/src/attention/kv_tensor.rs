//! Keys and values in pages, and the arguments of attention over them.

use std::ops::Range;

use larder_core::{NumberFormat, ROW_GROUP};

/// The most rows that are widened together.
pub const WIDENED_ROWS: usize = 32;

/// The pages of one sequence's keys or values, numbered by the positions they hold: page `i` has the positions from
/// `i · page_len` on.
pub trait KvPages: Sync {
    /// The numbers of the pages that are stored; earlier ones may have been given back.
    fn stored(&self) -> Range<usize>;

    /// The bytes `[heads, page_len, row]` of a page. The caller guarantees that it is stored.
    fn page(&self, index: usize) -> &[u8];
}

impl KvPages for Vec<Vec<u8>> {
    fn stored(&self) -> Range<usize> {
        0..self.len()
    }

    fn page(&self, index: usize) -> &[u8] {
        &self[index]
    }
}

/// Keys or values `[heads, positions, width]` in pages. The rows of a head are contiguous within a page.
#[derive(Clone, Copy)]
pub struct KvTensor<'a> {
    /// Number format: f32, f16, bf16 or q8_0. Attention is defined on the values that the rows stand for, in f32.
    pub kind: NumberFormat,
    /// Where the rows are stored.
    pub pages: &'a dyn KvPages,
    /// Positions per page, a multiple of eight.
    pub page_len: usize,
    /// Bytes from one row to the next.
    pub row_bytes: usize,
    /// Values of a row that are used.
    pub width: usize,
}

impl<'a> KvTensor<'a> {
    /// The bytes of the rows at these positions of a head, which are in one page.
    pub(super) fn rows(&self, head: usize, positions: Range<usize>) -> &'a [u8] {
        let page = self.pages.page(positions.start / self.page_len);
        let first = head * self.page_len + positions.start % self.page_len;
        let bytes = (positions.len() - 1) * self.row_bytes + self.used_bytes();
        &page[first * self.row_bytes..][..bytes]
    }

    /// The positions, split at the ends of pages.
    pub(super) fn by_page(&self, positions: Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let (len, Range { start, end }) = (self.page_len, positions);
        (start / len..end.div_ceil(len)).map(move |page| start.max(page * len)..end.min((page + 1) * len))
    }

    /// The positions in parts that lie in one page each and have at most [`WIDENED_ROWS`] positions, so that they can
    /// be widened, and stay in the cache while they are added to many outputs.
    pub(super) fn parts(&self, positions: Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let most = WIDENED_ROWS;
        let split =
            move |page: Range<usize>| page.clone().step_by(most).map(move |start| start..page.end.min(start + most));
        self.by_page(positions).flat_map(split)
    }

    /// Bytes of a row that are used; blocks are whole.
    pub(super) fn used_bytes(&self) -> usize {
        self.width.div_ceil(self.kind.block_len()) * self.kind.block_bytes()
    }

    pub(super) fn check(&self, heads: usize, positions: Range<usize>) {
        let KvTensor { kind, pages, page_len, row_bytes, width } = *self;
        let known = kind.is_float() || kind == NumberFormat::Q8_0;
        assert!(known, "keys and values must be in a float format or q8_0, not {kind}");
        assert!(page_len > 0 && page_len.is_multiple_of(ROW_GROUP), "a page cannot have {page_len} positions");
        assert!(
            width > 0 && self.used_bytes() <= row_bytes,
            "rows of {row_bytes} bytes are too short for {width} values"
        );
        let (stored, wanted) = (pages.stored(), positions.start / page_len..positions.end.div_ceil(page_len));
        assert!(stored.start <= wanted.start && wanted.end <= stored.end, "too few rows");
        let whole = |page| pages.page(page).len() == heads * page_len * row_bytes;
        assert!(wanted.into_iter().all(whole), "pages do not fit the shape");
    }
}

/// The arguments of attention. `T` names keys and values: pages in memory by default, or a handle to those on a device.
pub struct AttentionArgs<'a, T = KvTensor<'a>> {
    /// `[queries, heads, keys.width]`
    pub queries: &'a [f32],
    /// Number of query heads.
    pub heads: usize,
    /// Keys; there are no gaps between their rows.
    pub keys: T,
    /// Values.
    pub values: T,
    /// Number of key and value heads; each serves `heads / kv_heads` consecutive query heads.
    pub kv_heads: usize,
    /// The positions that each query sees; at least one position.
    pub seen: &'a [Range<usize>],
    /// Factor on the scores.
    pub scale: f32,
    /// `[heads]`: attention sinks, a score per head that takes part in the softmax and has no value.
    pub sinks: Option<&'a [f32]>,
    /// An addition to the scores.
    pub bias: Option<DistanceBias<'a>>,
}

/// A relative position bias: an addition to each score that depends on its head and on the distance from query to key.
#[derive(Clone, Copy)]
pub struct DistanceBias<'a> {
    /// `[heads, 2 · reach + 1]`: for keys from `reach` positions before the query to `reach` after it. Keys further
    /// away have the value at that end.
    pub values: &'a [f32],
    /// The distance beyond which the value does not change.
    pub reach: usize,
    /// Position of the first query; the others follow it.
    pub first_query: usize,
}

impl DistanceBias<'_> {
    /// Adds to the scores of query number `query` with the keys from position `first_key` on.
    pub(super) fn add(&self, head: usize, query: usize, first_key: usize, scores: &mut [f32]) {
        let (width, at) = (2 * self.reach + 1, self.first_query + query);
        let values = &self.values[head * width..][..width];
        for (key, score) in (first_key..).zip(scores) {
            *score += values[(key + self.reach).saturating_sub(at).min(width - 1)];
        }
    }
}

impl<'a, T> AttentionArgs<'a, T> {
    /// The same arguments with other keys and values.
    pub fn with_kv<U>(&self, keys: U, values: U) -> AttentionArgs<'a, U> {
        let AttentionArgs { queries, heads, kv_heads, seen, scale, sinks, bias, .. } = *self;
        AttentionArgs { queries, heads, keys, values, kv_heads, seen, scale, sinks, bias }
    }

    /// Pairs of a query and one of the heads that share a key head.
    pub(super) fn pairs(&self) -> usize {
        self.seen.len() * (self.heads / self.kv_heads)
    }

    /// The positions that any query sees; `None` without queries.
    pub fn visible(&self) -> Option<Range<usize>> {
        let start = self.seen.iter().map(|seen| seen.start).min()?;
        let end = self.seen.iter().map(|seen| seen.end).max()?;
        Some(start..end)
    }
}

/// Attention of one sequence's queries, as a part of a batch.
pub struct AttentionTask<'a, T = KvTensor<'a>> {
    /// The arguments.
    pub args: AttentionArgs<'a, T>,
    /// `[queries, heads, values.width]`
    pub out: &'a mut [f32],
}
