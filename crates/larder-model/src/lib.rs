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
mod expert_workspace;
mod experts;
mod matrix;
mod nn;
mod tap;
mod weights;

pub use arch::model_types;
pub use compute::{ComputeContext, ComputeTime};
pub use decoder::{Decoder, LogitsFor, blueprint};
pub use device::{DeviceAttention, DeviceExperts, DeviceKvShape, DeviceKvView, DeviceProduct, DeviceProducts};
pub use double::{AttentionDouble, ProductsDouble};
pub use error::{ModelError, Result};
pub use expert_workspace::ExpertWorkspace;
pub use experts::{AllResident, ExpertPath, MoeCall, Routed, distinct, route};
pub use nn::{Activation, KvCache, KvFormat};
pub use tap::{Phase, Tap};
