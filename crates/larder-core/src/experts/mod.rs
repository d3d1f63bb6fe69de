//! One expert of a layer: the layout of its bytes, how a router chooses it, and where it is.

pub(crate) mod gate;
pub(crate) mod layout;
pub(crate) mod per_matrix;
pub(crate) mod residency;
