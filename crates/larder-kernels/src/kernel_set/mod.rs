//! The kernels of each instruction set, and the choice between them.

use std::sync::OnceLock;

use larder_core::ROW_GROUP;

use crate::attention::StridedRows;
use crate::inputs::Block;
use crate::portable;
use crate::weights::Panel;

/// The most tokens that a kernel takes in one call.
pub const MAX_TOKENS: usize = 16;

/// The most panels that a kernel takes in one call. Two streams of reads get more bandwidth than one: on a Zen 3 one
/// thread reads 19 GB/s from one place, 26 from two, and 28 from four.
pub const MAX_PANELS: usize = 2;

/// The results of a panel for one token; those beyond the rows of the panel are unspecified.
pub type Sums = [f32; ROW_GROUP];

/// The kernels of one instruction set. All sets give the bits of [`portable`].
#[derive(Clone, Copy)]
pub struct KernelSet {
    pub(crate) name: &'static str,
    /// Products of 1 to [`MAX_PANELS`] panels of quantised weights with 1 to [`MAX_TOKENS`] tokens: `[panels, tokens]`.
    pub(crate) blocks: fn(&[Panel], &[&[Block]], &mut [Sums]),
    /// As `blocks`, for weights in a float format and activations in f32.
    pub(crate) floats: fn(&[Panel], &[&[f32]], &mut [Sums]),
    /// Adds rows of floats, each times its factor, to the output, one row after the other.
    pub(crate) weighted_sum: fn(StridedRows, &[f32], &mut [f32]),
    /// Widens the first values of a row in `q8_0`.
    pub(crate) widen_q8_0: fn(&[u8], &mut [f32]),
    /// Quantises activations, 32 to a block.
    pub(crate) quantise: fn(&[f32], &mut [Block]),
}

/// The name of the instruction set whose kernels are used on this processor: `avx2`, `neon+dotprod`, `neon` or `portable`.
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
    /// The sets that this processor can run, the best first.
    pub fn all() -> impl Iterator<Item = KernelSet> {
        TABLE.iter().filter_map(|set| set())
    }

    /// The best set that this processor can run, chosen once.
    pub fn best() -> &'static KernelSet {
        static BEST: OnceLock<KernelSet> = OnceLock::new();
        BEST.get_or_init(|| KernelSet::all().next().expect("every processor runs the portable kernels"))
    }

    /// Quantises activations, 32 to a block.
    pub fn quantise(&self, x: &[f32], out: &mut [Block]) {
        (self.quantise)(x, out);
    }
}

#[cfg(test)]
mod tests;
