//! Multiplies with weights that stay in a GPU's memory.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use larder_core::{ExpertPart, NumberFormat};
use larder_kernels::{Inputs, WeightMatrix};
use larder_model::{DeviceProduct, DeviceProducts};

use crate::driver::Driver;
use crate::error::{GpuError, Result};
use crate::expert_kernels::{BLOCK, BLOCK_BYTES, DeviceActivations};
use crate::launches::{Launches, ProductBatch, ProductKernelArgs, word};
use crate::memory::{DeviceBuffer, Download, Upload};
use crate::weight_allocator::WeightAllocator;

/// Bytes of a matrix that are copied at a time.
const PIECE: usize = 4 << 20;

/// Matrices on the device, and what products with them take.
pub struct GpuProducts {
    least: usize,
    state: Mutex<State>,
}

struct State {
    launches: Launches,
    resident: WeightAllocator,
    kept: Vec<Matrix>,
    /// What brings matrices, one piece while the other is being copied.
    pieces: [Upload; 2],
    x: Upload,
    lists: Upload,
    out: DeviceBuffer,
    download: Download,
    /// One for each kind.
    rounds: [ProductBatch; NumberFormat::ALL.len()],
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
            rounds: Default::default(),
        };
        Ok(GpuProducts { least: driver.min_matrix_bytes(), state: Mutex::new(state) })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DeviceProducts for GpuProducts {
    fn accepts(&self, bytes: usize) -> bool {
        bytes >= self.least
    }

    fn upload(&self, weights: WeightMatrix) -> larder_model::Result<usize> {
        let WeightMatrix { kind, order, rows, cols, bytes } = weights;
        let part = ExpertPart { kind, order, rows, cols, offset: 0, bytes: bytes.len() };
        let mut state = self.lock();
        let at = state.resident.place(bytes.len() as u64)?;
        for (i, piece) in bytes.chunks(PIECE).enumerate() {
            state.pieces[i % 2].copy(piece, at + (i * PIECE) as u64)?;
        }
        state.kept.push(Matrix { part, at });
        Ok(state.kept.len() - 1)
    }

    fn multiply(&self, x: &Inputs, round: &mut [DeviceProduct]) -> larder_model::Result<()> {
        Ok(self.lock().multiply(x, round)?)
    }
}

impl State {
    fn multiply(&mut self, x: &Inputs, round: &mut [DeviceProduct]) -> Result<()> {
        self.check(x, round)?;
        let widely = round.iter().any(|p| self.kept[p.weights].part.kind.is_float());
        let activations = DeviceActivations::send(&mut self.x, x, widely)?;
        let values: usize = round.iter().map(|p| p.out.len()).sum();
        self.out.ensure(4 * values)?;

        let lists = self.send_lists(activations, x.tokens(), round)?;
        self.launch(lists)?;

        let mut outputs: &[f32] = bytemuck::cast_slice(self.download.fetch(self.out.at(), 4 * values)?);
        for p in round {
            let (own, behind) = outputs.split_at(p.out.len());
            p.out.copy_from_slice(own);
            outputs = behind;
        }
        Ok(())
    }

    /// Copies the lists of products to the device, those of one kind after those of the other, and says where they are.
    fn send_lists(&mut self, x: DeviceActivations, all: usize, round: &[DeviceProduct]) -> Result<u64> {
        // The picks lie in front: their addresses are part of the lists.
        let picks: usize = round.iter().filter_map(|p| p.pick).map(size_of_val).sum();
        let lists = picks.next_multiple_of(16);
        let (base, bytes) = self.lists.begin(lists + round.len() * ProductBatch::BYTES)?;
        let (mut end, mut out) = (0, self.out.at());
        self.rounds.iter_mut().zip(NumberFormat::ALL).for_each(|(round, kind)| round.begin(kind));
        for p in round {
            let Matrix { part, at } = &self.kept[p.weights];
            let tokens = word(p.pick.map_or(all, <[u32]>::len))?;
            let pick = p.pick.map_or(0, |_| base + end as u64);
            let product =
                ProductKernelArgs { x: x.for_part(part), pick, out, tokens, ..ProductKernelArgs::with(part, *at)? };
            let of_kind = self.rounds.iter_mut().zip(NumberFormat::ALL).find(|(_, kind)| *kind == part.kind);
            of_kind.expect("every kind has a round").0.push(product);
            let chosen: &[u8] = bytemuck::cast_slice(p.pick.unwrap_or_default());
            bytes[end..][..chosen.len()].copy_from_slice(chosen);
            end += chosen.len();
            out += 4 * p.out.len() as u64;
        }
        let mut rest = &mut bytes[lists..];
        for round in &self.rounds {
            let (own, behind) = rest.split_at_mut(round.bytes());
            round.write(own);
            rest = behind;
        }
        self.lists.send()?;
        Ok(base + lists as u64)
    }

    /// A launch for each kind, whose lists follow each other.
    fn launch(&self, mut list: u64) -> Result<()> {
        for round in &self.rounds {
            self.launches.products(round, list)?;
            list += round.bytes() as u64;
        }
        Ok(())
    }

    /// That shapes fit, because nobody looks at them below.
    fn check(&self, x: &Inputs, round: &[DeviceProduct]) -> Result<()> {
        let quantised = x.all_blocks().len() / BLOCK_BYTES * BLOCK == x.all_values().len();
        for p in round {
            let matrix = self.kept.get(p.weights).ok_or_else(|| bad(format!("the GPU has no matrix {}", p.weights)))?;
            let ExpertPart { kind, rows, cols, .. } = matrix.part;
            let tokens = p.pick.map_or(x.tokens(), <[u32]>::len);
            let known = p.pick.is_none_or(|pick| pick.iter().all(|t| (*t as usize) < x.tokens()));
            if x.cols() != cols || p.out.len() != tokens * rows || !known {
                return Err(bad(format!(
                    "a product with {rows} x {cols} weights has inputs or outputs of another shape"
                )));
            }
            if !kind.is_float() && !quantised {
                return Err(bad(format!("weights in {kind} meet activations that are not quantised")));
            }
        }
        Ok(())
    }
}

fn bad(what: String) -> GpuError {
    GpuError::Unsupported(what)
}
