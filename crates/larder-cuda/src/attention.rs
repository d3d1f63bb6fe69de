//! The KV cache in GPU memory, and attention over it.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use larder_core::NumberFormat;
use larder_model::{DeviceAttention, DeviceKvShape, DeviceKvView};

use crate::driver::Driver;
use crate::error::{GpuError, Result};
use crate::launches::{AttentionKernelArgs, Launches, RowCopy, TILE_QUERIES, word};
use crate::memory::{DeviceBuffer, Download, Upload};

/// Bytes of scores per launch, unless one tile of queries has more.
const MAX_SCORE_BYTES: usize = 16 << 20;
/// The most tiles of a launch: the limit of CUDA for blocks in y.
const MAX_TILES: usize = 65_535;
/// Alignment, in bytes, of the arrays that kernels read.
const ALIGN: usize = 16;

/// Memory for scores grows by a multiple of this many bytes.
const STEP: usize = 1 << 20;

/// The arguments of attention over blocks on the device.
type Args<'a> = larder_kernels::AttentionArgs<'a, DeviceKvView>;

/// The KV cache on the device, and the buffers of attention.
pub struct GpuAttention {
    driver: Arc<dyn Driver>,
    state: Mutex<State>,
}

struct State {
    launches: Launches,
    blocks: HashMap<usize, KvBlock>,
    /// Blocks allocated so far; the number of the next block is one higher.
    numbers: usize,
    /// Staging of new rows: one is filled while the other is being copied.
    rows: [Upload; 2],
    turn: usize,
    args: Upload,
    scores: DeviceBuffer,
    out: DeviceBuffer,
    download: Download,
}

/// Rows of keys or values on the device.
struct KvBlock {
    shape: DeviceKvShape,
    buffer: DeviceBuffer,
}

impl GpuAttention {
    pub(crate) fn new(driver: &Arc<dyn Driver>) -> Result<Self> {
        let upload = || Upload::new(driver);
        let state = State {
            launches: Launches::new(driver),
            blocks: HashMap::new(),
            numbers: 0,
            rows: [upload()?, upload()?],
            turn: 0,
            args: upload()?,
            scores: DeviceBuffer::new(driver),
            out: DeviceBuffer::new(driver),
            download: Download::new(driver)?,
        };
        Ok(GpuAttention { driver: driver.clone(), state: Mutex::new(state) })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DeviceAttention for GpuAttention {
    fn allocate(&self, shape: DeviceKvShape) -> larder_model::Result<usize> {
        let DeviceKvShape { kind, heads, row_bytes: row, .. } = shape;
        if !matches!(kind, NumberFormat::F32 | NumberFormat::F16)
            || heads == 0
            || row == 0
            || !row.is_multiple_of(kind.block_bytes())
        {
            let what = format!("the GPU cannot keep a KV cache in {kind} with {heads} heads of {row} bytes per row");
            return Err(unsupported(what).into());
        }
        let buffer = DeviceBuffer::of(&self.driver, shape.bytes())?;
        let mut state = self.lock();
        state.numbers += 1;
        let number = state.numbers;
        state.blocks.insert(number, KvBlock { shape, buffer });
        Ok(number)
    }

    fn free(&self, rows: usize) {
        self.lock().blocks.remove(&rows);
    }

    fn append(&self, rows: usize, at: usize, bytes: &[u8]) -> larder_model::Result<()> {
        Ok(self.lock().append(rows, at, bytes)?)
    }

    fn copy(&self, from: usize, to: usize, len: usize) -> larder_model::Result<()> {
        Ok(self.lock().copy(from, to, len)?)
    }

    fn attend(&self, args: &Args, out: &mut [f32]) -> larder_model::Result<()> {
        Ok(self.lock().attend(args, out)?)
    }
}

impl State {
    fn block(&self, number: usize) -> Result<&KvBlock> {
        self.blocks.get(&number).ok_or_else(|| unsupported(format!("the GPU has no KV block {number}")))
    }

    fn append(&mut self, rows: usize, at: usize, bytes: &[u8]) -> Result<()> {
        let KvBlock { shape: DeviceKvShape { heads, capacity, row_bytes: row, .. }, buffer } = self.block(rows)?;
        let (heads, capacity, row, base) = (*heads, *capacity, *row, buffer.at());
        let count = bytes.len() / (heads * row);
        if !bytes.len().is_multiple_of(heads * row) || at + count > capacity {
            return Err(unsupported(format!(
                "cannot append {} bytes at position {at}: rows are {heads} x {row} bytes, with room for {capacity}",
                bytes.len()
            )));
        }
        self.turn = 1 - self.turn;
        let upload = &mut self.rows[self.turn];
        let (from, here) = upload.begin(bytes.len())?;
        here.copy_from_slice(bytes);
        upload.send()?;
        let (to, to_head) = (base + (at * row) as u64, capacity * row);
        let from_row = heads * row;
        self.launches.copy_rows(&RowCopy { from, from_head: row, from_row, to, to_head, bytes: row, count, heads })
    }

    fn copy(&self, from: usize, to: usize, count: usize) -> Result<()> {
        let (from, to) = (self.block(from)?, self.block(to)?);
        let (DeviceKvShape { kind, heads, capacity: room, row_bytes: row }, new) = (from.shape, to.shape);
        if (DeviceKvShape { capacity: room, ..new }) != from.shape || count > room.min(new.capacity) {
            let (room, there) = (from.shape.capacity, new.capacity);
            return Err(unsupported(format!(
                "cannot copy {count} of {room} rows in {kind} to a KV block of {there} rows in {}",
                new.kind
            )));
        }
        let (from_head, to_head, bytes) = (room * row, new.capacity * row, row);
        let (from, to) = (from.buffer.at(), to.buffer.at());
        self.launches.copy_rows(&RowCopy { from, from_head, from_row: row, to, to_head, bytes, count, heads })
    }

    fn attend(&mut self, args: &Args, out: &mut [f32]) -> Result<()> {
        let [keys, values] = self.check(args, out)?;
        if args.seen.is_empty() {
            return Ok(());
        }
        let (tiles, span) = tiles_and_span(args);
        let at_once = (MAX_SCORE_BYTES / (4 * TILE_QUERIES * span)).clamp(1, MAX_TILES).min(tiles);
        let scores = 4 * TILE_QUERIES * span * at_once;
        self.scores.ensure((scores + 4 * TILE_QUERIES * at_once).next_multiple_of(STEP))?;
        self.out.ensure(4 * out.len())?;
        let (kernel_args, list) = self.send(args, span, self.scores.at() + scores as u64)?;
        for first in (0..tiles).step_by(at_once) {
            let range = word(first)?..word(tiles.min(first + at_once))?;
            self.launches.attend(&kernel_args, [keys, values], list, range)?;
        }
        out.copy_from_slice(bytemuck::cast_slice(self.download.fetch(self.out.at(), 4 * out.len())?));
        Ok(())
    }

    /// Copies kernel arguments, visible positions, sinks and queries to the device. Returns the arguments and their address.
    fn send(&mut self, args: &Args, span: usize, inverse_sums: u64) -> Result<(AttentionKernelArgs, u64)> {
        let (keys, values) = (self.block(args.keys.block)?, self.block(args.values.block)?);
        let mut kernel_args = AttentionKernelArgs {
            queries: 0,
            keys: keys.buffer.at(),
            values: values.buffer.at(),
            key_head_stride: (keys.shape.capacity * keys.shape.row_bytes) as u64,
            value_head_stride: (values.shape.capacity * values.shape.row_bytes) as u64,
            seen: 0,
            sinks: 0,
            scores: self.scores.at(),
            inverse_sums,
            out: self.out.at(),
            count: word(args.seen.len())?,
            heads: word(args.heads)?,
            group: word(args.heads / args.kv_heads)?,
            key_row_stride: word(keys.shape.row_bytes)?,
            value_row_stride: word(values.shape.row_bytes)?,
            key_width: word(args.keys.width)?,
            value_width: word(args.values.width)?,
            score_stride: word(span)?,
            scale: args.scale,
        };
        let sinks = args.sinks.unwrap_or_default();
        let sinks_at = (AttentionKernelArgs::BYTES + 8 * args.seen.len()).next_multiple_of(ALIGN);
        let queries_at = (sinks_at + size_of_val(sinks)).next_multiple_of(ALIGN);
        let (list, bytes) = self.args.begin(queries_at + size_of_val(args.queries))?;
        kernel_args.seen = list + AttentionKernelArgs::BYTES as u64;
        kernel_args.sinks = args.sinks.map_or(0, |_| list + sinks_at as u64);
        kernel_args.queries = list + queries_at as u64;
        bytes[..AttentionKernelArgs::BYTES].copy_from_slice(&kernel_args.to_bytes());
        for (seen, out) in args.seen.iter().zip(bytes[AttentionKernelArgs::BYTES..].as_chunks_mut::<8>().0) {
            *out = bytemuck::cast([word(seen.start)?, word(seen.end)?]);
        }
        bytes[sinks_at..][..size_of_val(sinks)].copy_from_slice(bytemuck::cast_slice(sinks));
        bytes[queries_at..].copy_from_slice(bytemuck::cast_slice(args.queries));
        self.args.send()?;
        Ok((kernel_args, list))
    }

    /// Checks the shapes, which the kernels rely on. Returns the number formats of keys and values.
    fn check(&self, args: &Args, out: &[f32]) -> Result<[NumberFormat; 2]> {
        let (keys, values) = (self.block(args.keys.block)?.shape, self.block(args.values.block)?.shape);
        let (count, end) = (args.seen.len(), args.seen.iter().map(|seen| seen.end).max().unwrap_or_default());
        let fits = |shape: DeviceKvShape, width: usize| {
            shape.heads == args.kv_heads
                && (1..=shape.row_bytes / shape.kind.block_bytes()).contains(&width)
                && end <= shape.capacity
        };
        let all = args.heads.is_multiple_of(args.kv_heads)
            && fits(keys, args.keys.width)
            && fits(values, args.values.width)
            && args.queries.len() == count * args.heads * args.keys.width
            && out.len() == count * args.heads * args.values.width
            && args.sinks.is_none_or(|sinks| sinks.len() == args.heads)
            && args.seen.iter().all(|seen| seen.start < seen.end);
        match all {
            true => Ok([keys.kind, values.kind]),
            false => Err(unsupported(format!(
                "attention of {count} queries with {} heads over {end} positions does not fit keys {keys:?}, values \
                 {values:?} and {} outputs",
                args.heads,
                out.len(),
            ))),
        }
    }
}

/// The number of tiles of [`TILE_QUERIES`] queries, over all key heads, and the most positions that one tile spans.
fn tiles_and_span(args: &Args) -> (usize, usize) {
    let group = args.heads / args.kv_heads;
    let pairs = args.seen.len() * group;
    let span = |first: usize| {
        let visible: &[Range<usize>] = &args.seen[first / group..(pairs.min(first + TILE_QUERIES)).div_ceil(group)];
        let start = visible.iter().map(|seen| seen.start).min().expect("a tile has queries");
        visible.iter().map(|seen| seen.end).max().expect("a tile has queries") - start
    };
    let span = (0..pairs).step_by(TILE_QUERIES).map(span).max().expect("there are queries");
    (args.kv_heads * pairs.div_ceil(TILE_QUERIES), span)
}

fn unsupported(what: String) -> GpuError {
    GpuError::Unsupported(what)
}
