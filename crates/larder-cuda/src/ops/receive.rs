//! Copies of rows of a chain back to main memory.

use std::ops::Range;

use larder_model::Rows;

use super::State;
use crate::error::{GpuError, Result};
use crate::memory::Download;

/// Bytes that are copied back together with wanted ones between which they are, as that takes less time than a second
/// wait.
const NEAR_BYTES: usize = 256 << 10;

/// A copy of rows that was begun.
pub struct BegunCopy {
    wanted: Vec<Rows>,
    pieces: Pieces,
}

/// The pieces of memory that are copied back.
struct Pieces {
    /// Address and bytes of each.
    places: Vec<(u64, usize)>,
    /// The bytes of the wanted rows among those that are staged.
    wanted: Vec<Range<usize>>,
}

impl State {
    /// Begins to copy rows back.
    pub(super) fn begin_download(&mut self, wanted: &[Rows]) -> Result<()> {
        self.begun = None;
        let pieces = self.pieces_of(wanted.iter().copied())?;
        self.download.begin(&pieces.places)?;
        self.begun = Some(BegunCopy { wanted: wanted.to_vec(), pieces });
        Ok(())
    }

    /// Copies rows back, and waits once.
    pub(super) fn receive(&mut self, wanted: &mut [(Rows, &mut [f32])]) -> Result<()> {
        if wanted.iter().any(|(rows, out)| 4 * rows.rows * rows.width != size_of_val(&**out)) {
            return Err(GpuError::Unsupported("rows have another size than the place that they are copied to".into()));
        }
        let begun = self.begun.take().filter(|begun| begun.wanted.iter().eq(wanted.iter().map(|(rows, _)| rows)));
        let (pieces, bytes) = match begun {
            Some(BegunCopy { pieces, .. }) => {
                let bytes = self.download.end()?;
                (pieces, bytes)
            }
            None => {
                let pieces = self.pieces_of(wanted.iter().map(|(rows, _)| *rows))?;
                let bytes = self.download.fetch_all(&pieces.places)?;
                (pieces, bytes)
            }
        };
        for (from, (_, out)) in pieces.wanted.into_iter().zip(wanted) {
            out.copy_from_slice(bytemuck::cast_slice(&bytes[from]));
        }
        Ok(())
    }

    /// The pieces to copy for these rows: one, if they are close together in one piece of memory.
    fn pieces_of(&self, wanted: impl Iterator<Item = Rows>) -> Result<Pieces> {
        let places: Vec<(u64, usize)> =
            wanted.map(|rows| Ok((self.at(rows)?, 4 * rows.rows * rows.width))).collect::<Result<_>>()?;
        let (all, bytes) = (span(&places), places.iter().map(|(_, bytes)| bytes).sum::<usize>());
        let is_one_piece = self.chains.iter().any(|chain| chain.results.has(all.clone()));
        let size = (all.end - all.start) as usize;
        if is_one_piece && size <= (2 * bytes).max(NEAR_BYTES) {
            let wanted = places.iter().map(|(at, bytes)| (at - all.start) as usize..(at - all.start) as usize + bytes);
            return Ok(Pieces { wanted: wanted.collect(), places: vec![(all.start, size)] });
        }
        Ok(Pieces { wanted: Download::staged(&places).collect(), places })
    }
}

/// The addresses from the first byte of these places to the last.
fn span(places: &[(u64, usize)]) -> Range<u64> {
    let start = places.iter().map(|(at, _)| *at).min().unwrap_or_default();
    start..places.iter().map(|(at, bytes)| at + *bytes as u64).max().unwrap_or_default()
}
