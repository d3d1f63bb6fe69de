//! All but the driver, over a GPU that is none.

mod bench;
#[cfg(feature = "cuda")]
mod card;
mod common;
mod link;
mod measure;
mod order;
mod products;
