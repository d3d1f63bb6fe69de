//! Everything above the driver, on an emulated GPU.

mod attention;
mod backends;
#[cfg(feature = "cuda")]
mod card;
mod cca;
mod common;
mod expert_choice;
mod experts;
mod flash;
mod hits;
mod hyper_connections;
mod latents;
mod link;
mod measure;
mod ops;
mod order;
mod products;
mod recurrent;
mod sampling;
mod sparse;
