//! The backends of a model's operations.

mod cpu;

pub use cpu::{CpuOps, CpuPages, HostBuffer, HostRows, gather_bytes};
use smallvec::SmallVec;

use crate::compute::ComputeContext;
use crate::device::{Ops, Place, Rows};
use crate::error::Result;

/// Values of which there are seldom more than eight, so that seldom memory is allocated for them.
pub type Few<T> = SmallVec<[T; 8]>;

/// The backend that has a layer's rows of the KV cache, and the one that computes the step.
#[derive(Clone, Copy)]
pub struct Near<'o> {
    /// The backend that has the rows.
    pub ops: &'o dyn Ops,
    far: &'o dyn Ops,
}

impl<'o> Near<'o> {
    /// For rows in this place, in a step that `far` computes.
    pub fn new(compute: &'o ComputeContext, place: Place, far: &'o dyn Ops) -> Self {
        Near { ops: if far.is_host() { far } else { compute.near(place) }, far }
    }

    /// The backend that has the rows of other layers.
    pub fn other(&self, compute: &'o ComputeContext) -> &'o dyn Ops {
        compute.near(if self.ops.is_host() { Place::Device } else { Place::Host })
    }

    /// Rows of the step, where the rows of the KV cache are.
    pub fn take<const N: usize>(&self, rows: [Rows; N]) -> Result<[Rows; N]> {
        let mut taken = rows;
        moved(&mut taken, self.far, self.ops)?;
        Ok(taken)
    }

    /// The same of any number of rows.
    pub fn take_all(&self, mut rows: Few<Rows>) -> Result<Few<Rows>> {
        moved(&mut rows, self.far, self.ops)?;
        Ok(rows)
    }

    /// Rows from where those of the KV cache are, in the step.
    pub fn give(&self, rows: Rows) -> Result<Rows> {
        let mut given = [rows];
        moved(&mut given, self.ops, self.far)?;
        Ok(given[0])
    }
}

/// Makes rows of one backend rows of another, with one wait.
fn moved(rows: &mut [Rows], from: &dyn Ops, to: &dyn Ops) -> Result<()> {
    if from.is_host() != to.is_host() {
        let hosts = from.download(rows)?;
        for (rows, host) in rows.iter_mut().zip(hosts) {
            *rows = to.send(&host, rows.width)?;
        }
    }
    Ok(())
}
