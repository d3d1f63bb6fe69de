//! The KV cache in GPU memory, and attention over it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use larder_core::NumberFormat;
use larder_kernels::{AttentionArgs, AttentionTask};
use larder_model::{DeviceAttention, DeviceKvView, KvPageShape};

use crate::attention_tiles::{TaskGroup, TaskTiles, groups, takes_halves, tiles_and_span};
use crate::driver::Driver;
use crate::error::{GpuError, Result};
use crate::expert_kernels::{BLOCK, BLOCK_BYTES};
use crate::launch_queue::LaunchQueue;
use crate::launches::{AttentionKernelArgs, Launches, NewHeadsArgs, RowCopy, TaskList, word};
use crate::memory::{DeviceBuffer, Download, Upload};
use crate::new_tokens::NewTokens;
use crate::page_slabs::{PageMemory, PageSlabs};

/// Alignment, in bytes, of the arrays that kernels read.
const ALIGN: usize = 16;

/// A table of pages has room for a multiple of this many.
const PAGES: usize = 16;
/// Memory for scores grows by a multiple of this many bytes.
const STEP: usize = 1 << 20;

/// Attention of one sequence over its pages on the device.
type Task<'a> = AttentionTask<'a, DeviceKvView>;
/// What such an attention reads.
type Args<'a> = AttentionArgs<'a, DeviceKvView>;

/// The KV cache on the device, and the buffers of attention.
pub struct GpuAttention {
    queue: Arc<LaunchQueue>,
    state: Mutex<State>,
}

struct State {
    launches: Launches,
    pages: HashMap<usize, KvPage>,
    slabs: PageSlabs,
    /// Pages allocated so far; the number of the next page is one higher.
    numbers: usize,
    /// Staging of new rows: one is filled while the other is being copied.
    rows: [Upload; 2],
    turn: usize,
    scores: DeviceBuffer,
    out: DeviceBuffer,
    download: Download,
    /// Whether attention of many queries is computed in half precision.
    flash: bool,
}

/// Rows of keys or values on the device.
struct KvPage {
    shape: KvPageShape,
    memory: PageMemory,
}

/// The outputs of the attention of a batch, one task after another.
#[derive(Clone, Copy)]
pub(crate) struct Outputs {
    /// `[all queries, heads, value_width]`
    pub at: u64,
    /// The same, quantised, where rows are whole blocks.
    pub blocks: Option<u64>,
    /// Number of values.
    pub values: usize,
}

/// One task of a batch, with the places of its arrays in the batch's copies to and from the device.
struct PlacedTask {
    args: AttentionKernelArgs,
    tiles: TaskTiles,
    /// Of the arrays, in the copy to the device, in bytes.
    at: usize,
    /// The tokens of the tasks before.
    first: usize,
}

impl GpuAttention {
    pub(crate) fn new(queue: &Arc<LaunchQueue>, flash: bool) -> Result<Self> {
        let driver: &Arc<dyn Driver> = &(queue.clone() as _);
        let upload = || Upload::new(driver);
        let state = State {
            launches: Launches::new(driver),
            pages: HashMap::new(),
            slabs: PageSlabs::default(),
            numbers: 0,
            rows: [upload()?, upload()?],
            turn: 0,
            scores: DeviceBuffer::new(driver),
            out: DeviceBuffer::new(driver),
            download: Download::new(driver)?,
            flash,
        };
        Ok(GpuAttention { queue: queue.clone(), state: Mutex::new(state) })
    }

    /// Begins the attention of several sequences, whose queries are those of the tasks or of new tokens. The outputs are valid until the
    /// next call.
    pub(crate) fn begin(&self, tasks: &[&Args], new: Option<&NewTokens>) -> Result<Outputs> {
        self.lock().begin(&self.queue, tasks, new)
    }

    /// Address and size of a page.
    pub(crate) fn page(&self, id: usize) -> Result<(u64, usize)> {
        self.lock().page(id).map(|page| (page.memory.at(), page.shape.bytes()))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DeviceAttention for GpuAttention {
    fn allocate(&self, shape: KvPageShape) -> larder_model::Result<usize> {
        let KvPageShape { kind, heads, positions, row_bytes: row } = shape;
        if !matches!(kind, NumberFormat::F32 | NumberFormat::F16 | NumberFormat::Q8_0)
            || heads == 0
            || row == 0
            || !positions.is_power_of_two()
            || !row.is_multiple_of(kind.block_bytes())
        {
            let what = format!(
                "the GPU cannot keep a KV cache in {kind} with {heads} heads of {row} bytes per row and {positions} positions \
                 per page"
            );
            return Err(GpuError::Unsupported(what).into());
        }
        let mut state = self.lock();
        let memory = state.slabs.allocate(&(self.queue.clone() as _), shape.bytes())?;
        state.numbers += 1;
        let number = state.numbers;
        state.pages.insert(number, KvPage { shape, memory });
        Ok(number)
    }

    fn free(&self, page: usize) {
        let mut state = self.lock();
        let removed = state.pages.remove(&page);
        let unused = removed.map(|KvPage { shape, memory }| state.slabs.free(memory, shape.bytes()));
        // Without the lock, because freeing waits for launches.
        drop(state);
        drop(unused);
    }

    fn append(&self, page: usize, at: usize, bytes: &[u8]) -> larder_model::Result<()> {
        Ok(self.lock().append(page, at, bytes)?)
    }

    fn copy(&self, from: usize, to: usize, len: usize) -> larder_model::Result<()> {
        Ok(self.lock().copy(from, to, len)?)
    }

    fn read(&self, page: usize, out: &mut [u8]) -> larder_model::Result<()> {
        let mut state = self.lock();
        let KvPage { shape, memory } = state.page(page)?;
        let (at, bytes) = (memory.at(), shape.bytes());
        if bytes != out.len() {
            let room = out.len();
            return Err(GpuError::Unsupported(format!("a KV page of {bytes} bytes is not {room} bytes long")).into());
        }
        out.copy_from_slice(state.download.fetch(at, bytes)?);
        Ok(())
    }

    fn attend(&self, tasks: &mut [Task]) -> larder_model::Result<()> {
        Ok(self.lock().attend(&self.queue, tasks)?)
    }
}

impl State {
    fn page(&self, number: usize) -> Result<&KvPage> {
        self.pages.get(&number).ok_or_else(|| GpuError::Unsupported(format!("the GPU has no KV page {number}")))
    }

    fn append(&mut self, page: usize, at: usize, bytes: &[u8]) -> Result<()> {
        let KvPage { shape: KvPageShape { heads, positions, row_bytes: row, .. }, memory } = self.page(page)?;
        let (heads, positions, row, base) = (*heads, *positions, *row, memory.at());
        let count = bytes.len() / (heads * row);
        if !bytes.len().is_multiple_of(heads * row) || at + count > positions {
            return Err(GpuError::Unsupported(format!(
                "cannot append {} bytes at row {at}: rows are {heads} x {row} bytes, with room for {positions}",
                bytes.len()
            )));
        }
        self.turn = 1 - self.turn;
        let upload = &mut self.rows[self.turn];
        let (from, here) = upload.begin(bytes.len())?;
        here.copy_from_slice(bytes);
        upload.send()?;
        let (to, to_head) = (base + (at * row) as u64, positions * row);
        let from_row = heads * row;
        self.launches.copy_rows(&RowCopy { from, from_head: row, from_row, to, to_head, bytes: row, count, heads })
    }

    fn copy(&self, from: usize, to: usize, count: usize) -> Result<()> {
        let (from, to) = (self.page(from)?, self.page(to)?);
        let KvPageShape { heads, positions, row_bytes: row, .. } = from.shape;
        if to.shape != from.shape || count > positions {
            let (from, to) = (from.shape, to.shape);
            return Err(GpuError::Unsupported(format!(
                "cannot copy {count} rows from a KV page {from:?} to one {to:?}"
            )));
        }
        let (head, from, to) = (positions * row, from.memory.at(), to.memory.at());
        let copy = RowCopy { from, from_head: head, from_row: row, to, to_head: head, bytes: row, count, heads };
        self.launches.copy_rows(&copy)
    }

    /// Attention with one copy back.
    fn attend(&mut self, queue: &LaunchQueue, tasks: &mut [Task]) -> Result<()> {
        if let Some(Task { args, out }) = tasks.iter().find(|task| task.out.len() != outputs(&task.args)) {
            let (count, heads, room) = (args.seen.len(), args.heads, out.len());
            let what = format!("attention of {count} queries with {heads} heads does not fit into {room} outputs");
            return Err(GpuError::Unsupported(what));
        }
        let args: Vec<_> = tasks.iter().map(|task| &task.args).collect();
        let Outputs { at, values, .. } = self.begin(queue, &args, None)?;
        if values == 0 {
            return Ok(());
        }
        let mut found: &[f32] = bytemuck::cast_slice(self.download.fetch(at, 4 * values)?);
        for task in tasks {
            let (own, rest) = found.split_at(task.out.len());
            task.out.copy_from_slice(own);
            found = rest;
        }
        Ok(())
    }

    /// Stages what the launches of all tasks read, and launches them.
    fn begin(&mut self, queue: &LaunchQueue, tasks: &[&Args], new: Option<&NewTokens>) -> Result<Outputs> {
        let tasks: Vec<&Args> = tasks.iter().copied().filter(|args| !args.seen.is_empty()).collect();
        let (placed, groups, outputs) = self.place(&tasks, new)?;
        let list = self.send(queue, &tasks, &placed, new)?;
        let args: Vec<AttentionKernelArgs> = placed.iter().map(|task| task.args).collect();
        for TaskGroup { tasks, at_once, tiles, .. } in groups {
            let at = list + (tasks.start * TaskList::BYTES) as u64;
            let TaskTiles { kinds, flash, .. } = placed[tasks.start].tiles;
            let list = TaskList { tasks: &args[tasks], at, kinds };
            if new.is_some() {
                self.launches.new_heads(&list)?;
            }
            if flash {
                self.launches.flash(&list)?;
                continue;
            }
            for first in (0..tiles).step_by(at_once) {
                self.launches.attend(&list, word(first)?..word(tiles.min(first + at_once))?)?;
            }
        }
        Ok(outputs)
    }

    /// Checks the tasks, all of which have queries, and makes room for their scores and outputs.
    fn place(
        &mut self,
        tasks: &[&Args],
        new: Option<&NewTokens>,
    ) -> Result<(Vec<PlacedTask>, Vec<TaskGroup>, Outputs)> {
        let (mut placed, mut at, mut outputs, mut first) = (Vec::new(), tasks.len() * TaskList::BYTES, 0, 0);
        for args in tasks {
            let kinds = self.check(args, new)?;
            let (tiles, span) = tiles_and_span(args);
            let flash = self.flash && takes_halves(args, kinds, self.shape(&args.keys)?.positions);
            let tiles = TaskTiles { tiles, span, width: args.values.width, kinds, flash };
            // Offsets for now, until there is memory.
            let queries = new.map_or(0, |new| new.queries + 4 * (first * args.heads * args.keys.width) as u64);
            let own = self.kernel_args(args, span)?;
            let kernel_args = AttentionKernelArgs { queries, out: 4 * outputs as u64, ..own };
            placed.push(PlacedTask { args: kernel_args, tiles, at, first });
            at += Arrays::of(args, new).bytes;
            first += args.seen.len();
            outputs += self::outputs(args);
        }
        let groups = groups(&placed.iter().map(|task| task.tiles).collect::<Vec<_>>());
        let of_group = |group: &TaskGroup| placed[group.tasks.clone()].iter().map(|task| scratch_of(task, group)).sum();
        self.scores.ensure(groups.iter().map(of_group).max().unwrap_or(0).next_multiple_of(STEP))?;
        let in_blocks = tasks.iter().all(|args| args.values.width.is_multiple_of(BLOCK));
        let first_block = (4 * outputs).next_multiple_of(ALIGN);
        self.out.ensure(first_block + if in_blocks { outputs / BLOCK * BLOCK_BYTES } else { 0 })?;
        let out = self.out.at();
        let blocks = in_blocks.then_some(out + first_block as u64);
        for group in &groups {
            let (mut scratch, mut first_tile) = (self.scores.at(), 0);
            for PlacedTask { args, tiles, .. } in &mut placed[group.tasks.clone()] {
                args.blocks = blocks.map_or(0, |blocks| blocks + args.out / (4 * BLOCK as u64) * BLOCK_BYTES as u64);
                args.out += out;
                args.first_tile = word(first_tile)?;
                first_tile += tiles.tiles;
                let places = tiles.scratch(tiles.tiles.min(group.at_once), group.parts).map(|bytes| {
                    let at = scratch;
                    scratch += bytes as u64;
                    at
                });
                [args.scores, args.factors, args.inverse_sums, args.partial_sums] = places;
                args.partial_sums *= u64::from(group.parts);
            }
        }
        Ok((placed, groups, Outputs { at: out, blocks, values: outputs }))
    }

    /// The arguments without the addresses of arrays.
    fn kernel_args(&self, args: &Args, span: usize) -> Result<AttentionKernelArgs> {
        let [keys, values] = [self.shape(&args.keys)?, self.shape(&args.values)?];
        Ok(AttentionKernelArgs {
            queries: 0,
            key_pages: 0,
            value_pages: 0,
            seen: 0,
            sinks: 0,
            scores: 0,
            inverse_sums: 0,
            factors: 0,
            partial_sums: 0,
            out: 0,
            blocks: 0,
            count: word(args.seen.len())?,
            heads: word(args.heads)?,
            group: word(args.heads / args.kv_heads)?,
            key_row_stride: word(keys.row_bytes)?,
            value_row_stride: word(values.row_bytes)?,
            key_width: word(args.keys.width)?,
            value_width: word(args.values.width)?,
            score_stride: word(span)?,
            scale: args.scale,
            page_shift: keys.positions.ilog2(),
            first_tile: 0,
        })
    }

    /// Stages kernel arguments, visible positions, page tables, sinks and queries, and returns their address.
    fn send(
        &self,
        queue: &LaunchQueue,
        tasks: &[&Args],
        placed: &[PlacedTask],
        new: Option<&NewTokens>,
    ) -> Result<u64> {
        let arrays: Vec<Arrays> = tasks.iter().map(|args| Arrays::of(args, new)).collect();
        let first = tasks.len() * TaskList::BYTES;
        let total = first + arrays.iter().map(|arrays| arrays.bytes).sum::<usize>();
        queue.stage(total, |list, bytes| {
            let (own_args, mut bytes) = bytes.split_at_mut(first);
            let own_args = own_args.chunks_exact_mut(TaskList::BYTES);
            for (((args, placed), arrays), own_args) in tasks.iter().zip(placed).zip(&arrays).zip(own_args) {
                let (own, rest) = bytes.split_at_mut(arrays.bytes);
                let (of_attention, of_heads) = own_args.split_at_mut(AttentionKernelArgs::BYTES);
                let at = list + placed.at as u64;
                of_attention.copy_from_slice(&arrays.write(args, placed, at, &self.pages, own)?.to_bytes());
                if let Some(new) = new {
                    of_heads.copy_from_slice(&arrays.write_new(new, placed, at, own).to_bytes());
                }
                bytes = rest;
            }
            Ok(())
        })
    }

    /// The shape of the pages of a view.
    fn shape(&self, view: &DeviceKvView) -> Result<KvPageShape> {
        let first =
            view.pages.first().ok_or_else(|| GpuError::Unsupported("attention needs at least one KV page".into()))?;
        let shape = self.page(*first)?.shape;
        for id in &view.pages {
            let other = self.page(*id)?.shape;
            if other != shape {
                return Err(GpuError::Unsupported(format!("a KV page {other:?} is among those of shape {shape:?}")));
            }
        }
        Ok(shape)
    }

    /// Checks the shapes, which the kernels rely on. Returns the number formats of keys and values.
    fn check(&self, args: &Args, new: Option<&NewTokens>) -> Result<[NumberFormat; 2]> {
        let [keys, values] = [self.shape(&args.keys)?, self.shape(&args.values)?];
        let (count, visible) = (args.seen.len(), args.visible().unwrap_or_default());
        let fits = |view: &DeviceKvView, shape: KvPageShape| {
            let positions = view.first_page * shape.positions..(view.first_page + view.pages.len()) * shape.positions;
            shape.heads == args.kv_heads
                && (1..=shape.row_values()).contains(&view.width)
                && (visible.is_empty() || positions.start <= visible.start && visible.end <= positions.end)
        };
        let all = args.heads.is_multiple_of(args.kv_heads)
            && fits(&args.keys, keys)
            && fits(&args.values, values)
            && keys.positions == values.positions
            && args.queries.len() == if new.is_some() { 0 } else { count * args.heads * args.keys.width }
            && new.is_none_or(|new| new.fits(args) && keys.kind == values.kind)
            && args.sinks.is_none_or(|sinks| sinks.len() == args.heads)
            && args.seen.iter().all(|seen| seen.start < seen.end);
        match all {
            true => Ok([keys.kind, values.kind]),
            false => Err(GpuError::Unsupported(format!(
                "attention of {count} queries with {} heads over positions {visible:?} does not fit keys {keys:?} and values \
                 {values:?}",
                args.heads,
            ))),
        }
    }
}

/// Where a task's arrays are, in bytes from the visible positions, which come first.
struct Arrays {
    pages: [usize; 2],
    sinks: usize,
    /// Of the queries, or of the turns and factors of new tokens.
    queries: usize,
    bytes: usize,
}

impl Arrays {
    fn of(args: &Args, new: Option<&NewTokens>) -> Self {
        let mut end = 8 * args.seen.len();
        let mut next = |bytes: usize| {
            let at = end.next_multiple_of(ALIGN);
            end = at + bytes;
            at
        };
        // With room for more, so that what follows is at the same address for many tokens.
        let room = |view: &DeviceKvView| 8 * (view.first_page + view.pages.len()).next_multiple_of(PAGES);
        let pages = [&args.keys, &args.values].map(|view| next(room(view)));
        let turns = new.map_or(0, |new| new.bytes(args.seen.len()));
        let (sinks, queries) =
            (next(size_of_val(args.sinks.unwrap_or_default())), next(size_of_val(args.queries).max(turns)));
        Arrays { pages, sinks, queries, bytes: end.next_multiple_of(ALIGN) }
    }

    /// Writes all arrays, which will be at address `list`. Returns the arguments.
    fn write(
        &self,
        args: &Args,
        placed: &PlacedTask,
        list: u64,
        pages: &HashMap<usize, KvPage>,
        bytes: &mut [u8],
    ) -> Result<AttentionKernelArgs> {
        let (sinks, mut kernel_args) = (args.sinks.unwrap_or_default(), placed.args);
        kernel_args.seen = list;
        [kernel_args.key_pages, kernel_args.value_pages] = self.pages.map(|at| list + at as u64);
        kernel_args.sinks = args.sinks.map_or(0, |_| list + self.sinks as u64);
        if kernel_args.queries == 0 {
            kernel_args.queries = list + self.queries as u64;
        }
        for (seen, out) in args.seen.iter().zip(bytes.as_chunks_mut::<8>().0) {
            *out = bytemuck::cast([word(seen.start)?, word(seen.end)?]);
        }
        for (view, at) in [&args.keys, &args.values].into_iter().zip(self.pages) {
            let table = bytes[at..].as_chunks_mut::<8>().0;
            table[..view.first_page].fill([0; 8]);
            for (id, out) in view.pages.iter().zip(&mut table[view.first_page..]) {
                *out = pages[id].memory.at().to_ne_bytes();
            }
        }
        bytes[self.sinks..][..size_of_val(sinks)].copy_from_slice(bytemuck::cast_slice(sinks));
        bytes[self.queries..][..size_of_val(args.queries)].copy_from_slice(bytemuck::cast_slice(args.queries));
        Ok(kernel_args)
    }

    /// Writes what the heads of a task's tokens are rotated by. Returns the arguments for them.
    fn write_new(&self, new: &NewTokens, placed: &PlacedTask, list: u64, bytes: &mut [u8]) -> NewHeadsArgs {
        let count = placed.args.count as usize;
        new.write(placed.first, count, &mut bytes[self.queries..]);
        new.args(placed.first, count, list + self.queries as u64)
    }
}

/// Bytes of the memory that a task needs beside the others of its group.
fn scratch_of(task: &PlacedTask, group: &TaskGroup) -> usize {
    task.tiles.scratch(task.tiles.tiles.min(group.at_once), group.parts).iter().sum()
}

/// Number of values that an attention yields.
fn outputs(args: &Args) -> usize {
    args.seen.len() * args.heads * args.values.width
}
