//! Decisions of the expert cache and of routing, as pure functions of what happened before: which expert to evict, and
//! which experts a token gets.
//!
//! Nothing here reads bytes or files, measures time or touches tensors, so every decision can be replayed from a trace
//! and measured.
//!
//! - [`eviction`]: the [`Eviction`](eviction::Eviction) trait, one policy per file, and
//!   [`EvictionSpec`](eviction::EvictionSpec), which parses `lru` or `lfru:half-life=8`. A policy is made for a
//!   [`CacheShape`](eviction::CacheShape).
//! - [`routing`]: the [`Router`](routing::Router) trait, one strategy per file, and
//!   [`RoutingSpec`](routing::RoutingSpec). [`routing::quality`] measures how far a choice is from the model's own.
//! - [`spec`]: names with options, and the errors of both.
//!
//! ```
//! use larder_core::{CacheScope, MoeRow};
//! use larder_policy::eviction::{CacheShape, EvictionSpec, PolicyInputs};
//!
//! // One layer of eight experts, and slots for two of them.
//! let shape = CacheShape { rows: 1, experts: 8, top_k: 2, slots: 2, scope: CacheScope::Layer, scratch: 0 };
//! let spec: EvictionSpec = "lru".parse()?;
//! let mut pools = spec.make(&shape, &PolicyInputs::default())?;
//! let (first, second) = (shape.key(MoeRow(0).expert(3)), shape.key(MoeRow(0).expert(5)));
//! pools[0].admit(first);
//! pools[0].admit(second);
//! pools[0].touch(first);
//! assert_eq!(pools[0].victim(&|_| true), Some(second));
//! # Ok::<(), larder_policy::PolicyError>(())
//! ```

pub mod eviction;
pub mod routing;
pub mod spec;

pub use spec::PolicyError;
