//! Chains of operations on rows of activations in GPU memory, for which the host waits once.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use larder_kernels::AttentionArgs;
use larder_model::{DeviceKvView, DeviceOps, DeviceRows};

use crate::attention::GpuAttention;
use crate::driver::Driver;
use crate::error::{GpuError, Result};
use crate::expert_kernels::{BLOCK, BLOCK_BYTES};
use crate::launches::{Launches, ProductBatch, ProductKernelArgs, word};
use crate::memory::{DeviceBuffer, Download, Upload};
use crate::products::GpuProducts;

/// The least bytes of a piece of memory for results.
const PIECE_BYTES: usize = 1 << 20;
/// Alignment of results, in bytes.
const ALIGN: usize = 256;
/// The most lists of products that are kept on the device.
const MAX_LISTS: usize = 4096;

/// Operations on rows of activations, with the weights of [`GpuProducts`] and the KV cache of [`GpuAttention`].
pub struct GpuOps {
    driver: Arc<dyn Driver>,
    products: Arc<GpuProducts>,
    attention: Arc<GpuAttention>,
    state: Mutex<State>,
}

struct State {
    launches: Launches,
    /// Values that do not change.
    kept: Vec<DeviceBuffer>,
    results: Results,
    /// By operation of the chain: the address of its result, and its shape.
    rows: Vec<(u64, DeviceRows)>,
    /// Staging of the rows that were sent, of which the first `sent` are used in this chain.
    uploads: Vec<Upload>,
    sent: usize,
    lists: HashMap<ListKey, DeviceBuffer>,
    staging: Upload,
    download: Download,
}

/// What a list of one product depends on. Results are at the same addresses in each token, and so lists are written once.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct ListKey {
    weights: usize,
    x: u64,
    out: u64,
    tokens: usize,
}

/// Memory for the results of a chain, used from its start again by the next chain.
struct Results {
    driver: Arc<dyn Driver>,
    pieces: Vec<(DeviceBuffer, usize)>,
    piece: usize,
    used: usize,
}

impl Results {
    fn begin(&mut self) {
        (self.piece, self.used) = (0, 0);
    }

    /// The address of memory for `bytes` bytes. Results of one chain are in order and close to each other.
    fn take(&mut self, bytes: usize) -> Result<u64> {
        let bytes = bytes.next_multiple_of(ALIGN);
        while self.pieces.get(self.piece).is_some_and(|(_, size)| self.used + bytes > *size) {
            (self.piece, self.used) = (self.piece + 1, 0);
        }
        if self.piece == self.pieces.len() {
            let size = bytes.max(PIECE_BYTES);
            self.pieces.push((DeviceBuffer::of(&self.driver, size)?, size));
        }
        let at = self.pieces[self.piece].0.at() + self.used as u64;
        self.used += bytes;
        Ok(at)
    }
}

impl GpuOps {
    pub(crate) fn new(
        driver: &Arc<dyn Driver>,
        products: Arc<GpuProducts>,
        attention: Arc<GpuAttention>,
    ) -> Result<Self> {
        let results = Results { driver: driver.clone(), pieces: Vec::new(), piece: 0, used: 0 };
        let state = State {
            launches: Launches::new(driver),
            kept: Vec::new(),
            results,
            rows: Vec::new(),
            uploads: Vec::new(),
            sent: 0,
            lists: HashMap::new(),
            staging: Upload::new(driver)?,
            download: Download::new(driver)?,
        };
        Ok(GpuOps { driver: driver.clone(), products, attention, state: Mutex::new(state) })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Adds a result to the chain.
    fn push(&mut self, at: u64, rows: usize, width: usize) -> DeviceRows {
        let result = DeviceRows { id: self.rows.len(), rows, width };
        self.rows.push((at, result));
        result
    }

    /// The address of a result of this chain.
    fn at(&self, rows: DeviceRows) -> Result<u64> {
        match self.rows.get(rows.id) {
            Some((at, known)) if *known == rows => Ok(*at),
            _ => Err(GpuError::Unsupported(format!("the GPU has no rows {rows:?} in this chain"))),
        }
    }

    /// The address of a value that does not change.
    fn kept(&self, id: usize) -> Result<u64> {
        let kept = self.kept.get(id).map(DeviceBuffer::at);
        kept.ok_or_else(|| GpuError::Unsupported(format!("the GPU keeps no value {id}")))
    }

    /// Copies values to memory of their own on the device, and waits.
    fn keep(&mut self, driver: &Arc<dyn Driver>, bytes: &[u8]) -> Result<DeviceBuffer> {
        let buffer = DeviceBuffer::of(driver, bytes.len())?;
        self.staging.copy(bytes, buffer.at())?;
        Ok(buffer)
    }

    fn send(&mut self, driver: &Arc<dyn Driver>, values: &[f32], width: usize) -> Result<DeviceRows> {
        if self.sent == self.uploads.len() {
            self.uploads.push(Upload::new(driver)?);
        }
        let upload = &mut self.uploads[self.sent];
        let (at, staged) = upload.begin(size_of_val(values))?;
        staged.copy_from_slice(bytemuck::cast_slice(values));
        upload.send()?;
        self.sent += 1;
        Ok(self.push(at, values.len() / width, width))
    }

    fn multiply(
        &mut self,
        driver: &Arc<dyn Driver>,
        x: DeviceRows,
        weights: usize,
        product: ProductKernelArgs,
        batch: &mut ProductBatch,
    ) -> Result<DeviceRows> {
        let at = self.at(x)?;
        let x_at = if batch.takes_blocks() { self.quantise(at, x)? } else { at };
        let out = self.results.take(4 * x.rows * product.rows as usize)?;
        batch.push(ProductKernelArgs { x: x_at, out, tokens: word(x.rows)?, ..product });
        let key = ListKey { weights, x: x_at, out, tokens: x.rows };
        if !self.lists.contains_key(&key) {
            let mut bytes = [0; ProductBatch::BYTES];
            batch.write(&mut bytes);
            if self.lists.len() == MAX_LISTS {
                self.lists.clear();
            }
            let list = self.keep(driver, &bytes)?;
            self.lists.insert(key, list);
        }
        self.launches.products(batch, self.lists[&key].at())?;
        Ok(self.push(out, x.rows, product.rows as usize))
    }

    fn quantise(&mut self, at: u64, x: DeviceRows) -> Result<u64> {
        let blocks = x.rows * x.width / BLOCK;
        let out = self.results.take(blocks * BLOCK_BYTES)?;
        self.launches.quantise(at, out, word(blocks)?)?;
        Ok(out)
    }

    /// Copies the bytes from the first wanted row to the last back at once, where they are close together.
    fn receive(&mut self, wanted: &mut [(DeviceRows, &mut [f32])]) -> Result<()> {
        let places = wanted.iter().map(|(rows, _)| Ok((self.at(*rows)?, 4 * rows.rows * rows.width)));
        let places: Vec<(u64, usize)> = places.collect::<Result<_>>()?;
        if places.iter().zip(&*wanted).any(|((_, bytes), (_, out))| *bytes != size_of_val(&**out)) {
            return Err(GpuError::Unsupported("rows have another size than the place that they are copied to".into()));
        }
        let Range { start, end } = span(&places);
        let total: usize = places.iter().map(|(_, bytes)| bytes).sum();
        if (end - start) as usize <= 2 * total + ALIGN * places.len() {
            let bytes = self.download.fetch(start, (end - start) as usize)?;
            for ((at, size), (_, out)) in places.iter().zip(wanted) {
                out.copy_from_slice(bytemuck::cast_slice(&bytes[(at - start) as usize..][..*size]));
            }
            return Ok(());
        }
        for ((at, size), (_, out)) in places.iter().zip(wanted) {
            out.copy_from_slice(bytemuck::cast_slice(self.download.fetch(*at, *size)?));
        }
        Ok(())
    }
}

/// The addresses from the first byte of these places to the last.
fn span(places: &[(u64, usize)]) -> Range<u64> {
    let start = places.iter().map(|(at, _)| *at).min().unwrap_or_default();
    start..places.iter().map(|(at, bytes)| at + *bytes as u64).max().unwrap_or_default()
}

impl DeviceOps for GpuOps {
    fn keep(&self, values: &[f32]) -> larder_model::Result<usize> {
        let mut state = self.lock();
        let buffer = state.keep(&self.driver, bytemuck::cast_slice(values))?;
        state.kept.push(buffer);
        Ok(state.kept.len() - 1)
    }

    fn begin(&self) {
        let mut state = self.lock();
        state.rows.clear();
        state.results.begin();
        state.sent = 0;
    }

    fn send(&self, values: &[f32], width: usize) -> larder_model::Result<DeviceRows> {
        Ok(self.lock().send(&self.driver, values, width)?)
    }

    fn attend(&self, tasks: &[&AttentionArgs<DeviceKvView>]) -> larder_model::Result<DeviceRows> {
        let width = tasks.first().map_or(1, |args| args.heads * args.values.width);
        let (at, values) = self.attention.begin(tasks)?;
        Ok(self.lock().push(at, values / width, width))
    }

    fn multiply(&self, x: DeviceRows, weights: usize) -> larder_model::Result<DeviceRows> {
        let mut batch = ProductBatch::default();
        let product = self.products.alone(weights, &mut batch)?;
        if product.cols as usize != x.width {
            let (rows, cols) = (product.rows, product.cols);
            return Err(GpuError::Unsupported(format!("{} inputs do not fit {rows} x {cols} weights", x.width)).into());
        }
        Ok(self.lock().multiply(&self.driver, x, weights, product, &mut batch)?)
    }

    fn add(&self, x: DeviceRows, y: DeviceRows, factor: f32) -> larder_model::Result<DeviceRows> {
        let mut state = self.lock();
        let (x_at, y_at, values) = (state.at(x)?, state.at(y)?, x.rows * x.width);
        if (x.rows, x.width) != (y.rows, y.width) {
            return Err(GpuError::Unsupported(format!("rows {x:?} and {y:?} cannot be added")).into());
        }
        let out = state.results.take(4 * values)?;
        state.launches.add_scaled([x_at, y_at, out], word(values)?, word(values)?, factor)?;
        Ok(state.push(out, x.rows, x.width))
    }

    fn add_row(&self, x: DeviceRows, row: usize) -> larder_model::Result<DeviceRows> {
        let mut state = self.lock();
        let (x_at, row, values) = (state.at(x)?, state.kept(row)?, x.rows * x.width);
        let out = state.results.take(4 * values)?;
        state.launches.add_scaled([x_at, row, out], word(values)?, word(x.width)?, 1.0)?;
        Ok(state.push(out, x.rows, x.width))
    }

    fn rms_norm(&self, x: DeviceRows, weight: usize, eps: f64) -> larder_model::Result<DeviceRows> {
        let mut state = self.lock();
        let (at, weight) = (state.at(x)?, state.kept(weight)?);
        let out = state.results.take(4 * x.rows * x.width)?;
        state.launches.rms_norm([at, weight, out], word(x.rows)?, word(x.width)?, eps)?;
        Ok(state.push(out, x.rows, x.width))
    }

    fn receive(&self, wanted: &mut [(DeviceRows, &mut [f32])]) -> larder_model::Result<()> {
        Ok(self.lock().receive(wanted)?)
    }
}
