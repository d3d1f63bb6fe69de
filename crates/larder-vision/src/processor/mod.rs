//! From a picture to the patches that a tower reads: resized on bytes, normalised, cut into patches. The values are
//! those of transformers' processors with torchvision, to the last bit.

use larder_core::ImageGrid;
use larder_kernels::ThreadPool;

use crate::decode::RgbImage;
use crate::error::VisionError;

mod config;
mod resize;
mod size;

pub use config::{MOST_PIXELS, ProcessorConfig};
pub use resize::ResizeFilter;
pub use size::{MOST_ASPECT, smart_resize};

/// A picture cut into patches.
#[derive(Clone, PartialEq, Debug)]
pub struct Patches {
    /// The grid of patches.
    pub rows: usize,
    /// Patches of a row.
    pub columns: usize,
    /// `[patches, channel, y, x]`. The patches of a token follow each other, row by row, as tokens do. A picture is
    /// the same at all times, so that these values stand for each of its time slices.
    pub values: Vec<f32>,
}

impl Patches {
    /// Number of patches.
    pub fn count(&self) -> usize {
        self.rows * self.columns
    }
}

/// Cuts pictures into patches.
#[derive(Clone, Debug)]
pub struct Processor {
    config: ProcessorConfig,
    /// What becomes of each byte of each channel.
    values: Box<[[f32; 256]; 3]>,
}

impl Processor {
    /// A processor.
    pub fn new(config: ProcessorConfig) -> Self {
        // Rescaling is moved into mean and deviation, in f32, as transformers does.
        let unscale = (1.0 / config.rescale) as f32;
        let value = |channel: usize, byte: usize| {
            let (mean, std) = (config.mean[channel] * unscale, config.std[channel] * unscale);
            (byte as f32 - mean) / std
        };
        let values = Box::new(std::array::from_fn(|channel| std::array::from_fn(|byte| value(channel, byte))));
        Processor { config, values }
    }

    /// Its settings.
    pub fn config(&self) -> &ProcessorConfig {
        &self.config
    }

    /// The same for at most this many pixels of a resized picture, and at least one token's.
    pub fn limited_to(&self, pixels: usize) -> Self {
        let mut config = self.config.clone();
        config.most_pixels = config.most_pixels.min(pixels).max(self.token_side().pow(2));
        config.least_pixels = config.least_pixels.min(config.most_pixels);
        Processor::new(config)
    }

    /// Pixels of the side of a token.
    pub fn token_side(&self) -> usize {
        self.config.patch * self.config.merge
    }

    /// The size to which a picture is resized: width and height.
    ///
    /// # Errors
    /// If one side is too long for the other.
    pub fn size(&self, width: usize, height: usize) -> Result<(usize, usize), VisionError> {
        let limits = (self.config.least_pixels, self.config.most_pixels);
        smart_resize((width, height), self.token_side(), limits).ok_or(VisionError::TooNarrow { width, height })
    }

    /// The grid of tokens that a picture of this size becomes.
    ///
    /// # Errors
    /// If one side is too long for the other.
    pub fn grid(&self, width: usize, height: usize) -> Result<ImageGrid, VisionError> {
        let (width, height) = self.size(width, height)?;
        Ok(ImageGrid { rows: height / self.token_side(), columns: width / self.token_side() })
    }

    /// Resizes a picture and cuts it into patches.
    ///
    /// # Errors
    /// If one side is too long for the other.
    pub fn patches(&self, pool: &ThreadPool, image: &RgbImage) -> Result<Patches, VisionError> {
        let size = self.size(image.width(), image.height())?;
        let from = (image.width(), image.height());
        let pixels = resize::resize(pool, image.pixels(), from, size, self.config.filter);
        let (rows, columns) = (size.1 / self.config.patch, size.0 / self.config.patch);
        let mut patches = Patches { rows, columns, values: vec![0.0; pixels.len()] };
        let patch_values = 3 * self.config.patch * self.config.patch;
        pool.run_chunks(&mut patches.values, patch_values, &|number, out| {
            let (row, column) = self.place(number, columns);
            self.cut(&pixels, size.0, row, column, out);
        });
        Ok(patches)
    }

    /// Row and column of the patch `number`.
    fn place(&self, number: usize, columns: usize) -> (usize, usize) {
        place(number, columns, self.config.merge)
    }

    fn cut(&self, pixels: &[u8], width: usize, row: usize, column: usize, out: &mut [f32]) {
        let patch = self.config.patch;
        for (channel, out) in out.chunks_exact_mut(patch * patch).enumerate() {
            for (y, out) in out.chunks_exact_mut(patch).enumerate() {
                let first = ((row * patch + y) * width + column * patch) * 3;
                let bytes = pixels[first..][..3 * patch].as_chunks::<3>().0;
                out.iter_mut().zip(bytes).for_each(|(out, pixel)| *out = self.values[channel][pixel[channel] as usize]);
            }
        }
    }
}

/// Row and column of the patch `number`, where the `merge` × `merge` patches of a token follow each other.
pub fn place(number: usize, columns: usize, merge: usize) -> (usize, usize) {
    let (token, within) = (number / (merge * merge), number % (merge * merge));
    let (row, column) = (token / (columns / merge), token % (columns / merge));
    (row * merge + within / merge, column * merge + within % merge)
}
