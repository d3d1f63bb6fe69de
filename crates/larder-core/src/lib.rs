//! Types that all crates of larder share: ids of layers and experts, number formats, the byte layout of an expert, the
//! gate that turns router logits into experts and weights, the description of a checkpoint, and routing traces.
//!
//! This crate holds no weights, starts no threads, measures no time and calls no operating system. The only files that
//! it reads and writes, through larder-os, are those of a [`Trace`] and of [`ExpertActivations`].
//!
//! - [`LayerIdx`], [`MoeRow`], [`ExpertId`], [`ExpertKey`]: ids.
//! - [`NumberFormat`], [`RowOrder`], [`TensorMeta`], [`Tensors`]: how weights are encoded, and how tensors are read by
//!   name.
//! - [`ExpertLayout`], [`PerMatrix`]: where gate, up and down lie in the bytes of one expert.
//! - [`Blueprint`], [`Geometry`]: what a config says about a model's tensors and sizes.
//! - [`Gate`]: from router logits to experts and their weights.
//! - [`CacheScope`], [`Residency`]: what routing and eviction share with the cache.
//! - [`EncodedImage`], [`ImageGrid`]: what stands for an image in a prompt.
//! - [`Trace`]: the recorded routing of a run.
//!
//! ```
//! use larder_core::{ExpertLayout, Gate, NumberFormat};
//!
//! // The best two of four experts, with weights that sum to 1.
//! let gate = Gate::softmax(4, 2, true).checked()?;
//! let logits = [0.0, 2.0, 1.0, -1.0];
//! let (mut scores, mut chosen, mut weights) = (vec![], vec![], vec![]);
//! gate.selection_scores(&logits, &mut scores);
//! gate.choose(&scores, &mut chosen);
//! gate.weights(&logits, &chosen, &mut weights);
//! assert_eq!(chosen.iter().map(|e| e.0).collect::<Vec<_>>(), [1, 2]);
//! assert!((weights.iter().sum::<f32>() - 1.0).abs() < 1e-6);
//!
//! // What one expert of hidden size 64 and width 32 takes in q8_0, padded to whole pages.
//! let layout = ExpertLayout::new(64, 32, [NumberFormat::Q8_0; 3], false)?;
//! assert_eq!(layout.bytes, 8192);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod checkpoint;
mod definition;
mod experts;
mod fieldwise;
mod formats;
mod ids;
mod images;
mod memory;
mod numbers;
mod task_threads;
mod text;
mod trace;

pub use checkpoint::blueprint::{
    Blueprint, ExpertNames, Geometry, IGNORED_KEY, MTP_KEY, RowPick, TensorSlice, TensorSpec,
};
pub use checkpoint::tensors::{
    MatrixScale, TensorMeta, TensorRows, Tensors, TensorsError, matrix_scale, matrix_scale_name,
};
pub use definition::DEFINITION;
pub use experts::gate::{ExpertGroups, Gate, GateError, GroupRank, Renorm, Score, Weighting};
pub use experts::layout::{
    ComputeStage, ExpertLayout, ExpertPart, LayoutError, PART_ALIGN, SEGMENTS, SHARD_ALIGN, STAGED_ROWS,
};
pub use experts::per_matrix::PerMatrix;
pub use experts::residency::{CacheScope, Presence, Residency};
pub use formats::block_parts::{BlockParts, ROW_GROUP};
pub use formats::code_books;
pub use formats::integers::{DIGITS, digits, from_digits};
pub use formats::levels::{
    IQ2_LEVELS, IQ3_S_LEVELS, IQ3_XXS_LEVELS, IQ4_NL_LEVELS, MXFP4_LEVELS, mxfp4_scale, nvfp4_scale,
};
pub use formats::number_format::{NumberFormat, UnknownNumberFormat};
pub use formats::row_order::{RowOrder, UnknownRowOrder, deinterleave, interleave};
pub use ids::{ExpertId, ExpertKey, LayerIdx, MoeRow, WantedExpert};
pub use images::{EncodedImage, FIRST_IMAGE_ID, ImageGrid};
pub use memory::sequence::{CheckpointPolicy, KV_PAGE_TOKENS, SequenceMemory};
pub use memory::step::StepMemory;
pub use numbers::exp::{exp, softplus};
pub use numbers::rng::Rng;
pub use numbers::xoshiro::Xoshiro256;
pub use task_threads::{CallerThread, TaskThreads};
pub use text::prefix::common_prefix;
pub use text::printable::{PRINTABLE_CHARS, printable};
pub use text::timestamp::rfc3339;
pub use text::units::{format_bytes, format_count, parse_bytes, size_down, size_up};
pub use trace::expert_activations::{Coactivation, ExpertActivations, ExpertActivationsError};
pub use trace::{
    CapacityAt, EXPERTS_MAX, GATES_KEY, Steps, Trace, TraceError, TracePass, TraceStep, TraceToken, UNUSED,
};
