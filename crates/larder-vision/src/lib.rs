//! Pictures for models that see: bytes of a file to pixels ([`decode`]), pixels to patches ([`Processor`]), patches
//! to rows of the text model's residual stream ([`Tower`]).
//!
//! Everything is computed in f32 on a [`ThreadPool`](larder_kernels::ThreadPool), in orders of sums that depend on
//! nothing but the picture, so an encoded image has the same bits on one thread or many, alone or among others.

mod compute;
mod decode;
mod error;
mod fields;
mod processor;
mod tower;

pub use decode::{DecodeError, DecodeLimits, PictureFormat, RgbImage, decode};
pub use error::VisionError;
pub use processor::{MOST_ASPECT, MOST_PIXELS, Patches, Processor, ProcessorConfig, ResizeFilter, smart_resize};
pub use tower::{
    Tower, TowerFile, TowerLimits, TowerSizes, describe_processor, describe_tower, open_tower, seeing_model_types,
};
