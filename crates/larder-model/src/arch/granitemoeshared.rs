//! Granite-MoE with a shared expert: Granite-MoE, and an MLP beside the experts whose gate and up are one tensor.
//!
//! ```text
//! x += factor · (Σ_k weight · expert(y) + shared(y))  y = rms(x); the rest as Granite-MoE
//! ```

use super::granitemoe::{Relative, build_with};
use crate::config::Config;
use crate::error::Result;
use crate::stack::Stack;
use crate::weights::WeightLoader;

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    let shared_width = config.count_or(&["shared_intermediate_size"], 0)?;
    build_with(config, weights, Relative { shared_width, ..Relative::default() })
}
