//! Sums and norms of rows, and the best values of rows.

use std::sync::Arc;

use larder_model::{BEST_FOUND, Rows};

use super::State;
use crate::error::{GpuError, Result};
use crate::launch_queue::LaunchQueue;
use crate::launches::{BestArgs, word};

/// Steps in which places are sent.
const PLACES: usize = 256;

impl State {
    pub(super) fn scale(&mut self, x: Rows, factor: f32) -> Result<Rows> {
        let (x_at, values) = (self.at(x)?, word(x.rows * x.width)?);
        let (scaled, out) = self.result(x.rows, x.width)?;
        self.launches.add_scaled([0, x_at, out], values, values, factor)?;
        Ok(scaled)
    }

    pub(super) fn scale_columns(&mut self, x: Rows, factors: usize) -> Result<Rows> {
        let (x_at, factors, values) = (self.at(x)?, self.kept(factors)?, x.rows * x.width);
        let (scaled, out) = self.result(x.rows, x.width)?;
        self.launches.scale_columns([x_at, factors, out], word(values)?, word(x.width)?)?;
        Ok(scaled)
    }

    pub(super) fn add(&mut self, x: Rows, y: Rows, factor: f32) -> Result<Rows> {
        check_shapes([x, y])?;
        let (x_at, y_at, values) = (self.at(x)?, self.at(y)?, word(x.rows * x.width)?);
        let (sum, out) = self.result(x.rows, x.width)?;
        self.launches.add_scaled([x_at, y_at, out], values, values, factor)?;
        Ok(sum)
    }

    pub(super) fn add_norm(&mut self, [x, y]: [Rows; 2], factor: f32, weight: usize, eps: f64) -> Result<[Rows; 2]> {
        check_shapes([x, y])?;
        let (x_at, y_at, weight, shape) =
            (self.at(x)?, self.at(y)?, self.kept(weight)?, [word(x.rows)?, word(x.width)?]);
        let (sum, sum_at) = self.result(x.rows, x.width)?;
        let (normalised, [out, blocks]) = self.result_in_blocks(x.rows, x.width)?;
        self.launches.add_norm([x_at, y_at, sum_at, weight, out, blocks], shape, factor, eps)?;
        Ok([sum, normalised])
    }

    pub(super) fn add_row(&mut self, x: Rows, row: usize) -> Result<Rows> {
        let (x_at, row, values) = (self.at(x)?, self.kept(row)?, x.rows * x.width);
        let (sum, out) = self.result(x.rows, x.width)?;
        self.launches.add_scaled([x_at, row, out], word(values)?, word(x.width)?, 1.0)?;
        Ok(sum)
    }

    /// Behind the sum of experts that was launched last, both become one launch.
    pub(super) fn rms_norm(&mut self, queue: &LaunchQueue, x: Rows, weight: usize, eps: f64) -> Result<Rows> {
        let (at, weight) = (self.at(x)?, self.kept(weight)?);
        let (normalised, [out, blocks]) = self.result_in_blocks(x.rows, x.width)?;
        if let Some((sums, sum, number)) = self.last_sum.take()
            && sums == x
            && queue.take_back(number)
        {
            self.launches.sum_experts_norm(&sum, [weight, out, blocks], eps)?;
            queue.end_varying()?;
            return Ok(normalised);
        }
        self.launches.rms_norm([at, weight, out, blocks], [word(x.rows)?, word(x.width)?, 1], eps)?;
        Ok(normalised)
    }

    pub(super) fn layer_norm(&mut self, x: Rows, weights: [usize; 2], eps: f64) -> Result<Rows> {
        let (at, weight, bias) = (self.at(x)?, self.kept(weights[0])?, self.kept(weights[1])?);
        let (normalised, [out, blocks]) = self.result_in_blocks(x.rows, x.width)?;
        self.launches.layer_norm([at, weight, bias, out, blocks], [word(x.rows)?, word(x.width)?], eps)?;
        Ok(normalised)
    }

    /// Places are sent in steps of some hundred, so that the same launches come again as a text grows.
    pub(super) fn take_out(&mut self, queue: &Arc<LaunchQueue>, x: Rows, places: &[u32]) -> Result<Rows> {
        let (at, mut all) = (self.at(x)?, places.to_vec());
        all.resize(places.len().next_multiple_of(PLACES), u32::MAX);
        let sent = self.chains[0].send(&(queue.clone() as _), bytemuck::cast_slice(&all))?;
        let (taken, out) = self.result(x.rows, all.len())?;
        self.launches.take_out([at, sent, out], [word(x.rows)?, word(x.width)?, word(all.len())?])?;
        self.quantised.remove(&x.id);
        Ok(taken)
    }

    pub(super) fn find_best(&mut self, x: Rows, best: usize) -> Result<Rows> {
        let (at, [rows, width], most) = (self.at(x)?, [word(x.rows)?, word(x.width)?], word(BEST_FOUND)?);
        let mut args = BestArgs { x: at, maxima: 0, found: 0, rows, width, best: word(best)?, most };
        // The result that is copied back comes first, next to the values that were taken out.
        let (found, found_at) = self.result(x.rows, 1 + 2 * BEST_FOUND)?;
        args.found = found_at;
        args.maxima = self.chains[0].results.take(args.maxima_bytes())?;
        self.launches.find_best(&args)?;
        Ok(found)
    }
}

/// Checks that two results have the same shape.
fn check_shapes([x, y]: [Rows; 2]) -> Result<()> {
    if (x.rows, x.width) == (y.rows, y.width) {
        Ok(())
    } else {
        Err(GpuError::Unsupported(format!("rows {x:?} and {y:?} cannot be added")))
    }
}
