//! Mixture-of-Experts decoders, one file per `model_type`, all built from the same parts (attention, norms, rotary
//! positions, MoE layers, KV cache).
//!
//! [`blueprint`] reads a `config.json` and lists the tensors that the model needs. [`Decoder`] loads the resident
//! weights and computes prefill and decode; [`KvCache`] is the state of one sequence. Each MoE layer hands its router
//! logits to an [`ExpertPath`], which chooses and computes the experts: [`AllResident`] keeps all of them in memory,
//! the crates above stream them. Matmuls and attention run on a [`ComputeContext`], on CPU threads or on a
//! device behind [`DeviceProducts`], [`DeviceAttention`], [`Ops`] and [`DeviceExperts`]. A [`Tap`] observes hidden
//! states, routing and times.
//!
//! This crate never opens a file, tokenises text, evicts or prefetches an expert. Results have the same bits for any
//! number of threads, any size of the prefill chunks, and on a device as on the CPU.
//!
//! A tiny model whose weights are all zero:
//!
//! ```
//! use std::collections::BTreeMap;
//! use std::sync::Arc;
//!
//! use larder_core::{ExpertLayout, NumberFormat, RowOrder, TensorMeta, Tensors, TensorsError};
//! use larder_model::{AllResident, ComputeContext, Decoder, Span, blueprint};
//!
//! struct Zeros(BTreeMap<String, TensorMeta>);
//!
//! impl Tensors for Zeros {
//!     fn meta(&self, name: &str) -> Option<&TensorMeta> {
//!         self.0.get(name)
//!     }
//!
//!     fn read(&self, _: &str, _: usize, into: &mut [u8]) -> Result<(), TensorsError> {
//!         into.fill(0);
//!         Ok(())
//!     }
//! }
//!
//! let config = serde_json::json!({
//!     "model_type": "mixtral", "vocab_size": 50, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2,
//!     "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
//!     "max_position_embeddings": 64
//! });
//! let geometry = blueprint(&config)?.geometry;
//! let meta = |shape: &[usize]| TensorMeta {
//!     kind: NumberFormat::F32,
//!     order: RowOrder::Plain,
//!     bytes: shape.iter().product::<usize>() * 4,
//!     shape: shape.to_vec(),
//! };
//! let resident = blueprint(&config)?.resident;
//! let weights = Zeros(resident.iter().map(|spec| (spec.name.clone(), meta(&spec.shape))).collect());
//!
//! let compute = Arc::new(ComputeContext::new(2, false)?);
//! let decoder = Decoder::load(&config, &weights, compute.clone())?;
//! let mut experts = AllResident::new(geometry.layers, compute);
//! for layer in &geometry.moe_layers {
//!     let layout = ExpertLayout::new(geometry.hidden, geometry.inter, [NumberFormat::F32; 3], false)?;
//!     let all = vec![vec![0u8; layout.bytes]; geometry.experts];
//!     experts.set(*layer, layout, all);
//! }
//!
//! let prompt = [7, 8, 9];
//! let mut cache = decoder.new_kv_cache();
//! let logits = decoder.step(&mut [Span::new(&prompt, &mut cache)], &mut experts, &mut ())?;
//! assert_eq!((logits.len(), cache.len), (50, 3));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod arch;
mod compute;
mod config;
mod decoder;
mod device;
mod error;
mod experts;
mod fake;
mod kv;
mod nn;
mod ops;
mod stack;
mod step;
mod tap;
mod weights;

pub use arch::{model_types, mtp_layers};
pub use compute::{ColumnSquares, ComputeContext, ComputeTime, ExpertInput, InputSquares, RowValues};
pub use decoder::{
    AheadInput, BegunStep, BestLogits, Decoder, Logits, LogitsRow, TokenLogit, blueprint, refused_keys, rewinds_freely,
    takes_images,
};
pub use device::{
    CHOICE_TOKENS, DeviceAttention, DeviceProduct, DeviceProducts, FEW_TILES, KvPageShape, KvView, MAX_SCORE_BYTES,
    MatrixShape, Place, TILE_QUERIES, device_attention_bytes, position_tiles,
};
pub use error::{Cause, ModelError, Result};
pub use experts::{
    AllResident, CallOnDevice, ChosenOnDevice, DeviceExperts, DeviceMoeCall, DevicePath, ExactExperts, ExactPath,
    ExpertPath, ExpertWorkspace, HashRouting, HintSource, MoeCall, PART_ROWS, Routed, route, wanted_experts,
};
pub use fake::{FakeAttention, FakeProducts};
pub use kv::{KvCache, KvFormat, KvPool, KvUsage, SavedStateError};
pub use larder_kernels::PoolActivity;
pub use ops::{
    Activation, BEST_FOUND, BlockPooling, CcaOps, ChangedLogit, ChannelDecay, ChannelScan, ChoiceOps, Convolution,
    CpuOps, CpuOps as FakeOps, CpuPages, Decay, Delta, DeltaHeads, DrawOps, DrawnFrom, Few, GateFunction, GateOrder,
    HeadConvolution, HeadMix, HeadNorm, HeadRest, Heads, HostBuffer, HostRows, HyperConnectionOps, IndexBlocks,
    IndexChoice, LogitChanges, MATRIX_STREAMS, ManifoldWeights, NormGate, Ops, RecurrentOps, Rotation, Rows,
    ScaledSides, Scan, ScanHeads, SeenRows, StateSpan, StreamGate, StreamMix, TokenDraw,
};
pub use step::{LogitsFor, PlacedImage, Span, SpanImages, TokenOrigin, TokenPhase};
pub use tap::{Phase, Tap};
pub use weights::{EmbeddingRows, Matrix, PlacedMatrix, RowTraffic, row_cache_bytes};
