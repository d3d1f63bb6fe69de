//! The operations of a step on rows of activations, and their backends: a layer is written once over [`Ops`].

mod activation;
mod cca;
mod convolution;
mod cpu;
mod delta_rule;
mod hyper_connections;
mod near;
mod parts;
mod recurrent;
mod rotary;
mod row_norms;
mod rows;
mod sampled;
mod scan;
mod top_scores;
mod topk_rows;

use std::sync::OnceLock;

pub use activation::{Activation, GateFunction};
pub(crate) use activation::{sigmoid, silu};
pub use cca::{CcaOps, HeadConvolution, HeadMix};
pub(crate) use convolution::{convolve_rows, shift_window};
pub use cpu::{CpuOps, CpuPages, HostBuffer, HostRows, gather_bytes};
pub(crate) use delta_rule::Decays;
pub use delta_rule::{ChannelDecay, DeltaHeads};
pub use hyper_connections::{HyperConnectionOps, MATRIX_STREAMS, ManifoldWeights, ScaledSides, StreamGate, StreamMix};
use larder_kernels::AttentionArgs;
pub use near::{HandedChoice, ListLengths, Near};
pub(crate) use parts::{StateParts, share};
pub use recurrent::{
    ChannelScan, Convolution, Decay, Delta, GateOrder, NormGate, RecurrentOps, Scan, ScanHeads, StateSpan,
};
pub use rotary::{RopeTable, Rotary};
pub(crate) use row_norms::{layer_norm_row, rms_row, scale, sum};
pub use rows::{Few, Rows};
pub use sampled::{ChangedLogit, DrawOps, DrawnFrom, LogitChanges, TokenDraw};
pub(crate) use scan::{ChannelTokens, ScanTokens};
pub(crate) use top_scores::{SCORES, best_of_blocks, highest};
pub use topk_rows::{BlockPooling, ChoiceOps, IndexBlocks, IndexChoice, SeenRows};

use crate::device::{KvView, Place};
use crate::error::Result;
use crate::weights::PlacedMatrix;

/// The most logits of a row that [`Ops::find_best`] returns.
pub const BEST_FOUND: usize = 127;

/// Queries, keys and values of new tokens as their matmuls yield them, and what is done with each head before
/// attention.
pub struct Heads<'a> {
    /// `[tokens, heads · key width]`, or the first values of each head if there is a rest.
    pub queries: Rows,
    /// The other values of each query.
    pub rest: Option<HeadRest>,
    /// `[tokens, key heads · key width]`
    pub keys: Rows,
    /// `[tokens, key heads · value width]`; `None` if values are the first numbers of keys, in the same pages.
    pub values: Option<Rows>,
    /// The norm of queries and keys.
    pub norm: Option<HeadNorm>,
    /// Queries and keys after a norm over all heads, and values, are clamped to ± this.
    pub clip: Option<f32>,
    /// Each head of the values has an RMS norm without weights, with this added under the root; the same as in `norm`,
    /// if there is one.
    pub value_norm: Option<f64>,
    /// Factor on the values.
    pub value_factor: f32,
    /// The rotation of each head of queries and keys.
    pub rotation: Option<Rotation<'a>>,
    /// `[tokens]`: factors on queries, after the rotation; empty for none.
    pub scales: &'a [f32],
    /// The values of the bias that all tasks have, if they have one, as values that are [kept](Ops::keep).
    pub bias: Option<usize>,
}

/// The last values of each query.
#[derive(Clone, Copy, Debug)]
pub struct HeadRest {
    /// `[tokens, heads · any]`
    pub rows: Rows,
    /// Which of a head's values is the first.
    pub first: usize,
}

/// An RMS norm of queries and keys.
#[derive(Clone, Copy, Debug)]
pub struct HeadNorm {
    /// The weights for queries and for keys, as values that are [kept](Ops::keep); `None` where there is no norm, or
    /// after the rotation one without weights.
    pub weights: [Option<usize>; 2],
    /// Added under the roots.
    pub eps: [f64; 2],
    /// Whether it is over all heads of a token instead of over each.
    pub whole: bool,
    /// The values of each head that it is over, from the first on, if it is not over all.
    pub width: Option<usize>,
    /// Whether it is after the rotation; then it is over each head.
    pub after_rotation: bool,
}

/// The rotation of some values of each head.
#[derive(Clone, Copy, Debug)]
pub struct Rotation<'a> {
    /// `[tokens, dim / 2]`: cosines and sines.
    pub cos_sin: &'a [(f32, f32)],
    /// The first value of a head that is rotated.
    pub first: usize,
    /// Values of a head that are rotated.
    pub dim: usize,
    /// Pairs are adjacent instead of in halves.
    pub interleaved: bool,
}

/// Chains of operations on rows of activations that stay in a device's memory. Only [`download`](Self::download) waits;
/// the others begin an operation, and operations run in the order of their calls. Each has the bits of its counterpart
/// on the CPU.
pub trait Ops: ChoiceOps + CcaOps + DrawOps + RecurrentOps + HyperConnectionOps + Send + Sync {
    /// Copies values that do not change, such as the weight of a norm, to the device, and returns their id.
    fn keep(&self, values: &[f32]) -> Result<usize>;

    /// A buffer for new rows, which the caller writes and [uploads](Self::upload).
    fn buffer(&self, rows: usize, width: usize) -> HostBuffer {
        HostBuffer::new(rows, width)
    }

    /// The rows of a buffer.
    fn upload(&self, buffer: HostBuffer) -> Result<Rows>;

    /// These values, in rows of `width`.
    fn send(&self, values: &[f32], width: usize) -> Result<Rows> {
        let mut buffer = self.buffer(values.len() / width, width);
        buffer.values().copy_from_slice(values);
        self.upload(buffer)
    }

    /// A layer begins, which uses results of the one before only: memory of earlier ones can be used again, without a
    /// wait.
    fn begin_layer(&self);

    /// Of all rows only these are used from now on: the memory of the others can be used again at once.
    fn retain(&self, live: &[Rows]) {
        let _ = live;
    }

    /// Whether it draws tokens, so that a step can begin before the host knows the token before.
    fn draws(&self) -> bool {
        true
    }

    /// Where rows are.
    fn place(&self) -> Place {
        Place::Device
    }

    /// Some consecutive rows of `x`, without a copy.
    fn slice(&self, x: Rows, first: usize, rows: usize) -> Result<Rows>;

    /// Attention of new tokens, whose rows are those of all tasks in order; tasks come without queries. Norms and
    /// rotations are computed first, and keys and values are written to the pages of the tasks: those of a token at the
    /// last position that it sees. May overwrite the queries and the keys.
    fn attend_new(&self, heads: &Heads, tasks: &[&AttentionArgs<KvView>]) -> Result<Rows>;

    /// `out[t, r] = Σ_c weights[r, c] · x[t, c]` for each of `weights`.
    fn matmul(&self, x: Rows, weights: &[&PlacedMatrix]) -> Result<Few<Rows>>;

    /// One matmul per head: `out[t, h · rows + r] = Σ_c weights[h][r, c] · x[t, h · step + c]`, where the step is the
    /// width of `x` by the number of heads. The caller guarantees weights of one shape and number format, and a step of
    /// whole blocks unless that is a float.
    fn matmul_heads(&self, x: Rows, weights: &[PlacedMatrix]) -> Result<Rows>;

    /// `act(gate) · up`, of rows of equal shapes. May overwrite `gate`.
    fn combine(&self, act: Activation, gate: Rows, up: Rows) -> Result<Rows>;

    /// `act(x)`. May overwrite `x`.
    fn activate(&self, act: Activation, x: Rows) -> Result<Rows>;

    /// `cap · tanh(x / cap)`. May overwrite `x`.
    fn softcap(&self, x: Rows, cap: f32) -> Result<Rows>;

    /// Values times a function of their gates: `x [n, heads · any]`, `gates [n, heads · any]`, with a gate for each
    /// value of a head or one for all of them. May overwrite `x`.
    fn gate(&self, x: Rows, gates: Rows, function: GateFunction, heads: usize) -> Result<Rows>;

    /// The norm of parts of the rows of `x`, with a function of `gates`, of the same shape. May overwrite `x`.
    fn norm_gate(&self, x: Rows, gates: Rows, norm: &NormGate) -> Result<Rows>;

    /// `factor · x`. May overwrite `x`.
    fn scale(&self, x: Rows, factor: f32) -> Result<Rows>;

    /// `x` with the values of each row times factors that are [kept](Self::keep), one for each.
    fn scale_columns(&self, x: Rows, factors: usize) -> Result<Rows>;

    /// `x + factor · y`, of rows of equal shapes. May overwrite `y`.
    fn add(&self, x: Rows, y: Rows, factor: f32) -> Result<Rows>;

    /// `x + factor · y`, and the RMS norm of each row of that, as [`rms_norm`](Self::rms_norm). May overwrite `y`.
    fn add_norm(&self, x: Rows, y: Rows, factor: f32, weight: usize, eps: f64) -> Result<[Rows; 2]>;

    /// `x` with a value that is [kept](Self::keep) added to each row. May overwrite `x`.
    fn add_row(&self, x: Rows, row: usize) -> Result<Rows>;

    /// `x / sqrt(mean(x²) + eps) · weight` for each row; the weight is a value that is [kept](Self::keep).
    fn rms_norm(&self, x: Rows, weight: usize, eps: f64) -> Result<Rows>;

    /// `(x - mean(x)) / sqrt(variance(x) + eps) · weight + bias` for each row; weight and bias are values that are
    /// [kept](Self::keep).
    fn layer_norm(&self, x: Rows, weights: [usize; 2], eps: f64) -> Result<Rows>;

    /// Finds the `best` highest values of each row, all equal to the last of them, and maybe some lower ones; NaN and
    /// infinity count as highest. A row of the result has the bits of their number, which may be more than
    /// [`BEST_FOUND`], and if it is not, behind it for each in any order the bits of its place in the row and its
    /// value.
    fn find_best(&self, x: Rows, best: usize) -> Result<Rows>;

    /// The values at some places of each row, which become minus infinity in `x`: `[rows, at least places]`. The places
    /// differ; behind the row there is no value.
    fn take_out(&self, x: Rows, places: &[u32]) -> Result<Rows>;

    /// Begins to copy rows back after the operations so far: [`download`](Self::download) of the same rows waits for
    /// these only, and the device goes on with what is begun in between.
    fn begin_download(&self, wanted: &[Rows]) -> Result<()> {
        let _ = wanted;
        Ok(())
    }

    /// Waits for all operations so far, and yields rows in main memory. Reports the errors of operations since the last
    /// call, if it has waited for them.
    fn download(&self, wanted: &[Rows]) -> Result<Few<HostRows>>;
}

/// The copy of values that do not change, on the device of their model. It is made when it is first used.
#[derive(Default)]
pub(crate) struct Constant([OnceLock<usize>; 2]);

impl Constant {
    /// The id of the copy of `values`.
    pub fn of(&self, values: &[f32], ops: &dyn Ops) -> Result<usize> {
        self.made_by(ops, || ops.keep(values))
    }

    /// As [`of`](Self::of), for values that are made for it.
    pub fn of_values(&self, values: impl FnOnce() -> Vec<f32>, ops: &dyn Ops) -> Result<usize> {
        self.made_by(ops, || ops.keep(&values()))
    }

    fn made_by(&self, ops: &dyn Ops, make: impl FnOnce() -> Result<usize>) -> Result<usize> {
        let own = &self.0[ops.place() as usize];
        match own.get() {
            Some(id) => Ok(*id),
            None => {
                let id = make()?;
                Ok(*own.get_or_init(|| id))
            }
        }
    }
}
