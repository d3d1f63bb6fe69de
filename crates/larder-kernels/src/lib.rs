//! CPU kernels: matrix products with weights in the number format in which they are stored, softmax attention over a KV
//! cache, and the thread pool on which both run.
//!
//! The crate works on borrowed bytes. It never reads files, never copies or converts a weight matrix as a whole, and
//! allocates nothing per product.
//!
//! `portable.rs` defines every result to the bit. The SIMD kernels (AVX2, AVX-512, NEON) are chosen at run time and
//! give the same bits, so a result depends neither on the machine, nor on the number of threads, nor on what else is in
//! the batch.
//!
//! | type or function | what it is |
//! |---|---|
//! | [`WeightMatrix`] | a matrix as stored, with its number format and row order |
//! | [`Inputs`] | activations, as f32 and quantised to 8 bits |
//! | [`Product`], [`products()`] | matrix products, many in one fork-join |
//! | [`AttentionTask`], [`attend`] | attention of queries over pages of keys and values in f32, f16, bf16 or q8_0, many sequences in one fork-join |
//! | [`IndexArgs`], [`index_scores`] | scores by which sparse attention chooses rows |
//! | [`DeltaHead`], [`delta_rule()`] | the delta rule of linear attention, on states of all heads |
//! | [`Arithmetic`], [`widest()`] | plain arithmetic on rows, compiled for the widest vectors |
//! | [`ThreadPool`] | the threads that share the tasks of one fork-join |
//! | [`KernelChoice`], [`instruction_sets`] | kernels by name, and why the others are not used |
//! | [`Peak`], [`memory_bandwidth`] | what the processor and its memory do at most |
//!
//! # Example
//!
//! A 2 × 3 matrix in f32, times one token:
//!
//! ```
//! use larder_core::{NumberFormat, RowOrder};
//! use larder_kernels::{InputBuffer, Product, ThreadPool, WeightMatrix, products};
//!
//! let values = [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0];
//! let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
//! let weights =
//!     WeightMatrix { kind: NumberFormat::F32, order: RowOrder::Plain, rows: 2, cols: 3, scale: 1.0, bytes: &bytes };
//!
//! let mut buffer = InputBuffer::new();
//! let x = buffer.fill(&[1.0, 0.0, -1.0], 3, false);
//! let mut out = [0.0; 2];
//! let product = Product { weights, x, pick: None, out: &mut out };
//! products(&ThreadPool::single_threaded(), &mut [product]);
//! assert_eq!(out, [-2.0, -2.0]);
//! ```

mod attention;
mod block;
mod delta_rule;
mod disjoint;
mod dispatch;
mod dot;
mod erf;
mod formats;
mod inputs;
mod kernel_set;
mod peaks;
mod portable;
mod products;
mod simd;
mod strip;
mod tanh;
mod thread_pool;
mod weights;
mod widest;

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;

pub use attention::{
    AttentionArgs, AttentionTask, DistanceBias, IndexArgs, KvPages, KvTensor, TILE_POSITIONS, attend,
    attention_scratch_bytes, index_scores,
};
pub use delta_rule::{DeltaHead, DeltaSizes, TokenRows, delta_rule};
pub use dispatch::{KernelChoice, KernelChoiceError, SetUse, instruction_set, instruction_sets};
pub use erf::erf;
pub use formats::q8_0::quantise_row;
pub use formats::{narrow, widen};
pub use inputs::{InputBuffer, Inputs};
pub use kernel_set::UnavailableSet;
pub use larder_core::{exp, softplus};
pub use peaks::{Peak, memory_bandwidth};
pub use products::{PRODUCT_SCRATCH_BYTES, Product, products};
pub use tanh::tanh;
pub use thread_pool::{PoolActivity, RecordedForkJoin, RecordedRun, SimulatedRun, ThreadPool, WakeCosts};
pub use weights::{WeightMatrix, widen_row};
pub use widest::{Arithmetic, widest};

#[cfg(test)]
mod testing;
