//! The draw of a token, and the row of the embedding that belongs to it.

use larder_model::{BEST_FOUND, DeviceDraw, DeviceRows, TokenDraw};

use super::{COPIES, GpuOps, Staging, State};
use crate::error::{GpuError, Result};
use crate::launch_queue::LaunchQueue;
use crate::launches::{BestArgs, DrawArgs, ProductKernelArgs, word};

/// Values of a row that the search for the best logits returns.
const FOUND: usize = 1 + 2 * BEST_FOUND;

impl State {
    fn draw(
        &mut self,
        queue: &LaunchQueue,
        found: DeviceRows,
        all: Option<DeviceRows>,
        draw: &TokenDraw,
    ) -> Result<DeviceRows> {
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
        let (drawn, out) = self.result(1, 1 + FOUND)?;
        let sums = if all.is_some() { self.chains[0].results.take(args.sums_bytes())? } else { 0 };
        self.launches.draw_token(&args, staged, sums, out)?;
        Ok(drawn)
    }

    fn row_of(&mut self, (part, at): (larder_core::ExpertPart, u64), number: DeviceRows) -> Result<DeviceRows> {
        let number = self.at(number)?;
        let matrix = ProductKernelArgs::with(&part, at)?;
        let (row, out) = self.result(1, part.cols)?;
        self.launches.widen_row(&matrix, part.kind, number, out)?;
        Ok(row)
    }

    fn begin_copy(&mut self, rows: DeviceRows) -> Result<usize> {
        let at = self.at(rows)?;
        self.copies += 1;
        let download = &mut self.copied[self.copies % COPIES];
        download.begin(at, 4 * rows.rows * rows.width)?;
        Ok(self.copies)
    }

    fn end_copy(&mut self, copy: usize, out: &mut [f32]) -> Result<()> {
        if copy > self.copies || copy + COPIES <= self.copies {
            return Err(GpuError::Unsupported(format!("copy {copy} of {} is not in flight", self.copies)));
        }
        self.waits += 1;
        let bytes = self.copied[copy % COPIES].end(size_of_val(out))?;
        out.copy_from_slice(bytemuck::cast_slice(bytes));
        Ok(())
    }
}

impl DeviceDraw for GpuOps {
    fn draw(&self, found: DeviceRows, all: Option<DeviceRows>, draw: &TokenDraw) -> larder_model::Result<DeviceRows> {
        Ok(self.lock().draw(&self.queue, found, all, draw)?)
    }

    fn row_of(&self, matrix: usize, number: DeviceRows) -> larder_model::Result<DeviceRows> {
        let matrix = self.products.stored(matrix)?;
        Ok(self.lock().row_of(matrix, number)?)
    }

    fn begin_copy(&self, rows: DeviceRows) -> larder_model::Result<usize> {
        Ok(self.lock().begin_copy(rows)?)
    }

    fn end_copy(&self, copy: usize, out: &mut [f32]) -> larder_model::Result<()> {
        Ok(self.lock().end_copy(copy, out)?)
    }

    fn waits(&self) -> u64 {
        self.lock().waits
    }
}
