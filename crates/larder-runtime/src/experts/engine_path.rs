//! The paths from a model to its experts, with what an engine asks of them beside that: one implementation for each.

use std::fmt::Display;

use anyhow::Result;
use larder_engine::{CachedPath, StreamingPath, TieredPath};
use larder_model::{AllResident, Decoder, ExpertPath};
use larder_store::reader::Slot;
use serde_json::{Value, json};

/// What computed experts beside the CPU: its name, and what it did as text and as JSON.
pub type OffloadReport = (&'static str, String, Value);

/// A path from a model to its experts.
pub trait EnginePath: Send {
    /// The path itself.
    fn experts(&self) -> &dyn ExpertPath;

    /// As [`experts`](Self::experts), for steps.
    fn experts_mut(&mut self) -> &mut dyn ExpertPath;

    /// The path's cache; `None` if all experts are in memory.
    fn cached(&self) -> Option<&dyn CachedPath> {
        None
    }

    /// As [`cached`](Self::cached), to be changed.
    fn cached_mut(&mut self) -> Option<&mut dyn CachedPath> {
        None
    }

    /// The path, if experts are read into slots in main memory alone.
    fn streaming(&self) -> Option<&StreamingPath> {
        None
    }

    /// As [`streaming`](Self::streaming), to be changed.
    fn streaming_mut(&mut self) -> Option<&mut StreamingPath> {
        None
    }

    /// Whether each of `experts` experts is in main memory, or has a slot there.
    fn has_room_for(&self, experts: usize) -> bool {
        self.streaming().is_some_and(|streaming| streaming.cache_shape().total_slots() >= experts)
    }

    /// Everything else is loaded: allocates what calls of up to `tokens` tokens need. Fails if a GPU cannot compute the
    /// model.
    fn prepare(&mut self, decoder: &Decoder, tokens: usize) -> Result<()> {
        let _ = (decoder, tokens);
        Ok(())
    }

    /// The most bytes of a GPU's memory that were allocated at one time; `None` without one.
    fn device_peak_bytes(&self) -> Option<u64> {
        None
    }

    /// What a GPU or edge workers did; `None` if only the CPU computes experts.
    fn offload_report(&self) -> Option<OffloadReport> {
        None
    }
}

/// All experts in memory.
impl EnginePath for AllResident<Slot> {
    fn experts(&self) -> &dyn ExpertPath {
        self
    }

    fn experts_mut(&mut self) -> &mut dyn ExpertPath {
        self
    }

    fn has_room_for(&self, _: usize) -> bool {
        true
    }
}

/// Slots in memory.
impl EnginePath for StreamingPath {
    fn experts(&self) -> &dyn ExpertPath {
        self
    }

    fn experts_mut(&mut self) -> &mut dyn ExpertPath {
        self
    }

    fn cached(&self) -> Option<&dyn CachedPath> {
        Some(self)
    }

    fn cached_mut(&mut self) -> Option<&mut dyn CachedPath> {
        Some(self)
    }

    fn streaming(&self) -> Option<&StreamingPath> {
        Some(self)
    }

    fn streaming_mut(&mut self) -> Option<&mut StreamingPath> {
        Some(self)
    }
}

/// Slots in VRAM and slots in memory.
pub struct GpuPath {
    /// The path itself.
    pub tiered: TieredPath,
    /// How memory is copied to the GPU, for the footer.
    pub how: Box<dyn Display + Send>,
}

impl EnginePath for GpuPath {
    fn experts(&self) -> &dyn ExpertPath {
        &self.tiered
    }

    fn experts_mut(&mut self) -> &mut dyn ExpertPath {
        &mut self.tiered
    }

    fn cached(&self) -> Option<&dyn CachedPath> {
        Some(&self.tiered)
    }

    fn cached_mut(&mut self) -> Option<&mut dyn CachedPath> {
        Some(&mut self.tiered)
    }

    fn prepare(&mut self, decoder: &Decoder, tokens: usize) -> Result<()> {
        self.tiered.prepare_slots();
        Ok(self.tiered.prepare(decoder, tokens)?)
    }

    fn device_peak_bytes(&self) -> Option<u64> {
        Some(self.tiered.device_peak_bytes())
    }

    fn offload_report(&self) -> Option<OffloadReport> {
        Some(("gpu", self.how.to_string(), json!(self.how.to_string())))
    }
}

/// Slots in memory, and edge workers.
#[cfg(feature = "edge")]
impl EnginePath for larder_edge::Edge {
    fn experts(&self) -> &dyn ExpertPath {
        self
    }

    fn experts_mut(&mut self) -> &mut dyn ExpertPath {
        self
    }

    fn cached(&self) -> Option<&dyn CachedPath> {
        Some(self.local())
    }

    fn cached_mut(&mut self) -> Option<&mut dyn CachedPath> {
        Some(self.local_mut())
    }

    fn offload_report(&self) -> Option<OffloadReport> {
        let report = self.report();
        let json = serde_json::to_value(&report).expect("text and numbers are JSON");
        Some(("edge", report.summary(), json))
    }
}
