//! The arrays that the kernels of attention read of a sequence: visible positions, page tables, sinks, queries.

use std::collections::HashMap;
use std::ops::Range;

use larder_model::KvView;

use super::{ALIGN, Args, KvPage, PlacedTask, Queries};
use crate::error::Result;
use crate::launches::{NewHeadsArgs, word};
use crate::new_tokens::NewTokens;

/// A table of pages has room for a multiple of this many.
const PAGES: usize = 16;

/// Where a task's arrays are, in bytes from the visible positions, which come first.
pub struct SequenceArrays {
    pages: [usize; 2],
    sinks: usize,
    /// Of the queries, or of cosines and sines and factors of new tokens.
    queries: usize,
    pub bytes: usize,
}

impl SequenceArrays {
    pub fn of(args: &Args, queries: Queries) -> Self {
        let (new, mut end) = (queries.new_tokens(), 8 * args.seen.len() * queries.parts());
        let mut next = |bytes: usize| {
            let at = end.next_multiple_of(ALIGN);
            end = at + bytes;
            at
        };
        let pages = [&args.keys, &args.values].map(|view| next(table_bytes(view)));
        let cos_sin = new.map_or(0, |new| new.bytes(args.seen.len()));
        let (sinks, queries) =
            (next(size_of_val(args.sinks.unwrap_or_default())), next(size_of_val(args.queries).max(cos_sin)));
        SequenceArrays { pages, sinks, queries, bytes: end.next_multiple_of(ALIGN) }
    }

    /// Writes all arrays but those of new tokens; `seen` are the rows that each query sees.
    pub fn write(
        &self,
        args: &Args,
        seen: impl Iterator<Item = Range<usize>>,
        pages: &HashMap<usize, KvPage>,
        bytes: &mut [u8],
    ) -> Result<()> {
        for (seen, out) in seen.zip(bytes.as_chunks_mut::<8>().0) {
            *out = bytemuck::cast([word(seen.start)?, word(seen.end)?]);
        }
        for (view, at) in [&args.keys, &args.values].into_iter().zip(self.pages) {
            write_pages(view, pages, bytes[at..].as_chunks_mut::<8>().0);
        }
        let sinks = args.sinks.unwrap_or_default();
        bytes[self.sinks..][..size_of_val(sinks)].copy_from_slice(bytemuck::cast_slice(sinks));
        bytes[self.queries..][..size_of_val(args.queries)].copy_from_slice(bytemuck::cast_slice(args.queries));
        Ok(())
    }

    /// Sets the addresses of what a task reads of arrays at address `list`, and of its queries, if those of all tasks
    /// are on the device.
    pub fn address(&self, args: &Args, task: &mut PlacedTask, queries: u64, list: u64) {
        let PlacedTask { args: kernel_args, query, seen, first, head, .. } = task;
        kernel_args.seen = list + 8 * *seen as u64;
        [kernel_args.key_pages, kernel_args.value_pages] = self.pages.map(|at| list + at as u64);
        kernel_args.sinks = args.sinks.map_or(0, |_| list + (self.sinks + 4 * *head) as u64);
        kernel_args.queries = match queries {
            0 => list + self.queries as u64,
            all => all + 4 * (((*first + *query) * args.heads + *head) * args.keys.width) as u64,
        };
    }

    /// Writes what the heads of a sequence's tokens, from `first` on of the step, are rotated by.
    pub fn write_new(&self, args: &Args, new: &NewTokens, first: usize, bytes: &mut [u8]) {
        new.write(first, args.seen.len(), &mut bytes[self.queries..]);
    }

    /// The arguments for these heads, with arrays at address `list`.
    pub fn new_heads(&self, args: &Args, new: &NewTokens, first: usize, list: u64) -> NewHeadsArgs {
        new.args(first, args.seen.len(), list + self.queries as u64)
    }
}

/// Writes the addresses of the pages of a view; those before the first that is stored are null.
pub fn write_pages(view: &KvView, pages: &HashMap<usize, KvPage>, table: &mut [[u8; 8]]) {
    table[..view.first_page].fill([0; 8]);
    for (id, out) in view.pages.iter().zip(&mut table[view.first_page..]) {
        *out = pages[id].memory.at().to_ne_bytes();
    }
}

/// Bytes of the table of the pages of a view, with room for more, so that what follows is at the same address for many
/// tokens.
pub fn table_bytes(view: &KvView) -> usize {
    8 * (view.first_page + view.pages.len()).next_multiple_of(PAGES)
}
