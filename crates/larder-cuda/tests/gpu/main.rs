//! Everything above the driver, on an emulated GPU.

mod attention;
mod backends;
#[cfg(feature = "cuda")]
mod card;
mod chosen;
mod common;
mod convolved;
mod experts;
mod flash;
mod hits;
mod latents;
mod link;
mod measure;
mod ops;
mod order;
mod products;
mod recurrent;
mod sampling;
mod sparse;
mod streams;
