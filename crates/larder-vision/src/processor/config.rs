//! What `preprocessor_config.json` says, with the defaults of the processor's class.

use serde_json::Value;

use super::resize::ResizeFilter;
use crate::error::VisionError;
use crate::fields::BoundedFields;

/// The most pixels of a resized picture, whatever a file says: 65,536 tokens of 32 × 32.
pub const MOST_PIXELS: usize = 1 << 26;

/// How pictures become patches.
#[derive(Clone, PartialEq, Debug)]
pub struct ProcessorConfig {
    /// Pixels of a patch's side.
    pub patch: usize,
    /// Patches of the side of a token.
    pub merge: usize,
    /// How often a picture is repeated in time.
    pub temporal: usize,
    /// The least pixels of a resized picture.
    pub least_pixels: usize,
    /// The most pixels of a resized picture.
    pub most_pixels: usize,
    /// Mean of red, green and blue, where white is 1.
    pub mean: [f32; 3],
    /// Standard deviations of red, green and blue.
    pub std: [f32; 3],
    /// What bytes are multiplied with.
    pub rescale: f64,
    /// The filter.
    pub filter: ResizeFilter,
}

impl ProcessorConfig {
    /// The defaults of transformers' class for Qwen2-VL, from which the files of later models differ.
    pub fn qwen() -> Self {
        ProcessorConfig {
            patch: 14,
            merge: 2,
            temporal: 2,
            least_pixels: 56 * 56,
            most_pixels: 28 * 28 * 1280,
            mean: [0.481_454_66, 0.457_827_5, 0.408_210_73],
            std: [0.268_629_54, 0.261_302_6, 0.275_777_1],
            rescale: 1.0 / 255.0,
            filter: ResizeFilter::Bicubic,
        }
    }

    /// From `preprocessor_config.json`, or `processor_config.json`, which has the same under `image_processor`.
    ///
    /// # Errors
    /// If a value is of a wrong kind, out of bounds, or asks for what this processor does not do.
    pub fn read(file: &Value) -> Result<Self, VisionError> {
        let nested = file.get("image_processor").filter(|inner| inner.is_object());
        let fields = BoundedFields::new("preprocessor_config.json", nested.unwrap_or(file))?;
        let (default, size) = (Self::qwen(), fields.object("size")?);
        let pixels = |edge: &str, key: &str, default: usize| -> Result<usize, VisionError> {
            let of_size = match &size {
                Some(size) => size.whole(edge, 1..=MOST_PIXELS)?.or(size.whole(key, 1..=MOST_PIXELS)?),
                None => None,
            };
            Ok(fields.whole(key, 1..=MOST_PIXELS)?.or(of_size).unwrap_or(default))
        };
        for key in ["do_resize", "do_rescale", "do_normalize", "do_convert_rgb"] {
            if fields.flag(key)? == Some(false) {
                return Err(fields.wrong(key, "true"));
            }
        }
        let filter = match fields.whole("resample", 0..=5)? {
            None | Some(3) => ResizeFilter::Bicubic,
            Some(2) => ResizeFilter::Bilinear,
            Some(_) => return Err(fields.wrong("resample", "2 (bilinear) or 3 (bicubic)")),
        };
        let config = ProcessorConfig {
            patch: fields.whole("patch_size", 1..=64)?.unwrap_or(default.patch),
            merge: fields.whole("merge_size", 1..=8)?.unwrap_or(default.merge),
            temporal: fields.whole("temporal_patch_size", 1..=8)?.unwrap_or(default.temporal),
            least_pixels: pixels("shortest_edge", "min_pixels", default.least_pixels)?,
            most_pixels: pixels("longest_edge", "max_pixels", default.most_pixels)?,
            mean: fields.three("image_mean")?.unwrap_or(default.mean),
            std: fields.three("image_std")?.unwrap_or(default.std),
            rescale: fields.number("rescale_factor")?.unwrap_or(default.rescale),
            filter,
        };
        config.checked(&fields)
    }

    fn checked(self, fields: &BoundedFields) -> Result<Self, VisionError> {
        if self.least_pixels > self.most_pixels {
            return Err(fields.wrong("size", "limits of which the lower is not above the upper"));
        }
        if self.std.iter().any(|std| *std < 1e-6) {
            return Err(fields.wrong("image_std", "three numbers above zero"));
        }
        if !(1e-6..=1e3).contains(&self.rescale) {
            return Err(fields.wrong("rescale_factor", "a number such as 1/255"));
        }
        Ok(self)
    }
}
