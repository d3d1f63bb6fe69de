//! Kernel launches: arguments, and numbers of blocks and threads.
#![allow(unsafe_code)]

mod attention;
mod choice;
mod recurrent;
mod sums;

use std::sync::Arc;

use larder_core::{ExpertPart, NumberFormat, ROW_GROUP, RowOrder};
use larder_model::Activation;

use crate::driver::{Argument, Driver, Launch, MAX_ARGUMENTS, Stream};
use crate::error::{GpuError, Result};
pub use attention::{AttentionKernelArgs, NewHeadsArgs, RowCopy, TILE_QUERIES};
pub use choice::{ChoiceArgs, Patch};
pub use recurrent::{ConvolutionArgs, DeltaArgs, ScanArgs, StateArgs};
pub use sums::{ExpertSum, ExpertTerm};

/// The fewest tokens of a product for which tensor cores are used: half of a tile.
const TILE_TOKENS: u32 = 8;
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
#[cfg(all(test, feature = "cuda"))]
pub const KERNELS: [&str; 82] = [
    "f32_matmul",
    "f16_matmul",
    "bf16_matmul",
    "q8_0_matvec",
    "q8_0_matmul",
    "q8_0_tiles",
    "q4_0_matvec",
    "q4_0_matmul",
    "q4_0_tiles",
    "q4_1_matvec",
    "q4_1_matmul",
    "q4_1_tiles",
    "q5_0_matvec",
    "q5_0_matmul",
    "q5_0_tiles",
    "q5_1_matvec",
    "q5_1_matmul",
    "q5_1_tiles",
    "q2_k_matvec",
    "q2_k_matmul",
    "q2_k_tiles",
    "q3_k_matvec",
    "q3_k_matmul",
    "q3_k_tiles",
    "iq4_xs_matvec",
    "iq4_xs_matmul",
    "iq4_xs_tiles",
    "iq4_nl_matvec",
    "iq4_nl_matmul",
    "iq4_nl_tiles",
    "mxfp4_matvec",
    "mxfp4_matmul",
    "mxfp4_tiles",
    "q4_k_matvec",
    "q4_k_matmul",
    "q4_k_tiles",
    "q5_k_matvec",
    "q5_k_matmul",
    "q5_k_tiles",
    "q6_k_matvec",
    "q6_k_matmul",
    "q6_k_tiles",
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
    "bend",
    "gate_values",
    "convolve",
    "delta_rule",
    "delta_rule_wide",
    "scan_states",
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
    "copy_rows",
    "copy_bytes",
    "add_scaled",
    "add_norm",
    "rms_norm",
    "sum_experts",
    "sum_experts_norm",
    "choose_experts",
    "new_heads_f32",
    "new_heads_f16",
    "new_heads_q8_0",
];

/// The arguments of one product, as kernels read them.
#[derive(Clone, Copy, Debug)]
pub struct ProductKernelArgs {
    /// Address of the weights.
    pub weights: u64,
    /// Address of the inputs: floats or quantised blocks, as the number format of the weights takes them.
    pub x: u64,
    /// Address of the list of input rows, or 0 for all rows in order.
    pub pick: u64,
    /// `[tokens, rows]`
    pub out: u64,
    /// Outputs per token.
    pub rows: u32,
    /// Inputs per token.
    pub cols: u32,
    /// Number of tokens.
    pub tokens: u32,
    /// Whether rows are interleaved in groups of eight.
    pub interleaved: bool,
    /// Values from one input row to the next.
    pub x_stride: u32,
    /// Values from the outputs of one token to those of the next.
    pub out_stride: u32,
}

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

/// Products that one launch computes, all with weights in one number format.
#[derive(Default)]
pub struct ProductBatch {
    kind: Option<NumberFormat>,
    products: Vec<ProductKernelArgs>,
}

impl ProductBatch {
    /// Size in kernels of the arguments of one product.
    pub const BYTES: usize = 64;

    /// Empties the batch, for products with weights in this number format.
    pub fn begin(&mut self, kind: NumberFormat) {
        self.kind = Some(kind);
        self.products.clear();
    }

    /// Whether the weights are multiplied with quantised activations.
    pub fn takes_blocks(&self) -> bool {
        self.kind.is_some_and(|kind| !kind.is_float())
    }

    /// The number format of the weights.
    pub fn kind(&self) -> Option<NumberFormat> {
        self.kind
    }

    /// The products.
    pub fn products_mut(&mut self) -> &mut [ProductKernelArgs] {
        &mut self.products
    }

    /// The products, to be read.
    pub fn products(&self) -> &[ProductKernelArgs] {
        &self.products
    }

    /// Adds a product.
    pub fn push(&mut self, product: ProductKernelArgs) {
        self.products.push(product);
    }

    /// Size of the list in kernels.
    pub fn bytes(&self) -> usize {
        self.products.len() * ProductBatch::BYTES
    }

    /// Writes the list for kernels, which find a product by the number of its first group of rows within the launch.
    pub fn write(&self, out: &mut [u8]) {
        let mut first_group = 0;
        for (p, out) in self.products.iter().zip(out.chunks_exact_mut(ProductBatch::BYTES)) {
            let ProductKernelArgs { rows, cols, tokens, interleaved, x_stride, out_stride, .. } = *p;
            let words = [rows, cols, tokens, u32::from(interleaved), first_group, x_stride, out_stride, 0];
            out.copy_from_slice(&pack::<{ ProductBatch::BYTES }, 4, 8>([p.weights, p.x, p.pick, p.out], words));
            first_group += p.groups();
        }
    }

    fn groups(&self) -> u32 {
        self.products.iter().map(ProductKernelArgs::groups).sum()
    }

    /// The kernel: for one token per product (`matvec`), for any number (`matmul`), or for many with tensor cores (`tiles`).
    fn kernel(&self, has_tensor_cores: bool) -> Option<&'static str> {
        let [matvec, matmul, tiles] = kernels(self.kind?)?;
        Some(match self.products.iter().map(|p| p.tokens).max() {
            None | Some(0 | 1) => matvec,
            Some(most) if has_tensor_cores && most >= TILE_TOKENS => tiles,
            _ => matmul,
        })
    }
}

/// The kernels for a number format: for one token per product, for any number, and for many; `None` if there are none.
pub fn kernels(kind: NumberFormat) -> Option<[&'static str; 3]> {
    Some(match kind {
        NumberFormat::F32 => ["f32_matmul"; 3],
        NumberFormat::F16 => ["f16_matmul"; 3],
        NumberFormat::Bf16 => ["bf16_matmul"; 3],
        NumberFormat::Q8_0 => ["q8_0_matvec", "q8_0_matmul", "q8_0_tiles"],
        NumberFormat::Q4_0 => ["q4_0_matvec", "q4_0_matmul", "q4_0_tiles"],
        NumberFormat::Q4_1 => ["q4_1_matvec", "q4_1_matmul", "q4_1_tiles"],
        NumberFormat::Q5_0 => ["q5_0_matvec", "q5_0_matmul", "q5_0_tiles"],
        NumberFormat::Q5_1 => ["q5_1_matvec", "q5_1_matmul", "q5_1_tiles"],
        NumberFormat::Q2K => ["q2_k_matvec", "q2_k_matmul", "q2_k_tiles"],
        NumberFormat::Q3K => ["q3_k_matvec", "q3_k_matmul", "q3_k_tiles"],
        NumberFormat::Iq4Xs => ["iq4_xs_matvec", "iq4_xs_matmul", "iq4_xs_tiles"],
        NumberFormat::Iq4Nl => ["iq4_nl_matvec", "iq4_nl_matmul", "iq4_nl_tiles"],
        NumberFormat::Mxfp4 => ["mxfp4_matvec", "mxfp4_matmul", "mxfp4_tiles"],
        NumberFormat::Q4K => ["q4_k_matvec", "q4_k_matmul", "q4_k_tiles"],
        NumberFormat::Q5K => ["q5_k_matvec", "q5_k_matmul", "q5_k_tiles"],
        NumberFormat::Q6K => ["q6_k_matvec", "q6_k_matmul", "q6_k_tiles"],
        _ => return None,
    })
}

/// Refuses a number format for which there are no kernels.
pub fn check_kind(kind: NumberFormat) -> Result<()> {
    kernels(kind).map(drop).ok_or_else(|| {
        let known = NumberFormat::names(|k| kernels(k).is_some());
        GpuError::Unsupported(format!("the GPU has no kernels for weights in {kind}; it has them for {known}"))
    })
}

impl ProductKernelArgs {
    /// A product with the matrix at address `weights`; inputs and outputs are to be filled in.
    pub fn with(part: &ExpertPart, weights: u64) -> Result<Self> {
        let interleaved = part.order == RowOrder::Rows8 && !part.kind.is_float();
        let (rows, cols) = (word(part.rows)?, word(part.cols)?);
        let (x_stride, out_stride) = (cols, rows);
        Ok(ProductKernelArgs {
            weights,
            x: 0,
            pick: 0,
            out: 0,
            rows,
            cols,
            tokens: 0,
            interleaved,
            x_stride,
            out_stride,
        })
    }

    fn groups(&self) -> u32 {
        self.rows.div_ceil(ROW_GROUP as u32)
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
        let (count, groups) = (round.products.len() as u32, round.groups());
        let Some(kernel) = round.kernel(self.0.has_tensor_cores()).filter(|_| groups > 0) else { return Ok(()) };
        let arguments = [Argument::Address(list), Argument::Word(count), Argument::Word(groups)];
        self.launch(kernel, [groups.div_ceil(WARPS), 1], 32 * WARPS, &arguments)
    }

    /// Applies the activation function: replaces `gate` by its combination with `up`, both of `count` values, and quantises it into
    /// `blocks` unless that is 0.
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

    /// `out = x + factor · y` of `count` values; `y` has `period` values, which repeat.
    pub fn add_scaled(&self, [x, y, out]: [u64; 3], count: u32, period: u32, factor: f32) -> Result<()> {
        let [x, y, out] = [x, y, out].map(Argument::Address);
        let arguments = [x, y, out, Argument::Word(count), Argument::Word(period), Argument::Float(factor)];
        self.launch("add_scaled", [count.div_ceil(THREADS), 1], THREADS, &arguments)
    }

    /// The RMS norm of each row, times `weight`; quantised into `blocks` too unless that is 0.
    pub fn rms_norm(&self, [x, weight, out, blocks]: [u64; 4], [rows, width]: [u32; 2], eps: f64) -> Result<()> {
        let [x, weight, out, blocks] = [x, weight, out, blocks].map(Argument::Address);
        let arguments = [x, weight, out, blocks, Argument::Word(rows), Argument::Word(width), Argument::Double(eps)];
        self.launch("rms_norm", norm_grid(rows, width), 32 * WARPS, &arguments)
    }

    /// `sum = x + factor · y`, and into `out` the RMS norm of each row of it, times `weight`; quantised into `blocks` too unless that
    /// is 0.
    pub fn add_norm(
        &self,
        [x, y, sum, weight, out, blocks]: [u64; 6],
        [rows, width]: [u32; 2],
        factor: f32,
        eps: f64,
    ) -> Result<()> {
        let [x, y, sum, weight, out, blocks] = [x, y, sum, weight, out, blocks].map(Argument::Address);
        let shape = [rows, width].map(Argument::Word);
        let (factor, eps) = (Argument::Float(factor), Argument::Double(eps));
        let arguments = [x, y, sum, weight, out, blocks, shape[0], shape[1], factor, eps];
        self.launch("add_norm", norm_grid(rows, width), 32 * WARPS, &arguments)
    }

    /// Copies bytes between the device and page-locked memory by a kernel, bypassing the copy engine that is used for
    /// experts. Both addresses are multiples of 16.
    pub fn copy_bytes(&self, from: u64, to: u64, bytes: u64) -> Result<()> {
        let (grid, arguments) = copy_arguments(from, to, bytes);
        self.launch(COPY_KERNEL, grid, THREADS, &arguments)
    }

    fn launch(&self, kernel: &'static str, grid: [u32; 2], block: u32, arguments: &[Argument]) -> Result<()> {
        assert!(arguments.len() <= MAX_ARGUMENTS, "the kernel {kernel} has too many arguments");
        let launch = Launch { kernel, grid, block, arguments };
        // SAFETY: the arguments match the kernel's parameters. The memory that they name belongs to buffers that wait for
        // the device before they are freed.
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

/// Blocks of a norm: a warp has 32 values of a row.
fn norm_grid(rows: u32, width: u32) -> [u32; 2] {
    [(rows * width.div_ceil(32)).div_ceil(WARPS), 1]
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
    fn products_are_written_as_kernels_read_them() {
        let product = ProductKernelArgs {
            weights: 1,
            x: 2,
            pick: 3,
            out: 4,
            rows: 17,
            cols: 64,
            tokens: 5,
            interleaved: true,
            x_stride: 96,
            out_stride: 20,
        };
        let mut round = ProductBatch::default();
        round.begin(NumberFormat::Q4_0);
        round.push(product);
        round.push(product);
        let mut bytes = vec![0xAA; round.bytes()];
        round.write(&mut bytes);
        let words: Vec<u32> = bytes.as_chunks().0.iter().map(|b| u32::from_ne_bytes(*b)).collect();
        assert_eq!(words[16 + 8..], [17, 64, 5, 1, 3, 96, 20, 0], "the second product begins after three groups");
        assert_eq!((words[15], bytes[8], bytes[64 + 24]), (0, 2, 4));
        assert_eq!((round.groups(), round.kernel(false)), (6, Some("q4_0_matmul")));
    }

    #[test]
    fn a_count_above_32_bits_is_an_error() {
        assert_eq!(word(7), Ok(7));
        let error = word(1 << 32).unwrap_err().to_string();
        assert_eq!(error, "4294967296 values exceed the limit of 4294967295 per kernel launch");
    }
}
