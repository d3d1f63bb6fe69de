//! Operations where the rows of a KV cache are, if those are not where the step is computed.

use std::sync::Arc;

use crate::compute::ComputeContext;
use crate::device::Place;
use crate::error::Result;
use crate::ops::{Few, Ops, Rows};

/// The lengths of the lists of a choice, which a backend keeps; `None` if each token attends to all rows that it sees.
pub type ListLengths = Option<Arc<[usize]>>;

/// The positions that an indexer chose for the tokens of a step.
#[derive(Clone)]
pub struct HandedChoice {
    /// Where the lists are.
    pub place: Place,
    /// Their lengths.
    pub lengths: ListLengths,
}

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
        let ops = match far.place() {
            Place::Host => far,
            Place::Device => compute.near(place),
        };
        Near { ops, far }
    }

    /// The lists of rows, of at most `most` positions, that a layer chose whose rows of the KV cache may be elsewhere.
    pub fn take_choice(&self, choice: &HandedChoice, most: usize, compute: &ComputeContext) -> Result<()> {
        if let Some(lengths) = choice.lengths.as_deref().filter(|_| choice.place != self.ops.place()) {
            let lists = compute.near(choice.place).receive_choice(lengths)?;
            self.ops.send_choice(&lists.iter().map(Vec::as_slice).collect::<Vec<_>>(), most)?;
        }
        Ok(())
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
    if from.place() != to.place() {
        let hosts = from.download(rows)?;
        for (rows, host) in rows.iter_mut().zip(hosts) {
            *rows = to.send(&host, rows.width)?;
        }
    }
    Ok(())
}
