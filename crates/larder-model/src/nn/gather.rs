//! Attention to chosen rows: they are copied side by side, as stored, and the attention kernel runs over the copies.
//!
//! If all positions are chosen that a query sees, the result is that of attention to them, to the bit.

use std::cell::RefCell;
use std::ops::Range;

use larder_core::KV_PAGE_TOKENS;
use larder_kernels::{AttentionArgs, AttentionTask, KvPages, KvTensor};

use super::KvRows;
use crate::compute::{ComputeContext, share};
use crate::device::KvPageShape;

/// Bytes of the copies for the queries that are computed together; those of one query may be more.
const BUFFER_BYTES: usize = 16 << 20;

/// Chosen rows of one source.
#[derive(Clone, Copy)]
pub struct ChosenRows<'a> {
    /// Keys.
    pub keys: &'a KvRows,
    /// Values; none in any source if they are the first numbers of the keys.
    pub values: Option<&'a KvRows>,
    /// The positions of the rows, all of them stored.
    pub positions: &'a [u32],
}

/// One query, and the rows that it attends to.
pub struct ChosenQuery<'a> {
    /// `[heads, key_width]`
    pub query: &'a [f32],
    /// The sources, whose rows have one shape; together they have at least one row. Rows are added up in this order.
    pub sources: Vec<ChosenRows<'a>>,
    /// `[heads, value_width]`
    pub out: &'a mut [f32],
}

/// What the queries have in common.
#[derive(Clone, Copy)]
pub struct ChosenAttention<'a> {
    /// Query heads.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Width of a head's queries and keys.
    pub key_width: usize,
    /// Width of a head's values.
    pub value_width: usize,
    /// Factor on the scores.
    pub scale: f32,
    /// `[heads]`: attention sinks.
    pub sinks: Option<&'a [f32]>,
}

/// The most bytes of the copies, in attention to up to `rows` rows of `values` values (keys and values together) per query.
pub fn gather_bytes(rows: usize, values: usize) -> usize {
    let one = rows.saturating_add(KV_PAGE_TOKENS).saturating_mul(values).saturating_mul(size_of::<f32>());
    BUFFER_BYTES.max(one)
}

thread_local! {
    /// Copies of keys, and of values.
    static BUFFERS: RefCell<[Vec<u8>; 2]> = RefCell::default();
}

impl ChosenAttention<'_> {
    /// Into the output of each query, its attention to its rows. They are in main memory.
    pub fn attend(&self, compute: &ComputeContext, queries: &mut [ChosenQuery]) {
        self.attend_from_head(0, compute, queries);
    }

    /// As [`attend`](Self::attend), to rows of which there are more heads than `kv_heads`: those from head `first` on are used.
    pub fn attend_from_head(&self, first: usize, compute: &ComputeContext, queries: &mut [ChosenQuery]) {
        let heads = first..first + self.kv_heads;
        BUFFERS.with_borrow_mut(|buffers| {
            let mut rest = queries;
            while !rest.is_empty() {
                let len = batch_len(rest);
                let (batch, others) = std::mem::take(&mut rest).split_at_mut(len);
                self.attend_batch(compute, &heads, batch, buffers);
                rest = others;
            }
        });
    }

    /// As [`attend`](Self::attend), for queries whose rows fit into the buffers together.
    fn attend_batch(
        &self,
        compute: &ComputeContext,
        heads: &Range<usize>,
        batch: &mut [ChosenQuery],
        [keys, values]: &mut [Vec<u8>; 2],
    ) {
        let keys = Copies::of(compute, batch, (|source| Some(source.keys), heads), keys);
        let values = Copies::of(compute, batch, (|source| source.values, heads), values);
        let seen: Vec<_> = batch.iter().map(|query| 0..query.rows()).collect();
        let pages = batch.iter().scan(0, |before, query| {
            let first = *before;
            *before += query.pages();
            Some((first, query.pages()))
        });
        let pages: Vec<[PagesOf; 2]> = pages
            .map(|(first, count)| {
                let keys = keys.as_ref().expect("there are keys").pages(first, count);
                [keys, values.as_ref().map_or(keys, |values| values.pages(first, count))]
            })
            .collect();
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
        compute.attend_on_host(&mut tasks.collect::<Vec<_>>());
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
        let of = |rows: Option<&KvRows>| rows.and_then(KvRows::page_shape).map_or(0, |shape| shape.bytes());
        let page = self.sources.iter().map(|source| of(Some(source.keys)) + of(source.values)).max();
        self.pages() * page.unwrap_or(0)
    }

    /// Copies the rows of some heads to a page of the copies, `into [heads, KV_PAGE_TOKENS, row]`.
    fn copy_page(&self, page: usize, (of, heads): (SourceRows, &Range<usize>), shape: KvPageShape, into: &mut [u8]) {
        let positions = self.sources.iter().flat_map(|source| {
            let rows = of(source).expect("all sources have these rows");
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
type SourceRows = for<'a> fn(&ChosenRows<'a>) -> Option<&'a KvRows>;

/// Copies of the keys or of the values of a batch, in pages.
struct Copies<'a> {
    shape: KvPageShape,
    bytes: &'a [u8],
}

impl<'a> Copies<'a> {
    /// The copies of some heads for a batch of queries one after the other; `None` if there are no such rows.
    fn of(
        compute: &ComputeContext,
        batch: &[ChosenQuery],
        (of, heads): (SourceRows, &Range<usize>),
        buffer: &'a mut Vec<u8>,
    ) -> Option<Copies<'a>> {
        let mut sources = batch.iter().flat_map(|query| &query.sources);
        let all_heads = sources.find_map(|source| of(source)?.page_shape())?;
        let shape = KvPageShape { heads: heads.len(), ..all_heads };
        let pages: usize = batch.iter().map(ChosenQuery::pages).sum();
        let bytes = pages * shape.bytes();
        buffer.resize(buffer.len().max(bytes), 0);
        let places = batch.iter().flat_map(|query| (0..query.pages()).map(move |page| (query, page)));
        let units = places.zip(buffer.chunks_exact_mut(shape.bytes()));
        share(&compute.pool, units, |_, ((query, page), into)| query.copy_page(*page, (of, heads), shape, into));
        Some(Copies { shape, bytes: &buffer[..bytes] })
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

#[cfg(test)]
mod tests {
    use larder_core::Rng;

    use super::*;
    use crate::hidden::Place;
    use crate::nn::{KvFormat, KvPool, made_up};

    const HEADS: usize = 6;
    const KV_HEADS: usize = 3;
    const WIDTH: usize = 36;
    const VALUE_WIDTH: usize = 20;

    struct Sequence {
        keys: KvRows,
        values: KvRows,
    }

    impl Sequence {
        fn new(format: KvFormat, rows: usize, rng: &mut Rng) -> Self {
            let pool = KvPool::new(format, Default::default(), None, None);
            let [mut keys, mut values] = [KvRows::new(&pool, Place::Host), KvRows::new(&pool, Place::Host)];
            keys.append(&made_up(rows * KV_HEADS * WIDTH, rng), KV_HEADS, WIDTH).unwrap();
            values.append(&made_up(rows * KV_HEADS * VALUE_WIDTH, rng), KV_HEADS, VALUE_WIDTH).unwrap();
            Sequence { keys, values }
        }

        fn rows<'a>(&'a self, with_values: bool, positions: &'a [u32]) -> ChosenRows<'a> {
            ChosenRows { keys: &self.keys, values: with_values.then_some(&self.values), positions }
        }
    }

    fn attention(sinks: &[f32]) -> ChosenAttention<'_> {
        let [heads, kv_heads, key_width, value_width] = [HEADS, KV_HEADS, WIDTH, VALUE_WIDTH];
        ChosenAttention { heads, kv_heads, key_width, value_width, scale: 0.3, sinks: Some(sinks) }
    }

    /// Attention to the first `seen` positions.
    fn dense(
        compute: &ComputeContext,
        of: &Sequence,
        seen: usize,
        with_values: bool,
        sinks: &[f32],
        q: &[f32],
    ) -> Vec<f32> {
        let mut out = vec![0.0; HEADS * VALUE_WIDTH];
        let visible = 0..seen;
        let args = AttentionArgs {
            queries: q,
            heads: HEADS,
            keys: of.keys.view(WIDTH),
            values: if with_values { &of.values } else { &of.keys }.view(VALUE_WIDTH),
            kv_heads: KV_HEADS,
            seen: std::slice::from_ref(&visible),
            scale: 0.3,
            sinks: Some(sinks),
            bias: None,
        };
        compute.attend(&mut [AttentionTask { args, out: &mut out }]).unwrap();
        out
    }

    fn chosen(compute: &ComputeContext, sources: Vec<ChosenRows>, sinks: &[f32], q: &[f32]) -> Vec<f32> {
        let mut out = vec![0.0; HEADS * VALUE_WIDTH];
        attention(sinks).attend(compute, &mut [ChosenQuery { query: q, sources, out: &mut out }]);
        out
    }

    #[test]
    fn all_positions_give_the_bits_of_attention_and_others_those_of_their_rows() {
        let (mut rng, all) = (Rng::new(3), (0..700).collect::<Vec<u32>>());
        let compute = ComputeContext::new(2, false).unwrap();
        for format in [KvFormat::F32, KvFormat::F16, KvFormat::Q8_0] {
            let (of, sinks) = (Sequence::new(format, 700, &mut rng), made_up(HEADS, &mut rng));
            for with_values in [true, false] {
                let q = made_up(HEADS * WIDTH, &mut rng);
                for seen in [1, 64, 700] {
                    let want = dense(&compute, &of, seen, with_values, &sinks, &q);
                    let rows = of.rows(with_values, &all[..seen]);
                    assert_eq!(chosen(&compute, vec![rows], &sinks, &q), want, "{format:?}, {seen}");
                    let parts = [&all[..seen / 2], &[], &all[seen / 2..seen]];
                    let parts = parts.map(|positions| of.rows(with_values, positions));
                    assert_eq!(chosen(&compute, parts.to_vec(), &sinks, &q), want, "{format:?}, {seen} in parts");
                }
                // A sequence of these rows alone.
                let some: Vec<u32> = (0..700).filter(|at| at % 3 == 1).collect();
                let mut alone = Sequence::new(format, 1, &mut rng);
                alone.keys.truncate(0);
                alone.values.truncate(0);
                for at in some.iter().map(|at| *at as usize) {
                    let keys = of.keys.widened(at..at + 1, WIDTH);
                    let values = of.values.widened(at..at + 1, VALUE_WIDTH);
                    alone.keys.append(&keys, KV_HEADS, WIDTH).unwrap();
                    alone.values.append(&values, KV_HEADS, VALUE_WIDTH).unwrap();
                }
                let want = dense(&compute, &alone, some.len(), with_values, &sinks, &q);
                let found = chosen(&compute, vec![of.rows(with_values, &some)], &sinks, &q);
                let near = found.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-6);
                assert!(near && (format == KvFormat::Q8_0 || found == want), "{format:?}");
            }
        }
    }

    #[test]
    fn some_heads_give_their_part_of_the_output() {
        let (mut rng, positions) = (Rng::new(7), [2u32, 3, 60, 64, 99]);
        let compute = ComputeContext::new(2, false).unwrap();
        let (of, sinks) = (Sequence::new(KvFormat::F16, 100, &mut rng), made_up(HEADS, &mut rng));
        let q = made_up(HEADS * WIDTH, &mut rng);
        let all = chosen(&compute, vec![of.rows(true, &positions)], &sinks, &q);
        let group = HEADS / KV_HEADS;
        for head in 0..KV_HEADS {
            let own = head * group..(head + 1) * group;
            let attention = ChosenAttention { heads: group, kv_heads: 1, ..attention(&sinks[own.clone()]) };
            let mut out = vec![0.0; group * VALUE_WIDTH];
            let query = &q[own.start * WIDTH..own.end * WIDTH];
            let sources = vec![of.rows(true, &positions)];
            attention.attend_from_head(head, &compute, &mut [ChosenQuery { query, sources, out: &mut out }]);
            assert_eq!(out, all[own.start * VALUE_WIDTH..own.end * VALUE_WIDTH], "head {head}");
        }
    }

    #[test]
    fn queries_are_taken_in_batches_that_fit_the_buffer() {
        let mut rng = Rng::new(5);
        let compute = ComputeContext::new(2, false).unwrap();
        let (of, sinks) = (Sequence::new(KvFormat::F32, 3000, &mut rng), made_up(HEADS, &mut rng));
        let (all, queries) = ((0..3000).collect::<Vec<u32>>(), made_up(20 * HEADS * WIDTH, &mut rng));
        let mut out = vec![0.0; 20 * HEADS * VALUE_WIDTH];
        let seen = |i: usize| if i == 7 { 1 } else { 3000 - 9 * i };
        let pairs = queries.chunks(HEADS * WIDTH).zip(out.chunks_mut(HEADS * VALUE_WIDTH)).enumerate();
        let mut batch: Vec<_> = pairs
            .map(|(i, (query, out))| ChosenQuery { query, sources: vec![of.rows(true, &all[..seen(i)])], out })
            .collect();
        let bytes: usize = batch.iter().map(ChosenQuery::bytes).sum();
        assert!(bytes > 2 * BUFFER_BYTES && batch_len(&batch) < 10);
        attention(&sinks).attend(&compute, &mut batch);
        for (i, (query, out)) in queries.chunks(HEADS * WIDTH).zip(out.chunks(HEADS * VALUE_WIDTH)).enumerate() {
            assert_eq!(out, dense(&compute, &of, seen(i), true, &sinks, query), "query {i}");
        }
        BUFFERS.with_borrow(|[keys, values]| assert!(keys.len() + values.len() <= BUFFER_BYTES));
    }
}
