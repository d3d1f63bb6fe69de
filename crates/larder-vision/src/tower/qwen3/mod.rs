//! The tower of Qwen3-VL, Qwen3.5, Qwen4 and Qwen3-Omni: a vision transformer whose tokens are merged four by four,
//! with mergers after some blocks whose results are added to the first layers of the text model.

use std::hash::Hasher;
use std::sync::Arc;

use larder_core::{EncodedImage, ImageGrid, Tensors};
use larder_kernels::ThreadPool;
use twox_hash::XxHash3_64;

use super::weights::WeightReader;
use super::{Tower, TowerFile, TowerLimits, TowerSizes};
use crate::compute::{ColumnPanels, FullAttention, LayerNorm, TowerActivation, TowerLinear, attention};
use crate::decode::RgbImage;
use crate::error::VisionError;
use crate::processor::{Patches, Processor};

mod config;
mod names;
mod positions;
mod sizes;

pub use config::Qwen3TowerConfig;
use config::processor_of;
use names::{MergerNames, Qwen3Names};
use positions::{Rotations, add_learned};

struct Block {
    norms: [LayerNorm; 2],
    qkv: TowerLinear,
    projection: TowerLinear,
    mlp: [TowerLinear; 2],
}

/// Joins the patches of a token.
struct Merger {
    /// As wide as a patch, or as all patches of a token.
    norm: LayerNorm,
    layers: [TowerLinear; 2],
}

/// The tower.
pub struct Qwen3Tower {
    config: Qwen3TowerConfig,
    processor: Processor,
    pool: Arc<ThreadPool>,
    patches: TowerLinear,
    /// `[positions, positions, hidden]`
    positions: Vec<f32>,
    blocks: Vec<Block>,
    merger: Merger,
    deepstack: Vec<Merger>,
    fingerprint: u64,
}

/// Opens the tower of a file.
pub fn open(file: &TowerFile, tensors: &dyn Tensors, pool: Arc<ThreadPool>) -> Result<Box<dyn Tower>, VisionError> {
    let weights = WeightReader { tensors };
    let (config, names) = read_config(file, &weights)?;
    let processor = Processor::new(processor_of(file, &config)?);
    Ok(Box::new(Qwen3Tower::read(config, processor, &weights, &names, pool)?))
}

/// The sizes of the tower of a file.
pub fn describe(file: &TowerFile, tensors: &dyn Tensors, limits: TowerLimits) -> Result<TowerSizes, VisionError> {
    let weights = WeightReader { tensors };
    let (config, names) = read_config(file, &weights)?;
    let processor = Processor::new(processor_of(file, &config)?);
    config.sizes(&processor, &weights, &names, limits)
}

/// The processor of the tower of a file.
pub fn processor(file: &TowerFile, tensors: &dyn Tensors) -> Result<Processor, VisionError> {
    let (config, _) = read_config(file, &WeightReader { tensors })?;
    Ok(Processor::new(processor_of(file, &config)?))
}

/// The config of the tower of a file, and the names of its tensors.
fn read_config(file: &TowerFile, weights: &WeightReader) -> Result<(Qwen3TowerConfig, Qwen3Names), VisionError> {
    Ok(match file {
        TowerFile::Checkpoint { config, .. } => {
            (Qwen3TowerConfig::of_checkpoint(config)?, Qwen3Names::of_checkpoint(weights))
        }
        TowerFile::Mmproj(keys) => (Qwen3TowerConfig::of_mmproj(keys, weights.tensors)?, Qwen3Names::of_mmproj()),
    })
}

impl Qwen3Tower {
    fn read(
        config: Qwen3TowerConfig,
        processor: Processor,
        weights: &WeightReader,
        names: &Qwen3Names,
        pool: Arc<ThreadPool>,
    ) -> Result<Self, VisionError> {
        let (embedding, kernel) = patch_embedding(&config, weights, &names.patches())?;
        let positions = weights.values(&names.positions(), &[config.positions.pow(2), config.hidden])?;
        let blocks =
            (0..config.depth).map(|block| read_block(&config, weights, names, block)).collect::<Result<_, _>>();
        let merger = read_merger(&config, weights, &names.merger(), false)?;
        let deepstack = (0..config.deepstack.len())
            .map(|index| read_merger(&config, weights, &names.deepstack(&config, index), true))
            .collect::<Result<_, _>>();
        let (blocks, deepstack) = (blocks?, deepstack?);
        let fingerprint = fingerprint(&config, &processor, &[&kernel, &positions, &merger.layers[1].bias]);
        Ok(Qwen3Tower {
            config,
            processor,
            pool,
            patches: embedding,
            positions,
            blocks,
            merger,
            deepstack,
            fingerprint,
        })
    }

    fn linears(&self) -> impl Iterator<Item = &TowerLinear> {
        let blocks = self.blocks.iter().flat_map(|b| [&b.qkv, &b.projection, &b.mlp[0], &b.mlp[1]]);
        blocks.chain(self.deepstack.iter().chain([&self.merger]).flat_map(|m| &m.layers)).chain([&self.patches])
    }

    fn embed(&self, patches: &Patches) -> Vec<f32> {
        let grid = (patches.rows, patches.columns);
        let mut x = self.patches.apply(&self.pool, &patches.values, &|_, _| ());
        add_learned(&mut x, &self.positions, self.config.positions, grid, self.config.merge);
        x
    }

    fn block(&self, block: &Block, x: &mut [f32], rotations: &Rotations) {
        let mixed = self.mix(block, x, rotations);
        add(x, &mixed);
        let activation = self.config.activation;
        let inside =
            block.mlp[0].apply(&self.pool, &block.norms[1].apply(&self.pool, x), &|_, rows| activation.apply(rows));
        add(x, &block.mlp[1].apply(&self.pool, &inside, &|_, _| ()));
    }

    fn mix(&self, block: &Block, x: &[f32], rotations: &Rotations) -> Vec<f32> {
        let (hidden, heads, head_dim) = (self.config.hidden, self.config.heads, self.config.head_dim());
        let turn = |first: usize, rows: &mut [f32]| {
            for (i, row) in rows.chunks_exact_mut(3 * hidden).enumerate() {
                rotations.turn(first + i, &mut row[..2 * hidden]);
            }
        };
        let joined = block.qkv.apply(&self.pool, &block.norms[0].apply(&self.pool, x), &turn);
        let scale = (1.0 / (head_dim as f64).sqrt()) as f32;
        let mixed = attention(&self.pool, &FullAttention { heads, head_dim, joined: &joined, scale });
        drop(joined);
        block.projection.apply(&self.pool, &mixed, &|_, _| ())
    }

    fn merge(&self, merger: &Merger, x: &[f32]) -> Vec<f32> {
        // The patches of a token follow each other, so that joining them changes no value's place.
        let joined = merger.norm.apply(&self.pool, x);
        let inside = merger.layers[0].apply(&self.pool, &joined, &|_, rows| TowerActivation::Gelu.apply(rows));
        merger.layers[1].apply(&self.pool, &inside, &|_, _| ())
    }
}

impl Tower for Qwen3Tower {
    fn processor(&self) -> &Processor {
        &self.processor
    }

    fn encode_observed(
        &self,
        image: &RgbImage,
        progress: &mut dyn FnMut(usize, usize) -> bool,
    ) -> Result<EncodedImage, VisionError> {
        let patches = self.processor.patches(&self.pool, image)?;
        let (rows, columns) = (patches.rows, patches.columns);
        let (config, grid) = (&self.config, (rows, columns));
        let rotations = Rotations::new(config.head_dim(), config.theta, grid, config.merge);
        let mut x = self.embed(&patches);
        drop(patches);
        let mut deepstack = Vec::with_capacity(self.deepstack.len());
        for (number, block) in self.blocks.iter().enumerate() {
            if !progress(number, self.blocks.len()) {
                return Err(VisionError::Stopped);
            }
            self.block(block, &mut x, &rotations);
            if config.deepstack.get(deepstack.len()) == Some(&number) {
                deepstack.push(self.merge(&self.deepstack[deepstack.len()], &x));
            }
        }
        progress(self.blocks.len(), self.blocks.len());
        let grid = ImageGrid { rows: rows / config.merge, columns: columns / config.merge };
        Ok(EncodedImage { grid, width: config.out, rows: self.merge(&self.merger, &x), deepstack })
    }

    fn limit_pixels(&mut self, pixels: usize) {
        self.processor = self.processor.limited_to(pixels);
    }

    fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    fn width(&self) -> usize {
        self.config.out
    }

    fn deepstack_layers(&self) -> usize {
        self.deepstack.len()
    }

    fn weight_bytes(&self) -> u64 {
        let norms = self.blocks.len() * 4 + (self.deepstack.len() + 1) * 2 * self.config.patches_per_token();
        let values = self.positions.len() + norms * self.config.hidden;
        (self.linears().map(TowerLinear::bytes).sum::<usize>() + values * size_of::<f32>()) as u64
    }

    fn memory_bytes(&self, pixels: usize) -> u64 {
        self.config.encoding_bytes(pixels, self.pool.threads())
    }

    fn operations(&self, pixels: usize) -> f64 {
        let patches = (pixels / self.config.patch.pow(2)) as f64;
        let of = |linear: &TowerLinear| (linear.weights.depth() * linear.weights.columns()) as f64;
        let merged = self.config.patches_per_token() as f64;
        let mergers: f64 = self.deepstack.iter().chain([&self.merger]).flat_map(|m| &m.layers).map(of).sum();
        let rest: f64 = self.linears().map(of).sum::<f64>() - mergers;
        let scores = 2.0 * patches * (self.config.hidden * self.config.depth) as f64;
        2.0 * patches * (rest + mergers / merged + scores)
    }
}

/// The patch embedding as a matrix. A picture is the same in all time slices, so that their kernels are summed.
fn patch_embedding(
    config: &Qwen3TowerConfig,
    weights: &WeightReader,
    name: &str,
) -> Result<(TowerLinear, Vec<f32>), VisionError> {
    let (hidden, square) = (config.hidden, config.patch * config.patch);
    let second = format!("{name}.weight.1");
    let is_apart = weights.has(&second);
    let mut kernel = vec![0.0; hidden * 3 * square];
    if is_apart {
        for name in [format!("{name}.weight"), second] {
            add(&mut kernel, &weights.values(&name, &[hidden, 3, config.patch, config.patch])?);
        }
    } else {
        let shape = [hidden, 3, config.temporal, config.patch, config.patch];
        let slices = weights.values(&format!("{name}.weight"), &shape)?;
        for (sum, slices) in kernel.chunks_exact_mut(square).zip(slices.chunks_exact(config.temporal * square)) {
            slices.chunks_exact(square).for_each(|slice| add(sum, slice));
        }
    }
    let bias = weights.values(&format!("{name}.bias"), &[hidden])?;
    Ok((TowerLinear { weights: ColumnPanels::from_f32(&kernel, 3 * square), bias }, kernel))
}

fn read_block(
    config: &Qwen3TowerConfig,
    weights: &WeightReader,
    names: &Qwen3Names,
    block: usize,
) -> Result<Block, VisionError> {
    let (hidden, inside) = (config.hidden, config.intermediate);
    let [before, after] = names.norms(block);
    let [up, down] = names.mlp(block);
    Ok(Block {
        norms: [weights.norm(&before, hidden, config.epsilon)?, weights.norm(&after, hidden, config.epsilon)?],
        qkv: weights.linear(&names.qkv(block), 3 * hidden, hidden)?,
        projection: weights.linear(&names.projection(block), hidden, hidden)?,
        mlp: [weights.linear(&up, inside, hidden)?, weights.linear(&down, hidden, inside)?],
    })
}

fn read_merger(
    config: &Qwen3TowerConfig,
    weights: &WeightReader,
    names: &MergerNames,
    is_joined_first: bool,
) -> Result<Merger, VisionError> {
    let joined = config.hidden * config.patches_per_token();
    let normed = if is_joined_first { joined } else { config.hidden };
    let norm = weights.norm(&names.norm, normed, config.epsilon)?;
    let layers = [weights.linear(&names.first, joined, joined)?, weights.linear(&names.second, config.out, joined)?];
    Ok(Merger { norm, layers })
}

fn fingerprint(config: &Qwen3TowerConfig, processor: &Processor, values: &[&[f32]]) -> u64 {
    let mut hash = XxHash3_64::default();
    hash.write(format!("{config:?} {:?}", processor.config()).as_bytes());
    values.iter().for_each(|values| values.iter().for_each(|value| hash.write(&value.to_le_bytes())));
    hash.finish()
}

fn add(to: &mut [f32], values: &[f32]) {
    to.iter_mut().zip(values).for_each(|(to, value)| *to += value);
}
