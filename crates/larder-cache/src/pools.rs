//! The eviction policies of a cache, one for each pool of slots.

use larder_core::{ExpertKey, MoeRow};
use larder_policy::eviction::{CacheShape, Eviction, Key, LayerChoice};

/// One policy per pool, addressed by the experts that it ranks.
pub(crate) struct PolicyPools {
    shape: CacheShape,
    policies: Vec<Box<dyn Eviction>>,
}

impl PolicyPools {
    /// The caller guarantees one policy for each pool of `shape`.
    pub fn new(shape: &CacheShape, policies: Vec<Box<dyn Eviction>>) -> Self {
        assert_eq!(policies.len(), shape.pools(), "one policy per pool");
        PolicyPools { shape: *shape, policies }
    }

    /// Replaces the policies. The new ones are told of the residents in the order in which the old ones would have
    /// evicted them. The caller guarantees one policy for each pool.
    pub fn replace(&mut self, policies: Vec<Box<dyn Eviction>>) {
        assert_eq!(policies.len(), self.policies.len(), "one policy per pool");
        for (policy, mut next) in self.policies.iter_mut().zip(policies) {
            while let Some(key) = policy.victim(&|_| true) {
                policy.forget(key);
                next.admit(key);
            }
            *policy = next;
        }
    }

    /// Each pool has `slots` slots from now on.
    pub fn resize(&mut self, slots: usize) {
        self.policies.iter_mut().for_each(|policy| policy.resize(slots));
    }

    /// A new sequence begins, unrelated to the one before.
    pub fn new_sequence(&mut self) {
        self.policies.iter_mut().for_each(|policy| policy.new_sequence());
    }

    /// A layer has chosen.
    pub fn begin(&mut self, choice: &LayerChoice) {
        self.of(choice.row).begin(choice);
    }

    /// An expert has come into its pool.
    pub fn admit(&mut self, expert: ExpertKey) {
        let key = self.shape.key(expert);
        self.of(expert.row).admit(key);
    }

    /// An expert is used again.
    pub fn touch(&mut self, expert: ExpertKey) {
        let key = self.shape.key(expert);
        self.of(expert.row).touch(key);
    }

    /// An expert has left its pool.
    pub fn forget(&mut self, expert: ExpertKey) {
        let key = self.shape.key(expert);
        self.of(expert.row).forget(key);
    }

    /// The victim in the pool of `row` among the experts that `evictable` allows.
    pub fn victim(&mut self, row: MoeRow, evictable: impl Fn(ExpertKey) -> bool) -> Option<ExpertKey> {
        self.pick(row, evictable, |policy, evictable| policy.victim(evictable))
    }

    /// The worst-ranked expert in the pool of `row` among those that `eligible` allows, when it is not going to leave.
    pub fn worst(&mut self, row: MoeRow, eligible: impl Fn(ExpertKey) -> bool) -> Option<ExpertKey> {
        self.pick(row, eligible, |policy, eligible| policy.worst(eligible))
    }

    fn pick(
        &mut self,
        row: MoeRow,
        eligible: impl Fn(ExpertKey) -> bool,
        rank: impl FnOnce(&mut dyn Eviction, &dyn Fn(Key) -> bool) -> Option<Key>,
    ) -> Option<ExpertKey> {
        let shape = self.shape;
        let pool = shape.pool(row);
        let eligible = |key| eligible(shape.expert(pool, key));
        rank(self.of(row), &eligible).map(|key| shape.expert(pool, key))
    }

    /// The policy of a row's pool.
    fn of(&mut self, row: MoeRow) -> &mut dyn Eviction {
        self.policies[self.shape.pool(row)].as_mut()
    }
}
