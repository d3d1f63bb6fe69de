//! Growing rows of keys or values, in pages that sequences share until one of them writes.

use std::io::{self, Write};
use std::mem;
use std::ops::Range;
use std::sync::Arc;

use larder_core::KV_PAGE_TOKENS;
use larder_kernels::widen;

use super::pool::{KvPage, page_shape};
use super::{KvPool, RowShape};
use crate::device::{KvPageShape, KvView, Place};
use crate::error::Result;
use crate::kv::{SavedState, SavedStateError};

/// Keys or values `[heads, positions, width]`, which grow by positions. Pages at the front can be given back.
///
/// Clones share pages. An append to a shared page copies that page; full pages are never copied.
#[derive(Clone)]
pub struct KvRows {
    pool: Arc<KvPool>,
    /// Where the pages are.
    place: Place,
    /// Of every page; `None` before the first append.
    shape: Option<KvPageShape>,
    /// Number of the first page that is stored.
    first_page: usize,
    pages: Vec<Arc<KvPage>>,
    /// Their numbers.
    ids: Arc<Vec<usize>>,
    /// Pages before the first one that pinned positions need, and their indices, ascending.
    behind: Vec<(usize, Arc<KvPage>)>,
    len: usize,
}

impl KvRows {
    /// No rows yet, and no memory. With a place on a device the pool has one.
    pub fn new(pool: &Arc<KvPool>, place: Place) -> Self {
        KvRows {
            pool: pool.clone(),
            place,
            shape: None,
            first_page: 0,
            pages: Vec::new(),
            ids: Arc::default(),
            behind: Vec::new(),
            len: 0,
        }
    }

    /// Where the rows are.
    pub fn place(&self) -> Place {
        self.place
    }

    /// Positions appended, those given back included.
    pub fn len(&self) -> usize {
        self.len
    }

    /// The first position that is stored.
    pub fn first_position(&self) -> usize {
        self.first_page * KV_PAGE_TOKENS
    }

    /// Bytes of the pages, shared ones included.
    pub fn bytes(&self) -> usize {
        self.shape.map_or(0, |shape| shape.bytes()) * (self.pages.len() + self.behind.len())
    }

    /// The values of rows: `[positions, heads, width]`. The caller guarantees that they are stored. Waits for a device
    /// that has them.
    pub fn widened(&self, positions: Range<usize>, width: usize) -> Result<Vec<f32>> {
        let Some(KvPageShape { kind, heads, positions: of_page, row_bytes }) = self.shape else {
            return Ok(Vec::new());
        };
        let mut values = vec![0.0; positions.len() * heads * width];
        let mut row = vec![0.0; width.next_multiple_of(kind.block_len())];
        let (mut page, mut read) = (vec![0; of_page * heads * row_bytes], None);
        for (at, out) in positions.zip(values.chunks_exact_mut(heads * width)) {
            if read.replace(at / of_page) != Some(at / of_page) {
                self.pages[at / of_page - self.first_page].read(&mut page)?;
            }
            for (head, out) in out.chunks_exact_mut(width).enumerate() {
                widen(kind, &page[(head * of_page + at % of_page) * row_bytes..][..row_bytes], &mut row);
                out.copy_from_slice(&row[..width]);
            }
        }
        Ok(values)
    }

    /// Whether those of the rows of these positions that were appended are stored.
    pub fn has(&self, positions: &Range<usize>) -> bool {
        let is_behind = |page| self.behind.binary_search_by_key(&page, |(index, _)| *index).is_ok();
        pages_of(positions).take_while(|page| *page < self.first_page).all(is_behind)
    }

    /// Keeps the positions before the end of `needed` and gives the pages of the others back. The caller guarantees
    /// that the rows needed are stored, and so is the last page if it is not full.
    pub fn truncate(&mut self, needed: Range<usize>) {
        self.len = self.len.min(needed.end);
        let (first, end) = (needed.start.min(self.len) / KV_PAGE_TOKENS, self.len.div_ceil(KV_PAGE_TOKENS));
        if first < self.first_page {
            let stored = (self.first_page..).zip(mem::take(&mut self.pages));
            self.behind.extend(stored);
            self.behind.retain(|(page, _)| *page < end);
            let pages = self.behind.split_off(self.behind.partition_point(|(page, _)| *page < first));
            (self.first_page, self.pages) = (first, pages.into_iter().map(|(_, page)| page).collect());
            self.ids = Arc::new(self.pages.iter().map(|page| page.id()).collect());
        } else {
            self.pages.truncate(end - self.first_page);
            Arc::make_mut(&mut self.ids).truncate(self.pages.len());
        }
    }

    /// Gives the pages back that hold only positions before `position`, and of which no range of `pinned` ones has any.
    pub fn release_before(&mut self, position: usize, pinned: &[Range<usize>]) {
        let pages = (position / KV_PAGE_TOKENS).saturating_sub(self.first_page).min(self.pages.len());
        if pages > 0 {
            self.behind.extend((self.first_page..).zip(self.pages.drain(..pages)));
            Arc::make_mut(&mut self.ids).drain(..pages);
            self.first_page += pages;
        }
        let is_pinned = |page: &usize| pinned.iter().any(|range| pages_of(range).contains(page));
        self.behind.retain(|(page, _)| *page >= position / KV_PAGE_TOKENS || is_pinned(page));
    }

    /// Gives the pages back that pinned positions alone need.
    pub fn forget_behind(&mut self) {
        self.behind = Vec::new();
    }

    /// Appends `new [n, heads, width]`.
    pub fn append(&mut self, new: &[f32], heads: usize, width: usize) -> Result<()> {
        let shape = page_shape(self.pool.format(), heads, width);
        debug_assert!(new.len().is_multiple_of(heads * width), "rows are whole");
        debug_assert!(self.shape.is_none_or(|earlier| earlier == shape), "the rows of a layer have one shape");
        self.shape = Some(shape);
        let mut rest = new;
        while !rest.is_empty() {
            let at = self.len % KV_PAGE_TOKENS;
            let count = (rest.len() / (heads * width)).min(KV_PAGE_TOKENS - at);
            self.make_writable(shape, at)?;
            let (now, later) = rest.split_at(count * heads * width);
            self.write(shape, at, now, width)?;
            self.len += count;
            rest = later;
        }
        Ok(())
    }

    /// Appends `count` positions, whose rows an operation writes.
    pub fn extend(&mut self, count: usize, heads: usize, width: usize) -> Result<()> {
        let shape = page_shape(self.pool.format(), heads, width);
        self.shape = Some(shape);
        let mut rest = count;
        while rest > 0 {
            let at = self.len % KV_PAGE_TOKENS;
            self.make_writable(shape, at)?;
            let now = rest.min(KV_PAGE_TOKENS - at);
            (self.len, rest) = (self.len + now, rest - now);
        }
        Ok(())
    }

    /// Makes the page of the next position, of which `used` positions are in use, one that only this sequence has.
    fn make_writable(&mut self, shape: KvPageShape, used: usize) -> Result<()> {
        if used == 0 {
            let page = self.pool.page(shape, self.place)?;
            self.push(page);
            return Ok(());
        }
        let last = self.pages.last_mut().expect("a page that is partly used is stored");
        if Arc::get_mut(last).is_none() {
            let page = self.pool.page(shape, self.place)?;
            page.copy_from(last, used)?;
            self.pages.pop();
            Arc::make_mut(&mut self.ids).pop();
            self.push(page);
        }
        Ok(())
    }

    fn push(&mut self, page: KvPage) {
        Arc::make_mut(&mut self.ids).push(page.id());
        self.pages.push(Arc::new(page));
    }

    /// Writes `new [n, heads, width]` to the last page, from row `at` on.
    fn write(&mut self, shape: KvPageShape, at: usize, new: &[f32], width: usize) -> Result<()> {
        let (format, row) = (self.pool.format(), shape.row_bytes);
        let mut bytes = vec![0; new.len() / width * row]; // [n, heads, row]
        new.chunks_exact(width).zip(bytes.chunks_exact_mut(row)).for_each(|(new, row)| format.store(new, row));
        self.pages.last().expect("the page was made writable").write(at, &bytes)
    }

    /// Writes the rows that are stored, as [`saved_state`](super::saved_state) has them; nothing before the first
    /// append.
    pub fn save(&self, out: &mut dyn Write) -> io::Result<()> {
        let Some(shape) = self.shape else { return Ok(()) };
        out.write_all(&(self.first_page as u32).to_le_bytes())?;
        let [mut rows, mut bytes] = [(); 2].map(|()| vec![0; shape.bytes()]);
        let mut save_page = |page: &KvPage, count: usize, out: &mut dyn Write| {
            let rows = &mut rows[..shape.rows_bytes(count)];
            page.read(&mut bytes).map_err(io::Error::other)?;
            shape.rows_of(&bytes, rows);
            out.write_all(rows)
        };
        for (start, page) in (self.first_position()..).step_by(KV_PAGE_TOKENS).zip(&self.pages) {
            save_page(page, KV_PAGE_TOKENS.min(self.len - start), out)?;
        }
        out.write_all(&(self.behind.len() as u32).to_le_bytes())?;
        for (index, page) in &self.behind {
            out.write_all(&(*index as u32).to_le_bytes())?;
            save_page(page, KV_PAGE_TOKENS, out)?;
        }
        Ok(())
    }

    /// The rows of `len` positions that [`save`](Self::save) wrote, of which later queries see those from `seen` on.
    pub(crate) fn load(
        pool: &Arc<KvPool>,
        RowShape { heads, width }: RowShape,
        len: usize,
        seen: usize,
        from: &mut SavedState,
    ) -> Result<Self, SavedStateError> {
        let shape = page_shape(pool.format(), heads, width);
        let first_page = from.u32()? as usize;
        if first_page > seen / KV_PAGE_TOKENS {
            return Err(SavedStateError::Wrong("rows are missing that its next token sees"));
        }
        let mut loaded = KvRows { shape: Some(shape), first_page, len, ..KvRows::new(pool, Place::Host) };
        let mut rows = vec![0; shape.bytes()];
        let mut load_page = |count: usize, from: &mut SavedState| {
            let rows = &mut rows[..shape.rows_bytes(count)];
            from.read(rows)?;
            let page = pool.page(shape, Place::Host)?;
            page.write(0, rows)?;
            Ok::<_, SavedStateError>(page)
        };
        for start in (loaded.first_position()..len).step_by(KV_PAGE_TOKENS) {
            loaded.push(load_page(KV_PAGE_TOKENS.min(len - start), from)?);
        }
        for _ in 0..from.u32()? {
            let index = from.u32()? as usize;
            if index >= first_page || loaded.behind.last().is_some_and(|(last, _)| *last >= index) {
                return Err(SavedStateError::Wrong("its pages are not in order"));
            }
            loaded.behind.push((index, Arc::new(load_page(KV_PAGE_TOKENS, from)?)));
        }
        Ok(loaded)
    }

    /// The indices of the pages that are stored.
    #[cfg(test)]
    pub(super) fn stored_pages(&self) -> Vec<usize> {
        let behind = self.behind.iter().map(|(page, _)| *page);
        behind.chain(self.first_page..self.first_page + self.pages.len()).collect()
    }

    /// All rows, or the first `width` numbers of each row.
    pub fn view(&self, width: usize) -> KvView {
        KvView { place: self.place, first_page: self.first_page, pages: self.ids.clone(), width }
    }
}

/// The indices of the pages of some positions.
fn pages_of(positions: &Range<usize>) -> Range<usize> {
    positions.start / KV_PAGE_TOKENS..positions.end.div_ceil(KV_PAGE_TOKENS)
}

/// The rows of which `first` is the first one needed, of `len`, and those of the last page if it is not full.
pub(super) fn needed_rows(first: usize, len: usize) -> Range<usize> {
    first.min(len / KV_PAGE_TOKENS * KV_PAGE_TOKENS)..len
}
