//! The future of a replayed trace, for Belady's rule.

use larder_core::{CacheScope, MoeRow};

use super::{CacheShape, Key};

/// The next use of an expert that is not needed again.
pub const NEVER: u32 = u32::MAX;

/// The requests to come, which only a replay knows.
///
/// Time is counted in steps, one for each layer's choice.
pub struct FutureUses {
    experts: usize,
    /// For each row, the steps in which it chose.
    visits: Vec<Vec<u32>>,
    /// For each expert of each row, the steps in which it is wanted.
    uses: Vec<Vec<u32>>,
}

impl FutureUses {
    /// From the row and the wanted experts of each step, in order. The caller guarantees that all of them exist.
    pub fn new<W: AsRef<[usize]>>(rows: usize, experts: usize, steps: impl IntoIterator<Item = (MoeRow, W)>) -> Self {
        let mut future = FutureUses { experts, visits: vec![Vec::new(); rows], uses: vec![Vec::new(); rows * experts] };
        for (step, (row, wanted)) in steps.into_iter().enumerate() {
            future.visits[row.index()].push(step as u32);
            for expert in wanted.as_ref() {
                future.uses[row.expert(*expert).index(experts)].push(step as u32);
            }
        }
        future
    }

    /// Whether these are the requests of a model of this size.
    pub fn fits(&self, shape: &CacheShape) -> bool {
        (self.visits.len(), self.experts) == (shape.rows, shape.experts)
    }

    /// The step of a pool's `visit`, counted from 0; [`NEVER`] beyond the end.
    pub(super) fn step(&self, scope: CacheScope, pool: usize, visit: usize) -> u32 {
        match scope {
            CacheScope::Layer => self.visits[pool].get(visit).copied().unwrap_or(NEVER),
            CacheScope::Global => visit as u32,
        }
    }

    /// The steps in which a pool's key is wanted.
    pub(super) fn uses(&self, shape: &CacheShape, pool: usize, key: Key) -> &[u32] {
        &self.uses[shape.expert(pool, key).index(self.experts)]
    }
}
