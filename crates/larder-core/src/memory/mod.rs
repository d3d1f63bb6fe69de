//! Sizes of the memory that a run needs beside weights.

pub(crate) mod sequence;
pub(crate) mod step;
