//! The machine that a model runs on: its memory, the nodes that this is in, and control groups, the locking of memory, its power supply, and how fast memory and SSD are.

pub mod budget;
pub mod group;
pub mod lock;
pub mod memory;
pub mod nodes;
pub mod power;
pub mod rates;
