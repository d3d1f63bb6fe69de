use std::io;

use larder_kernels::{Inputs, Pool};

/// How products are computed.
pub struct Compute {
    /// On which threads.
    pub pool: Pool,
    /// Whether activations meet quantised weights as they are, not rounded to eight bits: slow, and what the fast way
    /// is compared with.
    pub exact: bool,
}

impl Compute {
    /// The fast way on so many threads, each bound to a processor of its own if `pin`.
    pub fn new(threads: usize, pin: bool) -> io::Result<Self> {
        Ok(Compute { pool: Pool::new(threads, pin)?, exact: false })
    }

    /// On the caller's thread.
    pub(crate) fn alone() -> Self {
        Compute { pool: Pool::alone(), exact: false }
    }

    /// Takes `x [tokens, cols]` into `inputs`; `quantised` says whether it will meet quantised weights.
    pub(crate) fn fill(&self, inputs: &mut Inputs, x: &[f32], cols: usize, quantised: bool) {
        inputs.fill_on(&self.pool, x, cols, quantised && !self.exact);
    }
}
