//! All but the driver, over a GPU that is none.

mod attention;
mod bench;
#[cfg(feature = "cuda")]
mod card;
mod common;
mod link;
mod measure;
mod order;
mod products;
