//! Chains with several residual streams.

use larder_model::{HyperConnectionOps, MATRIX_STREAMS, ManifoldWeights, Rows, ScaledSides, StreamGate, StreamMix};

use super::GpuOps;
use crate::error::{GpuError, Result};
use crate::expert_kernels::BLOCK;
use crate::launches::word;

impl HyperConnectionOps for GpuOps {
    fn rms_groups(&self, x: Rows, groups: usize, weight: Option<usize>, eps: f64) -> larder_model::Result<Rows> {
        let (mut state, width) = (self.lock(), width_of_stream(x, groups)?);
        let (at, weight) = (state.at(x)?, weight.map_or(Ok(0), |weight| state.kept(weight))?);
        let (normalised, out) = state.result(x.rows, x.width)?;
        // Rows are quantised where their parts are whole blocks.
        let blocks = if width.is_multiple_of(BLOCK) { state.blocks_of(normalised)? } else { 0 };
        let shape = [word(x.rows * groups)?, word(width)?, word(groups)?];
        state.launches.rms_norm([at, weight, out, blocks], shape, eps)?;
        Ok(normalised)
    }

    fn stream_weights(&self, products: Rows, count: usize, weights: &ManifoldWeights) -> larder_model::Result<Rows> {
        let mut state = self.lock();
        if products.width != count && (products.width != StreamMix::Matrix.width(count) || count > MATRIX_STREAMS) {
            return Err(no_fit(products, count).into());
        }
        let (at, base) = (state.at(products)?, state.kept(weights.base)?);
        let (result, out) = state.result(products.rows, products.width)?;
        let shape = [word(products.rows)?, word(products.width)?, word(count)?];
        state.launches.stream_weights([at, base, out], shape, weights)?;
        Ok(result)
    }

    fn read_streams(&self, streams: Rows, count: usize, weights: Option<Rows>) -> larder_model::Result<Rows> {
        let (mut state, hidden) = (self.lock(), width_of_stream(streams, count)?);
        if weights.is_some_and(|weights| weights.rows != streams.rows || weights.width < count) {
            return Err(no_fit(streams, count).into());
        }
        let (at, weights_at) = (state.at(streams)?, weights.map_or(Ok(0), |weights| state.at(weights))?);
        let (read, out) = state.result(streams.rows, hidden)?;
        let (shape, stride) =
            ([word(streams.rows)?, word(hidden)?, word(count)?], weights.map_or(0, |rows| rows.width));
        state.launches.read_streams([at, weights_at, out], shape, word(stride)?)?;
        Ok(read)
    }

    fn write_streams(&self, streams: Rows, y: Rows, (mix, form): (Rows, StreamMix)) -> larder_model::Result<Rows> {
        self.queue.end_varying()?;
        let mut state = self.lock();
        let count = streams.width / y.width.max(1);
        let fits = y.rows == streams.rows && mix.rows == streams.rows && count * y.width == streams.width;
        if !fits || mix.width != form.width(count) {
            return Err(no_fit(streams, count).into());
        }
        let addresses = [state.at(streams)?, state.at(y)?, state.at(mix)?];
        let (written, out) = state.result(streams.rows, streams.width)?;
        let shape = [word(streams.rows)?, word(y.width)?, word(count)?];
        let [streams, y, mix_at] = addresses;
        state.launches.write_streams([streams, y, mix_at, out], shape, (word(mix.width)?, form))?;
        Ok(written)
    }

    fn add_scaled_sides(&self, stream: Rows, y: Rows, sides: &ScaledSides) -> larder_model::Result<Rows> {
        self.queue.end_varying()?;
        let mut state = self.lock();
        if (stream.rows, stream.width) != (y.rows, y.width) {
            return Err(no_fit(stream, 1).into());
        }
        let weights = [sides.y[0], sides.y[1], sides.stream[0], sides.stream[1]].map(|kept| state.kept(kept));
        let [a, b, c, d] = weights;
        let (inputs, weights) = ([state.at(stream)?, state.at(y)?], [a?, b?, c?, d?]);
        let (sum, out) = state.result(y.rows, y.width)?;
        let shape = [word(y.rows * y.width)?, word(y.width)?];
        state.launches.add_scaled_sides([inputs[0], inputs[1], out], shape, weights)?;
        Ok(sum)
    }

    fn gate_by_keys(&self, rows: [Rows; 3], count: usize) -> larder_model::Result<Rows> {
        let (mut state, [keys, queries, values]) = (self.lock(), rows);
        let width = values.width * count;
        if [keys.width, queries.width] != [width; 2] || [keys.rows, queries.rows] != [values.rows; 2] {
            return Err(no_fit(keys, count).into());
        }
        let inputs = [state.at(keys)?, state.at(queries)?, state.at(values)?];
        let (gated, out) = state.result(values.rows, width)?;
        let shape = [word(values.rows)?, word(values.width)?, word(count)?];
        state.launches.gate_by_keys([inputs[0], inputs[1], inputs[2], out], shape)?;
        Ok(gated)
    }

    fn stream_gates(&self, x: Rows, count: usize, gate: StreamGate) -> larder_model::Result<Rows> {
        let mut state = self.lock();
        let at = state.at(x)?;
        let (gates, out) = state.result(x.rows, x.width)?;
        state.launches.stream_gates([at, out], word(x.rows * x.width)?, count as f32, gate == StreamGate::Silu)?;
        Ok(gates)
    }

    fn gated_mean(&self, x: Rows, gates: Rows, count: usize) -> larder_model::Result<Rows> {
        let (mut state, hidden) = (self.lock(), width_of_stream(x, count)?);
        if [x.rows, x.width] != [gates.rows, gates.width] {
            return Err(no_fit(gates, count).into());
        }
        let [at, gates] = [state.at(x)?, state.at(gates)?];
        let (mean, out) = state.result(x.rows, hidden)?;
        state.launches.gated_mean([at, gates, out], [word(x.rows)?, word(hidden)?, word(count)?])?;
        Ok(mean)
    }
}

/// Values of each of `count` parts of a row.
fn width_of_stream(rows: Rows, count: usize) -> Result<usize> {
    match rows.width.checked_div(count) {
        Some(width) if width * count == rows.width => Ok(width),
        _ => Err(no_fit(rows, count)),
    }
}

fn no_fit(rows: Rows, count: usize) -> GpuError {
    GpuError::Unsupported(format!("{rows:?} are not those of {count} residual streams"))
}
