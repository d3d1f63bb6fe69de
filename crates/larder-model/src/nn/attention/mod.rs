//! Attention in its forms, each a mixer in a file of its own, and their output gates.

mod cca;
mod compressed;
mod grouped_query;
mod latent;
mod output_gate;
mod relative;
mod selected;

pub use cca::{CcaInputs, CcaShape};
pub use compressed::{CompressedAttention, CompressedShape, Compressor, CompressorShape, Entries, EntryIndexer};
pub use grouped_query::{Attention, AttentionShape, AttentionTemperature, InputProducts, QkNorm};
pub use latent::{LatentAttention, LatentShape, RowChoice};
pub use output_gate::OutputGate;
pub use relative::{DistanceBuckets, PositionBias, RelativeAttention};
pub use selected::{KeysAndValues, RowAttention};
