//! What the caches of one and of two tiers have in common besides their visits.

use larder_core::{ExpertId, ExpertLayout, LayerIdx, MoeRow, Residency};
use larder_policy::eviction::{CacheShape, Eviction};

use crate::visit::Visit;

/// A cache of experts, of one tier or of two.
pub trait ExpertCache {
    /// The result of the last visit. Hits are in any tier; evicted experts have left all of them.
    fn last_visit(&self) -> &Visit;

    /// The residency of experts, for routing.
    fn residency(&self) -> &dyn Residency;

    /// The shape that the policies are made for.
    fn policy_shape(&self) -> CacheShape;

    /// Replaces the eviction policies, one for each pool.
    fn set_policies(&mut self, policies: Vec<Box<dyn Eviction>>);

    /// A new sequence begins, unrelated to the one before.
    fn new_sequence(&mut self);

    /// The MoE row of a layer. The caller guarantees that it has experts.
    fn row(&self, layer: LayerIdx) -> MoeRow;

    /// The layout of the experts of `layer`.
    fn layout(&self, layer: LayerIdx) -> &ExpertLayout;

    /// A hint: the experts that `layer` will probably want, likeliest first. The first `limit` that are in no tier are
    /// prefetched into memory when the SSD would otherwise be idle. A new hint discards prefetches of the previous one
    /// that have not begun.
    fn hint(&mut self, layer: LayerIdx, experts: &[ExpertId], limit: usize);
}
