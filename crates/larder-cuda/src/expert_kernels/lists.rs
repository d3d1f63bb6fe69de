//! What kernels have to know of a group: its products, its biases, and which token of the inputs is which.

use larder_core::{ExpertLayout, ExpertPart};

use super::{BLOCK, BLOCK_BYTES, DeviceActivations, ExpertBatch};
use crate::error::Result;
use crate::launches::{BiasKernelArgs, ProductBatch, ProductKernelArgs, word};
use crate::memory::Upload;

/// What lists begin at a multiple of.
const ALIGN: usize = 16;

/// Where a group's values between the products are.
pub struct Intermediates {
    pub gate: u64,
    pub up: u64,
    /// The gate once it is combined with up, as down takes it.
    pub activations: DeviceActivations,
}

/// A group's lists.
#[derive(Default)]
pub struct Lists {
    /// Also those of up, where it is of the same kind.
    pub gate: ProductBatch,
    pub up: ProductBatch,
    pub down: ProductBatch,
    /// Of gate and up.
    biases: Vec<BiasKernelArgs>,
    down_biases: Vec<BiasKernelArgs>,
}

/// Where the lists are on the device.
pub struct Addresses {
    pub gate: u64,
    pub up: u64,
    pub down: u64,
    pub biases: u64,
    pub down_biases: u64,
}

impl Lists {
    /// What the lists of so many experts with so many tokens together take at most.
    pub fn bytes(experts: usize, tokens: usize) -> usize {
        const LISTS: usize = 6;
        LISTS * ALIGN + 3 * experts * (ProductBatch::BYTES + BiasKernelArgs::BYTES) + size_of::<u32>() * tokens
    }

    /// Copies the lists of a group to the device.
    pub fn send(&mut self, group: &ExpertBatch, between: &Intermediates, upload: &mut Upload) -> Result<Addresses> {
        let picks: &[u8] = bytemuck::cast_slice(group.picks);
        // The picks lie in front: their address is part of what follows.
        let (base, bytes) = upload.begin(Lists::bytes(group.experts.len(), group.picks.len()))?;
        self.fill(group, between, base)?;
        let mut sheet = ListWriter { base, bytes, end: 0 };
        sheet.put(picks.len(), |out| out.copy_from_slice(picks));
        let mut round = |round: &ProductBatch| sheet.put(round.bytes(), |out| round.write(out));
        let [gate, up, down] = [&self.gate, &self.up, &self.down].map(&mut round);
        let mut list = |biases: &[BiasKernelArgs]| {
            sheet.put(biases.len() * BiasKernelArgs::BYTES, |out| {
                out.chunks_exact_mut(BiasKernelArgs::BYTES)
                    .zip(biases)
                    .for_each(|(out, b)| out.copy_from_slice(&b.to_bytes()));
            })
        };
        let (biases, down_biases) = (list(&self.biases), list(&self.down_biases));
        upload.send()?;
        Ok(Addresses { gate, up, down, biases, down_biases })
    }

    /// `pick` is where the picks begin on the device.
    fn fill(&mut self, group: &ExpertBatch, between: &Intermediates, mut pick: u64) -> Result<()> {
        let ExpertLayout { gate, up, down, bias, .. } = group.layout;
        let (inter, hidden) = (gate.rows, down.rows);
        let inner_row = if down.kind.is_float() { 4 * inter } else { inter / BLOCK * BLOCK_BYTES };
        self.gate.begin(gate.kind);
        self.up.begin(up.kind);
        self.down.begin(down.kind);
        self.biases.clear();
        self.down_biases.clear();
        let mut before = 0;
        for (data, n) in group.experts {
            let tokens = word(*n)?;
            let behind = |base: u64, row_bytes: usize| base + (before * row_bytes) as u64;
            let product = |part: &ExpertPart, x, pick, out| -> Result<ProductKernelArgs> {
                let whole = ProductKernelArgs::with(part, data + part.offset as u64)?;
                Ok(ProductKernelArgs { x, pick, out, tokens, ..whole })
            };
            let (gate_out, up_out) = (behind(between.gate, 4 * inter), behind(between.up, 4 * inter));
            let (inner, out) = (between.activations.for_part(down), behind(group.out, 4 * hidden));
            self.gate.push(product(gate, group.x.for_part(gate), pick, gate_out)?);
            let with_up = if up.kind == gate.kind { &mut self.gate } else { &mut self.up };
            with_up.push(product(up, group.x.for_part(up), pick, up_out)?);
            self.down.push(product(down, behind(inner, inner_row), 0, out)?);
            if let Some([of_gate, of_up, of_down]) = bias {
                let bias = |part: &ExpertPart, out| -> Result<BiasKernelArgs> {
                    Ok(BiasKernelArgs { bias: data + part.offset as u64, out, tokens, cols: word(part.cols)? })
                };
                self.biases.extend([bias(of_gate, gate_out)?, bias(of_up, up_out)?]);
                self.down_biases.push(bias(of_down, out)?);
            }
            pick += 4 * u64::from(tokens);
            before += n;
        }
        Ok(())
    }
}

/// Bytes to be uploaded, filled from the front.
struct ListWriter<'a> {
    base: u64,
    bytes: &'a mut [u8],
    end: usize,
}

impl ListWriter<'_> {
    /// Writes so many bytes more, and says where they will be on the device.
    fn put(&mut self, bytes: usize, write: impl FnOnce(&mut [u8])) -> u64 {
        let at = self.end.next_multiple_of(ALIGN);
        self.end = at + bytes;
        write(&mut self.bytes[at..self.end]);
        self.base + at as u64
    }
}
