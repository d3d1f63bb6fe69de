//! Attention to chosen rows: they are copied side by side, as stored, and the attention kernel runs over the copies.
//!
//! If all positions are chosen that a query sees, the result is that of attention to them, to the bit.

use std::cell::RefCell;
use std::ops::Range;

use larder_core::KV_PAGE_TOKENS;
use larder_kernels::{AttentionArgs, AttentionTask, KvPages, KvTensor, ThreadPool, attend};

use super::pages::ViewPages;
use crate::device::KvPageShape;
use crate::ops::share;

/// Bytes of the copies for the queries that are computed together; those of one query may be more.
const BUFFER_BYTES: usize = 16 << 20;

/// Chosen rows of one source.
#[derive(Clone, Copy)]
pub struct ChosenRows<'a> {
    /// Keys.
    pub keys: ViewPages<'a>,
    /// Values.
    pub values: ViewPages<'a>,
    /// The positions of the rows, all of them stored.
    pub positions: &'a [u32],
}

/// One query, and the rows that it attends to.
pub struct ChosenQuery<'a> {
    /// `[heads, key_width]`
    pub query: &'a [f32],
    /// The sources, whose rows have one shape; together they have at least one row. Rows are added up in this order.
    pub sources: [ChosenRows<'a>; 2],
    /// `[heads, value_width]`
    pub out: &'a mut [f32],
}

/// What the queries have in common.
#[derive(Clone, Copy)]
pub struct ChosenAttention<'a> {
    /// Query heads.
    pub heads: usize,
    /// Heads of keys and values that are used.
    pub kv_heads: usize,
    /// The first of them.
    pub first_kv_head: usize,
    /// Width of a head's queries and keys.
    pub key_width: usize,
    /// Width of a head's values.
    pub value_width: usize,
    /// Factor on the scores.
    pub scale: f32,
    /// `[heads]`: attention sinks.
    pub sinks: Option<&'a [f32]>,
}

/// The most bytes of the copies, in attention to up to `rows` rows of `values` values (keys and values together) per
/// query.
pub fn gather_bytes(rows: usize, values: usize) -> usize {
    let one = rows.saturating_add(KV_PAGE_TOKENS).saturating_mul(values).saturating_mul(size_of::<f32>());
    BUFFER_BYTES.max(one)
}

thread_local! {
    /// Copies of keys, and of values.
    static BUFFERS: RefCell<[Vec<u8>; 2]> = RefCell::default();
}

impl ChosenAttention<'_> {
    /// Into the output of each query, its attention to its rows.
    pub fn attend(&self, pool: &ThreadPool, queries: &mut [ChosenQuery]) {
        let heads = self.first_kv_head..self.first_kv_head + self.kv_heads;
        BUFFERS.with_borrow_mut(|buffers| {
            let mut rest = queries;
            while !rest.is_empty() {
                let len = batch_len(rest);
                let (batch, others) = std::mem::take(&mut rest).split_at_mut(len);
                self.attend_batch(pool, &heads, batch, buffers);
                rest = others;
            }
        });
    }

    /// As [`attend`](Self::attend), for queries whose rows fit into the buffers together.
    fn attend_batch(
        &self,
        pool: &ThreadPool,
        heads: &Range<usize>,
        batch: &mut [ChosenQuery],
        [keys, values]: &mut [Vec<u8>; 2],
    ) {
        let keys = Copies::of(pool, batch, (|source| source.keys, heads), keys);
        let values = Copies::of(pool, batch, (|source| source.values, heads), values);
        let seen: Vec<_> = batch.iter().map(|query| 0..query.rows()).collect();
        let pages = batch.iter().scan(0, |before, query| {
            let first = *before;
            *before += query.pages();
            Some((first, query.pages()))
        });
        let pages: Vec<[PagesOf; 2]> =
            pages.map(|(first, count)| [keys.pages(first, count), values.pages(first, count)]).collect();
        let tasks = batch.iter_mut().zip(&pages).zip(&seen).map(|((query, [keys, values]), seen)| {
            let args = AttentionArgs {
                queries: query.query,
                heads: self.heads,
                keys: keys.tensor(self.key_width),
                values: values.tensor(self.value_width),
                kv_heads: self.kv_heads,
                seen: std::slice::from_ref(seen),
                scale: self.scale,
                sinks: self.sinks,
                bias: None,
            };
            AttentionTask { args, out: &mut *query.out }
        });
        attend(pool, &mut tasks.collect::<Vec<_>>());
    }
}

/// How many of the queries, at least one, have copies that fit into the buffers.
fn batch_len(queries: &[ChosenQuery]) -> usize {
    let mut left = BUFFER_BYTES;
    let fits = |query: &&ChosenQuery| {
        let fits = query.bytes() <= left;
        left = left.saturating_sub(query.bytes());
        fits
    };
    queries.iter().take_while(fits).count().max(1)
}

impl ChosenQuery<'_> {
    fn rows(&self) -> usize {
        self.sources.iter().map(|source| source.positions.len()).sum()
    }

    /// Pages of the copies.
    fn pages(&self) -> usize {
        self.rows().div_ceil(KV_PAGE_TOKENS)
    }

    /// Bytes of the copies.
    fn bytes(&self) -> usize {
        let [ChosenRows { keys, values, .. }, _] = &self.sources;
        self.pages() * (keys.shape().bytes() + values.shape().bytes())
    }

    /// Copies the rows of some heads to a page of the copies, `into [heads, KV_PAGE_TOKENS, row]`.
    fn copy_page(&self, page: usize, (of, heads): (SourceRows, &Range<usize>), shape: KvPageShape, into: &mut [u8]) {
        let positions = self.sources.iter().flat_map(|source| {
            let rows = of(source);
            source.positions.iter().map(move |at| (rows, *at as usize))
        });
        for (i, (rows, at)) in positions.skip(page * KV_PAGE_TOKENS).take(KV_PAGE_TOKENS).enumerate() {
            for (place, head) in heads.clone().enumerate() {
                let to = (place * shape.positions + i) * shape.row_bytes;
                into[to..][..shape.row_bytes].copy_from_slice(rows.row(head, at));
            }
        }
    }
}

/// The keys or the values of a source.
type SourceRows = for<'a> fn(&ChosenRows<'a>) -> ViewPages<'a>;

/// Copies of the keys or of the values of a batch, in pages.
struct Copies<'a> {
    shape: KvPageShape,
    bytes: &'a [u8],
}

impl<'a> Copies<'a> {
    /// The copies of some heads for a batch of queries one after the other.
    fn of(
        pool: &ThreadPool,
        batch: &[ChosenQuery],
        (of, heads): (SourceRows, &Range<usize>),
        buffer: &'a mut Vec<u8>,
    ) -> Copies<'a> {
        let all_heads = of(&batch[0].sources[0]).shape();
        let shape = KvPageShape { heads: heads.len(), positions: KV_PAGE_TOKENS, ..all_heads };
        let pages: usize = batch.iter().map(ChosenQuery::pages).sum();
        let bytes = pages * shape.bytes();
        buffer.resize(buffer.len().max(bytes), 0);
        let places = batch.iter().flat_map(|query| (0..query.pages()).map(move |page| (query, page)));
        let units = places.zip(buffer.chunks_exact_mut(shape.bytes()));
        share(pool, units, |_, ((query, page), into)| query.copy_page(*page, (of, heads), shape, into));
        Copies { shape, bytes: &buffer[..bytes] }
    }

    /// `count` pages from page `first` on.
    fn pages(&self, first: usize, count: usize) -> PagesOf<'a> {
        let page = self.shape.bytes();
        PagesOf { shape: self.shape, bytes: &self.bytes[first * page..][..count * page] }
    }
}

/// The copies for one query.
#[derive(Clone, Copy)]
struct PagesOf<'a> {
    shape: KvPageShape,
    bytes: &'a [u8],
}

impl PagesOf<'_> {
    fn tensor(&self, width: usize) -> KvTensor<'_> {
        let KvPageShape { kind, positions: page_len, row_bytes, .. } = self.shape;
        KvTensor { kind, pages: self, page_len, row_bytes, width }
    }
}

impl KvPages for PagesOf<'_> {
    fn stored(&self) -> Range<usize> {
        0..self.bytes.len() / self.shape.bytes()
    }

    fn page(&self, index: usize) -> &[u8] {
        &self.bytes[index * self.shape.bytes()..][..self.shape.bytes()]
    }
}
