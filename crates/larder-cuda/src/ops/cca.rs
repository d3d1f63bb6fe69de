//! Chains with convolved queries and keys.

use larder_model::{CcaOps, HeadConvolution, HeadMix, Rows, StateSpan};

use super::GpuOps;
use super::recurrent::States;
use crate::error::GpuError;
use crate::launches::word;

impl CcaOps for GpuOps {
    fn convolve_heads(&self, convolution: &HeadConvolution, spans: &[StateSpan]) -> larder_model::Result<[Rows; 2]> {
        Ok(self.lock().convolve_heads(&self.queue, convolution, &States::of(spans, &self.attention)?)?)
    }

    fn mix_heads(&self, rows: [Rows; 3], mix: &HeadMix) -> larder_model::Result<[Rows; 2]> {
        let (mut state, [queries, keys, mixed]) = (self.lock(), rows);
        let HeadMix { heads, kv_heads, bias, factors } = *mix;
        let width = keys.width / kv_heads.max(1);
        let fits = [keys.rows, mixed.rows] == [queries.rows; 2]
            && [queries.width, keys.width] == [heads * width, kv_heads * width]
            && mixed.width == queries.width + keys.width
            && heads.is_multiple_of(kv_heads);
        if !fits {
            return Err(GpuError::Unsupported(format!("rows {rows:?} are not those of {heads} heads")).into());
        }
        let inputs = [state.at(queries)?, state.at(keys)?, state.at(mixed)?, state.kept(bias)?, state.kept(factors)?];
        let (out_queries, to_queries) = state.result(queries.rows, queries.width)?;
        let (out_keys, to_keys) = state.result(keys.rows, keys.width)?;
        let shape = [word(queries.rows)?, word(heads)?, word(kv_heads)?, word(width)?];
        state.launches.mix_heads(inputs, [to_queries, to_keys], shape)?;
        Ok([out_queries, out_keys])
    }
}
