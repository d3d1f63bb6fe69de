//! The interface that all expert paths with a cache share.

use larder_cache::{ExpertCache, Traffic, Visit};
use larder_core::Residency;
use larder_model::ExpertPath;
use larder_policy::eviction::{CacheShape, Eviction};

use crate::paths::routing::Routing;

/// An expert path with a cache: statistics, residency, and policies that can be exchanged.
pub trait CachedPath: ExpertPath {
    /// The cache.
    fn cache(&self) -> &dyn ExpertCache;

    /// The cache, to be changed between steps.
    fn cache_mut(&mut self) -> &mut dyn ExpertCache;

    /// Hits, misses, bytes and times so far.
    fn traffic(&self) -> Traffic;

    /// The routing strategy.
    fn routing(&self) -> &Routing;

    /// Replaces the routing strategy from the next layer on.
    fn set_routing(&mut self, routing: Routing);

    /// The cache's results for the last computed layer.
    fn last_visit(&self) -> &Visit {
        self.cache().last_visit()
    }

    /// The residency of all experts.
    fn residency(&self) -> &dyn Residency {
        self.cache().residency()
    }

    /// The cache shape that eviction policies are built for.
    fn cache_shape(&self) -> CacheShape {
        self.cache().policy_shape()
    }

    /// Replaces the eviction policies, one per pool.
    fn set_policies(&mut self, policies: Vec<Box<dyn Eviction>>) {
        self.cache_mut().set_policies(policies);
    }

    /// Tells the policies that a new sequence begins, unrelated to the tokens before.
    fn new_sequence(&mut self) {
        self.cache_mut().new_sequence();
    }
}
