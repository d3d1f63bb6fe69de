//! Products of activations with weights in the format they are stored in, on borrowed bytes, and the threads that they
//! are computed on.
//!
//! `portable.rs` defines every product to the bit; other instruction sets are chosen at run time and give the same bits.
//! So a result depends neither on the machine, nor on the number of threads, nor on what else is computed with it.

mod attention;
mod blocks;
mod crew;
mod disjoint;
mod dot;
mod erf;
mod exp;
mod inputs;
mod pin;
mod pool;
mod portable;
mod processors;
mod products;
mod set;
mod tanh;
mod weights;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod rows;

pub use attention::{Look, Table, attend};
pub use blocks::{narrow, widen};
pub use erf::erf;
pub use exp::exp;
pub use inputs::Inputs;
pub use pool::Pool;
pub use processors::strong_processors;
pub use products::{Product, products};
pub use set::instruction_set;
pub use tanh::tanh;
pub use weights::{Weights, widen_row};

#[cfg(test)]
mod testing;
