//! Granite-MoE with a shared expert: Granite-MoE, and an MLP beside the experts whose gate and up are one tensor.
//!
//! ```text
//! x += factor · (Σ_k weight · expert(y) + shared(y))  y = rms(x); the rest as Granite-MoE
//! ```

use crate::config::Config;
use crate::error::Result;
use crate::stack::Stack;
use crate::weights::WeightLoader;

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    let width = config.count_or(&["shared_intermediate_size"], 0)?;
    super::granitemoe::build_with(config, weights, width)
}
