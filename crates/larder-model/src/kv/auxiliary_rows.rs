//! Rows that a layer keeps of a sequence beside keys and values: the keys of an indexer, compressed entries, buffers.

use std::io::{self, Write};
use std::ops::Range;
use std::sync::Arc;

use larder_core::{KV_PAGE_TOKENS, Rng};

use super::{AuxiliaryShape, KvPool, KvRows, PinnedRows, RowShape, made_up};
use crate::device::Place;
use crate::error::Result;
use crate::kv::rows::needed_rows;
use crate::kv::{SavedState, SavedStateError};

/// The auxiliary rows of one kind that a layer has of a sequence.
#[derive(Clone)]
pub struct AuxiliaryRows {
    shape: AuxiliaryShape,
    /// Positions behind those needed whose rows are kept.
    kept_behind: usize,
    /// Those appended.
    pub rows: KvRows,
}

impl AuxiliaryRows {
    /// No rows yet. `kept_behind` positions behind those that are needed are kept for the sake of rewinding.
    pub fn new(shape: AuxiliaryShape, place: Place, kept_behind: usize, pool: &Arc<KvPool>) -> Self {
        AuxiliaryRows { shape, kept_behind, rows: KvRows::new(pool, place) }
    }

    /// Makes room for `count` rows, which a chain on the device of the pool writes.
    pub fn extend(&mut self, count: usize) -> Result<()> {
        let RowShape { heads, width } = self.shape.row;
        self.rows.extend(count, heads, width)
    }

    /// Appends `new [n, heads, width]`.
    pub fn append(&mut self, new: &[f32]) -> Result<()> {
        let RowShape { heads, width } = self.shape.row;
        self.rows.append(new, heads, width)
    }

    /// Appends made-up rows, until there are those of `tokens` tokens.
    pub fn fill(&mut self, tokens: usize, rng: &mut Rng) -> Result<()> {
        let RowShape { heads, width } = self.shape.row;
        let wanted = tokens / self.shape.tokens_per_row;
        while self.rows.len() < wanted {
            let count = KV_PAGE_TOKENS.min(wanted - self.rows.len());
            self.append(&made_up(count * heads * width, rng))?;
            self.release_unneeded(&[]);
        }
        Ok(())
    }

    /// Gives the pages back whose rows no later token needs, nor one behind a pinned position, save a few for the sake
    /// of rewinding.
    pub(super) fn release_unneeded(&mut self, pinned: &[usize]) {
        let tokens = self.rows.len().saturating_mul(self.shape.tokens_per_row);
        let first = self.shape.mask.first_visible(tokens).saturating_sub(self.kept_behind);
        let pinned: PinnedRows = pinned.iter().map(|at| self.needed(*at)).collect();
        self.rows.release_before(first / self.shape.tokens_per_row, &pinned);
    }

    /// Whether the rows are there that are needed after `tokens` tokens.
    pub(super) fn can_keep(&self, tokens: usize) -> bool {
        self.rows.has(&self.needed(tokens))
    }

    /// Keeps the rows of the first `tokens` tokens.
    pub(super) fn truncate(&mut self, tokens: usize) {
        self.rows.truncate(self.needed(tokens));
    }

    /// The rows that are needed after `tokens` tokens.
    fn needed(&self, tokens: usize) -> Range<usize> {
        let rows = tokens / self.shape.tokens_per_row;
        needed_rows(self.shape.first_needed(tokens), rows)
    }

    /// Writes the rows that are stored; nothing if there are none yet.
    pub(super) fn save(&self, out: &mut dyn Write) -> io::Result<()> {
        if self.rows.len() == 0 { Ok(()) } else { self.rows.save(out) }
    }

    /// Takes the rows of `tokens` tokens that were saved.
    pub(super) fn load(
        &mut self,
        tokens: usize,
        pool: &Arc<KvPool>,
        from: &mut SavedState,
    ) -> std::result::Result<(), SavedStateError> {
        let AuxiliaryShape { row, tokens_per_row, .. } = self.shape;
        let rows = tokens / tokens_per_row;
        if rows > 0 {
            self.rows = KvRows::load(pool, row, rows, self.shape.first_needed(tokens), from)?;
        }
        Ok(())
    }
}
