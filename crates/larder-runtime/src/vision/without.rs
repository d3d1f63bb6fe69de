//! No tower in builds without images.

use std::path::Path;

use anyhow::{Result, bail};
use larder_core::Blueprint;
use larder_store::Source;

use super::found::FoundTower;
use crate::notices::Setting;
use crate::options::VisionOptions;
use crate::plan::VisionMemory;

/// The tower of a model: none. A file that is named is refused.
pub fn find_tower(_source: &dyn Source, mmproj: Option<&Path>, _blueprint: &Blueprint) -> Result<Option<FoundTower>> {
    if mmproj.is_some() {
        bail!("{} needs a larder that was built with the feature vision", Setting::Mmproj);
    }
    Ok(None)
}

/// Tokens of the image that a file of a picture becomes: there is no such image.
pub fn tokens_of_picture(_tower: &FoundTower, _file: &[u8], _image_tokens: usize) -> Result<usize> {
    bail!("images need a larder that was built with the feature vision")
}

/// Memory that seeing takes.
pub fn vision_memory(_tower: &FoundTower, _options: &VisionOptions, _threads: usize) -> Result<Option<VisionMemory>> {
    Ok(None)
}

/// The types of models that see.
pub fn seeing_models() -> String {
    "none in this build, which lacks the feature vision".into()
}
