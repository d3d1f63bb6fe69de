//! Kernel launches: arguments, and numbers of blocks and threads.
#![allow(unsafe_code)]

mod attention;
mod expert_choice;
mod hyper_connections;
mod products;
mod recurrent;
mod rows;
mod sampling;
mod sums;
mod topk_rows;

use std::sync::Arc;

#[cfg(any(feature = "cuda", feature = "emulator"))]
use larder_core::NumberFormat;
use larder_model::Activation;

use crate::driver::{Argument, Driver, Launch, MAX_ARGUMENTS, Stream};
use crate::error::{GpuError, Result};
pub use attention::{AttentionKernelArgs, NewHeadsArgs, RowCopy, TaskList};
pub use expert_choice::{ChoiceArgs, ExpertList};
pub use products::{ProductBatch, ProductKernelArgs};
pub use recurrent::{ChannelScanArgs, ConvolutionArgs, DeltaArgs, HeadConvolutionArgs, ScanArgs, StateArgs};
pub use sampling::{BestArgs, ChangeArgs, DrawArgs, DrawPlaces};
pub use sums::{ExpertSum, ExpertTerm};
pub use topk_rows::{BestOfBlocks, ChoiceOfRows, IndexTask, PoolTask, PooledBlocks};

/// Warps of a block that computes products or quantises; each has rows or values of its own.
const WARPS: u32 = 4;
/// Threads of a block with one value per thread.
const THREADS: u32 = 256;
/// The kernel that copies between main memory and the device.
pub const COPY_KERNEL: &str = "copy_bytes";
/// The most threads of a block.
const MAX_THREADS: u32 = 1024;
/// Bytes that a thread copies at a time.
const COPY_BYTES_PER_THREAD: u64 = 16;
/// The most blocks of a copy: with that many threads enough bytes are in flight to fill any link, and more do not help.
const MAX_COPY_BLOCKS: u32 = 64;

/// Every kernel that is launched here.
#[cfg(any(feature = "cuda", feature = "emulator"))]
pub fn all_kernels() -> Vec<&'static str> {
    let mut products: Vec<_> = NumberFormat::ALL.into_iter().flat_map(products::kernels).collect();
    products.dedup();
    [&products[..], &OTHER_KERNELS].concat()
}

/// Those that are no products.
#[cfg(any(feature = "cuda", feature = "emulator"))]
const OTHER_KERNELS: [&str; 77] = [
    "silu",
    "gelu",
    "gelu_tanh",
    "relu",
    "relu2",
    "silu_alone",
    "gelu_alone",
    "gelu_tanh_alone",
    "relu_alone",
    "relu2_alone",
    "clamped_swiglu",
    "clamped_silu",
    "limited_silu",
    "softcap",
    "gate_values",
    "convolve",
    "convolve_heads",
    "mix_heads",
    "add_scaled_sides",
    "side_by_side",
    "gate_by_keys",
    "delta_rule",
    "delta_rule_wide",
    "scan_states",
    "scan_channels",
    "norm_gate",
    "quantise",
    "add_biases",
    "read_all",
    "scores_f32",
    "scores_f16",
    "scores_q8_0",
    "weighted_sum_f32",
    "weighted_sum_f16",
    "weighted_sum_q8_0",
    "partial_sums_f32",
    "partial_sums_f16",
    "partial_sums_q8_0",
    "add_partial_sums",
    "add_bias",
    "flash_f32",
    "flash_f16",
    "flash_q8_0",
    "copy_rows",
    "copy_bytes",
    "add_scaled",
    "add_norm",
    "rms_norm",
    "layer_norm",
    "scale_columns",
    "scale_inputs",
    "sum_experts",
    "sum_experts_norm",
    "choose_experts",
    "best_of_slices",
    "collect_best",
    "weigh_slices",
    "draw_token",
    "take_row",
    "change_logits",
    "take_out",
    "new_heads_f32",
    "new_heads_f16",
    "new_heads_q8_0",
    "index_scores_f32",
    "index_scores_f16",
    "index_scores_q8_0",
    "choose_rows",
    "best_of_blocks",
    "pool_blocks_f32",
    "pool_blocks_f16",
    "pool_blocks_q8_0",
    "stream_weights",
    "read_streams",
    "write_streams",
    "stream_gates",
    "gated_mean",
];

/// The arguments of adding one bias, as the kernel reads them.
#[derive(Clone, Copy, Debug)]
pub struct BiasKernelArgs {
    /// `[cols]`
    pub bias: u64,
    /// `[tokens, cols]`
    pub out: u64,
    /// Number of rows that the bias is added to.
    pub tokens: u32,
    /// Values per row.
    pub cols: u32,
}

impl BiasKernelArgs {
    /// Size of the struct in kernels.
    pub const BYTES: usize = 24;

    /// The bytes of the struct in kernels.
    pub fn to_bytes(self) -> [u8; BiasKernelArgs::BYTES] {
        pack([self.bias, self.out], [self.tokens, self.cols])
    }
}

/// A count as a 32-bit argument of kernels.
pub fn word(count: usize) -> Result<u32> {
    u32::try_from(count)
        .map_err(|_| GpuError::Unsupported(format!("{count} values exceed the limit of 4294967295 per kernel launch")))
}

/// The kernel of an activation function for experts without a gate.
pub fn kernel_alone(act: Activation) -> Result<&'static str> {
    match act {
        Activation::Silu => Ok("silu_alone"),
        Activation::Gelu => Ok("gelu_alone"),
        Activation::GeluTanh => Ok("gelu_tanh_alone"),
        Activation::Relu => Ok("relu_alone"),
        Activation::Relu2 => Ok("relu2_alone"),
        Activation::ClampedSwiglu { .. } | Activation::ClampedSilu { .. } | Activation::LimitedSilu { .. } => {
            Err(GpuError::Unsupported("clamped experts without a gate matrix are computed on the CPU only".into()))
        }
    }
}

/// Launches kernels on the compute stream.
pub struct Launches(Arc<dyn Driver>);

impl Launches {
    /// Launches on this device.
    pub fn new(driver: &Arc<dyn Driver>) -> Self {
        Launches(driver.clone())
    }

    /// Computes the products of a batch, whose list was written to address `list`.
    pub fn products(&self, round: &ProductBatch, list: u64) -> Result<()> {
        let (count, groups) = (round.products().len() as u32, round.groups());
        let Some(kernel) = round.kernel(self.0.has_tensor_cores()).filter(|_| groups > 0) else { return Ok(()) };
        let arguments = [Argument::Address(list), Argument::Word(count), Argument::Word(groups)];
        self.launch(kernel, [groups.div_ceil(WARPS), 1], 32 * WARPS, &arguments)
    }

    /// Applies the activation function: replaces `gate` by its combination with `up`, both of `count` values, and
    /// quantises it into `blocks` unless that is 0.
    pub fn combine(&self, act: Activation, [gate, up, blocks]: [u64; 3], count: u32) -> Result<()> {
        let [gate, up, blocks] = [gate, up, blocks].map(Argument::Address);
        let count_of = Argument::Word(count);
        let grid = [count.div_ceil(THREADS), 1];
        let kernel = match act {
            Activation::Silu => "silu",
            Activation::Gelu => "gelu",
            Activation::GeluTanh => "gelu_tanh",
            Activation::Relu => "relu",
            Activation::Relu2 => "relu2",
            Activation::ClampedSwiglu { alpha, limit } => {
                let arguments = [gate, up, count_of, blocks, Argument::Float(alpha), Argument::Float(limit)];
                return self.launch("clamped_swiglu", grid, THREADS, &arguments);
            }
            Activation::ClampedSilu { limit } => {
                let arguments = [gate, up, count_of, blocks, Argument::Float(limit)];
                return self.launch("clamped_silu", grid, THREADS, &arguments);
            }
            Activation::LimitedSilu { limit } => {
                let arguments = [gate, up, count_of, blocks, Argument::Float(limit)];
                return self.launch("limited_silu", grid, THREADS, &arguments);
            }
        };
        self.launch(kernel, grid, THREADS, &[gate, up, count_of, blocks])
    }

    /// Applies the activation function to `count` values, for experts without a gate.
    pub fn apply(&self, act: Activation, x: u64, count: u32) -> Result<()> {
        let arguments = [Argument::Address(x), Argument::Word(count)];
        self.launch(kernel_alone(act)?, [count.div_ceil(THREADS), 1], THREADS, &arguments)
    }

    /// Quantises activations into `blocks` blocks.
    pub fn quantise(&self, x: u64, out: u64, blocks: u32) -> Result<()> {
        let arguments = [Argument::Address(x), Argument::Address(out), Argument::Word(blocks)];
        self.launch("quantise", [blocks.div_ceil(WARPS), 1], 32 * WARPS, &arguments)
    }

    /// Adds `count` biases, whose list was written to address `list`; the largest output has `max_values` values.
    pub fn add_biases(&self, list: u64, count: u32, max_values: u32) -> Result<()> {
        self.launch("add_biases", [max_values.div_ceil(THREADS), count], THREADS, &[Argument::Address(list)])
    }

    /// Reads bytes, to measure the bandwidth of memory; each of the `blocks` blocks writes a word to `out`.
    pub fn read_all(&self, from: u64, bytes: u64, out: u64, blocks: u32) -> Result<()> {
        let arguments = [Argument::Address(from), Argument::Bytes(bytes), Argument::Address(out)];
        self.launch("read_all", [blocks, 1], THREADS, &arguments)
    }

    /// Copies bytes between the device and page-locked memory by a kernel, bypassing the copy engine that is used for
    /// experts. Both addresses are multiples of 16.
    pub fn copy_bytes(&self, from: u64, to: u64, bytes: u64) -> Result<()> {
        let (grid, arguments) = copy_arguments(from, to, bytes);
        self.launch(COPY_KERNEL, grid, THREADS, &arguments)
    }

    /// A device takes no launch without blocks: nothing is asked of it then.
    fn launch(&self, kernel: &'static str, grid: [u32; 2], block: u32, arguments: &[Argument]) -> Result<()> {
        if grid.contains(&0) {
            return Ok(());
        }
        assert!(arguments.len() <= MAX_ARGUMENTS, "the kernel {kernel} has too many arguments");
        let launch = Launch { kernel, grid, block, arguments };
        // SAFETY: the arguments match the kernel's parameters. The memory that they name belongs to buffers that wait
        // for the device before they are freed.
        unsafe { self.0.launch(Stream::Compute, &launch) }
    }
}

/// The launch of [`copy_bytes`](Launches::copy_bytes), for `then`.
pub fn with_copy_launch<T>(from: u64, to: u64, bytes: u64, then: impl FnOnce(&Launch) -> T) -> T {
    let (grid, arguments) = copy_arguments(from, to, bytes);
    then(&Launch { kernel: COPY_KERNEL, grid, block: THREADS, arguments: &arguments })
}

fn copy_arguments(from: u64, to: u64, bytes: u64) -> ([u32; 2], [Argument; 3]) {
    let blocks = bytes.div_ceil(COPY_BYTES_PER_THREAD * u64::from(THREADS)).min(u64::from(MAX_COPY_BLOCKS));
    ([blocks as u32, 1], [Argument::Address(from), Argument::Address(to), Argument::Bytes(bytes)])
}

/// Packs addresses, then words, as a C compiler lays them out.
fn pack<const BYTES: usize, const ADDRESSES: usize, const WORDS: usize>(
    addresses: [u64; ADDRESSES],
    words: [u32; WORDS],
) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    let (front, back) = bytes.split_at_mut(8 * ADDRESSES);
    front.as_chunks_mut().0.iter_mut().zip(addresses).for_each(|(b, a)| *b = a.to_ne_bytes());
    back.as_chunks_mut().0.iter_mut().zip(words).for_each(|(b, w)| *b = w.to_ne_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_above_32_bits_is_an_error() {
        assert_eq!(word(7), Ok(7));
        let error = word(1 << 32).unwrap_err().to_string();
        assert_eq!(error, "4294967296 values exceed the limit of 4294967295 per kernel launch");
    }
}
