//! The kernels of an instruction set, and the rows that they take.

use std::ops::Range;

use larder_core::{NumberFormat, ROW_GROUP};

use crate::block::Block;
use crate::strip::{STRIP_PANELS, Strip, StripSums};
use crate::weights::Panel;

/// The most tokens that a kernel takes in one call: as many as stay in the L2 cache with the weights of a panel.
pub const MAX_TOKENS: usize = 64;

/// The most panels that a kernel takes in one call. They fill a register of sixteen lanes, and two streams of reads get
/// more bandwidth than one: on a Zen 3 one thread reads 19 GB/s from one place, 26 from two, and 28 from four.
pub const MAX_PANELS: usize = 2;

/// The results of a panel for one token; those beyond the rows of the panel are unspecified.
pub type Sums = [f32; ROW_GROUP];

/// Rows at equal distances.
#[derive(Clone, Copy)]
pub struct StridedRows<'a> {
    pub kind: NumberFormat,
    /// Up to the last byte that is used.
    pub bytes: &'a [u8],
    /// Bytes from one row to the next.
    pub row_bytes: usize,
}

impl StridedRows<'_> {
    /// Checks what a weighted sum of these rows relies on: at least one output, all of one length that no row is
    /// shorter than, and for each output as many factors as there are rows.
    pub(crate) fn check(&self, factors: &[&[f32]], out: &[&mut [f32]]) {
        let (count, width) = (factors[0].len(), out[0].len());
        assert!(count > 0, "there are no rows");
        assert!(
            factors.len() == out.len() && factors.iter().all(|own| own.len() == count),
            "factors do not fit the outputs"
        );
        assert!(out.iter().all(|out| out.len() == width), "outputs differ in length");
        let end = (count - 1) * self.row_bytes + width * self.kind.block_bytes();
        assert!(end <= self.bytes.len(), "rows are shorter than the output");
    }

    /// The rows without the first `count`.
    pub fn skip(self, count: usize) -> Self {
        StridedRows { bytes: &self.bytes[count * self.row_bytes..], ..self }
    }
}

/// Weighted sums of rows: the factors of each output, and the outputs.
pub type WeightedSums = fn(StridedRows, &[&[f32]], &mut [&mut [f32]]);

/// Unpacks some blocks of each row of four panels, and meanwhile prefetches the bytes of others.
pub type Unpack = fn(&[Panel; STRIP_PANELS], Range<usize>, [&[u8]; STRIP_PANELS], &mut Strip);

/// The kernels for strips.
#[derive(Clone, Copy)]
pub struct StripKernels {
    /// From this number of tokens on they are faster.
    pub least: usize,
    /// Unpacks.
    pub unpack: Unpack,
    /// Adds the products of a strip with some tokens, from one of their blocks on, to their sums.
    pub multiply: fn(&Strip, &[&[Block]], usize, &mut [StripSums]),
}

/// Columns of a state that are computed at a time: of 128 rows they stay in the first-level cache.
pub const DELTA_COLUMNS: usize = 32;

/// Some columns of a row of a state.
pub type DeltaRow = [f32; DELTA_COLUMNS];

/// A token that a state takes in by the delta rule. All but the corrections have a value for each row.
pub struct DeltaStep<'a> {
    pub decays: &'a [f32],
    pub key: &'a [f32],
    pub query: &'a [f32],
    pub correction: &'a DeltaRow,
    /// The factors by which the next token reads.
    pub next: &'a [f32],
}

impl DeltaStep<'_> {
    /// Checks that there is a value for each of `rows`.
    pub(crate) fn check(&self, rows: usize) {
        let each = [self.decays, self.key, self.query, self.next];
        assert!(each.iter().all(|values| values.len() == rows), "a value for each row");
    }
}

/// The kernels for the delta rule.
#[derive(Clone, Copy)]
pub struct DeltaKernels {
    /// Sums of the rows of a state, each times its factor.
    pub read: fn(&[DeltaRow], &[f32]) -> DeltaRow,
    /// Takes in a token; what it reads, and what the next one does.
    pub step: fn(&mut [DeltaRow], DeltaStep) -> [DeltaRow; 2],
}

/// An instruction set that this processor does not have.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UnavailableSet {
    /// Name of the instruction set.
    pub name: &'static str,
    /// Features of it that the processor lacks.
    pub missing: Vec<&'static str>,
}

impl UnavailableSet {
    /// With all features of the instruction set, and whether the processor has them.
    pub fn new(name: &'static str, features: &[(&'static str, bool)]) -> Self {
        UnavailableSet { name, missing: features.iter().filter(|(_, has)| !has).map(|(feature, _)| *feature).collect() }
    }
}

/// The vectors of an instruction set.
#[derive(Clone, Copy)]
pub enum Vectors {
    /// Those that every processor of the architecture has.
    Common,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

/// The kernels of one instruction set. All sets give the bits of [`portable`](crate::portable).
#[derive(Clone, Copy)]
pub struct KernelSet {
    pub(crate) name: &'static str,
    /// Products of 1 to [`MAX_PANELS`] panels of quantised weights with 1 to [`MAX_TOKENS`] tokens: `[panels, tokens]`.
    pub(crate) blocks: fn(&[Panel], &[&[Block]], &mut [Sums]),
    /// Products of strips of quantised weights with many tokens, where they are faster than `blocks`.
    pub(crate) strips: Option<StripKernels>,
    /// As `blocks`, for weights in a float format and activations in f32.
    pub(crate) floats: fn(&[Panel], &[&[f32]], &mut [Sums]),
    /// Adds rows of floats to each output, each row times the output's factor for it, one row after the other.
    pub(crate) weighted_sums: WeightedSums,
    /// Vectors for plain arithmetic.
    pub(crate) vectors: Vectors,
    /// The delta rule.
    pub(crate) delta: DeltaKernels,
    /// Widens the first values of a row in `q8_0`.
    pub(crate) widen_q8_0: fn(&[u8], &mut [f32]),
    /// Quantises activations, 32 to a block.
    pub(crate) quantise: fn(&[f32], &mut [Block]),
}

impl KernelSet {
    /// Quantises activations, 32 to a block.
    pub fn quantise(&self, x: &[f32], out: &mut [Block]) {
        (self.quantise)(x, out);
    }
}
