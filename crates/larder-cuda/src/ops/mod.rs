//! Chains of operations on rows of activations in GPU memory, for which the host waits once.

mod cca;
mod chain;
mod heads;
mod hyper_connections;
mod products;
mod receive;
mod recurrent;
mod rows;
mod sampled;
mod topk_rows;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use larder_kernels::AttentionArgs;
use larder_model::{
    Activation, Few, GateFunction, Heads, HostBuffer, HostRows, KvView, NormGate, Ops, PlacedMatrix, Rows,
};
use parking_lot::{Mutex, MutexGuard};

use crate::attention::{GpuAttention, Outputs, Queries};
use crate::driver::Driver;
use crate::error::{GpuError, Result};
use crate::expert_kernels::{BLOCK, BLOCK_BYTES, DeviceActivations};
use crate::launch_queue::LaunchQueue;
use crate::launches::{ExpertSum, Launches, ProductBatch, word};
use crate::memory::{DeviceBuffer, Download, Upload};
use crate::products::GpuProducts;
use chain::Chain;
use products::ListKey;
use receive::BegunCopy;

/// The most copies in flight that are waited for one by one: of drawn tokens and logits, of two steps.
const COPIES: usize = 4;

/// The place of bytes that are staged before a launch.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Staging {
    /// Among bytes that have one size each time, so that the launches behind them can become a graph.
    Steady,
    /// Apart from these, since their number varies.
    Varying,
}

/// Operations on rows of activations, with the weights of [`GpuProducts`] and the KV cache of [`GpuAttention`].
pub struct GpuOps {
    queue: Arc<LaunchQueue>,
    products: Arc<GpuProducts>,
    attention: Arc<GpuAttention>,
    state: Mutex<State>,
}

struct State {
    launches: Launches,
    /// Values that do not change.
    kept: Vec<DeviceBuffer>,
    /// Memory of the chain that is being begun, and of the one before.
    chains: [Chain; 2],
    /// By operation of both chains, from number `first` on: the address of its result, and its shape.
    rows: VecDeque<(u64, Rows)>,
    first: usize,
    /// Number of the first operation of this chain.
    begun_at: usize,
    /// By number of an operation of both chains: the address of its result, quantised.
    quantised: HashMap<usize, u64>,
    /// The sum of experts that was begun last, and the number of its launch: the norm behind it may be computed by the
    /// same launch.
    last_sum: Option<(Rows, ExpertSum, u64)>,
    lists: HashMap<ListKey, DeviceBuffer>,
    /// Failures of launches until the lists were written.
    failures: u64,
    staging: Upload,
    download: Download,
    /// The copy of rows that is in flight.
    begun: Option<BegunCopy>,
    /// The copies that were begun last, and their number so far.
    copied: [Download; COPIES],
    copies: usize,
    /// The token that was drawn last.
    last_drawn: Option<DeviceBuffer>,
    /// How often the host has waited.
    waits: u64,
}

impl GpuOps {
    pub(crate) fn new(
        queue: &Arc<LaunchQueue>,
        products: Arc<GpuProducts>,
        attention: Arc<GpuAttention>,
    ) -> Result<Self> {
        let driver: &Arc<dyn Driver> = &(queue.clone() as _);
        let download = || Download::new(driver);
        let state = State {
            launches: Launches::new(driver),
            kept: Vec::new(),
            chains: [(); 2].map(|()| Chain::new(driver)),
            rows: VecDeque::new(),
            first: 0,
            begun_at: 0,
            quantised: HashMap::new(),
            last_sum: None,
            lists: HashMap::new(),
            failures: 0,
            staging: Upload::new(driver)?,
            download: download()?,
            begun: None,
            copied: [download()?, download()?, download()?, download()?],
            copies: 0,
            last_drawn: None,
            waits: 0,
        };
        Ok(GpuOps { queue: queue.clone(), products, attention, state: Mutex::new(state) })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

impl State {
    /// Adds a result to the chain.
    fn push(&mut self, at: u64, rows: usize, width: usize) -> Rows {
        let result = Rows { id: self.first + self.rows.len(), rows, width };
        self.rows.push_back((at, result));
        result
    }

    /// Adds a result in new memory to the chain; also returns its address.
    fn result(&mut self, rows: usize, width: usize) -> Result<(Rows, u64)> {
        let at = self.chains[0].results.take(4 * rows * width)?;
        Ok((self.push(at, rows, width), at))
    }

    /// As [`result`](Self::result), with memory for its quantised form where rows are whole blocks; else the second
    /// address is 0.
    fn result_in_blocks(&mut self, rows: usize, width: usize) -> Result<(Rows, [u64; 2])> {
        let (result, at) = self.result(rows, width)?;
        Ok((result, [at, self.blocks_of(result)?]))
    }

    /// The address for the quantised form of a result, where its rows are whole blocks; else 0. The caller computes it.
    fn blocks_of(&mut self, result: Rows) -> Result<u64> {
        if !result.width.is_multiple_of(BLOCK) {
            return Ok(0);
        }
        let blocks = self.chains[0].results.take(result.rows * result.width / BLOCK * BLOCK_BYTES)?;
        self.quantised.insert(result.id, blocks);
        Ok(blocks)
    }

    /// The address of a result of this chain or the one before.
    fn at(&self, rows: Rows) -> Result<u64> {
        match rows.id.checked_sub(self.first).and_then(|index| self.rows.get(index)) {
            Some((at, known)) if *known == rows => Ok(*at),
            _ => Err(GpuError::Unsupported(format!("the GPU no longer has the rows {rows:?}"))),
        }
    }

    /// The address of a value that does not change.
    fn kept(&self, id: usize) -> Result<u64> {
        let kept = self.kept.get(id).map(DeviceBuffer::at);
        kept.ok_or_else(|| GpuError::Unsupported(format!("the GPU keeps no value {id}")))
    }

    /// As [`kept`](Self::kept), with the number of values.
    fn kept_values(&self, id: usize) -> Result<(u64, usize)> {
        Ok((self.kept(id)?, self.kept.get(id).map_or(0, DeviceBuffer::bytes) / size_of::<f32>()))
    }

    /// Copies bytes to memory of their own on the device, before the next launch.
    fn keep(&mut self, queue: &Arc<LaunchQueue>, bytes: &[u8]) -> Result<DeviceBuffer> {
        let buffer = DeviceBuffer::of(&(queue.clone() as _), bytes.len())?;
        self.fill(queue, buffer.at(), bytes, Staging::Varying)?;
        Ok(buffer)
    }

    /// Copies bytes to an address.
    fn fill(&mut self, queue: &LaunchQueue, at: u64, bytes: &[u8], staging: Staging) -> Result<()> {
        let staged = self.stage(queue, bytes, staging)?;
        self.launches.copy_bytes(staged, at, bytes.len() as u64)
    }

    /// Copies bytes to the device before the next launch, and returns their address, valid until the next wait.
    fn stage(&self, queue: &LaunchQueue, bytes: &[u8], staging: Staging) -> Result<u64> {
        let write = |_, out: &mut [u8]| {
            out.copy_from_slice(bytes);
            Ok(())
        };
        match staging {
            Staging::Steady => queue.stage(bytes.len(), write),
            Staging::Varying => queue.stage_varying(bytes.len(), write),
        }
    }

    fn send(&mut self, queue: &Arc<LaunchQueue>, values: &[f32], width: usize) -> Result<Rows> {
        let at = self.chains[0].send(&(queue.clone() as _), bytemuck::cast_slice(values))?;
        Ok(self.push(at, values.len() / width, width))
    }

    /// Adds the outputs of attention to the chain.
    fn push_outputs(&mut self, tasks: &[&AttentionArgs<KvView>], outputs: Outputs) -> Rows {
        let Outputs { at, blocks, values } = outputs;
        let width = tasks.first().map_or(1, |args| args.heads * args.values.width);
        let result = self.push(at, values / width, width);
        self.quantised.extend(blocks.map(|blocks| (result.id, blocks)));
        result
    }

    /// The address of rows as quantised blocks, which are made once.
    fn quantised(&mut self, x: Rows) -> Result<u64> {
        let at = self.at(x)?;
        if let Some(out) = self.quantised.get(&x.id) {
            return Ok(*out);
        }
        let blocks = x.rows * x.width / BLOCK;
        let out = self.chains[0].results.take(blocks * BLOCK_BYTES)?;
        self.launches.quantise(at, out, word(blocks)?)?;
        self.quantised.insert(x.id, out);
        Ok(out)
    }

    /// Begins the next chain: memory of the one before the last is used again.
    fn begin_chain(&mut self) {
        self.chains.swap(0, 1);
        self.chains[0].begin(self.waits);
        self.rows.drain(..self.begun_at - self.first);
        self.first = self.begun_at;
        self.begun_at = self.first + self.rows.len();
        self.quantised.retain(|id, _| *id >= self.first);
    }
}

impl GpuOps {
    /// Rows as experts read them: as floats, and quantised if wanted.
    pub(crate) fn activations(&self, rows: Rows, quantised: bool) -> Result<DeviceActivations> {
        let mut state = self.lock();
        let blocks = if quantised { state.quantised(rows)? } else { 0 };
        Ok(DeviceActivations { values: state.at(rows)?, blocks })
    }

    /// The address of rows.
    pub(crate) fn address(&self, rows: Rows) -> Result<u64> {
        self.lock().at(rows)
    }

    /// Begins the sums of the experts of tokens, whose terms are or will be at address `terms`; what is added to them
    /// has the same shape.
    pub(crate) fn begin_sum(&self, terms: u64, k: usize, shape: [usize; 2], added: [Option<Rows>; 2]) -> Result<Rows> {
        let (mut state, [tokens, width]) = (self.lock(), shape);
        if added.iter().flatten().any(|rows| [rows.rows, rows.width] != shape) {
            return Err(GpuError::Unsupported(format!("rows {added:?} cannot be added to sums {shape:?}")));
        }
        let at = |rows: Option<Rows>| rows.map_or(Ok(0), |rows| state.at(rows));
        let [shared, residual] = [at(added[0])?, at(added[1])?];
        let (sums, out) = state.result(tokens, width)?;
        let (tokens, k, width) = (word(tokens)?, word(k)?, word(width)?);
        let sum = ExpertSum { terms, shared, residual, out, tokens, k, width };
        state.launches.sum_experts(&sum)?;
        state.last_sum = Some((sums, sum, self.queue.asked()));
        Ok(sums)
    }

    /// How many submissions of launches have failed so far.
    pub(crate) fn failures(&self) -> u64 {
        self.queue.failures()
    }

    /// Copies bytes to a buffer of the caller.
    pub(crate) fn fill(&self, buffer: &DeviceBuffer, bytes: &[u8], staging: Staging) -> Result<()> {
        self.fill_at(buffer.at(), bytes, staging)
    }

    /// Copies bytes to an address in memory of the caller.
    pub(crate) fn fill_at(&self, at: u64, bytes: &[u8], staging: Staging) -> Result<()> {
        self.lock().fill(&self.queue, at, bytes, staging)
    }

    /// Copies values that do not change to the device.
    pub(crate) fn keep_bytes(&self, bytes: &[u8]) -> Result<DeviceBuffer> {
        self.lock().keep(&self.queue, bytes)
    }
}

impl Ops for GpuOps {
    fn keep(&self, values: &[f32]) -> larder_model::Result<usize> {
        let mut state = self.lock();
        // At once, since they are not sent again if a launch fails.
        let buffer = DeviceBuffer::of(&(self.queue.clone() as _), size_of_val(values))?;
        state.staging.copy(bytemuck::cast_slice(values), buffer.at())?;
        state.kept.push(buffer);
        Ok(state.kept.len() - 1)
    }

    fn upload(&self, mut buffer: HostBuffer) -> larder_model::Result<Rows> {
        let width = buffer.width();
        Ok(self.lock().send(&self.queue, buffer.values(), width)?)
    }

    fn send(&self, values: &[f32], width: usize) -> larder_model::Result<Rows> {
        Ok(self.lock().send(&self.queue, values, width)?)
    }

    fn begin_layer(&self) {
        self.lock().begin_chain();
    }

    fn slice(&self, x: Rows, first: usize, rows: usize) -> larder_model::Result<Rows> {
        let mut state = self.lock();
        let at = state.at(x)?;
        if (first, rows) == (0, x.rows) {
            return Ok(x);
        }
        if first + rows > x.rows {
            return Err(GpuError::Unsupported(format!("{x:?} has no {rows} rows from row {first} on")).into());
        }
        Ok(state.push(at + 4 * (first * x.width) as u64, rows, x.width))
    }

    fn attend_new(&self, heads: &Heads, tasks: &[&AttentionArgs<KvView>]) -> larder_model::Result<Rows> {
        let mut state = self.lock();
        let (new, _) = state.new_tokens(heads, tasks)?;
        let outputs = self.attention.begin(tasks, Queries::New(&new))?;
        Ok(state.push_outputs(tasks, outputs))
    }

    fn matmul(&self, x: Rows, weights: &[&PlacedMatrix]) -> larder_model::Result<Few<Rows>> {
        let weights = weights.iter().map(|weights| id_of(weights)).collect::<Result<Vec<_>>>()?;
        self.queue.end_varying()?;
        let mut results = vec![None; weights.len()];
        // One launch for each number format, in the order of the first of its products.
        while let Some(first) = results.iter().position(Option::is_none) {
            let (mut batch, mut places) = (ProductBatch::default(), Vec::new());
            self.products.begin_batch(weights[first], &mut batch)?;
            for (place, id) in weights.iter().enumerate().skip(first).filter(|(place, _)| results[*place].is_none()) {
                if self.products.add_to(&mut batch, *id, x.width)? {
                    places.push(place);
                }
            }
            let ids: Vec<usize> = places.iter().map(|place| weights[*place]).collect();
            let computed = self.lock().matmul(&self.queue, x, &ids, &mut batch)?;
            places.into_iter().zip(computed).for_each(|(place, rows)| results[place] = Some(rows));
        }
        Ok(results.into_iter().flatten().collect())
    }

    fn matmul_heads(&self, x: Rows, weights: &[PlacedMatrix]) -> larder_model::Result<Rows> {
        let weights = &weights.iter().map(id_of).collect::<Result<Vec<_>>>()?[..];
        let (mut batch, step) = (ProductBatch::default(), x.width / weights.len().max(1));
        let Some(first) = weights.first() else {
            return Err(GpuError::Unsupported("a product without heads".into()).into());
        };
        self.products.begin_batch(*first, &mut batch)?;
        for id in weights {
            if !self.products.add_head_to(&mut batch, *id, step)? {
                return Err(GpuError::Unsupported("heads have weights in several number formats".into()).into());
            }
        }
        Ok(self.lock().matmul_heads(&self.queue, x, weights, &mut batch)?)
    }

    fn combine(&self, act: Activation, gate: Rows, up: Rows) -> larder_model::Result<Rows> {
        let mut state = self.lock();
        if (gate.rows, gate.width) != (up.rows, up.width) {
            return Err(GpuError::Unsupported(format!("rows {gate:?} and {up:?} cannot be combined")).into());
        }
        let (at, up, values) = (state.at(gate)?, state.at(up)?, gate.rows * gate.width);
        let blocks = state.blocks_of(gate)?;
        state.launches.combine(act, [at, up, blocks], word(values)?)?;
        Ok(gate)
    }

    fn activate(&self, act: Activation, x: Rows) -> larder_model::Result<Rows> {
        let mut state = self.lock();
        state.launches.apply(act, state.at(x)?, word(x.rows * x.width)?)?;
        state.quantised.remove(&x.id);
        Ok(x)
    }

    fn softcap(&self, x: Rows, cap: f32) -> larder_model::Result<Rows> {
        let mut state = self.lock();
        state.launches.softcap(state.at(x)?, word(x.rows * x.width)?, cap)?;
        state.quantised.remove(&x.id);
        Ok(x)
    }

    fn gate(&self, x: Rows, gates: Rows, function: GateFunction, heads: usize) -> larder_model::Result<Rows> {
        Ok(self.lock().gate(x, gates, function, heads)?)
    }

    fn norm_gate(&self, x: Rows, gates: Rows, norm: &NormGate) -> larder_model::Result<Rows> {
        Ok(self.lock().norm_gate(x, gates, norm)?)
    }

    fn scale(&self, x: Rows, factor: f32) -> larder_model::Result<Rows> {
        Ok(self.lock().scale(x, factor)?)
    }

    fn scale_columns(&self, x: Rows, factors: usize) -> larder_model::Result<Rows> {
        Ok(self.lock().scale_columns(x, factors)?)
    }

    fn add(&self, x: Rows, y: Rows, factor: f32) -> larder_model::Result<Rows> {
        Ok(self.lock().add(x, y, factor)?)
    }

    fn add_norm(&self, x: Rows, y: Rows, factor: f32, weight: usize, eps: f64) -> larder_model::Result<[Rows; 2]> {
        Ok(self.lock().add_norm([x, y], factor, weight, eps)?)
    }

    fn add_row(&self, x: Rows, row: usize) -> larder_model::Result<Rows> {
        Ok(self.lock().add_row(x, row)?)
    }

    fn rms_norm(&self, x: Rows, weight: usize, eps: f64) -> larder_model::Result<Rows> {
        Ok(self.lock().rms_norm(&self.queue, x, weight, eps)?)
    }

    fn layer_norm(&self, x: Rows, weights: [usize; 2], eps: f64) -> larder_model::Result<Rows> {
        Ok(self.lock().layer_norm(x, weights, eps)?)
    }

    fn find_best(&self, x: Rows, best: usize) -> larder_model::Result<Rows> {
        Ok(self.lock().find_best(x, best)?)
    }

    fn take_out(&self, x: Rows, places: &[u32]) -> larder_model::Result<Rows> {
        Ok(self.lock().take_out(&self.queue, x, places)?)
    }

    fn begin_download(&self, wanted: &[Rows]) -> larder_model::Result<()> {
        Ok(self.lock().begin_download(wanted)?)
    }

    fn download(&self, wanted: &[Rows]) -> larder_model::Result<Few<HostRows>> {
        let mut state = self.lock();
        if state.begun.is_some() {
            // The host waits for these rows only, and the device goes on. The next wait reports an error.
            let _ = self.queue.flush();
        }
        state.waits += 1;
        let mut values: Vec<Vec<f32>> = wanted.iter().map(|rows| vec![0.0; rows.rows * rows.width]).collect();
        let mut places: Vec<_> = wanted.iter().copied().zip(values.iter_mut().map(|values| &mut values[..])).collect();
        state.receive(&mut places)?;
        Ok(wanted.iter().zip(values).map(|(rows, values)| HostRows::new(values, rows.width)).collect())
    }
}

/// The id of a matrix on the device.
fn id_of(matrix: &PlacedMatrix) -> Result<usize> {
    match matrix.on_device() {
        Some((_, id)) => Ok(id),
        None => Err(GpuError::Unsupported("a matrix in main memory has no products on the GPU".into())),
    }
}
