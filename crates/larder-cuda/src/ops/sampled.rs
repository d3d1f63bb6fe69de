//! The draw of a token, what changes logits before it, and the row of the embedding that belongs to it.

use std::sync::Arc;

use larder_model::{BEST_FOUND, DrawOps, DrawnFrom, LogitChanges, Rows, TokenDraw};

use super::{COPIES, GpuOps, Staging, State};
use crate::error::{GpuError, Result};
use crate::launch_queue::LaunchQueue;
use crate::launches::{BestArgs, ChangeArgs, DrawArgs, DrawPlaces, ProductKernelArgs, word};
use crate::memory::DeviceBuffer;

/// Values of a row that the search for the best logits returns.
const FOUND: usize = 1 + 2 * BEST_FOUND;

/// Steps in which changes of logits are sent.
const CHANGES: usize = 256;

impl State {
    /// Changes are sent in steps of some hundred, so that the same launches come again as a text grows.
    fn change(&mut self, queue: &Arc<LaunchQueue>, x: Rows, changes: &LogitChanges, follows: bool) -> Result<Rows> {
        if x.rows != 1 {
            return Err(GpuError::Unsupported(format!("no logits of the rows {x:?} can be changed")));
        }
        let count = changes.tokens.len().next_multiple_of(CHANGES).max(CHANGES);
        let words = changes.tokens.iter().map(|token| [token.id, token.bias.to_bits(), token.in_text, token.in_answer]);
        let none = [u32::MAX, 0, 0, 0];
        let all: Vec<[u32; 4]> = words.chain(std::iter::repeat(none)).take(count).collect();
        let tokens = self.stage(queue, bytemuck::cast_slice(&all), Staging::Steady)?;
        let (x_at, drawn) = (self.at(x)?, if follows { self.last_drawn(queue)? } else { 0 });
        let (changed, out) = self.result(1, count + 2)?;
        let penalties = [changes.repetition, changes.frequency, changes.presence];
        let (width, count) = (word(x.width)?, word(count)?);
        self.launches.change_logits(&ChangeArgs { x: x_at, tokens, drawn, out, width, count, penalties })?;
        self.quantised.remove(&x.id);
        Ok(changed)
    }

    /// The address of the token that was drawn last.
    fn last_drawn(&mut self, queue: &Arc<LaunchQueue>) -> Result<u64> {
        if self.last_drawn.is_none() {
            self.last_drawn = Some(DeviceBuffer::of(&(queue.clone() as _), 4)?);
        }
        Ok(self.last_drawn.as_ref().map_or(0, DeviceBuffer::at))
    }

    fn draw(&mut self, queue: &Arc<LaunchQueue>, from: &DrawnFrom, draw: &TokenDraw) -> Result<Rows> {
        let DrawnFrom { found, all, changed } = *from;
        let TokenDraw { temperature, top_k, top_p, min_p, unit } = *draw;
        if (found.rows, found.width) != (1, FOUND) {
            return Err(GpuError::Unsupported(format!("no token can be drawn from the rows {found:?}")));
        }
        let top_k = u32::try_from(top_k).unwrap_or(u32::MAX);
        let args = DrawArgs { unit, temperature, top_p, min_p, top_k }.to_bytes();
        let staged = self.stage(queue, &args, Staging::Steady)?;
        let (found, x) = (self.at(found)?, all.map_or(Ok(0), |all| self.at(all))?);
        let width = word(all.map_or(1, |all| all.width))?;
        let args = BestArgs { x, maxima: 0, found, rows: 1, width, best: 0, most: word(BEST_FOUND)? };
        let (changed, words) = changed.map_or(Ok((0, 0)), |rows| Ok::<_, GpuError>((self.at(rows)?, rows.width)))?;
        let (drawn, out) = self.result(1, 1 + FOUND + words)?;
        let sums = if all.is_some() { self.chains[0].results.take(args.sums_bytes())? } else { 0 };
        let (last, changed_words) = (self.last_drawn(queue)?, word(words)?);
        self.launches.draw_token(&args, &DrawPlaces { draw: staged, sums, changed, changed_words, out, last })?;
        Ok(drawn)
    }

    fn row_of(&mut self, (part, at): (larder_core::ExpertPart, u64), number: Rows) -> Result<Rows> {
        let number = self.at(number)?;
        let matrix = ProductKernelArgs::with(&part, at)?;
        let (row, out) = self.result(1, part.cols)?;
        self.launches.widen_row(&matrix, part.kind, number, out)?;
        Ok(row)
    }

    fn begin_copy(&mut self, rows: Rows) -> Result<usize> {
        let at = self.at(rows)?;
        self.copies += 1;
        let download = &mut self.copied[self.copies % COPIES];
        download.begin(&[(at, 4 * rows.rows * rows.width)])?;
        Ok(self.copies)
    }

    fn end_copy(&mut self, copy: usize, out: &mut [f32]) -> Result<()> {
        if copy > self.copies || copy + COPIES <= self.copies {
            return Err(GpuError::Unsupported(format!("copy {copy} of {} is not in flight", self.copies)));
        }
        self.waits += 1;
        let bytes = self.copied[copy % COPIES].end()?;
        out.copy_from_slice(bytemuck::cast_slice(&bytes[..size_of_val(out)]));
        Ok(())
    }
}

impl GpuOps {
    /// Takes the row of a table `[any, width]` that is kept, whose number is the token that was drawn last, to address
    /// `out`.
    pub(crate) fn take_row_of_drawn(&self, table: usize, out: u64, width: usize) -> Result<()> {
        let mut state = self.lock();
        let (table, drawn) = (state.kept(table)?, state.last_drawn(&self.queue)?);
        state.launches.take_row([table, drawn, out], word(width)?)
    }
}

impl DrawOps for GpuOps {
    fn change(&self, x: Rows, changes: &LogitChanges, follows: bool) -> larder_model::Result<Rows> {
        Ok(self.lock().change(&self.queue, x, changes, follows)?)
    }

    fn draw(&self, from: &DrawnFrom, draw: &TokenDraw) -> larder_model::Result<Rows> {
        Ok(self.lock().draw(&self.queue, from, draw)?)
    }

    fn row_of(&self, matrix: usize, number: Rows) -> larder_model::Result<Rows> {
        let matrix = self.products.stored(matrix)?;
        Ok(self.lock().row_of(matrix, number)?)
    }

    fn begin_copy(&self, rows: Rows) -> larder_model::Result<usize> {
        Ok(self.lock().begin_copy(rows)?)
    }

    fn end_copy(&self, copy: usize, out: &mut [f32]) -> larder_model::Result<()> {
        Ok(self.lock().end_copy(copy, out)?)
    }

    fn waits(&self) -> u64 {
        self.lock().waits
    }
}
