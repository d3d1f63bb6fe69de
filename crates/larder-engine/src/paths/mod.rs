//! Paths to the experts through a cache: routing, reading, computing, recording.

mod cached_path;
mod fake;
mod record;
mod routing;
mod streaming;
mod tiered;

pub use cached_path::CachedPath;
pub use fake::FakeDeviceExperts;
pub use record::Recorder;
pub use routing::Routing;
pub use streaming::StreamingPath;
pub use tiered::TieredPath;
