//! Contents of a checkpoint: sizes and names of tensors, and how tensors are read.

pub(crate) mod blueprint;
pub(crate) mod tensors;
