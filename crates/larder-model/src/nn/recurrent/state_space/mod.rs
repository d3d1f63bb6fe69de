//! State-space layers (Mamba): a causal convolution, and a linear recurrence whose rates follow from the token.
//!
//! The state has rows of as many values as `B` and `C` have. With each token, a row decays, takes in the row's input,
//! and is read:
//!
//! ```text
//! row[n] = decay[n] · row[n] + dt · x · B[n]
//! y      = Σ_n row[n] · C[n] + D · x
//! ```
//!
//! Version 2 has one decay for all rows of a head, version 1 one for each value of each row. The rows do not depend on
//! each other, so threads share them, and each walks over the tokens with rows that stay in its cache. Token by token
//! is the definition.

mod mamba1;
mod mamba2;

pub use mamba1::{Mamba1, Mamba1Shape};
pub use mamba2::{Mamba2, Mamba2Shape};

use crate::config::config_error;
use crate::error::Result;

/// Upper limit of the values of a layer's state, far above any model.
const MAX_STATE: usize = 1 << 32;

/// Checks the sizes of a state with `rows` rows of `state` values each, and of the window of its convolution.
fn check_sizes(rows: usize, state: usize, channels: usize, conv: usize) -> Result<()> {
    let fits = |a: usize, b: usize| a.checked_mul(b).is_some_and(|values| values <= MAX_STATE);
    if fits(rows, state) && fits(channels, conv) {
        Ok(())
    } else {
        Err(config_error(format!("a state of {rows} rows with {state} values each is too large")))
    }
}

#[cfg(test)]
mod tests;
