//! Copies of rows of a chain back to main memory.

use std::ops::Range;

use larder_model::DeviceRows;

use super::State;
use crate::error::{GpuError, Result};

/// Bytes that are copied back together with wanted ones between which they are, as that takes less time than a second wait.
const NEAR_BYTES: usize = 256 << 10;

/// A copy of rows that was begun.
pub struct BegunCopy {
    wanted: Vec<DeviceRows>,
    range: Range<u64>,
}

impl State {
    /// Begins to copy rows back, if they are close together in one piece of memory.
    pub(super) fn begin_receive(&mut self, wanted: &[DeviceRows]) -> Result<()> {
        self.begun = None;
        let places = wanted.iter().map(|rows| Ok((self.at(*rows)?, 4 * rows.rows * rows.width)));
        let places: Vec<(u64, usize)> = places.collect::<Result<_>>()?;
        if let Some(range) = self.one_copy(&places) {
            self.download.begin(range.start, (range.end - range.start) as usize)?;
            self.begun = Some(BegunCopy { wanted: wanted.to_vec(), range });
        }
        Ok(())
    }

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
        let begun = self.begun.take().filter(|begun| begun.wanted.iter().eq(wanted.iter().map(|(rows, _)| rows)));
        if let Some(Range { start, end }) = begun.as_ref().map(|b| b.range.clone()).or_else(|| self.one_copy(&places)) {
            let size = (end - start) as usize;
            let bytes = match begun {
                Some(_) => self.download.end(size)?,
                None => self.download.fetch(start, size)?,
            };
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

    /// The addresses from the first byte of these places to the last, if one copy of them all takes less time than several.
    fn one_copy(&self, places: &[(u64, usize)]) -> Option<Range<u64>> {
        let (all, wanted) = (span(places), places.iter().map(|(_, bytes)| bytes).sum::<usize>());
        let is_one_piece = self.chains.iter().any(|chain| chain.results.has(all.clone()));
        (is_one_piece && (all.end - all.start) as usize <= (2 * wanted).max(NEAR_BYTES)).then_some(all)
    }
}

/// The addresses from the first byte of these places to the last.
fn span(places: &[(u64, usize)]) -> Range<u64> {
    let start = places.iter().map(|(at, _)| *at).min().unwrap_or_default();
    start..places.iter().map(|(at, bytes)| at + *bytes as u64).max().unwrap_or_default()
}
