//! Mixture-of-Experts decoders in candle, one file per `model_type`, all written in one vocabulary.
//!
//! A model holds its resident weights and knows nothing of where experts are: each MoE layer hands its router's
//! logits to an [`ExpertPath`]. There are no tokenizers, files or caches here.

mod arch;
mod bytes;
mod compute;
mod config;
mod decoder;
mod device;
mod double;
mod error;
mod experts;
mod matrix;
mod nn;
mod tap;
mod weights;
mod workbench;

pub use arch::model_types;
pub use compute::{Compute, Work};
pub use decoder::{Decoder, Rows, blueprint};
pub use device::{DeviceAttention, DeviceBench, DeviceProduct, DeviceProducts, DeviceRows, DeviceTable};
pub use double::{AttentionDouble, ProductsDouble};
pub use error::{ModelError, Result};
pub use experts::{AllResident, Call, ExpertPath, Routed, distinct, route};
pub use nn::{Activation, Memory, State};
pub use tap::{Phase, Tap};
pub use workbench::Workbench;
