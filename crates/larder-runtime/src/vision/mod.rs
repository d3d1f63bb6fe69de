//! How a model sees: its image tower, found beside its text weights, and pictures that become parts of prompts.

mod file;
mod found;
mod kept;
mod marks;
mod prompt;
#[cfg(feature = "vision")]
mod sight;
#[cfg(feature = "vision")]
mod tower;
#[cfg(not(feature = "vision"))]
#[path = "without.rs"]
mod tower;

pub use file::{PICTURE_BYTES, PICTURE_PIXELS, PictureFile};
pub use found::FoundTower;
pub use kept::{UNKNOWN_TOWER, kept_tower};
pub(crate) use marks::image_marks;
pub use prompt::{ImagePrompt, PromptWithImages, content_with_images, expand_images, pictures_to_show};
#[cfg(feature = "vision")]
pub use sight::ModelSight;
pub use tower::{find_tower, seeing_models, tokens_of_picture, vision_memory};
