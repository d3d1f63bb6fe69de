//! How a model uses its machine: the memory that it may take, a GPU, fewer threads on battery, and how fast memory and
//! SSD are.

pub mod budget;
pub mod gpu;
pub(crate) mod power;
pub mod rates;
