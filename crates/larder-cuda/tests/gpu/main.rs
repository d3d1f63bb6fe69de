//! All but the driver, over a GPU that is none.

mod attention;
#[cfg(feature = "cuda")]
mod card;
mod common;
mod experts;
mod link;
mod measure;
mod order;
mod products;
