//! The kernels of each instruction set, and the choice between them.

use std::sync::OnceLock;

use larder_core::ROW_GROUP;

use crate::attention::StridedRows;
use crate::inputs::Block;
use crate::portable;
use crate::weights::Panel;

/// The most tokens that a kernel is given at once.
pub const MAX_TOKENS: usize = 16;

/// The most panels that a kernel is given at once. Memory gives more to who reads in two places: on a Zen 3 one thread
/// reads 19 GB/s in one, 26 in two, and 28 in four.
pub const MAX_PANELS: usize = 2;

/// The results of a panel for one token; those beyond its rows mean nothing.
pub type Sums = [f32; ROW_GROUP];

/// What an instruction set has kernels for. All of them give the bits of [`portable`].
#[derive(Clone, Copy)]
pub struct KernelSet {
    pub(crate) name: &'static str,
    /// Products of 1 to [`MAX_PANELS`] panels of quantised weights with 1 to [`MAX_TOKENS`] tokens: `[panels, tokens]`.
    pub(crate) blocks: fn(&[Panel], &[&[Block]], &mut [Sums]),
    /// The same of floats.
    pub(crate) floats: fn(&[Panel], &[&[f32]], &mut [Sums]),
    /// Adds rows of floats, a factor for each, to the output, one row after the other.
    pub(crate) weighted_sum: fn(StridedRows, &[f32], &mut [f32]),
    /// Values as integers, 32 for each block.
    pub(crate) quantise: fn(&[f32], &mut [Block]),
}

/// The name of the instruction set that products use on this processor.
pub fn instruction_set() -> &'static str {
    KernelSet::best().name
}

/// One row for each instruction set, the best first: its kernels, if this processor can run them.
const TABLE: &[fn() -> Option<KernelSet>] = &[
    #[cfg(target_arch = "x86_64")]
    crate::avx2::set,
    #[cfg(target_arch = "aarch64")]
    crate::neon::with_dot_products,
    #[cfg(target_arch = "aarch64")]
    crate::neon::set,
    portable::set,
];

impl KernelSet {
    /// Those that this processor can run, the best first.
    pub fn all() -> impl Iterator<Item = KernelSet> {
        TABLE.iter().filter_map(|set| set())
    }

    /// The best of them, chosen once.
    pub fn best() -> &'static KernelSet {
        static BEST: OnceLock<KernelSet> = OnceLock::new();
        BEST.get_or_init(|| KernelSet::all().next().expect("every processor runs the portable kernels"))
    }

    /// The values in quantised form.
    pub fn quantise(&self, x: &[f32], out: &mut [Block]) {
        (self.quantise)(x, out);
    }
}

#[cfg(test)]
mod tests;
