//! The KV cache in GPU memory, and attention over it.

mod arrays;
mod tiles;
mod topk_rows;

use std::collections::HashMap;
use std::sync::Arc;

use larder_core::NumberFormat;
use larder_kernels::{AttentionArgs, AttentionTask};
use larder_model::{DeviceAttention, KvPageShape, KvView};
use parking_lot::{Mutex, MutexGuard};

use crate::driver::Driver;
use crate::error::{GpuError, Result};
use crate::expert_kernels::{BLOCK, BLOCK_BYTES};
use crate::launch_queue::LaunchQueue;
use crate::launches::{AttentionKernelArgs, Launches, RowCopy, TaskList, word};
use crate::memory::{DeviceBuffer, Download, Upload};
use crate::new_tokens::NewTokens;
use crate::page_slabs::{PageMemory, PageSlabs};
use arrays::SequenceArrays;
use tiles::{TaskGroup, TaskTiles, groups, takes_halves, tiles_and_span};
use topk_rows::Choice;
pub(crate) use topk_rows::{ChosenTokens, IndexQueries};

/// Alignment, in bytes, of the arrays that kernels read.
const ALIGN: usize = 16;
/// Memory for scores grows by a multiple of this many bytes.
const STEP: usize = 1 << 20;

/// Attention of one sequence over its pages on the device.
type Task<'a> = AttentionTask<'a, KvView>;
/// What such an attention reads.
type Args<'a> = AttentionArgs<'a, KvView>;

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
    choice: Choice,
}

/// The queries of an attention, and which rows they see.
#[derive(Clone, Copy)]
pub(crate) enum Queries<'a> {
    /// Those of the tasks, in main memory.
    Sent,
    /// These, on the device.
    Given(u64),
    /// Those of new tokens on the device.
    New(&'a NewTokens<'a>),
    /// As `New`, without attention: keys and values are written, and queries rotated.
    HeadsOnly(&'a NewTokens<'a>),
    /// Those of tokens on the device that see rows of their own.
    Chosen(&'a ChosenTokens<'a>),
}

impl<'a> Queries<'a> {
    /// New tokens, if they are those of such.
    fn new_tokens(self) -> Option<&'a NewTokens<'a>> {
        match self {
            Queries::New(new) | Queries::HeadsOnly(new) => Some(new),
            Queries::Sent | Queries::Given(_) | Queries::Chosen(_) => None,
        }
    }

    /// Parts of the heads of a query, each of which sees rows of its own.
    fn parts(self) -> usize {
        match self {
            Queries::Chosen(tokens) => tokens.parts,
            Queries::Sent | Queries::Given(_) | Queries::New(_) | Queries::HeadsOnly(_) => 1,
        }
    }

    /// The address of the queries of all tasks, one after another; 0 if they are in main memory.
    fn address(self) -> u64 {
        match self {
            Queries::Sent => 0,
            Queries::Given(at) => at,
            Queries::New(new) | Queries::HeadsOnly(new) => new.queries,
            Queries::Chosen(tokens) => tokens.queries,
        }
    }
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

/// One task of the kernels: the queries of a sequence, or some heads of one of them.
struct PlacedTask {
    args: AttentionKernelArgs,
    tiles: TaskTiles,
    /// Its sequence.
    sequence: usize,
    /// Its first query within the sequence.
    query: usize,
    /// Number of what its first query sees, of that of the sequence.
    seen: usize,
    /// The queries of the sequences before.
    first: usize,
    /// Its first head.
    head: usize,
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
            choice: Choice::new(driver),
        };
        Ok(GpuAttention { queue: queue.clone(), state: Mutex::new(state) })
    }

    /// Begins the attention of several sequences. The outputs are valid until the next call.
    pub(crate) fn begin(&self, tasks: &[&Args], queries: Queries) -> Result<Outputs> {
        self.lock().begin(&self.queue, tasks, queries)
    }

    /// Address and size of a page.
    pub(crate) fn page(&self, id: usize) -> Result<(u64, usize)> {
        self.lock().page(id).map(|page| (page.memory.at(), page.shape.bytes()))
    }

    /// As [`larder_kernels::attend`] without biases, and waits for the results. Arguments that do not fit are an error,
    /// not a panic.
    pub fn attend(&self, tasks: &mut [Task]) -> larder_model::Result<()> {
        Ok(self.lock().attend(&self.queue, tasks)?)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
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
        let Outputs { at, values, .. } = self.begin(queue, &args, Queries::Sent)?;
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
    fn begin(&mut self, queue: &LaunchQueue, tasks: &[&Args], queries: Queries) -> Result<Outputs> {
        let tasks: Vec<&Args> = tasks.iter().copied().filter(|args| !args.seen.is_empty()).collect();
        let (mut placed, groups, outputs) = self.place(&tasks, queries)?;
        let list = self.send(queue, &tasks, &mut placed, queries)?;
        let args: Vec<AttentionKernelArgs> = placed.iter().map(|task| task.args).collect();
        for TaskGroup { tasks, at_once, tiles, .. } in groups {
            let at = list + (tasks.start * TaskList::BYTES) as u64;
            let TaskTiles { kinds, flash, .. } = placed[tasks.start].tiles;
            let list = TaskList { tasks: &args[tasks], at, kinds };
            if queries.new_tokens().is_some() {
                self.launches.new_heads(&list)?;
            }
            if matches!(queries, Queries::HeadsOnly(_)) {
                continue;
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
    fn place(&mut self, tasks: &[&Args], queries: Queries) -> Result<(Vec<PlacedTask>, Vec<TaskGroup>, Outputs)> {
        let (mut placed, mut outputs, mut first) = (Vec::new(), 0, 0);
        for (sequence, args) in tasks.iter().enumerate() {
            let kinds = self.check(args, queries)?;
            match queries {
                Queries::Chosen(tokens) => self.place_chosen(args, (sequence, first), tokens, kinds, &mut placed)?,
                Queries::Sent | Queries::Given(_) | Queries::New(_) | Queries::HeadsOnly(_) => {
                    let (tiles, span) = tiles_and_span(args);
                    let shapes = [self.shape(&args.keys)?, self.shape(&args.values)?];
                    let halves = self.flash && takes_halves(args, shapes);
                    let flash = halves || matches!(queries, Queries::HeadsOnly(_));
                    let tiles = TaskTiles { tiles, span, width: args.values.width, kinds, flash };
                    let bias = queries.new_tokens().map_or(0, |new| new.bias.0);
                    let own = AttentionKernelArgs { bias, ..self.kernel_args(args, span)? };
                    placed.push(PlacedTask { args: own, tiles, sequence, query: 0, seen: 0, first, head: 0 });
                }
            }
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
        let before = outputs_before(tasks);
        for group in &groups {
            let (mut scratch, mut first_tile) = (self.scores.at(), 0);
            for task in &mut placed[group.tasks.clone()] {
                let PlacedTask { args, tiles, .. } = task;
                let of_sequence = tasks[task.sequence];
                let value =
                    before[task.sequence] + (task.query * of_sequence.heads + task.head) * of_sequence.values.width;
                args.out = out + 4 * value as u64;
                args.blocks = blocks.map_or(0, |blocks| blocks + (value / BLOCK * BLOCK_BYTES) as u64);
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

    /// The arguments of all queries without the addresses of arrays.
    fn kernel_args(&self, args: &Args, span: usize) -> Result<AttentionKernelArgs> {
        let [keys, values] = [self.shape(&args.keys)?, self.shape(&args.values)?];
        Ok(AttentionKernelArgs {
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
            reach: word(args.bias.map_or(0, |bias| bias.reach))?,
            first_query: word(args.bias.map_or(0, |bias| bias.first_query))?,
            ..AttentionKernelArgs::default()
        })
    }

    /// Stages kernel arguments, visible positions, page tables, sinks and queries, and returns their address.
    fn send(&self, queue: &LaunchQueue, tasks: &[&Args], placed: &mut [PlacedTask], queries: Queries) -> Result<u64> {
        let new = queries.new_tokens();
        let arrays: Vec<SequenceArrays> = tasks.iter().map(|args| SequenceArrays::of(args, queries)).collect();
        let mut end = (placed.len() * TaskList::BYTES).next_multiple_of(ALIGN);
        let places = arrays.iter().map(|arrays| {
            let at = end;
            end += arrays.bytes;
            at
        });
        let places: Vec<usize> = places.collect();
        queue.stage(end, |list, bytes| {
            let (own_args, _) = bytes.split_at_mut(placed.len() * TaskList::BYTES);
            for (task, own_args) in placed.iter_mut().zip(own_args.chunks_exact_mut(TaskList::BYTES)) {
                let (args, arrays, at) =
                    (tasks[task.sequence], &arrays[task.sequence], list + places[task.sequence] as u64);
                arrays.address(args, task, queries.address(), at);
                let (of_attention, of_heads) = own_args.split_at_mut(AttentionKernelArgs::BYTES);
                of_attention.copy_from_slice(&task.args.to_bytes());
                if let Some(new) = new {
                    of_heads.copy_from_slice(&arrays.new_heads(args, new, task.first, at).to_bytes());
                }
            }
            let mut first = 0;
            for ((args, arrays), at) in tasks.iter().zip(&arrays).zip(places) {
                let own = &mut bytes[at..][..arrays.bytes];
                match queries {
                    Queries::Chosen(tokens) => arrays.write(args, tokens.seen(args, first), &self.pages, own)?,
                    _ => arrays.write(args, args.seen.iter().cloned(), &self.pages, own)?,
                }
                if let Some(new) = new {
                    arrays.write_new(args, new, first, own);
                }
                first += args.seen.len();
            }
            Ok(())
        })
    }

    /// The shape of the pages of a view.
    fn shape(&self, view: &KvView) -> Result<KvPageShape> {
        let first =
            view.pages.first().ok_or_else(|| GpuError::Unsupported("attention needs at least one KV page".into()))?;
        let shape = self.page(*first)?.shape;
        for id in view.pages.iter() {
            let other = self.page(*id)?.shape;
            if other != shape {
                return Err(GpuError::Unsupported(format!("a KV page {other:?} is among those of shape {shape:?}")));
            }
        }
        Ok(shape)
    }

    /// Checks the shapes, which the kernels rely on. Returns the number formats of keys and values.
    fn check(&self, args: &Args, queries: Queries) -> Result<[NumberFormat; 2]> {
        let new = queries.new_tokens();
        let [keys, values] = [self.shape(&args.keys)?, self.shape(&args.values)?];
        let (count, visible) = (args.seen.len(), args.visible().unwrap_or_default());
        let fits = |view: &KvView, shape: KvPageShape| {
            let positions = view.first_page * shape.positions..(view.first_page + view.pages.len()) * shape.positions;
            shape.heads == args.kv_heads
                && (1..=shape.row_values()).contains(&view.width)
                && (visible.is_empty() || positions.start <= visible.start && visible.end <= positions.end)
        };
        let all = args.heads.is_multiple_of(args.kv_heads)
            && fits(&args.keys, keys)
            && fits(&args.values, values)
            && keys.positions == values.positions
            && args.queries.len() == if queries.address() != 0 { 0 } else { count * args.heads * args.keys.width }
            && new.is_none_or(|new| new.fits(args) && keys.kind == values.kind)
            // Only new tokens have a bias on the device.
            && (args.bias.is_none() || new.is_some())
            && args.sinks.is_none_or(|sinks| sinks.len() == args.heads)
            && args.seen.iter().all(|seen| seen.start < seen.end);
        if all {
            Ok([keys.kind, values.kind])
        } else {
            Err(GpuError::Unsupported(format!(
                "attention of {count} queries with {} heads over positions {visible:?} does not fit keys {keys:?} and values \
                 {values:?}",
                args.heads,
            )))
        }
    }
}

/// Bytes of the memory that a task needs beside the others of its group.
fn scratch_of(task: &PlacedTask, group: &TaskGroup) -> usize {
    task.tiles.scratch(task.tiles.tiles.min(group.at_once), group.parts).iter().sum()
}

/// Number of values that the attentions before each yield.
fn outputs_before(tasks: &[&Args]) -> Vec<usize> {
    let before = tasks.iter().scan(0, |sum, args| Some(std::mem::replace(sum, *sum + outputs(args))));
    before.collect()
}

/// Number of values that an attention yields.
fn outputs(args: &Args) -> usize {
    args.seen.len() * args.heads * args.values.width
}
