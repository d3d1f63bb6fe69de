//! Image towers: what turns a picture into rows of the text model's residual stream. One folder per tower, one row of
//! [`TOWERS`] per kind of file that has it.

use std::sync::Arc;

use larder_core::{EncodedImage, ImageGrid, Tensors};
use larder_kernels::ThreadPool;
use serde_json::Value;

use crate::decode::RgbImage;
use crate::error::VisionError;
use crate::processor::Processor;

pub mod qwen3;
mod sizes;
mod weights;

pub use sizes::{TowerLimits, TowerSizes};

/// A tower with its processor.
pub trait Tower: Send + Sync {
    /// The processor, which says how many tokens a picture becomes.
    fn processor(&self) -> &Processor;

    /// Encodes a picture. `progress` hears how many of how many steps are done, and stops it by answering `false`.
    ///
    /// The result depends on the picture and the tower only: not on threads, other pictures, or the machine.
    ///
    /// # Errors
    /// If the picture's shape is not possible, or `progress` has stopped it.
    fn encode_observed(
        &self,
        image: &RgbImage,
        progress: &mut dyn FnMut(usize, usize) -> bool,
    ) -> Result<EncodedImage, VisionError>;

    /// Encodes a picture.
    ///
    /// # Errors
    /// If the picture's shape is not possible.
    fn encode(&self, image: &RgbImage) -> Result<EncodedImage, VisionError> {
        self.encode_observed(image, &mut |_, _| true)
    }

    /// Lets a picture have at most this many pixels when it is resized, and at least one token's.
    fn limit_pixels(&mut self, pixels: usize);

    /// The grid of tokens that a picture of this size becomes.
    ///
    /// # Errors
    /// If the shape is not possible.
    fn grid(&self, width: usize, height: usize) -> Result<ImageGrid, VisionError> {
        self.processor().grid(width, height)
    }

    /// A number that differs where the settings of tower and processor, or its first weights, do: two pictures with
    /// equal pixels are encoded equally by towers with equal fingerprints.
    fn fingerprint(&self) -> u64;

    /// Width of a row of the result: the hidden size of the text model.
    fn width(&self) -> usize;

    /// After how many layers of the text model something is added to an image's rows.
    fn deepstack_layers(&self) -> usize;

    /// Bytes of its weights.
    fn weight_bytes(&self) -> u64;

    /// Bytes that encoding takes at most, beside the weights, of a picture with this many pixels when resized.
    fn memory_bytes(&self, pixels: usize) -> u64;

    /// Multiplications and additions of encoding a picture with this many pixels when resized.
    fn operations(&self, pixels: usize) -> f64;
}

/// What a file says about its tower.
pub enum TowerFile<'a> {
    /// A checkpoint: its `config.json`, and its `preprocessor_config.json` or `processor_config.json` if there is
    /// one.
    Checkpoint {
        /// `config.json`
        config: &'a Value,
        /// `preprocessor_config.json`
        processor: Option<&'a Value>,
    },
    /// An `mmproj` file of GGUF: its metadata as one JSON object, under the keys of the file.
    Mmproj(&'a Value),
}

/// A kind of tower.
struct TowerKind {
    /// `model_type` of checkpoints that have it.
    model_types: &'static [&'static str],
    /// `clip.projector_type` of `mmproj` files that have it.
    projector_types: &'static [&'static str],
    open: Open,
    describe: Describe,
    processor: ReadProcessor,
}

type Open = fn(&TowerFile, &dyn Tensors, Arc<ThreadPool>) -> Result<Box<dyn Tower>, VisionError>;

type Describe = fn(&TowerFile, &dyn Tensors, TowerLimits) -> Result<TowerSizes, VisionError>;

type ReadProcessor = fn(&TowerFile, &dyn Tensors) -> Result<Processor, VisionError>;

const TOWERS: &[TowerKind] = &[TowerKind {
    model_types: &["qwen3_vl_moe", "qwen3_5_moe", "qwen4_exp", "qwen3_8_flash_next", "qwen3_omni_moe"],
    projector_types: &["qwen3vl_merger"],
    open: qwen3::open,
    describe: qwen3::describe,
    processor: qwen3::processor,
}];

/// The values of `model_type` whose images can be encoded.
pub fn seeing_model_types() -> impl Iterator<Item = &'static str> {
    TOWERS.iter().flat_map(|kind| kind.model_types).copied()
}

/// Opens the tower of a file: reads its weights, and encodes on `pool` from then on.
///
/// # Errors
/// If there is no such tower, or the file is damaged.
pub fn open_tower(
    file: &TowerFile,
    tensors: &dyn Tensors,
    pool: Arc<ThreadPool>,
) -> Result<Box<dyn Tower>, VisionError> {
    (file.kind()?.open)(file, tensors, pool)
}

/// The sizes of the tower of a file, of which no weights are read.
///
/// # Errors
/// If there is no such tower, or what the file says of it is damaged.
pub fn describe_tower(file: &TowerFile, tensors: &dyn Tensors, limits: TowerLimits) -> Result<TowerSizes, VisionError> {
    (file.kind()?.describe)(file, tensors, limits)
}

/// The processor of the tower of a file, of which no weights are read.
///
/// # Errors
/// If there is no such tower, or what the file says of it is damaged.
pub fn describe_processor(file: &TowerFile, tensors: &dyn Tensors) -> Result<Processor, VisionError> {
    (file.kind()?.processor)(file, tensors)
}

impl TowerFile<'_> {
    /// The row of its kind.
    fn kind(&self) -> Result<&'static TowerKind, VisionError> {
        let name = self.name();
        let kind = TOWERS.iter().find(|kind| match self {
            TowerFile::Checkpoint { .. } => kind.model_types.contains(&name),
            TowerFile::Mmproj(_) => kind.projector_types.contains(&name),
        });
        kind.ok_or_else(|| {
            let known: Vec<&str> = seeing_model_types().collect();
            VisionError::UnknownTower(larder_core::printable(name), known.join(", "))
        })
    }

    /// The name of its kind.
    fn name(&self) -> &str {
        match self {
            TowerFile::Checkpoint { config, .. } => config.get("model_type"),
            TowerFile::Mmproj(keys) => keys.get("clip.vision.projector_type").or(keys.get("clip.projector_type")),
        }
        .and_then(Value::as_str)
        .unwrap_or_default()
    }
}
