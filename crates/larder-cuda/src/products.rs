//! Products with resident weights in GPU memory.

use std::sync::Arc;

use larder_core::{ExpertPart, NumberFormat};
use larder_kernels::Inputs;
use larder_model::{DeviceProduct, DeviceProducts, MatrixShape};
use parking_lot::Mutex;

use crate::driver::Driver;
use crate::error::{GpuError, Result};
use crate::expert_kernels::{BLOCK, BLOCK_BYTES, DeviceActivations};
use crate::launches::{Launches, ProductBatch, ProductKernelArgs, word};
use crate::memory::{DeviceBuffer, Download, Upload};
use crate::weight_allocator::WeightAllocator;

/// Bytes of a matrix per staged copy.
const PIECE: usize = 4 << 20;

/// Resident weights on the device, and products with them.
pub struct GpuProducts {
    state: Mutex<State>,
}

struct State {
    launches: Launches,
    resident: WeightAllocator,
    kept: Vec<Matrix>,
    /// Staging of matrices: one piece is written while the other is being copied.
    pieces: [Upload; 2],
    x: Upload,
    lists: Upload,
    out: DeviceBuffer,
    download: Download,
    /// One batch per number format.
    batches: [ProductBatch; NumberFormat::ALL.len()],
}

/// A matrix on the device.
struct Matrix {
    part: ExpertPart,
    at: u64,
}

impl GpuProducts {
    pub(crate) fn new(driver: &Arc<dyn Driver>, bytes: u64) -> Result<Self> {
        let upload = || Upload::new(driver);
        let state = State {
            launches: Launches::new(driver),
            resident: WeightAllocator::new(driver, bytes)?,
            kept: Vec::new(),
            pieces: [upload()?, upload()?],
            x: upload()?,
            lists: upload()?,
            out: DeviceBuffer::new(driver),
            download: Download::new(driver)?,
            batches: Default::default(),
        };
        Ok(GpuProducts { state: Mutex::new(state) })
    }

    /// Begins a batch of products with weights in the number format of these.
    pub(crate) fn begin_batch(&self, weights: usize, batch: &mut ProductBatch) -> Result<()> {
        batch.begin(self.state.lock().matrix(weights)?.part.kind);
        Ok(())
    }

    /// Adds a product whose inputs, of `width` values, and outputs are to be filled in, if its weights have the number
    /// format of the batch. Returns whether they have.
    pub(crate) fn add_to(&self, batch: &mut ProductBatch, weights: usize, width: usize) -> Result<bool> {
        self.add(batch, weights, width, |cols| cols == width)
    }

    /// As [`add_to`](Self::add_to), of a product that reads the first of `step` inputs.
    pub(crate) fn add_head_to(&self, batch: &mut ProductBatch, weights: usize, step: usize) -> Result<bool> {
        self.add(batch, weights, step, |cols| cols <= step)
    }

    /// A matrix, and its address.
    pub(crate) fn stored(&self, weights: usize) -> Result<(ExpertPart, u64)> {
        let state = self.state.lock();
        let Matrix { part, at } = state.matrix(weights)?;
        Ok((*part, *at))
    }

    fn add(
        &self,
        batch: &mut ProductBatch,
        weights: usize,
        width: usize,
        fits: impl Fn(usize) -> bool,
    ) -> Result<bool> {
        let state = self.state.lock();
        let Matrix { part, at } = state.matrix(weights)?;
        if !fits(part.cols) {
            let (rows, cols) = (part.rows, part.cols);
            return Err(GpuError::Unsupported(format!("{width} inputs do not fit {rows} x {cols} weights")));
        }
        let same = batch.kind() == Some(part.kind);
        if same {
            batch.push(ProductKernelArgs::with(part, *at)?);
        }
        Ok(same)
    }
}

impl DeviceProducts for GpuProducts {
    fn upload_rows(
        &self,
        shape: &MatrixShape,
        read: &mut dyn FnMut(usize, &mut [u8]) -> larder_model::Result<()>,
    ) -> larder_model::Result<usize> {
        let MatrixShape { kind, order, rows, cols, scale, bytes } = *shape;
        // Kernels read it as one word.
        let scale_at = (scale != 1.0).then(|| bytes.next_multiple_of(align_of_val(&scale)));
        let part = ExpertPart { kind, order, rows, cols, offset: 0, bytes, scale_at };
        let mut state = self.state.lock();
        let with_scale = scale_at.map_or(bytes, |at| at + size_of_val(&scale));
        let at = state.resident.place(with_scale as u64)?;
        let row_bytes = bytes / rows.max(1);
        let step = (PIECE / row_bytes.max(1)).max(1);
        for (i, first) in (0..rows).step_by(step).enumerate() {
            let piece = step.min(rows - first) * row_bytes;
            let to = at + (first * row_bytes) as u64;
            state.pieces[i % 2].write(piece, to, &mut |out| read(first, out))?;
        }
        if let Some(behind) = scale_at {
            state.pieces[0].copy(&scale.to_ne_bytes(), at + behind as u64)?;
        }
        state.kept.push(Matrix { part, at });
        Ok(state.kept.len() - 1)
    }

    fn matmul(&self, x: &Inputs, products: &mut [DeviceProduct]) -> larder_model::Result<()> {
        Ok(self.state.lock().matmul(x, products)?)
    }
}

impl State {
    fn matmul(&mut self, x: &Inputs, products: &mut [DeviceProduct]) -> Result<()> {
        self.check(x, products)?;
        let widely = products.iter().any(|p| self.kept[p.weights].part.kind.is_float());
        let activations = DeviceActivations::send(&mut self.x, x, widely)?;
        let values: usize = products.iter().map(|p| p.out.len()).sum();
        self.out.ensure(4 * values)?;

        let lists = self.send_lists(activations, x.tokens(), products)?;
        self.launch(lists)?;

        let mut outputs: &[f32] = bytemuck::cast_slice(self.download.fetch(self.out.at(), 4 * values)?);
        for p in products {
            let (own, behind) = outputs.split_at(p.out.len());
            p.out.copy_from_slice(own);
            outputs = behind;
        }
        Ok(())
    }

    /// Copies the lists of products to the device, one number format after another, and returns their address.
    fn send_lists(&mut self, x: DeviceActivations, all: usize, products: &[DeviceProduct]) -> Result<u64> {
        // The picks come first: the lists contain their addresses.
        let picks: usize = products.iter().filter_map(|p| p.pick).map(size_of_val).sum();
        let lists = picks.next_multiple_of(16);
        let (base, bytes) = self.lists.begin(lists + products.len() * ProductBatch::BYTES)?;
        let (mut end, mut out) = (0, self.out.at());
        self.batches.iter_mut().zip(NumberFormat::ALL).for_each(|(batch, kind)| batch.begin(kind));
        for p in products {
            let Matrix { part, at } = &self.kept[p.weights];
            let tokens = word(p.pick.map_or(all, <[u32]>::len))?;
            let pick = p.pick.map_or(0, |_| base + end as u64);
            let product =
                ProductKernelArgs { x: x.for_part(part), pick, out, tokens, ..ProductKernelArgs::with(part, *at)? };
            let of_kind = self.batches.iter_mut().zip(NumberFormat::ALL).find(|(_, kind)| *kind == part.kind);
            of_kind.expect("every number format has a batch").0.push(product);
            let chosen: &[u8] = bytemuck::cast_slice(p.pick.unwrap_or_default());
            bytes[end..][..chosen.len()].copy_from_slice(chosen);
            end += chosen.len();
            out += 4 * p.out.len() as u64;
        }
        let mut rest = &mut bytes[lists..];
        for batch in &self.batches {
            let (own, behind) = rest.split_at_mut(batch.bytes());
            batch.write(own);
            rest = behind;
        }
        self.lists.send()?;
        Ok(base + lists as u64)
    }

    /// One launch per number format; the lists are consecutive.
    fn launch(&self, mut list: u64) -> Result<()> {
        for batch in &self.batches {
            self.launches.products(batch, list)?;
            list += batch.bytes() as u64;
        }
        Ok(())
    }

    fn matrix(&self, weights: usize) -> Result<&Matrix> {
        self.kept.get(weights).ok_or_else(|| GpuError::Unsupported(format!("the GPU has no matrix {weights}")))
    }

    /// Checks the shapes, which the kernels rely on.
    fn check(&self, x: &Inputs, products: &[DeviceProduct]) -> Result<()> {
        let quantised = x.all_blocks().len() / BLOCK_BYTES * BLOCK == x.all_values().len();
        for p in products {
            let matrix = self.matrix(p.weights)?;
            let ExpertPart { kind, rows, cols, .. } = matrix.part;
            let tokens = p.pick.map_or(x.tokens(), <[u32]>::len);
            let known = p.pick.is_none_or(|pick| pick.iter().all(|t| (*t as usize) < x.tokens()));
            if x.cols() != cols || p.out.len() != tokens * rows || !known {
                return Err(GpuError::Unsupported(format!(
                    "inputs or outputs do not fit the shape of a product with {rows} x {cols} weights"
                )));
            }
            if !kind.is_float() && !quantised {
                return Err(GpuError::Unsupported(format!("weights in {kind} need quantised activations")));
            }
        }
        Ok(())
    }
}
