//! The shape of the cache that a policy is made for: rows, experts, slots and scope, and the key of each expert.

use larder_core::{CacheScope, ExpertKey, Geometry, MoeRow};

use super::Key;

/// The shape of a cache: what a policy is made for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheShape {
    /// Number of layers that have experts.
    pub rows: usize,
    /// Experts per layer.
    pub experts: usize,
    /// Experts that one token uses in one layer.
    pub top_k: usize,
    /// Slots of each pool, without [`scratch`](Self::scratch).
    pub slots: usize,
    /// Whether each layer has a pool of its own or all layers share one.
    pub scope: CacheScope,
    /// Scratch slots: shared by all pools, for experts that may leave as soon as they have been used.
    pub scratch: usize,
}

impl CacheShape {
    /// For a model of this geometry, without scratch slots.
    pub fn new(geometry: &Geometry, slots: usize, scope: CacheScope) -> Self {
        let Geometry { experts, top_k, .. } = *geometry;
        CacheShape { rows: geometry.moe_layers.len(), experts, top_k, slots, scope, scratch: 0 }
    }

    /// Number of pools.
    pub fn pools(&self) -> usize {
        match self.scope {
            CacheScope::Layer => self.rows,
            CacheScope::Global => 1,
        }
    }

    /// Number of keys in each pool.
    pub fn keys_per_pool(&self) -> usize {
        match self.scope {
            CacheScope::Layer => self.experts,
            CacheScope::Global => self.rows * self.experts,
        }
    }

    /// Slots of all pools together, scratch slots included.
    pub fn total_slots(&self) -> usize {
        self.pools() * self.slots + self.scratch
    }

    /// The pool that a row's experts are in.
    pub fn pool(&self, row: MoeRow) -> usize {
        match self.scope {
            CacheScope::Layer => row.index(),
            CacheScope::Global => 0,
        }
    }

    /// An expert's key in its pool.
    pub fn key(&self, expert: ExpertKey) -> Key {
        match self.scope {
            CacheScope::Layer => Key(u32::from(expert.expert.0)),
            CacheScope::Global => Key(expert.index(self.experts) as u32),
        }
    }

    /// The expert of a pool's key.
    pub fn expert(&self, pool: usize, key: Key) -> ExpertKey {
        match self.scope {
            CacheScope::Layer => MoeRow(pool).expert(key.index()),
            CacheScope::Global => ExpertKey::from_index(key.index(), self.experts),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_experts_correspond() {
        for scope in [CacheScope::Layer, CacheScope::Global] {
            let shape = CacheShape { rows: 3, experts: 5, top_k: 2, slots: 4, scope, scratch: 1 };
            let mut all: Vec<_> = (0..shape.pools())
                .flat_map(|p| (0..shape.keys_per_pool()).map(move |k| (p, Key(k as u32))))
                .map(|(p, key)| {
                    let expert = shape.expert(p, key);
                    assert_eq!((shape.pool(expert.row), shape.key(expert)), (p, key));
                    expert
                })
                .collect();
            all.dedup();
            assert_eq!(all.len(), 15, "{scope}");
        }
    }
}
