//! The lists that kernels read for a group: its products, its biases, and the input row of each token.

use larder_core::{ExpertLayout, ExpertPart, PerMatrix};

use super::{BLOCK, BLOCK_BYTES, DeviceActivations, ExpertBatch};
use crate::error::Result;
use crate::launches::{BiasKernelArgs, ProductBatch, ProductKernelArgs, word};
use crate::memory::Upload;

/// Alignment of each list in bytes.
const ALIGN: usize = 16;

/// Addresses of the values between the products of a group.
pub struct Intermediates {
    pub gate: u64,
    pub up: u64,
    /// Gate and up combined, as down takes them.
    pub activations: DeviceActivations,
}

/// The lists of a group.
#[derive(Default)]
pub struct Lists {
    /// Products of gate, and those of up if it has the same number format, or if there is no gate.
    pub gate: ProductBatch,
    pub up: ProductBatch,
    pub down: ProductBatch,
    /// Biases of gate and up.
    biases: Vec<BiasKernelArgs>,
    down_biases: Vec<BiasKernelArgs>,
}

/// Addresses of the lists on the device.
pub struct Addresses {
    pub gate: u64,
    pub up: u64,
    pub down: u64,
    pub biases: u64,
    pub down_biases: u64,
}

impl Lists {
    /// An upper bound, in bytes, of the lists of `experts` experts with `tokens` tokens in all.
    pub fn bytes(experts: usize, tokens: usize) -> usize {
        const LISTS: usize = 6;
        LISTS * ALIGN + 3 * experts * (ProductBatch::BYTES + BiasKernelArgs::BYTES) + size_of::<u32>() * tokens
    }

    /// Copies the lists of a group to the device.
    pub fn send(&mut self, group: &ExpertBatch, between: &Intermediates, upload: &mut Upload) -> Result<Addresses> {
        let picks: &[u8] = bytemuck::cast_slice(group.picks);
        // The picks come first: the lists of products contain their address.
        let (base, bytes) = upload.begin(Lists::bytes(group.experts.len(), group.picks.len()))?;
        self.fill(group, between, base)?;
        let mut writer = ListWriter { base, bytes, end: 0 };
        writer.put(picks.len(), |out| out.copy_from_slice(picks));
        let mut batch = |batch: &ProductBatch| writer.put(batch.bytes(), |out| batch.write(out));
        let [gate, up, down] = [&self.gate, &self.up, &self.down].map(&mut batch);
        let mut list = |biases: &[BiasKernelArgs]| {
            writer.put(biases.len() * BiasKernelArgs::BYTES, |out| {
                out.chunks_exact_mut(BiasKernelArgs::BYTES)
                    .zip(biases)
                    .for_each(|(out, b)| out.copy_from_slice(&b.to_bytes()));
            })
        };
        let (biases, down_biases) = (list(&self.biases), list(&self.down_biases));
        upload.send()?;
        Ok(Addresses { gate, up, down, biases, down_biases })
    }

    /// Fills the lists. `pick` is the address of the picks on the device.
    fn fill(&mut self, group: &ExpertBatch, between: &Intermediates, mut pick: u64) -> Result<()> {
        let ExpertLayout { gate, up, down, bias, .. } = group.layout;
        // Without a gate, up takes its place.
        let first = gate.as_ref().unwrap_or(up);
        let (inter, hidden) = (first.rows, down.rows);
        let inner_row = if down.kind.is_float() { 4 * inter } else { inter / BLOCK * BLOCK_BYTES };
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
