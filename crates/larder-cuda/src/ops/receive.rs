//! Copies of rows of a chain back to main memory.

use std::ops::Range;

use larder_model::DeviceRows;

use super::State;
use crate::error::{GpuError, Result};

/// Bytes that are copied back together with wanted ones between which they are, as that takes less time than a second wait.
const NEAR_BYTES: usize = 256 << 10;

impl State {
    /// Copies the bytes from the first wanted row to the last back at once, where they are close together in one piece of memory.
    pub(super) fn receive(&mut self, wanted: &mut [(DeviceRows, &mut [f32])]) -> Result<()> {
        let places = wanted.iter().map(|(rows, _)| Ok((self.at(*rows)?, 4 * rows.rows * rows.width)));
        let places: Vec<(u64, usize)> = places.collect::<Result<_>>()?;
        if places.iter().zip(&*wanted).any(|((_, bytes), (_, out))| *bytes != size_of_val(&**out)) {
            return Err(GpuError::Unsupported("rows have another size than the place that they are copied to".into()));
        }
        if places.is_empty() {
            // Only waits.
            return self.download.fetch(0, 0).map(drop);
        }
        let Range { start, end } = span(&places);
        let total: usize = places.iter().map(|(_, bytes)| bytes).sum();
        let is_one_piece = self.chains.iter().any(|chain| chain.results.has(start..end));
        if is_one_piece && (end - start) as usize <= (2 * total).max(NEAR_BYTES) {
            let bytes = self.download.fetch(start, (end - start) as usize)?;
            for ((at, size), (_, out)) in places.iter().zip(wanted) {
                out.copy_from_slice(bytemuck::cast_slice(&bytes[(at - start) as usize..][..*size]));
            }
            return Ok(());
        }
        for ((at, size), (_, out)) in places.iter().zip(wanted) {
            out.copy_from_slice(bytemuck::cast_slice(self.download.fetch(*at, *size)?));
        }
        Ok(())
    }
}

/// The addresses from the first byte of these places to the last.
fn span(places: &[(u64, usize)]) -> Range<u64> {
    let start = places.iter().map(|(at, _)| *at).min().unwrap_or_default();
    start..places.iter().map(|(at, bytes)| at + *bytes as u64).max().unwrap_or_default()
}
