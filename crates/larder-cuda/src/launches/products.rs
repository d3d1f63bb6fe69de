//! Arguments of products, and their kernels.

use larder_core::{ExpertPart, NumberFormat, ROW_GROUP, RowOrder};

use super::{Launches, THREADS, pack, word};
use crate::driver::Argument;
use crate::error::Result;

/// The fewest tokens of a product for which tensor cores are used: half of a tile.
const TILE_TOKENS: u32 = 8;
/// Values of a row in a block format that a thread widens.
const VALUES_PER_THREAD: u32 = 8;

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
    /// Where the f32 that all weights are multiplied with is, in bytes behind the first of them; 0 if there is none.
    pub scale_at: u32,
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
            let ProductKernelArgs { rows, cols, tokens, interleaved, x_stride, out_stride, scale_at, .. } = *p;
            let words = [rows, cols, tokens, u32::from(interleaved), first_group, x_stride, out_stride, scale_at];
            out.copy_from_slice(&pack::<{ ProductBatch::BYTES }, 4, 8>([p.weights, p.x, p.pick, p.out], words));
            first_group += p.groups();
        }
    }

    /// Groups of rows of all products.
    pub fn groups(&self) -> u32 {
        self.products.iter().map(ProductKernelArgs::groups).sum()
    }

    /// The kernel: for one token per product (`matvec`), for any number (`matmul`), or for many with tensor cores
    /// (`tiles`).
    pub fn kernel(&self, has_tensor_cores: bool) -> Option<&'static str> {
        let [matvec, matmul, tiles, _] = kernels(self.kind?);
        Some(match self.products.iter().map(|p| p.tokens).max() {
            None | Some(0 | 1) => matvec,
            Some(most) if has_tensor_cores && most >= TILE_TOKENS => tiles,
            _ => matmul,
        })
    }
}

/// The kernels for a number format: for one token per product, for any number, and for many; and for a row as floats.
pub const fn kernels(kind: NumberFormat) -> [&'static str; 4] {
    match kind {
        NumberFormat::F32 => ["f32_matmul", "f32_matmul", "f32_matmul", "f32_row"],
        NumberFormat::F16 => ["f16_matmul", "f16_matmul", "f16_matmul", "f16_row"],
        NumberFormat::Bf16 => ["bf16_matmul", "bf16_matmul", "bf16_matmul", "bf16_row"],
        NumberFormat::Q8_0 => ["q8_0_matvec", "q8_0_matmul", "q8_0_tiles", "q8_0_row"],
        NumberFormat::Q4_0 => ["q4_0_matvec", "q4_0_matmul", "q4_0_tiles", "q4_0_row"],
        NumberFormat::Q4_1 => ["q4_1_matvec", "q4_1_matmul", "q4_1_tiles", "q4_1_row"],
        NumberFormat::Q5_0 => ["q5_0_matvec", "q5_0_matmul", "q5_0_tiles", "q5_0_row"],
        NumberFormat::Q5_1 => ["q5_1_matvec", "q5_1_matmul", "q5_1_tiles", "q5_1_row"],
        NumberFormat::Iq4Nl => ["iq4_nl_matvec", "iq4_nl_matmul", "iq4_nl_tiles", "iq4_nl_row"],
        NumberFormat::Mxfp4 => ["mxfp4_matvec", "mxfp4_matmul", "mxfp4_tiles", "mxfp4_row"],
        NumberFormat::Q2K => ["q2_k_matvec", "q2_k_matmul", "q2_k_tiles", "q2_k_row"],
        NumberFormat::Q3K => ["q3_k_matvec", "q3_k_matmul", "q3_k_tiles", "q3_k_row"],
        NumberFormat::Q4K => ["q4_k_matvec", "q4_k_matmul", "q4_k_tiles", "q4_k_row"],
        NumberFormat::Q5K => ["q5_k_matvec", "q5_k_matmul", "q5_k_tiles", "q5_k_row"],
        NumberFormat::Q6K => ["q6_k_matvec", "q6_k_matmul", "q6_k_tiles", "q6_k_row"],
        NumberFormat::Iq4Xs => ["iq4_xs_matvec", "iq4_xs_matmul", "iq4_xs_tiles", "iq4_xs_row"],
        NumberFormat::Nvfp4 => ["nvfp4_matvec", "nvfp4_matmul", "nvfp4_tiles", "nvfp4_row"],
        NumberFormat::Iq3Xxs => ["iq3_xxs_matvec", "iq3_xxs_matmul", "iq3_xxs_tiles", "iq3_xxs_row"],
        NumberFormat::Iq3S => ["iq3_s_matvec", "iq3_s_matmul", "iq3_s_tiles", "iq3_s_row"],
        NumberFormat::Iq2Xxs => ["iq2_xxs_matvec", "iq2_xxs_matmul", "iq2_xxs_tiles", "iq2_xxs_row"],
        NumberFormat::Iq2Xs => ["iq2_xs_matvec", "iq2_xs_matmul", "iq2_xs_tiles", "iq2_xs_row"],
        NumberFormat::Iq2S => ["iq2_s_matvec", "iq2_s_matmul", "iq2_s_tiles", "iq2_s_row"],
        NumberFormat::Q2_0 => ["q2_0_matvec", "q2_0_matmul", "q2_0_tiles", "q2_0_row"],
        NumberFormat::Tq2_0 => ["tq2_0_matvec", "tq2_0_matmul", "tq2_0_tiles", "tq2_0_row"],
        NumberFormat::Q1_0 => ["q1_0_matvec", "q1_0_matmul", "q1_0_tiles", "q1_0_row"],
        NumberFormat::Iq1S => ["iq1_s_matvec", "iq1_s_matmul", "iq1_s_tiles", "iq1_s_row"],
        NumberFormat::Iq1M => ["iq1_m_matvec", "iq1_m_matmul", "iq1_m_tiles", "iq1_m_row"],
        NumberFormat::Tq1_0 => ["tq1_0_matvec", "tq1_0_matmul", "tq1_0_tiles", "tq1_0_row"],
    }
}

impl Launches {
    /// Widens the row of a matrix whose number is at address `number` to floats.
    pub fn widen_row(&self, matrix: &ProductKernelArgs, kind: NumberFormat, number: u64, out: u64) -> Result<()> {
        let ProductKernelArgs { weights, rows, cols, interleaved, scale_at, .. } = *matrix;
        let [.., kernel] = kernels(kind);
        let threads = if kind.is_float() { cols } else { cols / VALUES_PER_THREAD };
        let [weights, number, out] = [weights, number, out].map(Argument::Address);
        let [rows, cols, interleaved, scale_at] = [rows, cols, u32::from(interleaved), scale_at].map(Argument::Word);
        let arguments = [weights, number, out, rows, cols, interleaved, scale_at];
        self.launch(kernel, [threads.div_ceil(THREADS), 1], THREADS, &arguments)
    }
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
            scale_at: word(part.scale_at.map_or(0, |at| at - part.offset))?,
        })
    }

    fn groups(&self) -> u32 {
        self.rows.div_ceil(ROW_GROUP as u32)
    }
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
            scale_at: 900,
        };
        let mut round = ProductBatch::default();
        round.begin(NumberFormat::Q4_0);
        round.push(product);
        round.push(product);
        let mut bytes = vec![0xAA; round.bytes()];
        round.write(&mut bytes);
        let words: Vec<u32> = bytes.as_chunks().0.iter().map(|b| u32::from_ne_bytes(*b)).collect();
        assert_eq!(words[16 + 8..], [17, 64, 5, 1, 3, 96, 20, 900], "the second product begins after three groups");
        assert_eq!((words[15], bytes[8], bytes[64 + 24]), (900, 2, 4));
        assert_eq!((round.groups(), round.kernel(false)), (6, Some("q4_0_matmul")));
    }
}
