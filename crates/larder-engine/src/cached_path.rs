//! What can be asked and changed of every way to experts that leads through slots.

use larder_cache::{Traffic, Visit};
use larder_core::Residency;
use larder_model::ExpertPath;
use larder_policy::eviction::{CacheShape, Eviction};

use crate::routing::Routing;

/// A way to experts that leads through slots.
pub trait CachedPath: ExpertPath {
    /// What passed through them so far.
    fn traffic(&self) -> Traffic;

    /// What the last layer that was computed found in them.
    fn last_visit(&self) -> &Visit;

    /// Which experts are in them.
    fn residency(&self) -> &dyn Residency;

    /// How experts are chosen.
    fn routing(&self) -> &Routing;

    /// Chooses in another way from now on.
    fn set_routing(&mut self, routing: Routing);

    /// What eviction policies are made for.
    fn cache_shape(&self) -> CacheShape;

    /// Lets other policies say who leaves from now on, one for each pool.
    fn set_policies(&mut self, policies: Vec<Box<dyn Eviction>>);

    /// What comes has nothing to do with what was.
    fn new_sequence(&mut self);
}
