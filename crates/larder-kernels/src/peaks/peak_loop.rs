//! The loop whose rate is the peak of an instruction set.

/// Registers that are added to in turn, as many as an instruction set leaves: 16 has AVX2, and 32 NEON. Two units that
/// take an addition each cycle and have its sum after five are busy with ten; Arm's processors have up to four units.
pub const CHAINS: usize = if cfg!(target_arch = "aarch64") { 24 } else { 12 };

/// A loop of nothing but additions of products, to enough registers that none has to wait for the last one.
#[derive(Clone, Copy)]
pub struct PeakLoop {
    /// The instructions.
    pub instructions: &'static str,
    /// Multiplications and additions of a round.
    pub operations: usize,
    /// Runs a number of rounds.
    pub run: fn(u64),
}
