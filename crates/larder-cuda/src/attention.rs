//! Remembers keys and values in a GPU's memory, and attends to them there.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use larder_core::NumberFormat;
use larder_model::{DeviceAttention, DeviceKvShape, DeviceKvView};

use crate::driver::Driver;
use crate::error::{GpuError, Result};
use crate::launches::{AttentionKernelArgs, Launches, RowCopy, TILE_QUERIES, word};
use crate::memory::{DeviceBuffer, Download, Upload};

/// Bytes of scores at a time, unless a few queries alone have more.
const MAX_SCORE_BYTES: usize = 16 << 20;
/// The most blocks that a launch can have beside each other.
const MAX_TILES: usize = 65_535;
/// What kernels read begins at a multiple of so many bytes.
const ALIGN: usize = 16;

/// What memory for scores grows by.
const STEP: usize = 1 << 20;

type Wanted<'a> = larder_kernels::AttentionArgs<'a, DeviceKvView>;

/// Rows on the device, and what attention to them takes.
pub struct GpuAttention {
    driver: Arc<dyn Driver>,
    state: Mutex<State>,
}

struct State {
    launches: Launches,
    kept: HashMap<usize, Rows>,
    numbers: usize,
    /// What brings rows, one while the other is being copied.
    rows: [Upload; 2],
    turn: usize,
    look: Upload,
    scores: DeviceBuffer,
    out: DeviceBuffer,
    download: Download,
}

/// Rows on the device.
struct Rows {
    form: DeviceKvShape,
    room: DeviceBuffer,
}

impl GpuAttention {
    pub(crate) fn new(driver: &Arc<dyn Driver>) -> Result<Self> {
        let upload = || Upload::new(driver);
        let state = State {
            launches: Launches::new(driver),
            kept: HashMap::new(),
            numbers: 0,
            rows: [upload()?, upload()?],
            turn: 0,
            look: upload()?,
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
    fn allocate(&self, form: DeviceKvShape) -> larder_model::Result<usize> {
        let DeviceKvShape { kind, heads, row_bytes: row, .. } = form;
        if !matches!(kind, NumberFormat::F32 | NumberFormat::F16)
            || heads == 0
            || row == 0
            || !row.is_multiple_of(kind.block_bytes())
        {
            return Err(bad(format!("the GPU cannot remember {heads} rows of {row} bytes in {kind}")).into());
        }
        let room = DeviceBuffer::of(&self.driver, form.bytes())?;
        let mut state = self.lock();
        state.numbers += 1;
        let number = state.numbers;
        state.kept.insert(number, Rows { form, room });
        Ok(number)
    }

    fn free(&self, rows: usize) {
        self.lock().kept.remove(&rows);
    }

    fn append(&self, rows: usize, at: usize, bytes: &[u8]) -> larder_model::Result<()> {
        Ok(self.lock().append(rows, at, bytes)?)
    }

    fn copy(&self, from: usize, to: usize, len: usize) -> larder_model::Result<()> {
        Ok(self.lock().copy(from, to, len)?)
    }

    fn attend(&self, look: &Wanted, out: &mut [f32]) -> larder_model::Result<()> {
        Ok(self.lock().attend(look, out)?)
    }
}

impl State {
    fn rows(&self, number: usize) -> Result<&Rows> {
        self.kept.get(&number).ok_or_else(|| bad(format!("the GPU has no rows {number}")))
    }

    fn append(&mut self, rows: usize, at: usize, bytes: &[u8]) -> Result<()> {
        let Rows { form: DeviceKvShape { heads, capacity: room, row_bytes: row, .. }, room: there } =
            self.rows(rows)?;
        let (heads, room, row, there) = (*heads, *room, *row, there.at());
        let count = bytes.len() / (heads * row);
        if !bytes.len().is_multiple_of(heads * row) || at + count > room {
            return Err(bad(format!("{} bytes are no rows from position {at} on, of {room}", bytes.len())));
        }
        self.turn = 1 - self.turn;
        let upload = &mut self.rows[self.turn];
        let (from, here) = upload.begin(bytes.len())?;
        here.copy_from_slice(bytes);
        upload.send()?;
        let (to, to_head) = (there + (at * row) as u64, room * row);
        let from_row = heads * row;
        self.launches.copy_rows(&RowCopy { from, from_head: row, from_row, to, to_head, bytes: row, count, heads })
    }

    fn copy(&self, from: usize, to: usize, count: usize) -> Result<()> {
        let (from, to) = (self.rows(from)?, self.rows(to)?);
        let (DeviceKvShape { kind, heads, capacity: room, row_bytes: row }, new) = (from.form, to.form);
        if (DeviceKvShape { capacity: room, ..new }) != from.form || count > room.min(new.capacity) {
            let (room, there) = (from.form.capacity, new.capacity);
            return Err(bad(format!("{count} of {room} rows in {kind} cannot be copied to {there} in {}", new.kind)));
        }
        let (from_head, to_head, bytes) = (room * row, new.capacity * row, row);
        let (from, to) = (from.room.at(), to.room.at());
        self.launches.copy_rows(&RowCopy { from, from_head, from_row: row, to, to_head, bytes, count, heads })
    }

    fn attend(&mut self, look: &Wanted, out: &mut [f32]) -> Result<()> {
        let [keys, values] = self.check(look, out)?;
        if look.seen.is_empty() {
            return Ok(());
        }
        let (tiles, span) = tiles(look);
        let at_once = (MAX_SCORE_BYTES / (4 * TILE_QUERIES * span)).clamp(1, MAX_TILES).min(tiles);
        let scores = 4 * TILE_QUERIES * span * at_once;
        self.scores.ensure((scores + 4 * TILE_QUERIES * at_once).next_multiple_of(STEP))?;
        self.out.ensure(4 * out.len())?;
        let (listed, list) = self.send(look, span, self.scores.at() + scores as u64)?;
        for first in (0..tiles).step_by(at_once) {
            let some = word(first)?..word(tiles.min(first + at_once))?;
            self.launches.attend(&listed, [keys, values], list, some)?;
        }
        out.copy_from_slice(bytemuck::cast_slice(self.download.fetch(self.out.at(), 4 * out.len())?));
        Ok(())
    }

    /// Copies a look to the device with all that it has but tables, and says where it is.
    fn send(&mut self, look: &Wanted, span: usize, inverse_sums: u64) -> Result<(AttentionKernelArgs, u64)> {
        let (keys, values) = (self.rows(look.keys.block)?, self.rows(look.values.block)?);
        let mut listed = AttentionKernelArgs {
            queries: 0,
            keys: keys.room.at(),
            values: values.room.at(),
            key_head: (keys.form.capacity * keys.form.row_bytes) as u64,
            value_head: (values.form.capacity * values.form.row_bytes) as u64,
            seen: 0,
            sinks: 0,
            scores: self.scores.at(),
            inverse_sums,
            out: self.out.at(),
            count: word(look.seen.len())?,
            heads: word(look.heads)?,
            group: word(look.heads / look.kv_heads)?,
            key_row: word(keys.form.row_bytes)?,
            value_row: word(values.form.row_bytes)?,
            key_width: word(look.keys.width)?,
            value_width: word(look.values.width)?,
            stride: word(span)?,
            scale: look.scale,
        };
        let sinks = look.sinks.unwrap_or_default();
        let sinks_at = (AttentionKernelArgs::BYTES + 8 * look.seen.len()).next_multiple_of(ALIGN);
        let queries_at = (sinks_at + size_of_val(sinks)).next_multiple_of(ALIGN);
        let (list, bytes) = self.look.begin(queries_at + size_of_val(look.queries))?;
        listed.seen = list + AttentionKernelArgs::BYTES as u64;
        listed.sinks = look.sinks.map_or(0, |_| list + sinks_at as u64);
        listed.queries = list + queries_at as u64;
        bytes[..AttentionKernelArgs::BYTES].copy_from_slice(&listed.to_bytes());
        for (seen, out) in look.seen.iter().zip(bytes[AttentionKernelArgs::BYTES..].as_chunks_mut::<8>().0) {
            *out = bytemuck::cast([word(seen.start)?, word(seen.end)?]);
        }
        bytes[sinks_at..][..size_of_val(sinks)].copy_from_slice(bytemuck::cast_slice(sinks));
        bytes[queries_at..].copy_from_slice(bytemuck::cast_slice(look.queries));
        self.look.send()?;
        Ok((listed, list))
    }

    /// That shapes fit, because nobody looks at them below. Returns how keys and values are stored.
    fn check(&self, look: &Wanted, out: &[f32]) -> Result<[NumberFormat; 2]> {
        let (keys, values) = (self.rows(look.keys.block)?.form, self.rows(look.values.block)?.form);
        let (count, end) = (look.seen.len(), look.seen.iter().map(|seen| seen.end).max().unwrap_or_default());
        let fits = |form: DeviceKvShape, width: usize| {
            form.heads == look.kv_heads
                && (1..=form.row_bytes / form.kind.block_bytes()).contains(&width)
                && end <= form.capacity
        };
        let all = look.heads.is_multiple_of(look.kv_heads)
            && fits(keys, look.keys.width)
            && fits(values, look.values.width)
            && look.queries.len() == count * look.heads * look.keys.width
            && out.len() == count * look.heads * look.values.width
            && look.sinks.is_none_or(|sinks| sinks.len() == look.heads)
            && look.seen.iter().all(|seen| seen.start < seen.end);
        match all {
            true => Ok([keys.kind, values.kind]),
            false => Err(bad(format!(
                "a look of {count} queries with {} heads at {end} positions does not fit {keys:?}, {values:?} and {} \
                 outputs",
                look.heads,
                out.len(),
            ))),
        }
    }
}

/// How many times [`TILE_QUERIES`] queries look at one head of keys, in all; and the most positions that those see together.
fn tiles(look: &Wanted) -> (usize, usize) {
    let group = look.heads / look.kv_heads;
    let pairs = look.seen.len() * group;
    let span = |first: usize| {
        let some: &[Range<usize>] = &look.seen[first / group..(pairs.min(first + TILE_QUERIES)).div_ceil(group)];
        let start = some.iter().map(|seen| seen.start).min().expect("there is one");
        some.iter().map(|seen| seen.end).max().expect("there is one") - start
    };
    let span = (0..pairs).step_by(TILE_QUERIES).map(span).max().expect("there are queries");
    (look.kv_heads * pairs.div_ceil(TILE_QUERIES), span)
}

fn bad(what: String) -> GpuError {
    GpuError::Unsupported(what)
}
