//! Products of activations with weights in the format they are stored in, on borrowed bytes, and the threads that they
//! are computed on.
//!
//! `portable.rs` defines every product to the bit; other instruction sets are chosen at run time and give the same bits.
//! So a result depends neither on the machine, nor on the number of threads, nor on what else is computed with it.

mod affinity;
mod attention;
mod disjoint;
mod dot;
mod erf;
mod exp;
mod formats;
mod inputs;
mod kernel_set;
mod portable;
mod processors;
mod products;
mod tanh;
mod thread_pool;
mod weights;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod eight_rows;
#[cfg(target_arch = "aarch64")]
mod neon;

pub use attention::{AttentionArgs, KvTensor, attend};
pub use erf::erf;
pub use exp::exp;
pub use formats::{narrow, widen};
pub use inputs::Inputs;
pub use kernel_set::instruction_set;
pub use processors::performance_cores;
pub use products::{Product, products};
pub use tanh::tanh;
pub use thread_pool::ThreadPool;
pub use weights::{WeightMatrix, widen_row};

#[cfg(test)]
mod testing;
