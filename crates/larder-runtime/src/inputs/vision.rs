//! The memory of images, for the plan.

use anyhow::Result;

use crate::open::OpenModel;
use crate::options::{Options, VisionUse};
use crate::plan::VisionMemory;
use crate::vision::vision_memory;

/// The memory that seeing takes; `None` if the model does not see, or shall not.
pub(super) fn memory(model: &OpenModel, options: &Options) -> Result<Option<VisionMemory>> {
    if options.vision.tower == VisionUse::Off {
        return Ok(None);
    }
    match model.tower() {
        Ok(Some(tower)) => vision_memory(&tower, &options.vision, options.compute.threads),
        Ok(None) => Ok(None),
        // A text needs no tower; a picture will be refused.
        Err(_) if !model.names_tower() => Ok(None),
        Err(error) => Err(error),
    }
}
