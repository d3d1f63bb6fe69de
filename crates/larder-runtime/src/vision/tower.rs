//! Finds the image tower of a model.

use std::path::Path;

use anyhow::{Context, Result, bail};
use larder_core::Blueprint;
use larder_model::takes_images;
use larder_store::{Source, TowerForm, TowerSource, open_mmproj};
use larder_vision::{
    DecodeLimits, TowerFile, TowerLimits, TowerSizes, VisionError, decode, describe_processor, describe_tower,
    seeing_model_types,
};

use super::file::{PICTURE_BYTES, PICTURE_PIXELS};
use super::found::FoundTower;
use crate::options::{VisionOptions, VisionUse};
use crate::plan::VisionMemory;

/// How many images of the most tokens are kept as the tower made them.
const KEPT_IMAGES: u64 = 2;

/// The tower of a model: that of the `mmproj` file if one is named, else its own or that beside it. `None` if it has
/// none that can encode.
pub fn find_tower(source: &dyn Source, mmproj: Option<&Path>, blueprint: &Blueprint) -> Result<Option<FoundTower>> {
    let takes_images = takes_images(source.config())?;
    let tower = match mmproj {
        Some(path) if !takes_images => bail!(
            "{}: is an image tower, and the model takes no images; models that see are those of type {}",
            path.display(),
            seeing_models()
        ),
        Some(path) => Some(open_mmproj(path)?),
        None if !takes_images => None,
        None => source.tower()?,
    };
    let Some(tower) = tower else { return Ok(None) };
    let path = tower.path().display().to_string();
    let sizes = match sizes(&tower, TowerLimits { tokens: 1, threads: 1 }) {
        // A model of text, whose tower is of another kind.
        Err(VisionError::UnknownTower(..)) if mmproj.is_none() => return Ok(None),
        other => other.context(path.clone())?,
    };
    if sizes.out != blueprint.hidden {
        bail!(
            "{path}: this image tower makes rows of {}, and the model's are {} wide: it belongs to another model",
            sizes.out,
            blueprint.hidden
        );
    }
    let token_bytes = sizes.token_bytes();
    Ok(Some(FoundTower { layers: sizes.layers, width: sizes.width, token_bytes, source: tower }))
}

fn sizes(tower: &TowerSource, limits: TowerLimits) -> Result<TowerSizes, VisionError> {
    describe_tower(&tower_file(tower), tower, limits)
}

/// The tower as its file describes it.
pub(super) fn tower_file(tower: &TowerSource) -> TowerFile<'_> {
    match &tower.form {
        TowerForm::Checkpoint { config, processor } => TowerFile::Checkpoint { config, processor: processor.as_ref() },
        TowerForm::Mmproj { keys } => TowerFile::Mmproj(keys),
    }
}

/// The limits of files of pictures.
pub(super) fn decode_limits() -> DecodeLimits {
    DecodeLimits { bytes: PICTURE_BYTES, pixels: PICTURE_PIXELS }
}

/// Memory that seeing takes; `None` if that is off.
pub fn vision_memory(tower: &FoundTower, options: &VisionOptions, threads: usize) -> Result<Option<VisionMemory>> {
    if options.tower == VisionUse::Off {
        return Ok(None);
    }
    let limits = TowerLimits { tokens: options.image_tokens, threads };
    let sizes = sizes(&tower.source, limits).with_context(|| tower.source.path().display().to_string())?;
    // The decoded picture stays while it is encoded.
    let encoding = sizes.encoding_bytes.saturating_add(3 * PICTURE_PIXELS);
    Ok(Some(VisionMemory {
        tower_bytes: sizes.weight_bytes,
        working_bytes: encoding.max(decode_limits().memory_bytes()),
        kept_bytes: (KEPT_IMAGES * sizes.most_tokens as u64).saturating_mul(sizes.token_bytes()),
        preloaded: options.tower == VisionUse::Preload,
    }))
}

/// Tokens of the image that a file of a picture becomes; no weights are read.
pub fn tokens_of_picture(tower: &FoundTower, file: &[u8], image_tokens: usize) -> Result<usize> {
    let image = decode(file, &decode_limits())?;
    let processor = describe_processor(&tower_file(&tower.source), &tower.source)?;
    let pixels = image_tokens.saturating_mul(processor.token_side().pow(2));
    Ok(processor.limited_to(pixels).grid(image.width(), image.height())?.tokens())
}

/// The types of models that see, for sentences.
pub fn seeing_models() -> String {
    seeing_model_types().collect::<Vec<_>>().join(", ")
}
