//! The lists that kernels read for a group: its products, its biases, and the input row of each token.

use larder_core::{ExpertLayout, ExpertPart, PerMatrix};

use super::{BLOCK, BLOCK_BYTES, DeviceActivations, ExpertBatch};
use crate::error::Result;
use crate::launches::{BiasKernelArgs, ExpertList, ProductBatch, ProductKernelArgs, word};

/// Alignment of each list in bytes.
const ALIGN: usize = 16;

/// Addresses of the values between the products of a group.
#[derive(Clone, Copy, Default)]
pub struct Intermediates {
    pub gate: u64,
    pub up: u64,
    /// Gate and up combined, as down takes them.
    pub activations: DeviceActivations,
}

/// The lists of a group, and where they are on the device.
#[derive(Default)]
pub struct GroupLists {
    /// Products of gate, and those of up if it has the same number format, or if there is no gate.
    pub gate: ProductBatch,
    pub up: ProductBatch,
    pub down: ProductBatch,
    /// Biases of gate and up.
    biases: Vec<BiasKernelArgs>,
    down_biases: Vec<BiasKernelArgs>,
    pub at: Addresses,
    pub between: Intermediates,
    /// Number of experts, of their tokens, and the most tokens of one.
    pub experts: usize,
    pub tokens: usize,
    pub max_tokens: usize,
}

/// Addresses of the lists on the device.
#[derive(Clone, Copy, Default)]
pub struct Addresses {
    pub gate: u64,
    pub up: u64,
    pub down: u64,
    pub biases: u64,
    pub down_biases: u64,
}

impl GroupLists {
    /// An upper bound, in bytes, of the lists of `experts` experts with `tokens` tokens in all.
    pub fn bytes(experts: usize, tokens: usize) -> usize {
        const LISTS: usize = 6;
        LISTS * ALIGN + 3 * experts * (ProductBatch::BYTES + BiasKernelArgs::BYTES) + size_of::<u32>() * tokens
    }

    /// Writes the lists of a group, which will be at address `base`.
    pub fn write(&mut self, group: &ExpertBatch, between: Intermediates, base: u64, bytes: &mut [u8]) -> Result<()> {
        // The picks come first: the lists of products contain their address.
        self.fill(group, &between, base)?;
        let mut writer = ListWriter { base, bytes, end: 0 };
        writer.put(size_of_val(group.picks), |out| out.copy_from_slice(bytemuck::cast_slice(group.picks)));
        let [gate, up, down] = [&self.gate, &self.up, &self.down]
            .map(|batch: &ProductBatch| writer.put(batch.bytes(), |out| batch.write(out)));
        let [biases, down_biases] = [&self.biases, &self.down_biases].map(|biases| {
            writer.put(biases.len() * BiasKernelArgs::BYTES, |out| {
                out.chunks_exact_mut(BiasKernelArgs::BYTES)
                    .zip(biases)
                    .for_each(|(out, b)| out.copy_from_slice(&b.to_bytes()));
            })
        });
        self.at = Addresses { gate, up, down, biases, down_biases };
        self.between = between;
        (self.experts, self.tokens) = (group.experts.len(), group.picks.len());
        self.max_tokens = group.experts.iter().map(|(_, tokens)| *tokens).max().unwrap_or(0);
        Ok(())
    }

    /// The most lists [by expert](Self::by_expert).
    pub const BY_EXPERT: usize = 6;

    /// The lists whose entries depend on where experts are and which rows they have, of lists of experts at address 0.
    pub fn by_expert(&self, layout: &ExpertLayout) -> Vec<ExpertList> {
        let experts = self.experts.max(1);
        let of_products = |batch: &ProductBatch, at: u64, x_step: usize| -> Vec<ExpertList> {
            let each = batch.products().len() / experts;
            let list = |(number, p): (usize, &ProductKernelArgs)| ExpertList {
                entries: at + (number * ProductBatch::BYTES) as u64,
                offset: p.weights,
                x: p.x,
                out: p.out,
                picks: p.pick,
                stride: (each * ProductBatch::BYTES) as u32,
                x_step: x_step as u32,
                out_step: 4 * p.out_stride,
                is_bias: false,
            };
            batch.products()[..each].iter().enumerate().map(list).collect()
        };
        let of_biases = |biases: &[BiasKernelArgs], at: u64| -> Vec<ExpertList> {
            let each = biases.len() / experts;
            let list = |(number, b): (usize, &BiasKernelArgs)| ExpertList {
                entries: at + (number * BiasKernelArgs::BYTES) as u64,
                offset: b.bias,
                out: b.out,
                stride: (each * BiasKernelArgs::BYTES) as u32,
                out_step: 4 * b.cols,
                is_bias: true,
                ..ExpertList::default()
            };
            biases[..each].iter().enumerate().map(list).collect()
        };
        [
            of_products(&self.gate, self.at.gate, 0),
            of_products(&self.up, self.at.up, 0),
            of_products(&self.down, self.at.down, inner_row_bytes(layout)),
            of_biases(&self.biases, self.at.biases),
            of_biases(&self.down_biases, self.at.down_biases),
        ]
        .concat()
    }

    /// The same lists, to whose entries a kernel may write up to `most` rows of an expert.
    pub fn with_rows(self, most: usize) -> Self {
        GroupLists { max_tokens: most, ..self }
    }

    /// Fills the lists. `pick` is the address of the picks on the device.
    fn fill(&mut self, group: &ExpertBatch, between: &Intermediates, mut pick: u64) -> Result<()> {
        let ExpertLayout { gate, up, down, bias, .. } = group.layout;
        // Without a gate, up takes its place.
        let first = gate.as_ref().unwrap_or(up);
        let (inter, hidden, inner_row) = (first.rows, down.rows, inner_row_bytes(group.layout));
        self.gate.begin(first.kind);
        self.up.begin(up.kind);
        self.down.begin(down.kind);
        self.biases.clear();
        self.down_biases.clear();
        let mut before = 0;
        for (data, n) in group.experts {
            let tokens = word(*n)?;
            let offset = |base: u64, row_bytes: usize| base + (before * row_bytes) as u64;
            let product = |part: &ExpertPart, x, pick, out| -> Result<ProductKernelArgs> {
                let whole = ProductKernelArgs::with(part, data + part.offset as u64)?;
                Ok(ProductKernelArgs { x, pick, out, tokens, ..whole })
            };
            let (gate_out, up_out) = (offset(between.gate, 4 * inter), offset(between.up, 4 * inter));
            let (inner, out) = (between.activations.for_part(down), offset(group.out, 4 * hidden));
            self.gate.push(product(first, group.x.for_part(first), pick, gate_out)?);
            if gate.is_some() {
                let with_up = if up.kind == first.kind { &mut self.gate } else { &mut self.up };
                with_up.push(product(up, group.x.for_part(up), pick, up_out)?);
            }
            self.down.push(product(down, offset(inner, inner_row), 0, out)?);
            if let Some(PerMatrix { gate: of_gate, up: of_up, down: of_down }) = bias {
                let bias = |part: &ExpertPart, out| -> Result<BiasKernelArgs> {
                    Ok(BiasKernelArgs { bias: data + part.offset as u64, out, tokens, cols: word(part.cols)? })
                };
                self.biases.push(bias(of_gate.as_ref().unwrap_or(of_up), gate_out)?);
                if of_gate.is_some() {
                    self.biases.push(bias(of_up, up_out)?);
                }
                self.down_biases.push(bias(of_down, out)?);
            }
            pick += 4 * u64::from(tokens);
            before += n;
        }
        Ok(())
    }
}

/// Bytes of the values of a row between the products of an expert, as down takes them.
fn inner_row_bytes(layout: &ExpertLayout) -> usize {
    let inter = layout.up.rows;
    if layout.down.kind.is_float() { 4 * inter } else { inter / BLOCK * BLOCK_BYTES }
}

/// Writes lists one after another into a buffer that will be uploaded.
struct ListWriter<'a> {
    base: u64,
    bytes: &'a mut [u8],
    end: usize,
}

impl ListWriter<'_> {
    /// Appends `bytes` bytes and returns their address on the device.
    fn put(&mut self, bytes: usize, write: impl FnOnce(&mut [u8])) -> u64 {
        let at = self.end.next_multiple_of(ALIGN);
        self.end = at + bytes;
        write(&mut self.bytes[at..self.end]);
        self.base + at as u64
    }
}
