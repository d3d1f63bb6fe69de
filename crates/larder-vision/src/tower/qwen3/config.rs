//! The sizes of a tower, from `config.json` or the metadata of an `mmproj` file.

use larder_core::Tensors;
use serde_json::Value;

use crate::compute::TowerActivation;
use crate::error::VisionError;
use crate::fields::BoundedFields;
use crate::processor::{MOST_PIXELS, ProcessorConfig};
use crate::tower::TowerFile;

/// The most layers with a merger of their own.
const MOST_DEEPSTACK: usize = 16;
/// The most tokens of a picture where a file says nothing, as llama.cpp has it.
const MMPROJ_TOKENS: (usize, usize) = (8, 4096);

/// Sizes of a tower.
#[derive(Clone, PartialEq, Debug)]
pub struct Qwen3TowerConfig {
    /// Number of blocks.
    pub depth: usize,
    /// Width of a patch's row.
    pub hidden: usize,
    /// Width inside the MLP.
    pub intermediate: usize,
    /// FullAttention heads.
    pub heads: usize,
    /// Pixels of a patch's side.
    pub patch: usize,
    /// Patches of a token's side.
    pub merge: usize,
    /// Time slices of the patch embedding.
    pub temporal: usize,
    /// Width of the result.
    pub out: usize,
    /// The side of the table of learned positions.
    pub positions: usize,
    /// Blocks after which a merger stands.
    pub deepstack: Vec<usize>,
    /// The activation of the MLP.
    pub activation: TowerActivation,
    /// What norms add to the variance.
    pub epsilon: f64,
    /// The base of the rotary frequencies.
    pub theta: f64,
}

impl Qwen3TowerConfig {
    /// From `vision_config` of `config.json`, which the Omni models have under `thinker_config`.
    pub fn of_checkpoint(config: &Value) -> Result<Self, VisionError> {
        let outer = config.get("thinker_config").unwrap_or(config);
        let fields = BoundedFields::new("config.json", outer)?;
        let vision = fields.object("vision_config")?.ok_or_else(|| fields.wrong("vision_config", "an object"))?;
        let activation = match vision.word("hidden_act").unwrap_or("gelu_pytorch_tanh") {
            "gelu_pytorch_tanh" => TowerActivation::GeluTanh,
            "gelu" => TowerActivation::Gelu,
            "quick_gelu" => TowerActivation::QuickGelu,
            _ => return Err(vision.wrong("hidden_act", "gelu_pytorch_tanh, gelu or quick_gelu")),
        };
        let indexes = vision.list("deepstack_visual_indexes", MOST_DEEPSTACK)?;
        let deepstack: Option<Vec<usize>> = indexes.iter().map(|v| v.as_u64().map(|v| v as usize)).collect();
        let theta = match vision.object("rope_parameters")? {
            Some(rope) => rope.number("rope_theta")?,
            None => None,
        };
        let table = vision.whole("num_position_embeddings", 1..=1 << 20)?.unwrap_or(2304);
        let config = Qwen3TowerConfig {
            depth: vision.whole("depth", 1..=256)?.unwrap_or(27),
            hidden: vision.whole("hidden_size", 4..=16384)?.unwrap_or(1152),
            intermediate: vision.whole("intermediate_size", 1..=65536)?.unwrap_or(4304),
            heads: vision.whole("num_heads", 1..=256)?.unwrap_or(16),
            patch: vision.whole("patch_size", 1..=64)?.unwrap_or(16),
            merge: vision.whole("spatial_merge_size", 1..=8)?.unwrap_or(2),
            temporal: vision.whole("temporal_patch_size", 1..=8)?.unwrap_or(2),
            out: vision.needed("out_hidden_size", 1..=65536)?,
            positions: table.isqrt(),
            deepstack: deepstack.ok_or_else(|| vision.wrong("deepstack_visual_indexes", "a list of layers"))?,
            activation,
            epsilon: 1e-6,
            theta: theta.unwrap_or(10_000.0),
        };
        if vision.whole("in_channels", 3..=3)?.unwrap_or(3) != 3 || config.positions.pow(2) != table {
            return Err(vision.wrong("num_position_embeddings", "a square"));
        }
        config.checked(&vision)
    }

    /// From the metadata of an `mmproj` file. The table of positions is as large as its tensor.
    pub fn of_mmproj(keys: &Value, tensors: &dyn Tensors) -> Result<Self, VisionError> {
        let fields = BoundedFields::new("mmproj", keys)?;
        let number = |key: &str, bounds| fields.needed(&format!("clip.vision.{key}"), bounds);
        let flags = fields.list("clip.vision.is_deepstack_layers", 256)?;
        let deepstack = flags.iter().enumerate().filter(|(_, flag)| flag.as_bool() == Some(true)).map(|(i, _)| i);
        let table = tensors.meta("v.position_embd.weight").and_then(|meta| meta.shape.first()).copied().unwrap_or(0);
        let is_silu = fields.flag("clip.use_silu")? == Some(true);
        if is_silu || fields.flag("clip.use_gelu")? == Some(false) {
            return Err(fields.wrong("clip.use_gelu", "true"));
        }
        let config = Qwen3TowerConfig {
            depth: number("block_count", 1..=256)?,
            hidden: number("embedding_length", 4..=16384)?,
            intermediate: number("feed_forward_length", 1..=65536)?,
            heads: number("attention.head_count", 1..=256)?,
            patch: number("patch_size", 1..=64)?,
            merge: fields.whole("clip.vision.spatial_merge_size", 1..=8)?.unwrap_or(2),
            temporal: 2,
            out: number("projection_dim", 1..=65536)?,
            positions: table.min(1 << 20).isqrt(),
            deepstack: deepstack.collect(),
            activation: TowerActivation::GeluTanh,
            epsilon: fields.number("clip.vision.attention.layer_norm_epsilon")?.unwrap_or(1e-6),
            theta: 10_000.0,
        };
        if config.positions == 0 || config.positions.pow(2) != table {
            return Err(VisionError::MissingTensor("v.position_embd.weight".into()));
        }
        config.checked(&fields)
    }

    fn checked(self, fields: &BoundedFields) -> Result<Self, VisionError> {
        let rises = self.deepstack.windows(2).all(|pair| pair[0] < pair[1]);
        if !rises
            || self.deepstack.last().is_some_and(|last| *last >= self.depth)
            || self.deepstack.len() > MOST_DEEPSTACK
        {
            return Err(fields.wrong("deepstack_visual_indexes", "at most 16 layers of the tower, from the first on"));
        }
        if !self.hidden.is_multiple_of(self.heads) || !(self.hidden / self.heads).is_multiple_of(4) {
            return Err(fields.wrong("num_heads", "a number of heads with a multiple of four values each"));
        }
        if !(1e-12..=1.0).contains(&self.epsilon) || !(1.0..=1e12).contains(&self.theta) {
            return Err(fields.wrong("rope_theta", "a usual number, as the epsilon of the norms"));
        }
        Ok(self)
    }

    /// Values of a head.
    pub fn head_dim(&self) -> usize {
        self.hidden / self.heads
    }

    /// Patches of a token.
    pub fn patches_per_token(&self) -> usize {
        self.merge * self.merge
    }
}

/// The processor that belongs to a tower, which must cut the same patches.
pub fn processor_of(file: &TowerFile, tower: &Qwen3TowerConfig) -> Result<ProcessorConfig, VisionError> {
    let config = match file {
        TowerFile::Checkpoint { processor: Some(processor), .. } => ProcessorConfig::read(processor)?,
        TowerFile::Checkpoint { processor: None, .. } => published(tower),
        TowerFile::Mmproj(keys) => of_mmproj(keys, tower)?,
    };
    let cuts = (config.patch, config.merge, config.temporal);
    if cuts == (tower.patch, tower.merge, tower.temporal) {
        Ok(config)
    } else {
        let file = "preprocessor_config.json";
        let wanted = "that of the model's config.json, as 'merge_size' and 'temporal_patch_size' should".into();
        Err(VisionError::Config { file, key: "patch_size", wanted })
    }
}

/// The settings with which all models of this kind are published.
fn published(tower: &Qwen3TowerConfig) -> ProcessorConfig {
    let (patch, merge, temporal) = (tower.patch, tower.merge, tower.temporal);
    let (mean, std) = ([0.5; 3], [0.5; 3]);
    let (least_pixels, most_pixels) = (65_536, 16_777_216);
    ProcessorConfig { patch, merge, temporal, mean, std, least_pixels, most_pixels, ..ProcessorConfig::qwen() }
}

fn of_mmproj(keys: &Value, tower: &Qwen3TowerConfig) -> Result<ProcessorConfig, VisionError> {
    let fields = BoundedFields::new("mmproj", keys)?;
    let token = (tower.patch * tower.merge).pow(2);
    let pixels = |key: &str, tokens: usize| -> Result<usize, VisionError> {
        Ok(fields.whole(key, 1..=MOST_PIXELS)?.unwrap_or(tokens * token))
    };
    let (least_pixels, most_pixels) = (
        pixels("clip.vision.image_min_pixels", MMPROJ_TOKENS.0)?,
        pixels("clip.vision.image_max_pixels", MMPROJ_TOKENS.1)?,
    );
    if least_pixels > most_pixels {
        return Err(fields.wrong("clip.vision.image_min_pixels", "not above 'clip.vision.image_max_pixels'"));
    }
    let deviations = fields.three("clip.vision.image_std")?.unwrap_or([0.5; 3]);
    if deviations.iter().any(|std| *std < 1e-6) {
        return Err(fields.wrong("clip.vision.image_std", "three numbers above zero"));
    }
    let mean = fields.three("clip.vision.image_mean")?.unwrap_or([0.5; 3]);
    Ok(ProcessorConfig { mean, std: deviations, least_pixels, most_pixels, ..published(tower) })
}
